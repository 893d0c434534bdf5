"""The contract of every backend in the tree."""

from kerneldyno.testing.backend import BackendContract
from tests.contract.found import backend_modules
from tests.contract.found import title


for _name, _module in backend_modules().items():
    globals()[title(_name)] = type(title(_name), (BackendContract,), {"backend": _module})

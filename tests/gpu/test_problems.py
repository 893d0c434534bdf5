"""The contract of every problem in the tree, on the real GPU: references, budgets and library baselines."""

import pytest

from kerneldyno.measure.device import gpus
from kerneldyno.testing.problem import ProblemContract
from tests.contract.found import gemm
from tests.contract.found import problem_modules
from tests.contract.found import softmax
from tests.contract.found import title
from tests.contract.found import vector_add


pytestmark = pytest.mark.gpu

DEVICES = gpus()
if not DEVICES:
    pytest.skip("there is no NVIDIA GPU here", allow_module_level=True)

WORKLOADS = {
    "gemm": (
        gemm(17, 33, 65, "bf16", "nn"),
        gemm(16, 4096, 14336, "bf16"),
        gemm(64, 2112, 7168, "fp16"),
        gemm(1024, 1024, 4096, "bf16"),
        gemm(500, 300, 2000, "fp32"),
    ),
    "softmax": (softmax(3, 5, "fp32"), softmax(64, 4097, "bf16"), softmax(16, 131072, "fp16")),
    "vector_add": (vector_add(1003, "bf16"), vector_add(2**22, "fp32")),
}

for _name, _module in problem_modules().items():
    globals()[title(_name)] = type(
        title(_name),
        (ProblemContract,),
        {
            "problem": _module,
            "workloads": WORKLOADS[_name],
            "torch_device": "cuda:0",
            "device": DEVICES[0],
            # max-autotune times cuBLAS against its own kernels for each shape: half a minute for five of them
            "unhurried": ("torch.compile",) if _name == "gemm" else (),
        },
    )

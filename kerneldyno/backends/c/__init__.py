"""C with OpenMP, compiled by the system's C compiler: kernels for the CPU."""

from kerneldyno.backends.c._compile import compiler_version
from kerneldyno.backends.c._compile import find_compiler
from kerneldyno.core import Availability
from kerneldyno.core import Device
from kerneldyno.errors import Unavailable


name = "c"
device_kind = "cpu"


def probe(device: Device | None) -> Availability:
    """Say whether there is a C compiler that answers; whether it has OpenMP shows at the first build.

    Args:
        device: The CPU, or None.
    """
    try:
        command = find_compiler()
        versions = {"cc": compiler_version(tuple(command))}
    except Unavailable as error:
        return Availability(False, str(error), "install a C compiler with OpenMP (Debian: apt-get install gcc), or set CC to one")
    return Availability(True, versions=versions)

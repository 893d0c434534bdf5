"""Attention: two kernels, told apart by the shape, as few queries leave the tensor cores nothing to do but wait for memory."""

from types import ModuleType

from kerneldyno.backends.cuda import _attention_decode
from kerneldyno.backends.cuda import _attention_prefill
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Space
from kerneldyno.core import Workload


_DECODE_ROWS = 64
"""Most query rows that share a key head and are decoded as one tile, while all other warps stream keys and values."""


def space(workload: Workload, device: Device) -> Space:
    """Return the knobs of the kernel for this shape.

    Raises:
        Unsupported: Where that kernel has no variant for the dtype, the head dims or the device.
    """
    return _kernel(workload).space(workload, device)


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; touches no GPU."""
    return _kernel(workload).build(workload, config, arch)


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load the machine code, in the process that owns the GPU."""
    return _kernel(workload).load(artifact, workload)


def _kernel(workload: Workload) -> ModuleType:
    shape = workload.shape
    rows = int(shape["seq_q"]) * (int(shape["heads"]) // int(shape["kv_heads"]))
    return _attention_decode if rows <= _DECODE_ROWS else _attention_prefill

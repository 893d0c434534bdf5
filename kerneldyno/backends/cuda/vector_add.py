"""Vector addition: each thread adds a few words of 2 to 16 bytes, all its loads in flight before its first store."""

from kerneldyno.backends.cuda._compile import compile_kernel
from kerneldyno.backends.cuda._compile import source_text
from kerneldyno.backends.cuda._launch import CudaLaunch
from kerneldyno.core import DTYPE_BYTES
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Workload


_OTHER_REGISTERS = 40  # addresses and temporaries: what the compiled kernels have beside the data


def space(workload: Workload, device: Device) -> Space:
    """Return the knobs: the width of an access, the threads, the work of a thread, cache hints."""
    size = DTYPE_BYTES[workload.dtype]
    limit = device.max_threads_per_block
    return Space(
        [
            Param("threads", (128, 256, 512, 1024), "threads a block"),
            Param("access_bytes", tuple(width for width in (16, 8, 4) if width >= size), "bytes of one load or store"),
            Param("items", (1, 2, 4, 8), "accesses a thread makes to each tensor"),
            Param("load", ("stream", "cached", "prefetch"), "no place in L1, plain, or 256 bytes at a time into L2", _whole_packets),
            Param("store", ("stream", "cached"), "first out of L2, or plain", _whole_packets),
        ],
        [
            Constraint(lambda threads: threads <= limit, f"a block has at most {limit} threads"),
            Constraint(
                lambda threads, access_bytes, items: (items * access_bytes // 2 + _OTHER_REGISTERS) * threads <= device.registers_per_sm,
                f"what a thread has in flight and {_OTHER_REGISTERS} other registers must fit the block's {device.registers_per_sm}",
            ),
        ],
    )


def _whole_packets(access_bytes: int) -> bool:
    return access_bytes == 16


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; touches no GPU."""
    n = int(workload.shape["n"])
    threads, width, items = int(config["threads"]), int(config["access_bytes"]), int(config["items"])
    text = source_text(
        "vector_add",
        workload.dtype,
        {"N": n, "THREADS": threads, "BYTES": width, "ITEMS": items},
        {"LOAD": f"Load::{config.get('load', 'cached')}", "STORE": f"Store::{config.get('store', 'cached')}"},
    )
    per_block = threads * items * (width // DTYPE_BYTES[workload.dtype])
    blocks = -(-n // per_block)
    return compile_kernel(text, "vector_add", config, arch, blocks=blocks, threads=threads, smem_bytes=0, tensors=("x", "y", "out"))


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load the machine code, in the process that owns the GPU."""
    return CudaLaunch(artifact)

"""Elementwise sum in TileLang: one load, one add and one store of a vector per thread and step."""

import tilelang.language as T

from kerneldyno.backends.tilelang import _compile
from kerneldyno.core import DTYPE_BYTES
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Workload


def space(workload: Workload, device: Device) -> Space:
    """The knobs: the block's size, the width of a memory access and how many of them a thread has in flight.

    Args:
        workload: vector_add of n elements in fp32, fp16 or bf16.
        device: The GPU, for its limit of threads.
    """
    return Space(
        [
            Param("threads", (128, 256, 512, 1024), "threads a block"),
            Param("vector_bytes", (4, 8, 16), "bytes of one load or store of a thread"),
            Param("unroll", (1, 2, 4, 8), "vectors a thread loads from each input before it stores"),
        ],
        [
            Constraint(
                lambda threads: threads <= device.max_threads_per_block,
                f"a block has at most {device.max_threads_per_block} threads",
            ),
        ],
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration for an architecture such as "sm_90a"."""
    return _compile.build(program(workload, config), config, arch)


def program(workload: Workload, config: Config) -> _compile.Program:
    """Write the TileLang function of one configuration."""
    function = _vector_add(
        n=int(workload.shape["n"]),
        dtype=_compile.DTYPES[workload.dtype],
        threads=int(config["threads"]),
        vector=int(config["vector_bytes"]) // DTYPE_BYTES[workload.dtype],
        unroll=int(config["unroll"]),
    )
    return _compile.Program(function)


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load what `build` made."""
    return _compile.load(artifact, ("x", "y", "out"))


def _vector_add(*, n: int, dtype: str, threads: int, vector: int, unroll: int) -> T.PrimFunc:
    """Out [n] = x [n] + y [n]; a thread takes vectors that are `threads` vectors apart, so that a warp's accesses are contiguous."""
    each = vector * unroll
    span = threads * each
    whole = n // span
    tail = n - whole * span
    blocks = whole + (tail > 0)

    @T.prim_func
    def vector_add(x: T.Tensor((n,), dtype), y: T.Tensor((n,), dtype), out: T.Tensor((n,), dtype)):  # noqa: ANN202
        with T.Kernel(blocks, threads=threads) as block:
            left = T.alloc_fragment((threads, each), dtype)
            right = T.alloc_fragment((threads, each), dtype)
            own = T.Fragment((threads, each), forward_thread_fn=lambda t, j: t, forward_index_fn=lambda t, j: j)
            T.annotate_layout({left: own, right: own})
            if block < whole:
                for t, j in T.Parallel(threads, each):
                    left[t, j] = x[block * span + j // vector * threads * vector + t * vector + j % vector]
                for t, j in T.Parallel(threads, each):
                    right[t, j] = y[block * span + j // vector * threads * vector + t * vector + j % vector]
                for t, j in T.Parallel(threads, each):
                    out[block * span + j // vector * threads * vector + t * vector + j % vector] = left[t, j] + right[t, j]
            else:
                # the last, partial block, element by element
                for j, t in T.Parallel(each, threads):
                    if j * threads + t < tail:
                        out[whole * span + j * threads + t] = x[whole * span + j * threads + t] + y[whole * span + j * threads + t]

    return vector_add

"""Softmax over rows in TileLang: a row held in registers, or a longer one streamed twice with its start kept in shared memory."""

from typing import Any

import tilelang
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


_LOWEST = -3.4028234663852886e38
"""The lowest float32: below every maximum, and unlike -inf no NaN where it is subtracted from itself."""

_LOG2_E = 1.4426950408889634

_WORKSPACE_BYTES = 4
"""Shared memory of a thread for the sum or maximum over a block."""

_MOST_HELD = 128
"""Float32 elements of a thread in `held`: with their 16-bit copies and addresses they fill most of the 255 registers."""

_LEAST_STREAMED = 4096
"""Shortest row that is streamed: below, one or two loads of a block hold all of it."""


def space(workload: Workload, device: Device) -> Space:
    """The knobs: which algorithm, threads and rows a block, width of an access, and what of a long row stays on chip.

    Args:
        workload: Softmax over the last axis of [m, n], in fp32, fp16 or bf16.
        device: The GPU, for its shared memory and registers.
    """
    n = int(workload.shape["n"])
    size = DTYPE_BYTES[workload.dtype]
    # rows start at multiples of n elements: an access may be as wide as the power of two in n's bytes
    widths = tuple(width for width in (size, 4, 8, 16) if width % size == 0 and n * size % width == 0)[-2:]
    algorithms = ("held", "streamed") if n >= _LEAST_STREAMED else ("held",)
    if not any(_held_elements(n, 1024, width // size) * 1024 <= _registers_for_elements(device) for width in widths):
        algorithms = ("streamed",)
    held = {"when": lambda algorithm: algorithm == "held"}
    streamed = {"when": lambda algorithm: algorithm == "streamed"}
    return Space(
        [
            Param("algorithm", algorithms, "held: a row is read once into registers; streamed: read in steps, twice where not kept"),
            Param("row_threads", (32, 64, 128, 256, 512, 1024), "threads that share a row"),
            Param("rows", (1, 2, 4, 8, 16), "rows a block", **held),
            Param("vector_bytes", tuple(dict.fromkeys(widths)), "bytes of one load or store of a thread"),
            Param("unroll", (1, 2, 4), "vectors a thread loads in one step", **streamed),
            Param("kept_kb", (0, 48, 104, 216), "shared memory a block that keeps the start of the row, in KiB", **streamed),
        ],
        [
            Constraint(
                lambda row_threads, rows: row_threads * rows <= device.max_threads_per_block,
                f"a block has at most {device.max_threads_per_block} threads",
            ),
            Constraint(
                lambda row_threads, rows: rows == 1 or row_threads * rows <= 512,
                "several rows share a block to fill it up to 512 threads, no further",
            ),
            Constraint(
                lambda row_threads, rows, vector_bytes: (
                    _held_elements(n, row_threads, vector_bytes // size) <= _MOST_HELD
                    and _held_elements(n, row_threads, vector_bytes // size) * row_threads * rows <= _registers_for_elements(device)
                ),
                f"a thread holds at most {_MOST_HELD} elements and a block at most half of the {device.registers_per_sm} registers",
            ),
            Constraint(
                lambda row_threads, rows, vector_bytes: row_threads == 32 or (row_threads // 2) * (vector_bytes // size) < n,
                "at least every other thread of a row has elements",
            ),
            Constraint(
                lambda algorithm, row_threads: algorithm == "held" or row_threads >= 256,
                "a streamed row has at least 256 threads, to have enough loads in flight",
            ),
            Constraint(
                lambda row_threads, vector_bytes, unroll: row_threads * (vector_bytes // size) * unroll <= n,
                "one step loads at most the row",
            ),
            Constraint(
                lambda row_threads, vector_bytes, unroll, kept_kb: (
                    kept_kb == 0 or _kept_steps(n, row_threads * (vector_bytes // size) * unroll, kept_kb, size) > 0
                ),
                "what is kept holds at least one step",
            ),
            Constraint(
                lambda kept_kb: kept_kb == 0 or _next_smaller(kept_kb) * 1024 < n * size,
                "no more is kept than the row has",
            ),
            Constraint(
                lambda row_threads, kept_kb: (
                    kept_kb * 1024 + row_threads * _WORKSPACE_BYTES + _compile.STATIC_SMEM_BYTES <= device.smem_per_block_bytes
                ),
                f"shared memory (what is kept and 4 bytes a thread) is at most {device.smem_per_block_bytes} bytes a block",
            ),
        ],
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration for an architecture such as "sm_90a"."""
    return _compile.build(program(workload, config), config, arch)


def program(workload: Workload, config: Config) -> _compile.Program:
    """Write the TileLang function of one configuration."""
    m, n = int(workload.shape["m"]), int(workload.shape["n"])
    size = DTYPE_BYTES[workload.dtype]
    dtype = _compile.DTYPES[workload.dtype]
    threads, vector = int(config["row_threads"]), int(config["vector_bytes"]) // size
    if config["algorithm"] == "held":
        function = _held(m, n, dtype, rows=int(config["rows"]), threads=threads, vector=vector)
    else:
        unroll = int(config["unroll"])
        kept = _kept_steps(n, threads * vector * unroll, int(config["kept_kb"]), size)
        function = _streamed(m, n, dtype, threads=threads, vector=vector, unroll=unroll, kept=kept)
    # approximate exp2 has 2 units of error in the last place of float32: nothing in 16 bits, too much in 32
    return _compile.Program(function, {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: size == 2})


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load what `build` made."""
    return _compile.load(artifact, ("x", "y"))


def _held_elements(n: int, threads: int, vector: int) -> int:
    """Elements of a thread where `threads` share a row in vectors."""
    return -(-n // (threads * vector)) * vector


def _registers_for_elements(device: Device) -> int:
    """Elements that the threads of a block may hold: one register each, and about as many for everything else."""
    return device.registers_per_sm // 2


def _kept_steps(n: int, step: int, kept_kb: int, size: int) -> int:
    """Steps of a row that fit in `kept_kb` KiB, at most all."""
    return min(-(-n // step), kept_kb * 1024 // (step * size))


def _next_smaller(kept_kb: int) -> int:
    return max(value for value in (0, 48, 104) if value < kept_kb)


def _exp(dtype: str, value: Any) -> Any:
    """exp(value): in 16 bits through exp2, one instruction after a product; in float32 the library's function."""
    return T.exp(value) if dtype == "float32" else T.exp2(value * _LOG2_E)


def _held(m: int, n: int, dtype: str, *, rows: int, threads: int, vector: int) -> T.PrimFunc:
    """Y [m, n] = softmax of x [m, n]; a block takes `rows` rows at once and each is read once, in vectors `threads` vectors apart."""
    each = _held_elements(n, threads, vector)
    shape = (rows, threads, each)

    @T.prim_func
    def softmax(x: T.Tensor((m, n), dtype), y: T.Tensor((m, n), dtype)):  # noqa: ANN202
        with T.Kernel(T.ceildiv(m, rows), threads=rows * threads) as block:
            raw = T.alloc_fragment(shape, dtype)
            value = T.alloc_fragment(shape, "float32")
            thread_max = T.alloc_fragment((rows, threads), "float32")
            thread_sum = T.alloc_fragment((rows, threads), "float32")
            row_max = T.alloc_fragment((rows,), "float32")
            row_sum = T.alloc_fragment((rows,), "float32")
            own = T.Fragment(shape, forward_thread_fn=lambda r, t, j: r * threads + t, forward_index_fn=lambda r, t, j: j)
            T.annotate_layout({raw: own, value: own})
            for r, t, j in T.Parallel(rows, threads, each):
                raw[r, t, j] = T.if_then_else(
                    j // vector * threads * vector + t * vector + j % vector < n,
                    x[block * rows + r, j // vector * threads * vector + t * vector + j % vector],
                    T.cast(0, dtype),
                )
            for r, t, j in T.Parallel(rows, threads, each):
                value[r, t, j] = T.if_then_else(
                    j // vector * threads * vector + t * vector + j % vector < n, T.cast(raw[r, t, j], "float32"), _LOWEST
                )
            T.reduce_max(value, thread_max, dim=2)
            T.reduce_max(thread_max, row_max, dim=1)
            for r, t, j in T.Parallel(rows, threads, each):
                value[r, t, j] = _exp(dtype, value[r, t, j] - row_max[r])
            T.reduce_sum(value, thread_sum, dim=2)
            T.reduce_sum(thread_sum, row_sum, dim=1)
            for r in T.Parallel(rows):
                row_sum[r] = 1.0 / row_sum[r]
            for r, t, j in T.Parallel(rows, threads, each):
                raw[r, t, j] = T.cast(value[r, t, j] * row_sum[r], dtype)
            for r, t, j in T.Parallel(rows, threads, each):
                if j // vector * threads * vector + t * vector + j % vector < n:
                    y[block * rows + r, j // vector * threads * vector + t * vector + j % vector] = raw[r, t, j]

    return softmax


def _streamed(m: int, n: int, dtype: str, *, threads: int, vector: int, unroll: int, kept: int) -> T.PrimFunc:
    """Y [m, n] = softmax of x [m, n]; a block walks its row twice in steps and keeps the first `kept` of them in shared memory.

    Each thread has a running maximum and sum of its own, so that the threads meet only once, at the end of the first walk. The
    second walk begins with the steps that were not kept, which are the latest in L2.

    Source: the running sum is that of M. Milakov and N. Gimelshein, Online normalizer calculation for softmax, 2018.
    """
    each = vector * unroll
    step = threads * each
    steps = -(-n // step)
    reread = steps - kept
    shape = (threads, each)

    @T.macro
    def fetch(x, raw, row, at):  # noqa: ANN001, ANN202
        for t, j in T.Parallel(threads, each):
            raw[t, j] = T.if_then_else(
                at * step + j // vector * threads * vector + t * vector + j % vector < n,
                x[row, at * step + j // vector * threads * vector + t * vector + j % vector],
                T.cast(0, dtype),
            )

    @T.prim_func
    def softmax(x: T.Tensor((m, n), dtype), y: T.Tensor((m, n), dtype)):  # noqa: ANN202
        with T.Kernel(m, threads=threads) as row:
            keep = T.alloc_shared((max(kept, 1) * unroll, threads, vector), dtype)
            raw = T.alloc_fragment(shape, dtype)
            value = T.alloc_fragment(shape, "float32")
            step_max = T.alloc_fragment((threads,), "float32")
            step_sum = T.alloc_fragment((threads,), "float32")
            thread_max = T.alloc_fragment((threads,), "float32")
            thread_sum = T.alloc_fragment((threads,), "float32")
            row_max = T.alloc_fragment((1,), "float32")
            row_sum = T.alloc_fragment((1,), "float32")
            own = T.Fragment(shape, forward_thread_fn=lambda t, j: t, forward_index_fn=lambda t, j: j)
            T.annotate_layout({raw: own, value: own})
            T.fill(thread_max, _LOWEST)
            T.clear(thread_sum)
            for at in T.serial(steps):
                fetch(x, raw, row, at)
                if at < kept:
                    for t, j in T.Parallel(threads, each):
                        keep[at * unroll + j // vector, t, j % vector] = raw[t, j]
                for t, j in T.Parallel(threads, each):
                    value[t, j] = T.if_then_else(
                        at * step + j // vector * threads * vector + t * vector + j % vector < n, T.cast(raw[t, j], "float32"), _LOWEST
                    )
                T.reduce_max(value, step_max, dim=1)
                for t in T.Parallel(threads):
                    step_max[t] = T.max(step_max[t], thread_max[t])
                    thread_sum[t] = thread_sum[t] * _exp(dtype, thread_max[t] - step_max[t])
                    thread_max[t] = step_max[t]
                for t, j in T.Parallel(threads, each):
                    value[t, j] = _exp(dtype, value[t, j] - thread_max[t])
                T.reduce_sum(value, step_sum, dim=1)
                for t in T.Parallel(threads):
                    thread_sum[t] = thread_sum[t] + step_sum[t]
            T.reduce_max(thread_max, row_max, dim=0)
            for t in T.Parallel(threads):
                thread_sum[t] = thread_sum[t] * _exp(dtype, thread_max[t] - row_max[0])
            T.reduce_sum(thread_sum, row_sum, dim=0)
            row_sum[0] = 1.0 / row_sum[0]
            for at in T.serial(steps):
                if at < reread:
                    fetch(x, raw, row, at + kept)
                else:
                    for t, j in T.Parallel(threads, each):
                        raw[t, j] = keep[(at - reread) * unroll + j // vector, t, j % vector]
                for t, j in T.Parallel(threads, each):
                    raw[t, j] = T.cast(_exp(dtype, T.cast(raw[t, j], "float32") - row_max[0]) * row_sum[0], dtype)
                for t, j in T.Parallel(threads, each):
                    if (at + kept) % steps * step + j // vector * threads * vector + t * vector + j % vector < n:
                        y[row, (at + kept) % steps * step + j // vector * threads * vector + t * vector + j % vector] = raw[t, j]

    return softmax

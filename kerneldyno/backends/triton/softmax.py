"""Softmax over rows in Triton: a whole row in registers, or two passes over tiles of it with a running maximum and sum.

Source: the running maximum and sum are those of Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv:1805.02867, algorithm 3.
"""

import triton
import triton.language as tl

from kerneldyno.backends.triton import _compile
from kerneldyno.core import DTYPE_BYTES
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Workload


_LOG2_E = tl.constexpr(1.4426950408889634)
# a maximum to start from that is finite, for exp2(x - x) to be 1 and not NaN where a lane has seen nothing; x * log2(e) stays finite too
_LOWEST = tl.constexpr(-2.3e38)

# half of a multiprocessor's 65,536 registers: the rest is for addresses, and for results while inputs are still live
_TILE_MAX = 32_768
_ELEMENTS_PER_THREAD_MAX = 64
# below it the row method holds a row with room to spare
_READ_TWICE_MIN = 8192
# the widest load of a thread
_VECTOR_BYTES = 16
# Source: CUDA C++ Programming Guide, table of compute capabilities (9.0)
_THREADS_PER_SM_MAX = 2048


@triton.jit
def _normalize_rows(
    x: tl.tensor,
    y: tl.tensor,
    block: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    EVICT: tl.constexpr,
) -> None:
    """Softmax of a block of ROWS whole rows; EVEN says that it reaches over no edge."""
    rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_N)
    at = rows[:, None] * n + columns[None, :]
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    if EVEN:
        values = tl.load(x + at, eviction_policy=EVICT).to(tl.float32)
    else:
        values = tl.load(x + at, mask=inside, other=float("-inf"), eviction_policy=EVICT).to(tl.float32)
    weights = tl.exp2((values - tl.max(values, axis=1)[:, None]) * _LOG2_E)
    result = (weights * (1.0 / tl.sum(weights, axis=1))[:, None]).to(y.dtype.element_ty)
    if EVEN:
        tl.store(y + at, result, eviction_policy=EVICT)
    else:
        tl.store(y + at, result, mask=inside, eviction_policy=EVICT)


@triton.jit
def softmax_row(
    x: tl.tensor,
    y: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    EVICT: tl.constexpr,
    PERSISTENT: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Softmax of x [m, n] over the last axis into y, whole rows in registers."""
    if PERSISTENT:
        for block in tl.range(tl.program_id(0), tl.cdiv(m, ROWS), tl.num_programs(0), num_stages=STAGES):
            _normalize_rows(x, y, block, m, n, ROWS, BLOCK_N, EVEN, EVICT)
    else:
        _normalize_rows(x, y, tl.program_id(0), m, n, ROWS, BLOCK_N, EVEN, EVICT)


@triton.jit
def _accumulate(high: tl.tensor, total: tl.tensor, values: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Take values [repeats, lanes] into the running maximum and sum of each lane; a lane is one thread's, so nothing is exchanged."""
    higher = tl.maximum(high, tl.max(values, axis=0))
    total = total * tl.exp2((high - higher) * _LOG2_E) + tl.sum(tl.exp2((values - higher[None, :]) * _LOG2_E), axis=0)
    return higher, total


@triton.jit
def softmax_online(
    x: tl.tensor,
    y: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    RESIDENT: tl.constexpr,
    EVEN: tl.constexpr,
    HINTS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Softmax of x [m, n] over the last axis into y, by tiles of BLOCK_N columns read twice.

    The second pass goes backwards: it begins with what was read last, which the caches still hold. The first RESIDENT columns are
    read once and stay in registers, as they are in memory.
    """
    KEEP: tl.constexpr = "evict_last" if HINTS else ""
    DROP: tl.constexpr = "evict_first" if HINTS else ""
    tile = tl.arange(0, BLOCK_N // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    blocks = tl.cdiv(n - RESIDENT, BLOCK_N)
    row = tl.program_id(0).to(tl.int64)
    x_row = x + row * n
    y_row = y + row * n
    high = tl.full((LANES,), _LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    if RESIDENT:
        kept_tile = tl.arange(0, RESIDENT // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        kept = tl.load(x_row + kept_tile, eviction_policy=DROP)
        high, total = _accumulate(high, total, kept.to(tl.float32))
    for block in tl.range(blocks, num_stages=STAGES):
        at = RESIDENT + block * BLOCK_N + tile
        if EVEN:
            values = tl.load(x_row + at, eviction_policy=KEEP)
        else:
            values = tl.load(x_row + at, mask=at < n, other=float("-inf"), eviction_policy=KEEP)
        high, total = _accumulate(high, total, values.to(tl.float32))
    highest = tl.max(high, axis=0)
    scale = 1.0 / tl.sum(total * tl.exp2((high - highest) * _LOG2_E), axis=0)
    if RESIDENT:
        if kept.dtype.primitive_bitwidth == 16:
            # n >> 31 is 0, which the compiler cannot know: else it would keep the fp32 values of the first pass, in twice the registers
            kept = (kept.to(tl.int16, bitcast=True) ^ (n >> 31).to(tl.int16)).to(kept.dtype, bitcast=True)
        first = (tl.exp2((kept.to(tl.float32) - highest) * _LOG2_E) * scale).to(y.dtype.element_ty)
        tl.store(y_row + kept_tile, first, eviction_policy=DROP)
    for block in tl.range(blocks, num_stages=STAGES):
        at = RESIDENT + (blocks - 1 - block) * BLOCK_N + tile
        if EVEN:
            values = tl.load(x_row + at, eviction_policy=DROP)
        else:
            values = tl.load(x_row + at, mask=at < n, other=float("-inf"), eviction_policy=DROP)
        result = (tl.exp2((values.to(tl.float32) - highest) * _LOG2_E) * scale).to(y.dtype.element_ty)
        if EVEN:
            tl.store(y_row + at, result, eviction_policy=DROP)
        else:
            tl.store(y_row + at, result, mask=at < n, eviction_policy=DROP)


_STARTS = (
    {"method": "row", "num_warps": 16, "hints": False},
    {"method": "row", "num_warps": 4, "hints": False},
    {"method": "online", "num_warps": 16, "block_n": 32768, "resident": 32768, "prefetch": 4},
    {"method": "online", "num_warps": 16, "block_n": 16384, "resident": 65536},
)
"""Best of earlier searches at 16384 x 8192, 4096 x 4096 and 8192 x 131072, bf16, H200 (docs/notes/softmax.md)."""


def space(workload: Workload, device: Device) -> Space:
    """The knobs: whole rows or two passes, the tile, the warps that share it, and how loads are scheduled and cached.

    Every dtype and shape has a variant.

    Source: the limits on registers come from cross-compiling for sm_90a with Triton 3.6 and 3.9.
    """
    m, n = workload.shape["m"], workload.shape["n"]
    size = DTYPE_BYTES[workload.dtype]
    width = triton.next_power_of_2(n)
    vector = _VECTOR_BYTES // size
    limit = device.smem_per_block_bytes
    params = [
        Param("method", ("row", "online"), "hold whole rows in registers, or read each row twice by tiles"),
        Param("num_warps", (1, 2, 4, 8, 16, 32), "warps of a program"),
        Param("rows", (1, 2, 4, 8, 16), "rows of a program", when=lambda method: method == "row"),
        Param(
            "programs_per_sm",
            (0, 1, 2, 4, 8),
            "size of a persistent grid; 0: a program for each block",
            when=lambda method: method == "row",
        ),
        Param("block_n", (2048, 4096, 8192, 16384, 32768), "columns of a tile", when=lambda method: method == "online"),
        Param("resident", (0, 16384, 32768, 65536), "columns read once and kept in registers", when=lambda method: method == "online"),
        Param("prefetch", (1, 2, 3, 4), "stages of the pipeline of loads; 1: none", when=lambda method: method == "online"),
        Param("row_prefetch", (1, 2, 3, 4), "stages of the pipeline of rows; 1: none", when=lambda programs_per_sm: programs_per_sm > 0),
        Param("hints", (True, False), "tell the caches what is read again and what is not"),
    ]

    def threads(num_warps: int) -> int:
        return 32 * num_warps

    few = f"every thread loads a vector of {_VECTOR_BYTES} B or more"
    staged = f"the stages of a pipeline take at most {limit:,} B of shared memory"
    constraints = [
        Constraint(
            lambda method: method == "online" or width <= _TILE_MAX,
            f"a row held in registers has at most {_TILE_MAX:,} elements (half of the register file), and n={n}",
        ),
        Constraint(lambda method: method == "row" or n > _READ_TWICE_MIN, f"a row of {_READ_TWICE_MIN:,} elements or fewer is read once"),
        Constraint(
            lambda rows, num_warps: rows * width <= min(_TILE_MAX, _ELEMENTS_PER_THREAD_MAX * threads(num_warps)),
            f"rows in registers: at most {_TILE_MAX:,} elements a program and {_ELEMENTS_PER_THREAD_MAX} a thread (more spill)",
        ),
        Constraint(lambda rows, num_warps: num_warps == 1 or rows * width >= vector * threads(num_warps), few),
        Constraint(lambda rows: rows < 2 * m, f"a program has no more rows than the input ({m})"),
        Constraint(
            lambda programs_per_sm, num_warps: programs_per_sm * threads(num_warps) <= _THREADS_PER_SM_MAX,
            f"a multiprocessor runs at most {_THREADS_PER_SM_MAX:,} threads",
        ),
        Constraint(
            lambda rows, programs_per_sm: programs_per_sm * device.sm_count < triton.cdiv(m, rows) or programs_per_sm == 0,
            f"a persistent grid has more blocks to do than programs ({device.sm_count} multiprocessors)",
        ),
        Constraint(lambda rows, programs_per_sm, row_prefetch: programs_per_sm * (row_prefetch - 1) * rows * width * size <= limit, staged),
        Constraint(lambda block_n: block_n < 2 * n, f"a tile is not much wider than a row ({n})"),
        Constraint(lambda block_n, num_warps: block_n >= vector * threads(num_warps), few),
        Constraint(
            lambda block_n, num_warps: block_n <= _ELEMENTS_PER_THREAD_MAX * threads(num_warps),
            f"a tile has at most {_ELEMENTS_PER_THREAD_MAX} elements a thread",
        ),
        Constraint(lambda resident: resident < n, f"the columns kept are fewer than all ({n})"),
        Constraint(lambda resident, num_warps: resident == 0 or resident >= vector * threads(num_warps), few),
        Constraint(
            lambda resident, block_n, num_warps: (
                resident == 0 or resident * size // 4 + block_n <= min(128, 56 * 1024 // threads(num_warps) - 16) * threads(num_warps)
            ),
            "columns kept and a tile in fp32 leave an eighth of the registers and 16 a thread, and take 128 a thread at most: more spill",
        ),
        Constraint(lambda block_n, prefetch: (prefetch - 1) * block_n * size <= limit, staged),
    ]
    return Space(params, constraints, _STARTS)


def program(workload: Workload, config: Config) -> _compile.Program:
    """What a configuration compiles and launches."""
    m, n = workload.shape["m"], workload.shape["n"]
    hints, num_warps = config["hints"], config["num_warps"]
    if config["method"] == "row":
        width, rows, resident_programs = triton.next_power_of_2(n), config["rows"], config["programs_per_sm"]
        blocks = triton.cdiv(m, rows)
        return _compile.Program(
            function=softmax_row,
            dtype=workload.dtype,
            sizes={"m": m, "n": n},
            constants={
                "ROWS": rows,
                "BLOCK_N": width,
                "EVEN": n == width and m % rows == 0,
                "EVICT": "evict_first" if hints else "",
                "PERSISTENT": resident_programs > 0,
                "STAGES": config.get("row_prefetch", 1),
            },
            grid=lambda sm_count: (min(blocks, resident_programs * sm_count) if resident_programs else blocks, 1, 1),
            num_warps=num_warps,
            num_stages=1,
        )
    return _compile.Program(
        function=softmax_online,
        dtype=workload.dtype,
        sizes={"m": m, "n": n},
        constants={
            "BLOCK_N": config["block_n"],
            "LANES": _VECTOR_BYTES // DTYPE_BYTES[workload.dtype] * 32 * num_warps,
            "RESIDENT": config["resident"],
            "EVEN": (n - config["resident"]) % config["block_n"] == 0,
            "HINTS": hints,
            "STAGES": config["prefetch"],
        },
        grid=lambda sm_count: (m, 1, 1),
        num_warps=num_warps,
        num_stages=1,
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; needs no GPU."""
    return _compile.build(program(workload, config), config, arch)


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load a built configuration on the current GPU."""
    return _compile.load(program(workload, artifact.config), artifact.arch)

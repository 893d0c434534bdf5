"""Matrix product in Triton: tiles through pointers or tensor maps, one tile a program or a persistent grid, warp specialisation.

Source: the tile order and the persistent loop follow Triton's tutorials 03-matrix-multiplication and 09-persistent-matmul.
"""

import math

import triton
import triton.language as tl

from kerneldyno.backends.triton import _compile
from kerneldyno.backends.triton import _tiles
from kerneldyno.core import DTYPE_BYTES
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Workload


# tensor-map coordinates are 32-bit; the margin keeps the far edge of the last tile in range
_MAP_EXTENT_MAX = 2**31 - 2**20
_INT32_MAX = 2**31 - 1
# barriers and scratch beside the tiles: at most 616 B seen with Triton 3.6 and 3.9
_SMEM_MARGIN_BYTES = 1280


@triton.jit
def _store_pointer(
    c: tl.tensor,
    accumulator: tl.tensor,
    tile_m: tl.tensor,
    tile_n: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_MN: tl.constexpr,
) -> None:
    """Write a tile of C; EVEN_MN says that no tile reaches over an edge."""
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    address = c + rows.to(tl.int64)[:, None] * n + columns[None, :]
    values = accumulator.to(c.dtype.element_ty)
    if EVEN_MN:
        tl.store(address, values)
    else:
        tl.store(address, values, mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def gemm_pointer(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    NT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_MN: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """C [m, n] = A [m, k] times B, one tile a program, loads through pointers; B is [n, k] where NT, else [k, n]."""
    tile_m, tile_n = _tiles.place(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # rows beyond the edge repeat the last one: in range, and never stored, with no mask to evaluate
    a_rows = rows if EVEN_MN else tl.minimum(rows, m - 1)
    a_at = a + a_rows.to(tl.int64)[:, None] * k + depth[None, :]
    if NT:
        b_rows = columns if EVEN_MN else tl.minimum(columns, n - 1)
        b_at = b + b_rows.to(tl.int64)[None, :] * k + depth[:, None]
        b_step = BLOCK_K
    else:
        b_at = b + depth.to(tl.int64)[:, None] * n + columns[None, :]
        b_step = n.to(tl.int64) * BLOCK_K
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(k, BLOCK_K)):
        left = k - step * BLOCK_K
        if EVEN_K:
            a_tile = tl.load(a_at)
        else:
            a_tile = tl.load(a_at, mask=depth[None, :] < left, other=0.0)
        if EVEN_K and (NT or EVEN_MN):
            b_tile = tl.load(b_at)
        elif NT:
            b_tile = tl.load(b_at, mask=depth[:, None] < left, other=0.0)
        else:
            b_tile = tl.load(b_at, mask=(depth[:, None] < left) & (columns[None, :] < n), other=0.0)
        accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision=PRECISION)
        a_at += BLOCK_K
        b_at += b_step
    _store_pointer(c, accumulator, tile_m, tile_n, m, n, BLOCK_M, BLOCK_N, EVEN_MN)


@triton.jit
def _multiply(
    a: tl.tensor,
    b: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    at: tl.tensor,
    accumulator: tl.tensor,
    NT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Add the product of the tiles of A and B at depth `at`, both read through tensor maps."""
    a_tile = a.load([row, at])
    if NT:
        b_tile = b.load([column, at]).T
    else:
        b_tile = b.load([at, column])
    return tl.dot(a_tile, b_tile, accumulator, input_precision=PRECISION)


@triton.jit
def _store(
    c: tl.tensor,
    c_map: tl.tensor,
    accumulator: tl.tensor,
    tile_m: tl.tensor,
    tile_n: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_MN: tl.constexpr,
    STORE_MAP: tl.constexpr,
    SUBTILE: tl.constexpr,
) -> None:
    """Write a tile of C through its tensor map (in SUBTILE pieces) where the row pitch allows one, else through pointers."""
    if STORE_MAP:
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        if SUBTILE == 2:
            left, right = tl.split(tl.permute(tl.reshape(accumulator, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
            c_map.store([row, column], left.to(c.dtype.element_ty))
            c_map.store([row, column + BLOCK_N // 2], right.to(c.dtype.element_ty))
        else:
            c_map.store([row, column], accumulator.to(c.dtype.element_ty))
    else:
        _store_pointer(c, accumulator, tile_m, tile_n, m, n, BLOCK_M, BLOCK_N, EVEN_MN)


@triton.jit
def gemm_descriptor(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    NT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_MN: tl.constexpr,
    PRECISION: tl.constexpr,
    STORE_MAP: tl.constexpr,
    SUBTILE: tl.constexpr,
    PERSISTENT: tl.constexpr,
    FLATTEN: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
) -> None:
    """C [m, n] = A [m, k] times B through tensor maps that the program builds; B is [n, k] where NT, else [k, n]."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    steps = tl.cdiv(k, BLOCK_K)
    a_map = tl.make_tensor_descriptor(a, [m, k], [k, 1], [BLOCK_M, BLOCK_K])
    if NT:
        b_map = tl.make_tensor_descriptor(b, [n, k], [k, 1], [BLOCK_N, BLOCK_K])
    else:
        b_map = tl.make_tensor_descriptor(b, [k, n], [n, 1], [BLOCK_K, BLOCK_N])
    if STORE_MAP:
        c_map = tl.make_tensor_descriptor(c, [m, n], [n, 1], [BLOCK_M, BLOCK_N // SUBTILE])
    else:
        c_map = None
    first = tl.program_id(0)
    if PERSISTENT:
        for tile in tl.range(first, tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE):
            tile_m, tile_n = _tiles.place(tile, tiles_m, tiles_n, GROUP_M)
            accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for step in range(steps):
                accumulator = _multiply(a_map, b_map, tile_m * BLOCK_M, tile_n * BLOCK_N, step * BLOCK_K, accumulator, NT, PRECISION)
            _store(c, c_map, accumulator, tile_m, tile_n, m, n, BLOCK_M, BLOCK_N, EVEN_MN, STORE_MAP, SUBTILE)
    else:
        tile_m, tile_n = _tiles.place(first, tiles_m, tiles_n, GROUP_M)
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in tl.range(steps, warp_specialize=WARP_SPECIALIZE):
            accumulator = _multiply(a_map, b_map, tile_m * BLOCK_M, tile_n * BLOCK_N, step * BLOCK_K, accumulator, NT, PRECISION)
        _store(c, c_map, accumulator, tile_m, tile_n, m, n, BLOCK_M, BLOCK_N, EVEN_MN, STORE_MAP, SUBTILE)


def _pitches(workload: Workload) -> dict[str, int]:
    """Bytes from one row of A and of B to the next."""
    shape, size = workload.shape, DTYPE_BYTES[workload.dtype]
    return {"A": shape["k"] * size, "B": (shape["k"] if shape["layout"] == "nt" else shape["n"]) * size}


def _maps_fit(workload: Workload) -> bool:
    """Say whether A and B can be read through tensor maps: rows start on 16 B, coordinates are 32-bit."""
    extent = max(workload.shape[dim] for dim in "mnk")
    return all(pitch % 16 == 0 for pitch in _pitches(workload).values()) and extent <= _MAP_EXTENT_MAX


def _heights(m: int) -> tuple[int, ...]:
    """Heights of a tile worth trying: wgmma takes 64 rows or more; fewer are for few rows, where reading B is all that counts."""
    return tuple(block for block in (16, 32, 64, 128, 256) if block <= max(64, triton.next_power_of_2(m)) and (block >= 64 or m <= 64))


_WIDE = {"load": "descriptor", "block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "persistent": True}
_SPECIALISED = {"load": "descriptor", "block_k": 64, "num_warps": 4, "num_stages": 3, "persistent": True, "warp_specialize": True}
_STARTS = (
    {**_WIDE, "num_stages": 3, "group_m": 4},
    {**_WIDE, "num_stages": 3, "group_m": 8, "flatten": True},
    {**_WIDE, "num_stages": 4, "group_m": 8, "flatten": True, "epilogue_subtile": 2},
    {**_SPECIALISED, "block_m": 128, "block_n": 256, "group_m": 16},
    {**_SPECIALISED, "block_m": 128, "block_n": 128, "group_m": 8, "num_stages": 4},
    {"load": "pointer", "block_m": 64, "block_n": 128, "block_k": 32, "group_m": 1, "num_warps": 8, "num_stages": 2},
)
"""Best of earlier searches at 8192^3, 4096^3 and 1000 x 1003 x 517, bf16, H200 (docs/notes/gemm.md)."""


def space(workload: Workload, device: Device) -> Space:
    """The knobs: tile, order of the tiles, warps, pipeline depth, and how tiles are loaded, scheduled and stored.

    Every layout, dtype and shape has a variant.

    Source: the limits on registers and shared memory come from cross-compiling for sm_90a with Triton 3.6 and 3.9.
    """
    shape, size = workload.shape, DTYPE_BYTES[workload.dtype]
    m, n = shape["m"], shape["n"]
    fp32 = workload.dtype == "fp32"
    # cp.async copies 4 B at least; what it cannot copy passes through registers, in no pipeline
    asynchronous = all(pitch % 4 == 0 for pitch in _pitches(workload).values())
    depths = (16, 32, 64) if fp32 else (64, 128) if asynchronous else (32, 64)
    params = [
        Param(
            "load",
            ("descriptor", "pointer") if _maps_fit(workload) else ("pointer",),
            "tiles by tensor maps (TMA) or by addresses (cp.async)",
        ),
        Param("block_m", _heights(m), "rows of a tile of C"),
        Param("block_n", (32, 64, 128, 256) if m <= 64 else (64, 128, 256), "columns of a tile of C"),
        Param("block_k", depths, "depth of a tile of A and B"),
        Param("group_m", (1, 4, 8, 16), "rows of tiles in a band that is swept column by column"),
        Param("num_warps", (4, 8), "warps of a program, before the compiler adds those of warp specialisation"),
        Param("num_stages", (2, 3, 4, 5) if asynchronous else (2,), "tiles of A and B in flight"),
        Param("persistent", (False, True), "one program a multiprocessor, which loops over tiles", when=lambda load: load == "descriptor"),
        Param(
            "warp_specialize",
            (False,) if fp32 else (False, True),
            "one group of 4 warps loads, two multiply",
            when=lambda load: load == "descriptor",
        ),
        Param(
            "flatten",
            (False, True),
            "fuse the loops over tiles and depth, to load across tiles",
            when=lambda persistent, warp_specialize: persistent and not warp_specialize,
        ),
        Param(
            "epilogue_subtile",
            (1, 2) if n * size % 16 == 0 else (1,),
            "pieces in which a tile of C is stored, to save shared memory",
            when=lambda persistent, warp_specialize: persistent and not warp_specialize,
        ),
    ]
    if fp32:
        params.insert(1, Param("precision", ("tf32x3", "ieee"), "three TF32 tensor-core products for each, or FP32 arithmetic"))

    def tiles(block_m: int, block_n: int) -> int:
        return triton.cdiv(m, block_m) * triton.cdiv(n, block_n)

    def accumulators(block_m: int, block_n: int, num_warps: int) -> int:
        return block_m * block_n // (32 * num_warps)

    def pipeline_bytes(block_m: int, block_n: int, block_k: int, num_stages: int) -> int:
        # tf32x3 holds a tile of A once more
        return ((block_m + block_n) * num_stages + (block_m if fp32 else 0)) * block_k * size + _SMEM_MARGIN_BYTES

    def all_tiles_bytes(block_m: int, block_n: int, block_k: int, num_stages: int, copies: float = 1) -> float:
        return pipeline_bytes(block_m, block_n, block_k, num_stages) + block_m * block_n * size * copies

    limit = device.smem_per_block_bytes
    most = 64 if fp32 else 128
    constraints = [
        Constraint(lambda block_m, block_n: tiles(block_m, block_n) <= _INT32_MAX, f"a grid has at most {_INT32_MAX:,} programs"),
        Constraint(
            lambda block_m, group_m: group_m == 1 or group_m <= triton.cdiv(m, block_m),
            f"a band has no more rows of tiles than C ({m} rows)",
        ),
        Constraint(
            lambda block_m, block_n, num_warps: num_warps == 4 or accumulators(block_m, block_n, num_warps) >= 32 or block_m < 64,
            "8 warps share a tile of 8,192 elements or more: 32 accumulators a thread",
        ),
        Constraint(
            lambda block_m, block_n, block_k, num_stages: pipeline_bytes(block_m, block_n, block_k, num_stages) <= limit,
            f"the tiles of A and B in flight take at most {limit:,} B of shared memory",
        ),
    ]
    # elements of one load: what divides the rows of A and B, up to 16 B
    vector = max(1, math.gcd(16, *_pitches(workload).values()) // size)
    constraints.append(
        Constraint(
            lambda load, block_m, block_n, block_k, num_warps: (
                load == "descriptor" or (block_m + block_n) * block_k <= 32 * vector * 32 * num_warps
            ),
            f"at most 32 loads of A and B a thread, here of {vector * size} B: their addresses fill the registers",
        )
    )
    if fp32:
        constraints += [
            Constraint(
                lambda precision, block_k: block_k <= 32 if precision == "ieee" else block_k >= 32,
                "depths of 16 and 32 are for ieee, of 32 and 64 for tf32x3",
            ),
            Constraint(
                lambda block_m, block_n, block_k, num_warps: block_k < 64 or accumulators(block_m, block_n, num_warps) <= 32,
                "with a depth of 64 at most 32 accumulators a thread: the split operands of tf32x3 spill beside more",
            ),
            Constraint(
                lambda load, precision: load == "pointer" or precision == "tf32x3",
                "FP32 arithmetic loads through pointers: on tensor-map tiles it spills over 5,000 B a thread",
            ),
        ]
    all_fit = f"the tiles of A and B in flight and that of C take at most {limit:,} B of shared memory"
    too_many = f"a thread holds at most {most} accumulators: with more the operands spill (255 registers)"
    constraints += [
        # two groups of 4 warps share the tile where the compiler specialises
        Constraint(
            lambda load, block_m, block_n, num_warps: load == "descriptor" or accumulators(block_m, block_n, num_warps) <= most, too_many
        ),
        Constraint(
            lambda block_m, block_n, num_warps, warp_specialize: (
                accumulators(block_m, block_n, num_warps * (2 if warp_specialize else 1)) <= most
            ),
            too_many,
        ),
        Constraint(
            lambda block_m, block_n, persistent: not persistent or tiles(block_m, block_n) > device.sm_count,
            f"a persistent grid has more tiles to do than the {device.sm_count} multiprocessors",
        ),
        Constraint(
            lambda num_warps, warp_specialize: num_warps == 4 or not warp_specialize,
            "warp specialisation starts from 4 warps: with 8 the compiler ignores it without a word",
        ),
        Constraint(
            lambda block_m, block_n, warp_specialize: (
                not warp_specialize or (block_m >= 64 and (block_m, block_n) != (64, 256) and block_n >= 64)
            ),
            "warp specialisation halves the tile: 64 rows and columns at least, and not 64x256, which fails an assertion of the compiler",
        ),
        # C has shared memory of its own where loads of the next tile begin before it is stored, and always in fp32
        Constraint(
            lambda block_m, block_n, block_k, num_stages, persistent, warp_specialize: (
                not (warp_specialize or (fp32 and not persistent))
                # a tile of 64 rows is split by columns, through a second copy of C
                or all_tiles_bytes(block_m, block_n, block_k, num_stages, 2 if warp_specialize and block_m == 64 else 1) <= limit
            ),
            all_fit,
        ),
        Constraint(
            lambda block_m, block_n, block_k, num_stages, epilogue_subtile: (
                all_tiles_bytes(block_m, block_n, block_k, num_stages, 1 / epilogue_subtile) <= limit
            ),
            all_fit,
        ),
    ]
    return Space(params, constraints, _STARTS)


def program(workload: Workload, config: Config) -> _compile.Program:
    """What a configuration compiles and launches."""
    shape = workload.shape
    m, n, k = shape["m"], shape["n"], shape["k"]
    block_m, block_n, block_k = config["block_m"], config["block_n"], config["block_k"]
    tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    constants = {
        "NT": shape["layout"] == "nt",
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP_M": config["group_m"],
        "EVEN_MN": m % block_m == 0 and n % block_n == 0,
        "PRECISION": config.get("precision", "ieee"),
    }
    persistent = config.get("persistent", False)
    if config["load"] == "descriptor":
        function = gemm_descriptor
        constants |= {
            "STORE_MAP": n * DTYPE_BYTES[workload.dtype] % 16 == 0,
            "SUBTILE": config.get("epilogue_subtile", 1),
            "PERSISTENT": persistent,
            "FLATTEN": config.get("flatten", False),
            "WARP_SPECIALIZE": config.get("warp_specialize", False),
        }
    else:
        function = gemm_pointer
        constants["EVEN_K"] = k % block_k == 0
    return _compile.Program(
        function=function,
        dtype=workload.dtype,
        sizes={"m": m, "n": n, "k": k},
        constants=constants,
        grid=lambda sm_count: (min(tiles, sm_count) if persistent else tiles, 1, 1),
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; needs no GPU."""
    return _compile.build(program(workload, config), config, arch)


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load a built configuration on the current GPU."""
    return _compile.load(program(workload, artifact.config), artifact.arch)

"""Grouped product of a mixture of experts in Triton: one launch over ragged groups of rows, each times its expert's weights.

Knobs are named as vLLM's and SGLang's fused_moe kernels name theirs, so that a configuration can be carried over.
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
from kerneldyno.core import Tensors
from kerneldyno.core import Workload
from kerneldyno.core.ragged import RaggedTiles
from kerneldyno.core.ragged import most_tiles
from kerneldyno.errors import Unsupported


# tensor-map coordinates are 32-bit; the margin keeps the far edge of the last tile in range
_MAP_EXTENT_MAX = 2**31 - 2**20
_INT32_MAX = 2**31 - 1
# barriers and scratch beside the tiles: at most 616 B seen with Triton 3.6 and 3.9
_SMEM_MARGIN_BYTES = 1280


@triton.jit
def _store(
    c: tl.tensor,
    c_map: tl.tensor,
    accumulator: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    column: tl.tensor,
    n: tl.tensor,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr,
    SWAP_AB: tl.constexpr,
    STORE_MAP: tl.constexpr,
) -> None:
    """Write the rows of a tile of C that are before `end`; the rest are another group's."""
    values = accumulator.to(c.dtype.element_ty)
    if STORE_MAP:
        c_map.store([start, column], values)
    else:
        rows = start + tl.arange(0, HEIGHT)
        columns = column + tl.arange(0, BLOCK_N)
        if SWAP_AB:
            address = c + rows.to(tl.int64)[None, :] * n + columns[:, None]
            inside = (rows < end)[None, :] & (columns < n)[:, None]
        elif EVEN_N:
            address = c + rows.to(tl.int64)[:, None] * n + columns[None, :]
            inside = (rows < end)[:, None]
        else:
            address = c + rows.to(tl.int64)[:, None] * n + columns[None, :]
            inside = (rows < end)[:, None] & (columns < n)[None, :]
        tl.store(address, values, mask=inside)


@triton.jit
def _tile(
    a: tl.tensor,
    index: tl.tensor,
    w: tl.tensor,
    c: tl.tensor,
    a_map: tl.tensor,
    w_map: tl.tensor,
    group: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    column: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATHER: tl.constexpr,
    MAPS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    STORE_MAP: tl.constexpr,
) -> None:
    """Compute and write one tile of C: HEIGHT rows from `start`, less those from `end` on, and BLOCK_N columns of their group's.

    Rows of A beyond `end` are read (they are another group's, or zeros) and never written.
    """
    # a tensor map that ends where the group does: the hardware drops the rows beyond; made early, since it takes a microsecond
    c_map = tl.make_tensor_descriptor(c, [end, n], [n, 1], [HEIGHT, BLOCK_N]) if STORE_MAP else None
    depth = tl.arange(0, BLOCK_K)
    if GATHER or not MAPS:
        # rows beyond the group repeat its last: in range, with no mask to evaluate
        rows = tl.minimum(start + tl.arange(0, HEIGHT), end - 1)
        if GATHER:
            rows = tl.load(index + rows)
        a_at = a + rows.to(tl.int64)[:, None] * k + depth[None, :]
    else:
        a_at = a
    if MAPS:
        w_at = w
    else:
        columns = column + tl.arange(0, BLOCK_N)
        w_rows = group.to(tl.int64) * n + (columns if EVEN_N else tl.minimum(columns, n - 1))
        w_at = w + w_rows[:, None] * k + depth[None, :]
    if SWAP_AB:
        accumulator = tl.zeros((BLOCK_N, HEIGHT), dtype=tl.float32)
    else:
        accumulator = tl.zeros((HEIGHT, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(k, BLOCK_K)):
        if MAPS:
            # columns beyond n are the next expert's first: read, and never written
            w_tile = w_map.load([group * n + column, step * BLOCK_K])
        elif EVEN_K:
            w_tile = tl.load(w_at + step * BLOCK_K)
        else:
            w_tile = tl.load(w_at + step * BLOCK_K, mask=depth[None, :] < k - step * BLOCK_K, other=0.0)
        if MAPS and not GATHER:
            a_tile = a_map.load([start, step * BLOCK_K])
        elif EVEN_K:
            a_tile = tl.load(a_at + step * BLOCK_K)
        else:
            a_tile = tl.load(a_at + step * BLOCK_K, mask=depth[None, :] < k - step * BLOCK_K, other=0.0)
        if SWAP_AB:
            accumulator = tl.dot(w_tile, a_tile.T, accumulator)
        else:
            accumulator = tl.dot(a_tile, w_tile.T, accumulator)
    _store(c, c_map, accumulator, start, end, column, n, HEIGHT, BLOCK_N, EVEN_N, SWAP_AB, STORE_MAP)


@triton.jit
def _take(
    tile: tl.tensor,
    tiles_m: tl.tensor,
    tiles_n: tl.tensor,
    a: tl.tensor,
    index: tl.tensor,
    w: tl.tensor,
    offsets: tl.tensor,
    groups: tl.tensor,
    starts: tl.tensor,
    c: tl.tensor,
    a_map: tl.tensor,
    short_map: tl.tensor,
    w_map: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SHORT: tl.constexpr,
    GATHER: tl.constexpr,
    MAPS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    STORE_MAP: tl.constexpr,
) -> None:
    """Find the group and rows of tile number `tile`, and compute it: as one of SHORT rows where it has no more (0: never)."""
    tile_m, tile_n = _tiles.place(tile, tiles_m, tiles_n, GROUP_M)
    group = tl.load(groups + tile_m)
    start = tl.load(starts + tile_m)
    end = tl.minimum(start + BLOCK_M, tl.load(offsets + group))
    column = tile_n * BLOCK_N
    # fmt: off
    if SHORT > 0 and end - start <= SHORT:
        # swapped: so few rows still fill the tensor cores
        _tile(
            a, index, w, c, short_map, w_map, group, start, end, column, n, k,
            SHORT, BLOCK_N, BLOCK_K, GATHER, MAPS, EVEN_N, EVEN_K, True, False,
        )
    else:
        _tile(
            a, index, w, c, a_map, w_map, group, start, end, column, n, k,
            BLOCK_M, BLOCK_N, BLOCK_K, GATHER, MAPS, EVEN_N, EVEN_K, SWAP_AB, STORE_MAP,
        )
    # fmt: on


@triton.jit
def moe_gemm(
    a: tl.tensor,
    index: tl.tensor,
    w: tl.tensor,
    offsets: tl.tensor,
    groups: tl.tensor,
    starts: tl.tensor,
    needed: tl.tensor,
    c: tl.tensor,
    rows_a: tl.tensor,
    rows_w: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    SHORT: tl.constexpr,
    GATHER: tl.constexpr,
    MAPS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    STORE_MAP: tl.constexpr,
    PERSISTENT: tl.constexpr,
    FLATTEN: tl.constexpr,
) -> None:
    """C [rows, n]: each group's rows of A [rows_a, k] (through `index` where GATHER) times its rows of W [experts * n, k], transposed.

    Tile i of the `needed` tiles of rows is the group `groups[i]`'s, from row `starts[i]` to BLOCK_SIZE_M further or the group's end.
    """
    tiles_m = tl.load(needed)
    tiles_n = tl.cdiv(n, BLOCK_SIZE_N)
    a_map = tl.make_tensor_descriptor(a, [rows_a, k], [k, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K]) if MAPS and not GATHER else None
    short_map = tl.make_tensor_descriptor(a, [rows_a, k], [k, 1], [SHORT, BLOCK_SIZE_K]) if SHORT > 0 and MAPS and not GATHER else None
    w_map = tl.make_tensor_descriptor(w, [rows_w, k], [k, 1], [BLOCK_SIZE_N, BLOCK_SIZE_K]) if MAPS else None
    # fmt: off
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
            _take(
                tile, tiles_m, tiles_n, a, index, w, offsets, groups, starts, c, a_map, short_map, w_map, n, k,
                BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, GROUP_SIZE_M, SHORT, GATHER, MAPS, EVEN_N, EVEN_K, SWAP_AB, STORE_MAP,
            )
    elif tl.program_id(0) < tiles_m * tiles_n:
        _take(
            tl.program_id(0), tiles_m, tiles_n, a, index, w, offsets, groups, starts, c, a_map, short_map, w_map, n, k,
            BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, GROUP_SIZE_M, SHORT, GATHER, MAPS, EVEN_N, EVEN_K, SWAP_AB, STORE_MAP,
        )
    # fmt: on


_MAPS = {"access": "descriptors"}
_STREAM = {**_MAPS, "BLOCK_SIZE_M": 16, "GROUP_SIZE_M": 1, "num_warps": 4, "swap_ab": True}
_MIDDLE = {**_MAPS, "BLOCK_SIZE_M": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 4}
_WIDE = {**_MAPS, "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "num_warps": 8}
_FEW = (
    {**_STREAM, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "num_stages": 5},
    {**_STREAM, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "num_stages": 5},
    {**_STREAM, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "num_stages": 5, "programs_per_sm": 2, "flatten": True},
    {**_STREAM, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 256, "num_stages": 3},
    {**_STREAM, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "num_stages": 5, "swap_ab": False},
)
_MANY = (
    {**_WIDE, "num_stages": 4, "short": 32},
    {**_WIDE, "num_stages": 3, "programs_per_sm": 1, "store": "descriptors", "short": 32},
    {**_WIDE, "num_stages": 4, "programs_per_sm": 1, "flatten": True},
    {**_WIDE, "num_stages": 4, "short": 64, "store": "descriptors"},
    {**_MIDDLE, "BLOCK_SIZE_N": 256, "num_warps": 8, "num_stages": 4, "short": 16},
    {**_MIDDLE, "BLOCK_SIZE_N": 128, "num_warps": 4, "num_stages": 4, "short": 16},
)
"""For groups of few rows and of many: the best of those tried on an H200 (docs/notes/moe_gemm.md)."""


def _check(workload: Workload) -> None:
    """Raise `errors.Unsupported` for what there is no variant for."""
    rows = workload.shape["tokens"] * workload.shape["top_k"]
    if workload.dtype not in ("bf16", "fp16"):
        raise Unsupported(f"moe_gemm on triton in {workload.dtype}: it multiplies in bf16 and fp16")
    if rows > _MAP_EXTENT_MAX:
        raise Unsupported(f"moe_gemm on triton with {rows:,} routed rows: they are counted in 32 bits, to {_MAP_EXTENT_MAX:,}")


def _heights(tokens: int, mean: float) -> tuple[int, ...]:
    """Heights of a tile worth trying: a group has `tokens` rows at most; below 64, wgmma's least, only where groups are small."""
    return tuple(
        block for block in (16, 32, 64, 128, 256) if block <= max(16, triton.next_power_of_2(tokens)) and (block >= 64 or mean <= 64)
    )


def space(workload: Workload, device: Device) -> Space:
    """The knobs: tile, order of the tiles, warps, pipeline depth, and how tiles are loaded, scheduled and stored.

    Every shape has a variant.

    Source: the limits on registers and shared memory come from cross-compiling for sm_90a with Triton 3.6 and 3.9.

    Raises:
        errors.Unsupported: For another dtype than bf16 and fp16, and for more rows than 32 bits count.
    """
    _check(workload)
    shape, size = workload.shape, DTYPE_BYTES[workload.dtype]
    tokens, experts, n, k, gather = shape["tokens"], shape["experts"], shape["n"], shape["k"], shape["gather"]
    rows = tokens * shape["top_k"]
    # a tensor map wants rows that start on 16 B; cp.async copies 4 B at least, what it cannot copy passes through registers
    maps = k * size % 16 == 0 and max(experts * n, k) <= _MAP_EXTENT_MAX
    asynchronous = k * size % 4 == 0
    # the mean of a group's rows
    few = rows <= 24 * experts
    heights = _heights(tokens, rows / experts)
    params = [
        Param(
            "access",
            ("descriptors", "pointers") if maps else ("pointers",),
            "tiles by tensor maps (TMA; gathered rows not) or by addresses (cp.async)",
        ),
        Param("BLOCK_SIZE_M", heights, "rows of a tile of C, all of one expert"),
        Param("BLOCK_SIZE_N", tuple(block for block in (32, 64, 128, 256) if block <= max(32, triton.next_power_of_2(n))), "columns"),
        Param("BLOCK_SIZE_K", (32, 64, 128, 256) if asynchronous else (32, 64), "depth of a tile of A and W"),
        Param("GROUP_SIZE_M", (1, 4, 8, 16, 32, 64), "rows of tiles in a band that is swept column by column"),
        Param("num_warps", (4, 8), "warps of a program"),
        Param("num_stages", (2, 3, 4, 5) if asynchronous else (2,), "tiles of A and W in flight"),
        Param(
            "programs_per_sm",
            (0, 1, 2, 3),
            "persistent programs a multiprocessor, which loop over tiles; 0: one program a tile",
            when=lambda access: access == "descriptors",
        ),
        Param(
            "flatten",
            (False, True),
            "fuse the loops over tiles and depth, to load across tiles",
            when=lambda programs_per_sm: programs_per_sm > 0,
        ),
        Param(
            "swap_ab",
            (False, True),
            "weights as the left operand, so that few rows of A still fill the tensor cores",
            when=lambda BLOCK_SIZE_M: BLOCK_SIZE_M <= 64,
        ),
        Param(
            "store",
            ("pointers", "descriptors") if n * size % 16 == 0 else ("pointers",),
            "tiles of C by masked addresses, or by a tensor map of the group's rows",
            when=lambda programs_per_sm: programs_per_sm >= 0,
        ),
        Param(
            "short",
            (0, 16, 32, 64),
            "a group's last tile with as few rows is computed as a tile of so many, swapped; 0: as any other",
            when=lambda programs_per_sm: programs_per_sm >= 0,
        ),
    ]
    limit = device.smem_per_block_bytes

    def tiles(block_m: int, block_n: int) -> int:
        return most_tiles(rows, experts, block_m) * triton.cdiv(n, block_n)

    def accumulators(block_m: int, block_n: int, num_warps: int) -> int:
        return block_m * block_n // (32 * num_warps)

    def pipeline_bytes(block_m: int, block_n: int, block_k: int, num_stages: int) -> int:
        return (block_m + block_n) * num_stages * block_k * size + _SMEM_MARGIN_BYTES

    def all_tiles_bytes(block_m: int, block_n: int, block_k: int, num_stages: int, pieces: int = 1) -> int:
        return pipeline_bytes(block_m, block_n, block_k, num_stages) + block_m * block_n * size // pieces

    def pieces(block_m: int, block_n: int) -> int:
        # a tile of C changes its layout on the way to its addresses: whole, or in halves where it is larger
        return 2 if block_m * block_n > 128 * 128 else 1

    # elements of one load: what divides the rows of A and W, up to 16 B
    vector = max(1, math.gcd(16, k * size) // size)
    all_fit = f"the tiles of A and W in flight and that of C take at most {limit:,} B of shared memory"
    swapped = "in a swapped tile every warp takes 16 columns or more"
    constraints = [
        Constraint(
            lambda BLOCK_SIZE_M, BLOCK_SIZE_N: tiles(BLOCK_SIZE_M, BLOCK_SIZE_N) <= _INT32_MAX,
            f"a grid has at most {_INT32_MAX:,} programs",
        ),
        Constraint(
            lambda BLOCK_SIZE_M, GROUP_SIZE_M: GROUP_SIZE_M == 1 or GROUP_SIZE_M <= triton.cdiv(tokens, BLOCK_SIZE_M),
            f"a band has no more tiles than one expert can have ({tokens} rows)",
        ),
        Constraint(
            lambda BLOCK_SIZE_M, BLOCK_SIZE_N, num_warps: num_warps == 4 or accumulators(BLOCK_SIZE_M, BLOCK_SIZE_N, num_warps) >= 16,
            "8 warps share a tile of 4,096 elements or more: 16 accumulators a thread",
        ),
        Constraint(
            lambda BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_stages: (
                pipeline_bytes(BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_stages) <= limit
            ),
            f"the tiles of A and W in flight take at most {limit:,} B of shared memory",
        ),
        Constraint(
            lambda access, BLOCK_SIZE_K: access == "pointers" or BLOCK_SIZE_K >= 64,
            "tiles of tensor maps are 64 deep or more: rows of 128 B, which a map's swizzle keeps free of bank conflicts",
        ),
        Constraint(
            lambda access, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps: (
                (BLOCK_SIZE_M * (gather or access == "pointers") + BLOCK_SIZE_N * (access == "pointers")) * BLOCK_SIZE_K
                <= 32 * vector * 32 * num_warps
            ),
            f"at most 32 loads of A and W a thread, here of {vector * size} B: their addresses fill the registers",
        ),
        Constraint(
            lambda BLOCK_SIZE_M, BLOCK_SIZE_N, num_warps: accumulators(BLOCK_SIZE_M, BLOCK_SIZE_N, num_warps) <= 128,
            "a thread holds at most 128 accumulators: with more the operands spill (255 registers)",
        ),
        Constraint(
            lambda BLOCK_SIZE_M, BLOCK_SIZE_N, programs_per_sm: (
                programs_per_sm == 0 or tiles(BLOCK_SIZE_M, BLOCK_SIZE_N) > programs_per_sm * device.sm_count
            ),
            f"a persistent grid has more tiles to do than programs on the {device.sm_count} multiprocessors",
        ),
        Constraint(
            lambda BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_stages, programs_per_sm: (
                programs_per_sm <= 1
                or programs_per_sm * pipeline_bytes(BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_stages) <= device.smem_per_sm_bytes
            ),
            f"the persistent programs of a multiprocessor share its {device.smem_per_sm_bytes:,} B of shared memory",
        ),
        Constraint(
            lambda BLOCK_SIZE_M, BLOCK_SIZE_N, num_warps, programs_per_sm: (
                programs_per_sm <= 1 or programs_per_sm * BLOCK_SIZE_M * BLOCK_SIZE_N <= 128 * 256
            ),
            "the persistent programs of a multiprocessor hold at most 32,768 accumulators, half its registers",
        ),
        Constraint(
            lambda BLOCK_SIZE_N, num_warps, swap_ab: not swap_ab or BLOCK_SIZE_N >= 16 * num_warps,
            swapped,
        ),
        Constraint(lambda swap_ab, store: not swap_ab or store == "pointers", "a swapped tile of C is stored by addresses"),
        Constraint(lambda BLOCK_SIZE_M, short: short < BLOCK_SIZE_M, "a short tile is shorter than the others"),
        Constraint(lambda flatten, short: not (flatten and short), "loops are fused around one kind of tile"),
        Constraint(lambda BLOCK_SIZE_N, num_warps, short: not short or BLOCK_SIZE_N >= 16 * num_warps, swapped),
        # C has shared memory of its own where it is stored by a tensor map, or loads of the next tile begin before it is stored
        Constraint(
            lambda BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_stages, programs_per_sm, store: (
                programs_per_sm == 0
                or store == "pointers"
                or all_tiles_bytes(BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_stages) <= limit
            ),
            all_fit,
        ),
        Constraint(
            lambda BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_stages, flatten: (
                not flatten
                or all_tiles_bytes(BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_stages, pieces(BLOCK_SIZE_M, BLOCK_SIZE_N)) <= limit
            ),
            all_fit,
        ),
    ]
    return Space(params, constraints, _FEW + _MANY if few else _MANY + _FEW)


def program(workload: Workload, config: Config) -> _compile.Program:
    """What a configuration compiles and launches."""
    shape = workload.shape
    tokens, experts, n, k = shape["tokens"], shape["experts"], shape["n"], shape["k"]
    rows = tokens * shape["top_k"]
    block_m, block_n, block_k = config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"], config["BLOCK_SIZE_K"]
    tiles = most_tiles(rows, experts, block_m) * triton.cdiv(n, block_n)
    resident = config.get("programs_per_sm", 0)
    constants = {
        "BLOCK_SIZE_M": block_m,
        "BLOCK_SIZE_N": block_n,
        "BLOCK_SIZE_K": block_k,
        "GROUP_SIZE_M": config["GROUP_SIZE_M"],
        "SHORT": config.get("short", 0),
        "GATHER": shape["gather"],
        "MAPS": config["access"] == "descriptors",
        "EVEN_N": n % block_n == 0,
        "EVEN_K": k % block_k == 0,
        "SWAP_AB": config.get("swap_ab", False),
        "STORE_MAP": config.get("store", "pointers") == "descriptors",
        "PERSISTENT": resident > 0,
        "FLATTEN": config.get("flatten", False),
    }
    if not shape["gather"]:
        constants["index"] = 0
    return _compile.Program(
        function=moe_gemm,
        dtype=workload.dtype,
        sizes={"rows_a": tokens if shape["gather"] else rows, "rows_w": experts * n, "n": n, "k": k},
        constants=constants,
        grid=lambda sm_count: (min(tiles, resident * sm_count) if resident else tiles, 1, 1),
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        dtypes=dict.fromkeys(("index", "offsets", "groups", "starts", "needed"), "i32"),
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; needs no GPU."""
    return _compile.build(program(workload, config), config, arch)


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load a built configuration on the current GPU."""
    return RoutedLaunch(_compile.load(program(workload, artifact.config), artifact.arch), workload, artifact.config)


class RoutedLaunch:
    """A loaded program, with the tiles of the routing that it was prepared for.

    Args:
        program: The loaded program; it is bound to the inputs and the tiles.
        workload: What it computes.
        config: The configuration it was built from.
    """

    def __init__(self, program: Launch, workload: Workload, config: Config) -> None:
        self._program = program
        self._workload = workload
        self._block_m = int(config["BLOCK_SIZE_M"])

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind tensors, and lay out the tiles."""
        import torch

        shape = self._workload.shape
        self._offsets = inputs["offsets"]
        self._tiles = RaggedTiles(shape["tokens"] * shape["top_k"], shape["experts"], self._block_m, self._offsets.device)
        self._needed = torch.empty(1, dtype=torch.int32, device=self._offsets.device)
        self.layout()
        bound = {**inputs, "groups": self._tiles.groups, "starts": self._tiles.starts, "needed": self._needed}
        if shape["gather"]:
            bound["a"] = bound.pop("x")
        self._program.prepare(bound, outputs)

    def layout(self) -> None:
        """Lay out the tiles for the routing: a few torch operations on the device, without a wait."""
        import torch

        self._tiles.fill(self._offsets)
        torch.sum(self._tiles.groups >= 0, dim=0, keepdim=True, dtype=torch.int32, out=self._needed)

    def run(self) -> None:
        """Launch once on torch's current stream."""
        self._program.run()

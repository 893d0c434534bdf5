"""Grouped product of a mixture of experts in TileLang: one launch over ragged groups of rows, on the tensor cores in two schedules."""

import tilelang

from kerneldyno.backends.tilelang import _compile
from kerneldyno.backends.tilelang import _overlap
from kerneldyno.backends.tilelang import _ragged
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


_TMA_PITCH_BYTES = 16
"""A tensor map's rows start at multiples of this. Source: CUDA driver API, cuTensorMapEncodeTiled."""

_TOKENS_BYTES = 1024
"""Shared memory for the rows that a tile gathers: at most 256 of 4 bytes."""

_MOST_GRID_Y = 65_535
"""Source: CUDA C++ Programming Guide, compute capabilities, greatest y-dimension of a grid."""

_MOST_SUMS = {1: 128, 2: 128, 3: 96}
"""Sums a thread can hold by warpgroups that compute: 240 registers a thread, 152 where there are three."""


_WIDE = {"schedule": "overlapped", "swap": False, "block_k": 64, "panel": 8, "pieces": 2}
_FEW = {"swap": True, "panel": 1}
_STARTS = (
    {**_WIDE, "block_m": 128, "block_n": 256, "stages": 4, "warpgroups": 2},
    {**_WIDE, "block_m": 192, "block_n": 128, "stages": 4, "warpgroups": 3},
    {**_WIDE, "block_m": 256, "block_n": 128, "stages": 4, "warpgroups": 2},
    {**_WIDE, "block_m": 128, "block_n": 128, "stages": 6, "warpgroups": 2, "panel": 2},
    {**_WIDE, "block_m": 128, "block_n": 64, "stages": 6, "warpgroups": 1, "pieces": 1},
    {**_FEW, "schedule": "overlapped", "block_m": 16, "block_n": 128, "block_k": 128, "stages": 5, "warpgroups": 2},
    {**_FEW, "schedule": "overlapped", "block_m": 8, "block_n": 64, "block_k": 128, "stages": 8, "warpgroups": 1},
    {**_FEW, "schedule": "pipelined", "block_m": 16, "block_n": 64, "block_k": 128, "stages": 4, "warpgroups": 1},
    {**_FEW, "schedule": "overlapped", "block_m": 32, "block_n": 128, "block_k": 128, "stages": 4, "warpgroups": 2},
    {"schedule": "pipelined", "swap": False, "block_m": 64, "block_n": 64, "block_k": 64, "stages": 2, "warpgroups": 1, "panel": 4},
)
"""The wide ones by the best of gemm's searches, the others by the bytes that they keep on their way. Figures: docs/notes/moe_gemm.md."""


def space(workload: Workload, device: Device) -> Space:
    """The knobs: which operand is the tensor cores' left one, tile, pipeline, warpgroups and the order of tiles.

    Args:
        workload: C [rows, n], each row A's times the transpose of its expert's [n, k].
        device: The GPU, for its shared memory and its multiprocessors.

    Raises:
        Unsupported: On a GPU without wgmma, or in float32.
    """
    if not device.arch.startswith("sm_90"):
        raise Unsupported(f"moe_gemm in TileLang is written for wgmma (sm_90a); {device.name} is {device.arch}")
    if workload.dtype == "fp32":
        raise Unsupported("moe_gemm in TileLang is for bf16 and fp16: the tensor cores would round float32 to TF32")
    shape = workload.shape
    experts, n, k = (int(shape[dim]) for dim in ("experts", "n", "k"))
    rows = int(shape["tokens"]) * int(shape["top_k"])
    gather = bool(shape["gather"])
    even = int(shape["tokens"]) if shape["routing"] == "one_hot" else -(-rows // min(experts, rows))
    size = DTYPE_BYTES[workload.dtype]
    limit = device.smem_per_block_bytes - _compile.STATIC_SMEM_BYTES - _TOKENS_BYTES
    k_mapped, n_mapped = (extent * size % _TMA_PITCH_BYTES == 0 for extent in (k, n))
    return Space(
        [
            Param(
                "schedule",
                ("overlapped", "pipelined") if k_mapped and n_mapped else ("pipelined",),
                "overlapped: by hand, one group of wgmma stays in flight; pipelined: by the compiler",
            ),
            Param("swap", (False, True), "the weights are the tensor cores' left operand, of at least 64 rows, so that a tile may have 8"),
            Param("block_m", (8, 16, 32, 64, 128, 192, 256), "rows of a tile of C, all of one expert"),
            Param("block_n", (64, 128, 192, 256), "columns of a tile of C"),
            Param("block_k", (32, 64, 128, 256), "depth of one step of the pipeline"),
            Param("stages", (2, 3, 4, 5, 6, 8), "steps in flight between global and shared memory"),
            Param("warpgroups", (1, 2, 3), "groups of 128 threads that compute; a producer comes on top where warps are specialised"),
            Param("panel", (1, 2, 4, 8, 16), "rows of tiles that blocks in flight share, for the L2 cache"),
            Param(
                "blocks",
                (device.sm_count, 0),
                "blocks that take tiles in turn; 0: one block a tile",
                when=lambda schedule: schedule == "overlapped",
            ),
            Param(
                "pieces",
                (1, 2, 4),
                "pieces in which a tile of C goes through shared memory",
                when=lambda schedule, swap: schedule == "overlapped" and not swap,
            ),
            Param(
                "specialise",
                (True, False),
                "a producer warpgroup loads through tensor maps; else every thread loads, with cp.async",
                # a producer cannot gather, as the compiler specialises: the computing threads would, one step at a time
                when=lambda schedule: schedule == "pipelined" and k_mapped and not gather,
            ),
        ],
        [
            Constraint(
                lambda swap, block_m: block_m <= 64 if swap else block_m >= 64,
                "a tile of C has at most 64 rows where operands are swapped, at least 64, the tensor cores' least, where not",
            ),
            Constraint(
                lambda block_m: min(64, even // 4) <= block_m <= max(16, 4 * even),
                f"a tile has a quarter to four times the rows of a group ({even} where all get the same), or 64 and more, or 8 and 16",
            ),
            Constraint(
                lambda block_n: block_n == 64 or block_n < 2 * n,
                f"a tile is less than twice as wide as C ({n} columns)",
            ),
            Constraint(
                lambda block_k: block_k == 32 or block_k < 2 * k,
                f"a step is less than twice as deep as the weights ({k})",
            ),
            Constraint(
                lambda schedule, block_m: schedule == "overlapped" or most_tiles(rows, experts, block_m) <= _MOST_GRID_Y,
                f"a grid has at most {_MOST_GRID_Y} rows of tiles",
            ),
            Constraint(
                lambda swap, block_k, stages: block_k >= min(64, k) if swap else 128 <= block_k * stages <= 384,
                "the pipeline holds 128 to 384 of k: less starves the tensor cores, more is never used; steps of at least 64 where swapped",
            ),
            Constraint(
                lambda swap, block_m, block_n, warpgroups: (block_n if swap else block_m) % (64 * warpgroups) == 0,
                "a warpgroup has multiples of 64 rows of its own of the left operand",
            ),
            Constraint(
                lambda swap, block_m, block_n, warpgroups: (
                    (0 if swap else 32) <= block_m * block_n // (128 * warpgroups) <= _MOST_SUMS[warpgroups]
                ),
                "a thread sums 32 (fewer where operands are swapped) to 128 elements, 96 where three warpgroups compute",
            ),
            Constraint(
                lambda schedule, swap, block_m, block_n, block_k, warpgroups: (
                    schedule == "pipelined" or (block_n if swap else block_m) // (64 * warpgroups) * (block_k // 16) <= 8
                ),
                "a warpgroup queues at most 8 wgmma a step in the overlapped schedule: ptxas runs 16 one by one",
            ),
            Constraint(
                lambda block_n, pieces: block_n % (64 * pieces) == 0,
                "a piece is multiples of 64 columns wide: 128 bytes, the span of the swizzle",
            ),
            Constraint(
                lambda swap, block_m, block_n, block_k, stages: not swap or stages * (block_m + block_n) * block_k * size >= 32_768,
                "a block keeps at least 32 KB on their way where operands are swapped: that is what memory's latency asks for",
            ),
            Constraint(
                lambda block_m, block_n, block_k, stages, pieces: (
                    stages * (block_m + block_n) * block_k * size + block_m * block_n * size // pieces <= limit
                ),
                f"shared memory (stages x tiles of A and W, and a piece of C) is at most {limit} bytes a block",
            ),
            Constraint(
                lambda schedule, swap, block_m, block_n, block_k, stages: (
                    (schedule == "overlapped" and not swap)
                    or stages * (block_m + block_n) * block_k * size + block_m * block_n * size <= limit
                ),
                f"shared memory (stages x tiles of A and W, and a tile of C, in pieces or not) is at most {limit} bytes a block",
            ),
        ],
        _STARTS,
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration for an architecture such as "sm_90a"."""
    return _compile.build(program(workload, config), config, arch)


def program(workload: Workload, config: Config) -> _compile.Program:
    """Write the TileLang function of one configuration."""
    shape = workload.shape
    tokens, experts = int(shape["tokens"]), int(shape["experts"])
    rows = tokens * int(shape["top_k"])
    gather = bool(shape["gather"])
    product = _ragged.Grouped(
        rows=rows,
        a_rows=tokens if gather else rows,
        groups=experts,
        n=int(shape["n"]),
        k=int(shape["k"]),
        tiles_m=most_tiles(rows, experts, int(config["block_m"])),
        gather=gather,
        dtype=_compile.DTYPES[workload.dtype],
    )
    tile = {key: int(config[key]) for key in ("block_m", "block_n", "block_k", "stages", "panel", "warpgroups")}
    swap = bool(config["swap"])
    if config["schedule"] == "overlapped":
        function = _ragged.overlapped(product, **tile, swap=swap, blocks=int(config["blocks"]), pieces=int(config.get("pieces", 1)))
        return _compile.Program(function, {**_overlap.PASSES, tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True})
    function = _ragged.pipelined(product, **tile, swap=swap)
    return _compile.Program(function, {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: not config.get("specialise", False)})


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load what `build` made."""
    gather = bool(workload.shape["gather"])
    arguments = ("x" if gather else "a", "w", "offsets", "groups", "starts", "index" if gather else "offsets", "c")
    return _Launch(_compile.load(artifact, arguments), int(artifact.config["block_m"]))


class _Launch:
    """A loaded library with the tiles of its groups."""

    def __init__(self, launch: Launch, block_m: int) -> None:
        self._launch = launch
        self._block_m = block_m
        self.run = launch.run

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind tensors and lay out the tiles."""
        self._offsets = inputs["offsets"]
        c = outputs["c"]
        self._tiles = RaggedTiles(c.shape[0], self._offsets.numel(), self._block_m, c.device)
        self.layout()
        self._launch.prepare({**inputs, "groups": self._tiles.groups, "starts": self._tiles.starts}, outputs)

    def layout(self) -> None:
        """Lay out the tiles for the routing that the offsets hold."""
        self._tiles.fill(self._offsets)

"""Product of ragged groups of rows, each with its expert's matrix, in one launch: wgmma where it is possible, and mma.sync."""

import torch

from kerneldyno.backends.cuda import _multistage
from kerneldyno.backends.cuda import _wgmma
from kerneldyno.backends.cuda._compile import compile_kernel
from kerneldyno.backends.cuda._compile import source_text
from kerneldyno.backends.cuda._launch import CudaLaunch
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Space
from kerneldyno.core import Tensors
from kerneldyno.core import Workload
from kerneldyno.core.ragged import RaggedTiles
from kerneldyno.core.ragged import most_tiles
from kerneldyno.errors import Unsupported


_BLOCKS_M = (128, 16, 32, 48, 64, 96, 160, 192)
_MANY_ROWS = 32  # of an expert on average: from there on the tensor cores are the limit, below it the memory
_WGMMA_STARTS = (
    {"mma": "wgmma", "block_m": 128, "block_n": 256, "stages": 4},
    {"mma": "wgmma", "block_m": 256, "block_n": 128, "stages": 4},
    {"mma": "wgmma", "block_m": 192, "block_n": 128, "stages": 4, "consumers": 3},
    {"mma": "wgmma", "block_m": 256, "block_n": 192, "stages": 3},
    {"mma": "wgmma", "block_m": 128, "block_n": 128, "stages": 6},
    {"mma": "wgmma", "block_m": 128, "block_n": 256, "stages": 4, "group_m": 1},
    {"mma": "wgmma", "block_m": 64, "block_n": 256, "stages": 5, "consumers": 1},
    {"mma": "wgmma", "block_m": 64, "block_n": 64, "stages": 8, "consumers": 1},
)
"""By TileLang's best with the same schedule, gemm's. Figures: docs/notes/moe_gemm.md."""
_COMPUTE_STARTS: tuple[Config, ...] = (
    {"block_m": 128, "block_n": 256, "block_k": 64, "warps_m": 2, "warps_n": 4, "stages": 3, "group_m": 16},
    {"block_m": 128, "block_n": 128, "block_k": 32, "warps_m": 2, "warps_n": 2, "stages": 4, "blocks_per_sm": 2},
    {"block_m": 96, "block_n": 256, "block_k": 64, "warps_m": 2, "warps_n": 4, "stages": 4},
    {"block_m": 160, "block_n": 192, "block_k": 64, "warps_m": 2, "warps_n": 4, "stages": 4},
    {"block_m": 64, "block_n": 256, "block_k": 64, "warps_m": 1, "warps_n": 4, "stages": 5},
)
"""Chosen for little padding at 128, 256 and 1024 rows an expert; the first two are the best of gemm (docs/notes/gemm.md)."""
_MEMORY_STARTS: tuple[Config, ...] = (
    {"block_m": 16, "block_n": 64, "block_k": 128, "warps_m": 1, "warps_n": 4, "stages": 5, "group_m": 1, "blocks_per_sm": 2},
    {"block_m": 16, "block_n": 128, "block_k": 64, "warps_m": 1, "warps_n": 4, "stages": 6, "group_m": 1, "blocks_per_sm": 2},
    {"block_m": 16, "block_n": 128, "block_k": 128, "warps_m": 1, "warps_n": 4, "stages": 5, "group_m": 1, "blocks_per_sm": 1},
    {"block_m": 16, "block_n": 32, "block_k": 128, "warps_m": 1, "warps_n": 2, "stages": 5, "group_m": 1, "blocks_per_sm": 3},
)
"""64 KB and more of weights in flight on every multiprocessor, for 1 or 2 rows an expert."""


def space(workload: Workload, device: Device) -> Space:
    """Return the knobs: tiles, warps, stages of the pipeline, order of the tiles, way out.

    Raises:
        Unsupported: For fp32, and for a matrix of an expert of 2^31 elements or more.
    """
    if workload.dtype == "fp32":
        raise Unsupported("moe_gemm on cuda has no fp32 variant: mma.sync multiplies 16-bit numbers; take dtype=bf16 or backend=c")
    rows, experts, n, k = _sizes(workload)
    if n * k >= 2**31 or rows * max(n, k) >= 2**46:
        raise Unsupported(f"moe_gemm on cuda counts the elements of one expert's matrix in 31 bits; n={n} k={k} is beyond")
    # of an expert, where all that have any get the same
    even = int(workload.shape["tokens"]) if workload.shape["routing"] == "one_hot" else -(-rows // min(experts, rows))
    many = even >= _MANY_ROWS
    faster = not bool(workload.shape["gather"]) and _wgmma.possible(workload, device, k)
    params = _multistage.params(
        [block_m for block_m in _BLOCKS_M if min(64, even // 4) <= block_m <= max(16, 2 * even)],
        _multistage.tiles(n, (128, 64, 32) if not many else (128, 256, 64) if faster else (128, 64, 192, 256)),
        blocks_per_sm=(1, 2) if many else (1, 2, 3),
        group_m=(8, 16) if many else (8, 1),
        few=many and faster,
    )
    constraints = _multistage.constraints(device, ragged=True)
    starts = (*_COMPUTE_STARTS, *_MEMORY_STARTS) if many else (*_MEMORY_STARTS, *_COMPUTE_STARTS)
    if not faster:
        return Space(params, constraints, starts)
    mma = tuple({"mma": "mma.sync", **start} for start in starts)
    starts = (*_WGMMA_STARTS, *mma) if many else (*mma, *_WGMMA_STARTS)
    return Space(_wgmma.params(params, device, 2 * even, n), [*constraints, *_wgmma.constraints(params, device)], starts)


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; touches no GPU."""
    rows, experts, n, k = _sizes(workload)
    block_m, block_n, block_k = (int(config[knob]) for knob in ("block_m", "block_n", "block_k"))
    gather = bool(workload.shape["gather"])
    capacity = most_tiles(rows, experts, block_m)
    constants: dict[str, int] = {"N": n, "K": k, "B_TRANSPOSED": True}
    if config["mma"] == "wgmma":
        constants |= {**_wgmma.constants(config, capacity, n), "C_CLIPPED": False}
        maps = _wgmma.maps(config, (rows, k), (n, k), (rows, n), True, experts)
        return compile_kernel(
            source_text("moe_gemm_wgmma", workload.dtype, constants, _wgmma.macros(n), _wgmma.PIECES),
            "moe_gemm",
            config,
            arch,
            blocks=_wgmma.grid(config, capacity, n),
            threads=_wgmma.threads(config),
            smem_bytes=_wgmma.smem_bytes(config),
            tensors=("a", "w", "offsets", "tile_experts", "tile_starts", "c_rows", *(("c",) if "c" in maps else ())),
            maps={"w" if name == "b" else name: description for name, description in maps.items()},
        )
    constants |= {"CAPACITY": capacity, "GATHER": gather, **_multistage.constants(config)}
    return compile_kernel(
        source_text("moe_gemm", workload.dtype, constants, {}, _multistage.PIECES),
        "moe_gemm",
        config,
        arch,
        blocks=capacity * -(-n // block_n),
        threads=_multistage.threads(config),
        smem_bytes=_multistage.smem_bytes(block_m, block_n, block_k, int(config["stages"]), str(config["epilogue"])),
        # without GATHER the second is not read
        tensors=(*(("x", "index") if gather else ("a", "offsets")), "w", "offsets", "tile_experts", "tile_starts", "c"),
    )


class _GroupedLaunch(CudaLaunch):
    """The kernel beside the list of tiles that it works through."""

    def __init__(self, artifact: Artifact, workload: Workload) -> None:
        super().__init__(artifact)
        self._rows, self._experts, _, _ = _sizes(workload)
        self._block_m = int(artifact.config["block_m"])

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind the tensors' addresses, make room for the tiles and lay them out.

        Raises:
            ValueError: Where a tensor is not contiguous or does not begin on a 16-byte boundary.
        """
        self._offsets: torch.Tensor = inputs["offsets"]
        self._tiles = RaggedTiles(self._rows, self._experts, self._block_m, self._offsets.device)
        tiles = {"tile_experts": self._tiles.groups, "tile_starts": self._tiles.starts}
        super().prepare({**inputs, **tiles, "c_rows": outputs["c"]}, outputs)
        self.layout()

    def layout(self) -> None:
        """Enqueue the listing of the tiles for the routing that the offsets hold now."""
        self._tiles.fill(self._offsets)


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load the machine code, in the process that owns the GPU."""
    return _GroupedLaunch(artifact, workload)


def _sizes(workload: Workload) -> tuple[int, int, int, int]:
    """Return the rows of all experts together, the experts, n and k."""
    tokens, experts, top_k, n, k = (int(workload.shape[dim]) for dim in ("tokens", "experts", "top_k", "n", "k"))
    return tokens * top_k, experts, n, k

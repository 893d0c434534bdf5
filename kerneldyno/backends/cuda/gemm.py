"""Matrix product: on the tensor cores for 16-bit dtypes, with wgmma where it is possible and mma.sync; FFMA for fp32."""

from kerneldyno.backends.cuda import _multistage
from kerneldyno.backends.cuda import _wgmma
from kerneldyno.backends.cuda._compile import compile_kernel
from kerneldyno.backends.cuda._compile import source_text
from kerneldyno.backends.cuda._launch import CudaLaunch
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported


def space(workload: Workload, device: Device) -> Space:
    """Return the knobs: tiles, warps, stages of the pipeline, order of the tiles, way out.

    Raises:
        Unsupported: For fewer than 80 as compute capability: there is no cp.async.
    """
    if _capability(device.arch) < 80:
        raise Unsupported(f"gemm on cuda needs compute capability 8.0 (cp.async, mma.sync with k=16); {device.name} is {device.arch}")
    return _ffma_space(workload, device) if workload.dtype == "fp32" else _mma_space(workload, device)


_FEW_ROWS = 64
"""Up to there the memory is the limit, and the least tile of wgmma is no smaller."""

_SMALL, _LARGE = 128, 1024
"""Rows and columns: below the first, tiles of every size may be best; from the second on there are more tiles than multiprocessors."""

_WGMMA_STARTS = (
    {"mma": "wgmma", "block_m": 128, "block_n": 256, "stages": 4},
    {"mma": "wgmma", "block_m": 256, "block_n": 128, "stages": 4},
    {"mma": "wgmma", "block_m": 192, "block_n": 128, "stages": 4, "consumers": 3},
    {"mma": "wgmma", "block_m": 256, "block_n": 192, "stages": 3},
    {"mma": "wgmma", "block_m": 128, "block_n": 256, "stages": 4, "group_m": 16},
    {"mma": "wgmma", "block_m": 128, "block_n": 128, "stages": 6},
    {"mma": "wgmma", "block_m": 192, "block_n": 192, "stages": 4, "consumers": 3},
    {"mma": "wgmma", "block_m": 64, "block_n": 64, "stages": 8, "consumers": 1},
)
"""TileLang's best with the same schedule (docs/notes/gemm.md), and tiles that load less or fit smaller products."""

_MMA_STARTS: tuple[Config, ...] = (
    {"block_m": 128, "block_n": 256, "block_k": 64, "warps_m": 2, "warps_n": 4, "stages": 3, "group_m": 16},
    {"block_m": 256, "block_n": 128, "block_k": 32, "warps_m": 4, "warps_n": 2, "stages": 4, "group_m": 8},
    {"block_m": 128, "block_n": 128, "block_k": 32, "warps_m": 2, "warps_n": 2, "stages": 4, "blocks_per_sm": 2},
    {
        "block_m": 64,
        "block_n": 64,
        "block_k": 128,
        "warps_m": 2,
        "warps_n": 4,
        "stages": 2,
        "group_m": 1,
        "blocks_per_sm": 2,
        "epilogue": "direct",
    },
    {"block_m": 16, "block_n": 64, "block_k": 128, "warps_m": 1, "warps_n": 4, "stages": 5, "group_m": 1, "blocks_per_sm": 2},
)
"""Best of earlier searches at 4096^3, 8192^3 and 1000 x 1003 x 517, bf16, H200 (docs/notes/gemm.md); the last for few rows."""


def _mma_space(workload: Workload, device: Device) -> Space:
    m, n, k = (int(workload.shape[dim]) for dim in ("m", "n", "k"))
    block_m = _multistage.tiles(m, (128, 64, 32, 16, 256))
    block_n = _multistage.tiles(n, (128, 64, 32, 192, 256))
    faster = _wgmma.possible(workload, device, k, *(() if workload.shape["layout"] == "nt" else (n,)))
    large = min(m, n) >= _LARGE
    params = _multistage.params(block_m, block_n, group_m=(8, 16) if large else (8, 1), few=faster and min(m, n) >= _SMALL)
    constraints = _multistage.constraints(device)
    if not faster:
        return Space(params, constraints, _MMA_STARTS)
    mma = tuple({"mma": "mma.sync", **start} for start in _MMA_STARTS)
    starts = (*mma, *_WGMMA_STARTS) if m <= _FEW_ROWS else (*_WGMMA_STARTS, *mma)
    return Space(_wgmma.params(params, device, m, n), [*constraints, *_wgmma.constraints(params, device)], starts)


def _ffma_space(workload: Workload, device: Device) -> Space:
    m, n = int(workload.shape["m"]), int(workload.shape["n"])
    threads_limit, smem_block = device.max_threads_per_block, device.smem_per_block_bytes
    return Space(
        [
            Param("mma", ("ffma",), "the multiply-add: one number at a time"),
            Param("block_m", _multistage.tiles(m, (128, 64, 32)), "rows of C a block computes"),
            Param("block_n", _multistage.tiles(n, (128, 64, 32)), "columns of C a block computes"),
            Param("block_k", (8, 16, 32), "depth of a tile of A and B"),
            Param("thread_m", (8, 4), "rows of C a thread computes"),
            Param("thread_n", (8, 4), "columns of C a thread computes"),
            _multistage.GROUP_M,
        ],
        [
            Constraint(
                lambda block_m, block_n, thread_m, thread_n: 32 <= block_m * block_n // (thread_m * thread_n) <= threads_limit,
                f"a block has a whole warp (32 threads) at least and {threads_limit} threads at most",
            ),
            Constraint(
                lambda block_m, block_n, block_k, thread_m, thread_n: (
                    (block_m + block_n) * block_k <= 32 * (block_m * block_n // (thread_m * thread_n))
                ),
                "the next tiles of A and B wait in registers: at most 32 numbers a thread",
            ),
            Constraint(
                lambda block_m, block_n, block_k: _ffma_smem_bytes(block_m, block_n, block_k) <= smem_block,
                f"shared memory (two slots of tiles) is at most {smem_block} bytes a block",
            ),
        ],
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; touches no GPU."""
    m, n, k = (int(workload.shape[dim]) for dim in ("m", "n", "k"))
    block_m, block_n, block_k = (int(config[knob]) for knob in ("block_m", "block_n", "block_k"))
    transposed = workload.shape["layout"] == "nt"
    tiles_m = -(-m // block_m)
    blocks, maps = tiles_m * -(-n // block_n), None
    constants: dict[str, int] = {"M": m, "N": n, "K": k, "B_TRANSPOSED": transposed}
    if config["mma"] == "wgmma":
        constants |= {**_wgmma.constants(config, tiles_m, n), "C_CLIPPED": True}
        blocks, threads = _wgmma.grid(config, tiles_m, n), _wgmma.threads(config)
        smem_bytes = _wgmma.smem_bytes(config)
        maps = _wgmma.maps(config, (m, k), (n, k) if transposed else (k, n), (m, n), transposed)
        text = source_text("gemm_wgmma", workload.dtype, constants, _wgmma.macros(n), _wgmma.PIECES)
    elif config["mma"] == "ffma":
        constants |= {knob.upper(): int(config[knob]) for knob in ("block_m", "block_n", "block_k", "thread_m", "thread_n", "group_m")}
        threads = block_m * block_n // (int(config["thread_m"]) * int(config["thread_n"]))
        smem_bytes = _ffma_smem_bytes(block_m, block_n, block_k)
        text = source_text("gemm_fp32", workload.dtype, constants, {})
    else:
        constants |= _multistage.constants(config)
        threads = _multistage.threads(config)
        smem_bytes = _multistage.smem_bytes(block_m, block_n, block_k, int(config["stages"]), str(config["epilogue"]))
        text = source_text("gemm", workload.dtype, constants, {}, _multistage.PIECES)
    return compile_kernel(
        text, "gemm", config, arch, blocks=blocks, threads=threads, smem_bytes=smem_bytes, tensors=("a", "b", "c"), maps=maps
    )


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load the machine code, in the process that owns the GPU."""
    return CudaLaunch(artifact)


def _ffma_smem_bytes(block_m: int, block_n: int, block_k: int) -> int:
    """Return the shared memory of a block: two slots of A and B, their rows padded by 4 floats."""
    return 2 * block_k * (block_m + 4 + block_n + 4) * 4


def _capability(arch: str) -> int:
    return int("".join(letter for letter in arch.partition("_")[2] if letter.isdigit()) or 0)

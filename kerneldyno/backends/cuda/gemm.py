"""Matrix product: mma.sync on the tensor cores for 16-bit dtypes, FFMA for fp32."""

from kerneldyno.backends.cuda._compile import REGISTERS_PER_THREAD
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


_OTHER_REGISTERS = 24  # addresses, loop counts, temporaries: what the compiled kernels have beside sums and fragments
_RESERVED_SMEM = 1024  # bytes of shared memory that the system takes for each block. Source: Hopper Tuning Guide, "Shared Memory"
_GROUP_M = Param("group_m", (8, 1, 16), "rows of tiles that blocks running together share, for the L2 cache")


def space(workload: Workload, device: Device) -> Space:
    """Return the knobs: tiles, warps, stages of the pipeline, order of the tiles, way out.

    Raises:
        Unsupported: For fewer than 80 as compute capability: there is no cp.async.
    """
    if _capability(device.arch) < 80:
        raise Unsupported(f"gemm on cuda needs compute capability 8.0 (cp.async, mma.sync with k=16); {device.name} is {device.arch}")
    return _ffma_space(workload, device) if workload.dtype == "fp32" else _mma_space(workload, device)


_MMA_STARTS = (
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
)
"""Best of earlier searches at 4096^3, 8192^3 and 1000 x 1003 x 517, bf16, H200 (docs/notes/gemm.md)."""


def _mma_space(workload: Workload, device: Device) -> Space:
    m, n = int(workload.shape["m"]), int(workload.shape["n"])
    threads_limit, smem_block, smem_sm, registers_sm = (
        device.max_threads_per_block,
        device.smem_per_block_bytes,
        device.smem_per_sm_bytes,
        device.registers_per_sm,
    )

    def registers_fit(block_m: int, block_n: int, warps_m: int, warps_n: int, fragment_sets: int, blocks_per_sm: int) -> bool:
        warp_m, warp_n, threads = block_m // warps_m, block_n // warps_n, warps_m * warps_n * 32
        needed = warp_m * warp_n // 32 + fragment_sets * (warp_m + warp_n) // 4 + _OTHER_REGISTERS
        return needed <= min(REGISTERS_PER_THREAD, registers_sm // (threads * blocks_per_sm))

    def smem_fits_sm(block_m: int, block_n: int, block_k: int, stages: int, blocks_per_sm: int, epilogue: str) -> bool:
        return (_mma_smem_bytes(block_m, block_n, block_k, stages, epilogue) + _RESERVED_SMEM) * blocks_per_sm <= smem_sm

    return Space(
        [
            Param("mma", ("mma.sync",), "the tensor-core instruction"),
            Param("block_m", _tiles(m, (128, 64, 32, 16, 256)), "rows of C a block computes"),
            Param("block_n", _tiles(n, (128, 64, 32, 192, 256)), "columns of C a block computes"),
            Param("block_k", (64, 32, 128), "depth of a tile of A and B"),
            Param("warps_m", (2, 1, 4), "warps along the rows of a block"),
            Param("warps_n", (2, 1, 4), "warps along the columns of a block"),
            Param("stages", (3, 2, 4, 5, 6), "tiles of A and B in flight or in use"),
            _GROUP_M,
            Param("fragment_sets", (2, 1), "operands in registers: the next beside the current, or only the current"),
            Param("blocks_per_sm", (1, 2), "blocks that the registers must leave room for on a multiprocessor"),
            Param("epilogue", ("shared", "direct"), "C through shared memory in 16-byte rows, or straight from the fragments"),
        ],
        [
            Constraint(
                lambda block_m, warps_m: block_m % (16 * warps_m) == 0,
                "each warp's rows are a multiple of the 16 of one mma.sync",
            ),
            Constraint(
                lambda block_n, warps_n: block_n % (16 * warps_n) == 0,
                "each warp's columns are a multiple of the 16 that one ldmatrix loads for two mma.sync",
            ),
            Constraint(
                lambda warps_m, warps_n: warps_m * warps_n * 32 <= threads_limit,
                f"a block has at most {threads_limit} threads",
            ),
            Constraint(
                registers_fit,
                f"sums, fragments and {_OTHER_REGISTERS} more need at most {REGISTERS_PER_THREAD} registers a thread, and the blocks of a "
                f"multiprocessor at most {registers_sm}",
            ),
            Constraint(
                lambda block_m, block_n, block_k, stages, epilogue: (
                    _mma_smem_bytes(block_m, block_n, block_k, stages, epilogue) <= smem_block
                ),
                f"shared memory (stages x tiles, or the tile of C) is at most {smem_block} bytes a block",
            ),
            Constraint(
                smem_fits_sm,
                f"shared memory of all blocks of a multiprocessor, each with {_RESERVED_SMEM} for the system, is at most {smem_sm} bytes",
            ),
        ],
        _MMA_STARTS,
    )


def _ffma_space(workload: Workload, device: Device) -> Space:
    m, n = int(workload.shape["m"]), int(workload.shape["n"])
    threads_limit, smem_block = device.max_threads_per_block, device.smem_per_block_bytes
    return Space(
        [
            Param("mma", ("ffma",), "the multiply-add: one number at a time"),
            Param("block_m", _tiles(m, (128, 64, 32)), "rows of C a block computes"),
            Param("block_n", _tiles(n, (128, 64, 32)), "columns of C a block computes"),
            Param("block_k", (8, 16, 32), "depth of a tile of A and B"),
            Param("thread_m", (8, 4), "rows of C a thread computes"),
            Param("thread_n", (8, 4), "columns of C a thread computes"),
            _GROUP_M,
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
    constants: dict[str, int] = {"M": m, "N": n, "K": k, "B_TRANSPOSED": workload.shape["layout"] == "nt"}
    if config["mma"] == "ffma":
        kernel = "gemm_fp32"
        knobs = ("block_m", "block_n", "block_k", "thread_m", "thread_n", "group_m")
        threads = block_m * block_n // (int(config["thread_m"]) * int(config["thread_n"]))
        smem_bytes = _ffma_smem_bytes(block_m, block_n, block_k)
    else:
        kernel = "gemm"
        knobs = ("block_m", "block_n", "block_k", "warps_m", "warps_n", "stages", "group_m", "fragment_sets", "blocks_per_sm")
        threads = int(config["warps_m"]) * int(config["warps_n"]) * 32
        smem_bytes = _mma_smem_bytes(block_m, block_n, block_k, int(config["stages"]), str(config["epilogue"]))
    constants |= {knob.upper(): int(config[knob]) for knob in knobs}
    if kernel == "gemm":
        constants["SHARED_EPILOGUE"] = config["epilogue"] == "shared"
    text = source_text(kernel, workload.dtype, constants, {})
    blocks = -(-m // block_m) * -(-n // block_n)
    return compile_kernel(text, "gemm", config, arch, blocks=blocks, threads=threads, smem_bytes=smem_bytes, tensors=("a", "b", "c"))


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load the machine code, in the process that owns the GPU."""
    return CudaLaunch(artifact)


def _mma_smem_bytes(block_m: int, block_n: int, block_k: int, stages: int, epilogue: str) -> int:
    """Return the shared memory of a block: the slots of A and B, which the padded tile of C takes over at the end."""
    slots = stages * (block_m + block_n) * block_k * 2
    return max(slots, block_m * (block_n + 8) * 2) if epilogue == "shared" else slots


def _ffma_smem_bytes(block_m: int, block_n: int, block_k: int) -> int:
    """Return the shared memory of a block: two slots of A and B, their rows padded by 4 floats."""
    return 2 * block_k * (block_m + 4 + block_n + 4) * 4


def _tiles(size: int, values: tuple[int, ...]) -> tuple[int, ...]:
    """Leave out tiles twice as long as the matrix or longer, of which more than half would idle; the least one stays."""
    return tuple(value for value in values if value < 2 * size or value == min(values))


def _capability(arch: str) -> int:
    return int("".join(letter for letter in arch.partition("_")[2] if letter.isdigit()) or 0)

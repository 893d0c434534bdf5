"""The knobs and hard limits of `multistage.cuh`, the product of tiles that gemm and moe_gemm share."""

from collections.abc import Sequence
from dataclasses import replace

from kerneldyno.backends.cuda._compile import REGISTERS_PER_THREAD
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Param


GROUP_M = Param("group_m", (8, 1, 16), "rows of tiles that blocks running together share, for the L2 cache")
PIECES = ("tiles", "multistage")
"""The files that a kernel on `multistage.cuh` builds on."""

_OTHER_REGISTERS = 24  # addresses, loop counts, temporaries: what the compiled kernels have beside sums and fragments
_ROW_REGISTERS = 16  # the same for rows that begin and end at run time
_RESERVED_SMEM = 1024  # bytes of shared memory that the system takes for each block. Source: Hopper Tuning Guide, "Shared Memory"
_KNOBS = ("block_m", "block_n", "block_k", "warps_m", "warps_n", "stages", "group_m", "fragment_sets", "blocks_per_sm")


def params(
    block_m: Sequence[int],
    block_n: Sequence[int],
    warps: Sequence[int] = (2, 1, 4),
    blocks_per_sm: Sequence[int] = (1, 2),
    group_m: Sequence[int] = (8, 1, 16),
    few: bool = False,
) -> list[Param]:
    """Return the knobs.

    Args:
        block_m: Rows of C that a block may compute.
        block_n: Columns of C that a block may compute.
        warps: Warps along either side of a block.
        blocks_per_sm: Blocks that a multiprocessor may be asked to hold.
        group_m: Rows of tiles that blocks running together may share.
        few: Of the other knobs only the values that were good at large products, where there is a faster instruction beside this one.
    """
    return [
        Param("mma", ("mma.sync",), "the tensor-core instruction"),
        Param("block_m", tuple(block_m), "rows of C a block computes"),
        Param("block_n", tuple(block_n), "columns of C a block computes"),
        Param("block_k", (64, 32) if few else (64, 32, 128), "depth of a tile of A and B"),
        Param("warps_m", tuple(warps), "warps along the rows of a block"),
        Param("warps_n", tuple(warps), "warps along the columns of a block"),
        Param("stages", (3, 4) if few else (3, 2, 4, 5, 6), "tiles of A and B in flight or in use"),
        replace(GROUP_M, values=tuple(group_m)),
        Param("fragment_sets", (2, 1), "operands in registers: the next beside the current, or only the current"),
        Param("blocks_per_sm", tuple(blocks_per_sm), "blocks that the registers must leave room for on a multiprocessor"),
        Param(
            "epilogue",
            ("shared",) if few else ("shared", "direct"),
            "C through shared memory in 16-byte rows, or straight from the fragments",
        ),
    ]


def constraints(device: Device, ragged: bool = False) -> list[Constraint]:
    """Return the hard limits of a device.

    Args:
        device: The GPU.
        ragged: Whether rows of A begin and end at run time, and a thread keeps the source of each of its copies.
    """
    threads_limit, smem_block, smem_sm, registers_sm = (
        device.max_threads_per_block,
        device.smem_per_block_bytes,
        device.smem_per_sm_bytes,
        device.registers_per_sm,
    )

    other = _OTHER_REGISTERS + (_ROW_REGISTERS if ragged else 0)

    def registers_fit(block_m: int, block_n: int, block_k: int, warps_m: int, warps_n: int, fragment_sets: int, blocks_per_sm: int) -> bool:
        warp_m, warp_n, threads = block_m // warps_m, block_n // warps_n, warps_m * warps_n * 32
        needed = warp_m * warp_n // 32 + fragment_sets * (warp_m + warp_n) // 4 + other
        if ragged:
            needed += -(-block_m * block_k // (8 * threads))
        return needed <= min(REGISTERS_PER_THREAD, registers_sm // (threads * blocks_per_sm))

    def smem_fits_sm(block_m: int, block_n: int, block_k: int, stages: int, blocks_per_sm: int, epilogue: str) -> bool:
        return (smem_bytes(block_m, block_n, block_k, stages, epilogue) + _RESERVED_SMEM) * blocks_per_sm <= smem_sm

    return [
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
            f"sums, fragments{', sources of rows' if ragged else ''} and {other} more need at most "
            f"{REGISTERS_PER_THREAD} registers a thread, and the blocks of a multiprocessor at most {registers_sm}",
        ),
        Constraint(
            lambda block_m, block_n, block_k, stages, epilogue: smem_bytes(block_m, block_n, block_k, stages, epilogue) <= smem_block,
            f"shared memory (stages x tiles, or the tile of C) is at most {smem_block} bytes a block",
        ),
        Constraint(
            smem_fits_sm,
            f"shared memory of all blocks of a multiprocessor, each with {_RESERVED_SMEM} for the system, is at most {smem_sm} bytes",
        ),
    ]


def constants(config: Config) -> dict[str, int]:
    """Return the constants that the text takes from a configuration."""
    return {knob.upper(): int(config[knob]) for knob in _KNOBS} | {"SHARED_EPILOGUE": config["epilogue"] == "shared"}


def threads(config: Config) -> int:
    """Return the threads of a block."""
    return int(config["warps_m"]) * int(config["warps_n"]) * 32


def smem_bytes(block_m: int, block_n: int, block_k: int, stages: int, epilogue: str) -> int:
    """Return the shared memory of a block: the slots of A and B, which the padded tile of C takes over at the end."""
    slots = stages * (block_m + block_n) * block_k * 2
    return max(slots, block_m * (block_n + 8) * 2) if epilogue == "shared" else slots


def tiles(size: int, values: tuple[int, ...]) -> tuple[int, ...]:
    """Leave out tiles twice as long as the matrix or longer, of which more than half would idle; the least one stays."""
    return tuple(value for value in values if value < 2 * size or value == min(values))

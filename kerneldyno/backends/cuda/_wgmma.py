"""The knobs, hard limits and tensor maps of `warpgroups.cuh`, the product of tiles with wgmma that gemm and moe_gemm share."""

from collections.abc import Sequence
from dataclasses import replace

from kerneldyno.backends.cuda._multistage import tiles
from kerneldyno.backends.cuda._tensor_map import tensor_map
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Param
from kerneldyno.core import Workload


PIECES = ("tma", "ring", "descriptor", "wgmma", "tiles", "warpgroups")
"""The files that a kernel on `warpgroups.cuh` builds on."""

_PITCH = 8  # elements of 16 bits: the rows of a tensor map begin at multiples of 16 bytes. Source: CUDA driver API, cuTensorMapEncodeTiled
_SLAB = 64  # elements of one row of the 128-byte swizzle, and rows of one product
_MOST_C_SLABS = 4  # through which a warpgroup writes: some are read by the copy unit while another is filled
_SLAB_BYTES = _SLAB * _SLAB * 2
_REGISTERS = 65_536  # of a multiprocessor of sm_90
_OTHER_REGISTERS = 32  # addresses, loop counts, converted sums: with 24, 192 sums spill
_PRODUCT_REGISTERS = 26  # that ptxas wants for one product beside its sums, of the registers that a thread begins with (its error C7602)
_MOST_REGISTERS = 240  # a thread; more than 128 sums and what stands beside them never need
_SMEM_PER_BLOCK, _SMEM_PER_SM = 232_448, 233_472  # bytes on sm_90. Source: CUDA C++ Programming Guide, compute capabilities
_RESERVED_SMEM = 1024  # bytes of shared memory that the system takes for each block. Source: Hopper Tuning Guide, "Shared Memory"
_LEAST_DEPTH, _MOST_DEPTH = 128, 512
_KNOBS = ("block_m", "block_n", "block_k", "consumers", "stages", "group_m", "blocks_per_sm")
_VALUES = {
    "block_m": (128, 256, 192, 64),
    "block_n": (256, 128, 192, 64),
    "block_k": (64, 128),
    "stages": (4, 3, 5, 6, 8, 2),
    "group_m": (8, 16, 1),
    "blocks_per_sm": (1, 2),
}
"""Values of the knobs that mma.sync has too."""


def possible(workload: Workload, device: Device, *pitches: int) -> bool:
    """Return whether a device has wgmma for the dtype and the copied tensors, by their elements a row, can have tensor maps."""
    return device.arch.startswith("sm_90") and workload.dtype != "fp32" and all(pitch % _PITCH == 0 for pitch in pitches)


def params(beside: Sequence[Param], device: Device, rows: int, columns: int) -> list[Param]:
    """Return the knobs of wgmma and those of mma.sync, each with the condition that its instruction is taken.

    Args:
        beside: The knobs of mma.sync, `mma` first.
        device: The GPU.
        rows: Of C; tiles twice as high and higher are left out.
        columns: Of C.
    """
    values = {**_VALUES, "block_m": tiles(rows, _VALUES["block_m"]), "block_n": tiles(columns, _VALUES["block_n"])}
    merged = [Param("mma", ("wgmma", *beside[0].values), "the tensor-core instruction; wgmma with copies by tensor map")]
    for param in beside[1:]:
        if param.name in _VALUES:
            merged.append(replace(param, values=tuple(dict.fromkeys((*values[param.name], *param.values)))))
        else:
            merged.append(replace(param, when=lambda mma: mma != "wgmma"))

    def is_wgmma(mma: str) -> bool:
        return mma == "wgmma"

    consumers = Param("consumers", (2, 1, 3), "warpgroups of a block that multiply; one more copies", is_wgmma)
    grids = (device.sm_count, 2 * device.sm_count, 0)
    blocks = Param("blocks", grids, "blocks that take tiles in turn; 0: one block a tile", is_wgmma)
    return [*merged, consumers, blocks]


def constraints(beside: Sequence[Param], device: Device) -> list[Constraint]:
    """Return the hard limits of wgmma on a device, and which values of a knob are for which instruction.

    Args:
        beside: The knobs of mma.sync, `mma` first.
        device: The GPU.
    """
    sm_count = device.sm_count
    others = {param.name: param.values for param in beside}

    def allowed(name: str, mma: str, value: int) -> bool:
        return value in (_VALUES if mma == "wgmma" else others)[name]

    def registers_fit(block_m: int, block_n: int, consumers: int, blocks_per_sm: int) -> bool:
        sums = block_m * block_n // (128 * consumers)
        return sums + _OTHER_REGISTERS <= _registers(consumers, blocks_per_sm)[1]

    reason = "each instruction has values of its own: {} is one of {} with wgmma, of {} with mma.sync"
    reasons = {name: reason.format(name, _VALUES[name], others[name]) for name in _VALUES}
    return [
        Constraint(lambda mma, block_m: allowed("block_m", mma, block_m), reasons["block_m"]),
        Constraint(lambda mma, block_n: allowed("block_n", mma, block_n), reasons["block_n"]),
        Constraint(lambda mma, block_k: allowed("block_k", mma, block_k), reasons["block_k"]),
        Constraint(lambda mma, stages: allowed("stages", mma, stages), reasons["stages"]),
        Constraint(lambda mma, group_m: allowed("group_m", mma, group_m), reasons["group_m"]),
        Constraint(lambda mma, blocks_per_sm: allowed("blocks_per_sm", mma, blocks_per_sm), reasons["blocks_per_sm"]),
        Constraint(
            lambda block_m, consumers: block_m % (_SLAB * consumers) == 0,
            f"a warpgroup's rows are a multiple of the {_SLAB} of one wgmma",
        ),
        Constraint(
            lambda mma, block_k, stages: mma != "wgmma" or _LEAST_DEPTH <= block_k * stages <= _MOST_DEPTH,
            f"with wgmma the slots hold {_LEAST_DEPTH} to {_MOST_DEPTH} of k: less starves the tensor cores, more is never used",
        ),
        Constraint(
            lambda block_m, block_k, consumers: block_m // (_SLAB * consumers) * block_k <= 128,
            "a warpgroup queues at most 8 wgmma for a slot (block_k / 16 for each 64 of its rows)",
        ),
        Constraint(
            lambda block_n, blocks_per_sm, consumers: block_n // 2 + _PRODUCT_REGISTERS <= _registers_of_launch(consumers, blocks_per_sm),
            f"the sums of one product (block_n / 2) and {_PRODUCT_REGISTERS} more need at most the registers that a thread begins with",
        ),
        Constraint(registers_fit, f"sums and {_OTHER_REGISTERS} more need at most the registers of a multiplying thread"),
        Constraint(
            lambda block_m, block_n, block_k, stages, blocks_per_sm, consumers: (
                _c_slabs(block_m, block_n, block_k, stages, consumers, blocks_per_sm) > 0
            ),
            f"shared memory (stages x tiles, {_SLAB_BYTES} bytes of C for each warpgroup) is at most {_SMEM_PER_BLOCK} bytes a block, "
            f"and of all blocks of a multiprocessor, each with {_RESERVED_SMEM} for the system, {_SMEM_PER_SM} bytes",
        ),
        Constraint(
            lambda blocks_per_sm, blocks: blocks in (0, blocks_per_sm * sm_count),
            f"blocks that take tiles in turn fill the device: blocks_per_sm x {sm_count} multiprocessors",
        ),
    ]


def constants(config: Config, tiles_m: int, n: int) -> dict[str, int]:
    """Return the constants that the text takes from a configuration.

    Args:
        config: The configuration.
        tiles_m: Tiles along the rows of C.
        n: Columns of C.
    """
    producer, consumer = _registers(int(config["consumers"]), int(config["blocks_per_sm"]))
    return {knob.upper(): int(config[knob]) for knob in _KNOBS} | {
        "TILES_M": tiles_m,
        "BLOCKS": grid(config, tiles_m, n),
        "C_SLABS": _c_slabs_of(config),
        "PRODUCER_REGISTERS": producer,
        "CONSUMER_REGISTERS": consumer,
    }


def macros(n: int) -> dict[str, str]:
    """Return the macros that the text takes from the columns of C."""
    return {"C_MAPPED": str(int(n % _PITCH == 0))}


def grid(config: Config, tiles_m: int, n: int) -> int:
    """Return the blocks of the launch."""
    tiles = tiles_m * -(-n // int(config["block_n"]))
    return min(tiles, int(config["blocks"]) or tiles)


def threads(config: Config) -> int:
    """Return the threads of a block."""
    return 128 * (int(config["consumers"]) + 1)


def smem_bytes(config: Config) -> int:
    """Return the shared memory of a block: the slots of A and B, the parts of C, the barriers of 8 bytes."""
    block_m, block_n, block_k, stages, consumers = (int(config[knob]) for knob in ("block_m", "block_n", "block_k", "stages", "consumers"))
    return _slot_bytes(block_m, block_n, block_k, stages) + consumers * _c_slabs_of(config) * _SLAB_BYTES


def matrix_map(rows: int, columns: int, box_rows: int, matrices: int = 1) -> dict[str, list[int]]:
    """Describe how boxes, 64 columns wide, of one or more matrices that lie after each other are copied."""
    matrix = rows * columns * 2
    return tensor_map((columns, rows, matrices, 1), (columns * 2, matrix, matrix * matrices), (_SLAB, box_rows, 1, 1))


def maps(
    config: Config, a: tuple[int, int], b: tuple[int, int], c: tuple[int, int], transposed: bool, matrices: int = 1
) -> dict[str, dict[str, list[int]]]:
    """Return the maps of a, b and, where its rows allow one, c.

    Args:
        config: The configuration.
        a: Its rows and columns; so also b and c.
        b: [n, k] where `transposed`, else [k, n].
        c: [m, n].
        transposed: How b lies.
        matrices: Of b, which lie after each other.
    """
    found = {
        "a": matrix_map(*a, int(config["block_m"]) // int(config["consumers"])),
        "b": matrix_map(*b, int(config["block_n" if transposed else "block_k"]), matrices),
    }
    return found | ({"c": matrix_map(*c, _SLAB)} if c[1] % _PITCH == 0 else {})


def _registers_of_launch(consumers: int, blocks_per_sm: int) -> int:
    """Return the registers that each thread of a block begins with, in the steps of 8 in which they are given."""
    return min(255, _REGISTERS // (128 * (consumers + 1) * blocks_per_sm)) // 8 * 8


def _registers(consumers: int, blocks_per_sm: int) -> tuple[int, int]:
    """Return the registers of a thread that copies and of one that multiplies: together what the block's threads begin with."""
    producer = 40 if consumers < 3 else 32
    given = _registers_of_launch(consumers, blocks_per_sm) * (consumers + 1) - producer
    return producer, min(_MOST_REGISTERS, given // consumers // 8 * 8)


def _slot_bytes(block_m: int, block_n: int, block_k: int, stages: int) -> int:
    """Return the bytes of the slots of A and B, and of the two barriers of each."""
    return stages * ((block_m + block_n) * block_k * 2 + 2 * 8)


def _c_slabs(block_m: int, block_n: int, block_k: int, stages: int, consumers: int, blocks_per_sm: int) -> int:
    """Return through how many parts of C each warpgroup writes: as many as there is room for, and as it has."""
    room = min(_SMEM_PER_BLOCK, _SMEM_PER_SM // blocks_per_sm - _RESERVED_SMEM) - _slot_bytes(block_m, block_n, block_k, stages)
    return min(_MOST_C_SLABS, block_m // (_SLAB * consumers) * (block_n // _SLAB), room // (_SLAB_BYTES * consumers))


def _c_slabs_of(config: Config) -> int:
    return _c_slabs(*(int(config[knob]) for knob in ("block_m", "block_n", "block_k", "stages", "consumers", "blocks_per_sm")))

"""Attention with few queries over a cache of keys and values: mma.sync on tiles copied with cp.async, keys split over blocks."""

import torch

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
from kerneldyno.core import Tensors
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported


_MAX_HEAD_DIM = 256
_LOG2_E = 1.4426950408889634
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_HELD_Q = 128  # a longer head's queries stay in shared memory (HOLD_Q)
_OTHER_REGISTERS = 56  # addresses, operands, maxima, temporaries: what the compiled kernels have beside sums, scores and queries
_MOST_KEYS = 64
_RESERVED_SMEM = 1024  # bytes of shared memory that the system takes for each block. Source: Hopper Tuning Guide, "Shared Memory"
_COMBINE_WARPS = 4


def space(workload: Workload, device: Device) -> Space:
    """Return the knobs: keys of a tile, warps along them, slots of the pipeline, parts of the keys.

    Raises:
        Unsupported: For fp32, for head dims that are not multiples of 16 up to 256, and for fewer than 80 as compute capability.
    """
    shape = workload.shape
    head_dim, head_dim_v = int(shape["head_dim"]), int(shape["head_dim_v"])
    if workload.dtype == "fp32":
        raise Unsupported("attention on cuda has no fp32 variant: mma.sync multiplies 16-bit numbers; take dtype=bf16 or backend=c")
    if head_dim % 16 or head_dim_v % 16 or max(head_dim, head_dim_v) > _MAX_HEAD_DIM:
        raise Unsupported(
            f"attention on cuda needs head_dim and head_dim_v that are multiples of 16 (a step of mma.sync) up to {_MAX_HEAD_DIM} "
            f"(the sums stay in registers), not {head_dim} and {head_dim_v}"
        )
    if not device.arch.startswith(("sm_8", "sm_9", "sm_1")):
        raise Unsupported(f"attention on cuda needs compute capability 8.0 (cp.async, mma.sync with k=16); {device.name} is {device.arch}")
    keys, warps_m = _keys(workload), _warps_m(workload)
    threads_limit, smem_block, smem_sm, registers_sm = (
        device.max_threads_per_block,
        device.smem_per_block_bytes,
        device.smem_per_sm_bytes,
        device.registers_per_sm,
    )

    def registers_fit(block_n: int, warps_n: int, blocks_per_sm: int) -> bool:
        held = head_dim // 4 if head_dim <= _HELD_Q else 0
        needed = head_dim_v // 2 + block_n // warps_n // 2 + held + _OTHER_REGISTERS
        return needed <= min(REGISTERS_PER_THREAD, registers_sm // (warps_m * warps_n * 32 * blocks_per_sm))

    block_n = tuple(value for value in (64, 32, 128, 16, 96, 256) if value < 2 * keys or value == 16)
    return Space(
        [
            Param("block_n", block_n, "keys of a tile"),
            Param("warps_n", (4, 2, 8, 1), "warps along the keys of a tile; beside them, one for each 16 rows of queries"),
            Param("stages", (3, 2, 4, 5, 6), "tiles of keys and values in flight or in use"),
            Param("num_splits", tuple(value for value in _SPLITS if value == 1 or value * 16 <= keys), "parts of the keys, a block each"),
            Param("blocks_per_sm", (2, 1, 3, 4), "blocks that the registers must leave room for on a multiprocessor"),
        ],
        [
            Constraint(
                lambda block_n, warps_n: block_n % (16 * warps_n) == 0 and block_n // warps_n <= _MOST_KEYS,
                f"each warp's keys are a multiple of the 16 of one mma.sync, and {_MOST_KEYS} at most: more would spill",
            ),
            Constraint(
                lambda warps_n: warps_m * warps_n * 32 <= threads_limit,
                f"a block ({warps_m} warps along the queries) has at most {threads_limit} threads",
            ),
            Constraint(
                lambda block_n, num_splits: num_splits <= -(-keys // block_n),
                f"each part has a tile: the {keys} keys seen have as many tiles as parts, or more",
            ),
            Constraint(
                registers_fit,
                f"sums, scores, queries and {_OTHER_REGISTERS} more need at most {REGISTERS_PER_THREAD} registers a thread, and the blocks "
                f"of a multiprocessor at most {registers_sm}",
            ),
            Constraint(
                lambda block_n, warps_n, stages: _smem_bytes(workload, block_n, warps_n, stages) <= smem_block,
                f"shared memory (queries, stages x tiles, or the warps' sums) is at most {smem_block} bytes a block",
            ),
            Constraint(
                lambda block_n, warps_n, stages, blocks_per_sm: (
                    (_smem_bytes(workload, block_n, warps_n, stages) + _RESERVED_SMEM) * blocks_per_sm <= smem_sm
                ),
                f"shared memory of all blocks of a multiprocessor, each with {_RESERVED_SMEM} for the system, is at most {smem_sm} bytes",
            ),
        ],
        _starts(workload, device),
    )


def _starts(workload: Workload, device: Device) -> list[Config]:
    """Return deep pipelines (64 KB and more in flight on every multiprocessor), with parts of the keys that fill the GPU once."""
    pairs = int(workload.shape["batch"]) * int(workload.shape["kv_heads"])
    warps_m = _warps_m(workload)
    starts: list[Config] = []
    for block_n, warps, stages, blocks_per_sm in (
        (64, 4, 3, 2),
        (64, 4, 6, 1),
        (128, 8, 3, 1),
        (32, 2, 4, 3),
        (64, 4, 2, 2),
        (32, 2, 2, 2),
        (32, 2, 6, 1),
    ):
        slots = device.sm_count * blocks_per_sm
        possible = [value for value in _SPLITS if value <= max(1, -(-_keys(workload) // block_n))]
        # the share of the places for blocks that is busy, on average over the waves; the fewest parts of those within 5%
        busy = {value: pairs * value / (-(-pairs * value // slots) * slots) for value in possible}
        num_splits = next(value for value in possible if busy[value] >= max(busy.values()) - 0.05)
        knobs = (block_n, max(1, warps // warps_m), stages, num_splits, blocks_per_sm)
        starts.append(dict(zip(("block_n", "warps_n", "stages", "num_splits", "blocks_per_sm"), knobs, strict=True)))
    return starts


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; touches no GPU."""
    shape = workload.shape
    batch, heads, kv_heads, seq_q, head_dim = (int(shape[dim]) for dim in ("batch", "heads", "kv_heads", "seq_q", "head_dim"))
    splits, block_n, warps_n, stages = (int(config[knob]) for knob in ("num_splits", "block_n", "warps_n", "stages"))
    softcap, scale, lse = float(shape["softcap"]), float(shape["scale"]) or head_dim**-0.5, bool(shape["lse"])
    constants: dict[str, int] = {
        dim.upper(): int(shape[dim]) for dim in ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim", "head_dim_v")
    }
    constants |= {"CAUSAL": bool(shape["causal"]), "WINDOW": _window(workload), "SOFTCAP": softcap > 0, "LSE": lse}
    constants |= {"HEADS_FIRST": shape["layout"] == "bhsd"}
    constants |= {knob.upper(): int(config[knob]) for knob in ("block_n", "warps_n", "stages", "blocks_per_sm")}
    macros = {
        "NUM_SPLITS": str(splits),
        "PRE_SCALE": f"{scale / softcap if softcap > 0 else 1.0!r}f",
        "SCALE": f"{(softcap if softcap > 0 else scale) * _LOG2_E!r}f",
    }
    text = source_text("attention_decode", workload.dtype, constants, macros, ("tiles", "softmax_online"))
    log_of_o = "lse" if lse else "o"  # without LSE nothing is written there
    combine = {
        "entry": "combine",
        "blocks": -(-batch * seq_q * heads // _COMBINE_WARPS),
        "threads": _COMBINE_WARPS * 32,
        "smem_bytes": 0,
        "tensors": ["part", "part_logs", "o", log_of_o],
    }
    return compile_kernel(
        text,
        "attention_decode",
        config,
        arch,
        blocks=batch * kv_heads * splits,
        threads=_warps_m(workload) * warps_n * 32,
        smem_bytes=_smem_bytes(workload, block_n, warps_n, stages),
        tensors=("q", "k", "v", *(("part", "part_logs") if splits > 1 else ("o", log_of_o))),
        then=[combine] if splits > 1 else [],
    )


class _SplitLaunch(CudaLaunch):
    """The kernel and the merging of its parts, with the workspace between them."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact)
        self._splits = int(artifact.config["num_splits"])

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind the tensors' addresses and make room for the parts: [splits, *o] and [splits, rows of o], float32.

        Raises:
            ValueError: Where a tensor is not contiguous or does not begin on a 16-byte boundary.
        """
        o = outputs["o"]
        part = torch.empty((self._splits, *o.shape), dtype=torch.float32, device=o.device)
        super().prepare({**inputs, "part": part, "part_logs": part.new_empty(part.shape[:-1])}, outputs)


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load the machine code, in the process that owns the GPU."""
    return _SplitLaunch(artifact) if int(artifact.config["num_splits"]) > 1 else CudaLaunch(artifact)


def _warps_m(workload: Workload) -> int:
    """Return the warps along the rows: the queries of all heads that read one kv head, 16 a warp."""
    shape = workload.shape
    return -(-int(shape["seq_q"]) * (int(shape["heads"]) // int(shape["kv_heads"])) // 16)


def _window(workload: Workload) -> int:
    """Return the window, 0 where it hides nothing."""
    window, seq_q, seq_kv = (int(workload.shape[dim]) for dim in ("window", "seq_q", "seq_kv"))
    return window if window < max(seq_q, seq_kv) else 0


def _keys(workload: Workload) -> int:
    """Return how many keys some query sees."""
    seq_q, seq_kv, window = int(workload.shape["seq_q"]), int(workload.shape["seq_kv"]), _window(workload)
    return min(seq_kv, seq_q + window - 1) if window else seq_kv


def _smem_bytes(workload: Workload, block_n: int, warps_n: int, stages: int) -> int:
    """Return the shared memory of a block: the queries, and the slots, which the warps' padded sums take over at the end."""
    head_dim, head_dim_v, rows = int(workload.shape["head_dim"]), int(workload.shape["head_dim_v"]), _warps_m(workload) * 16
    slots = stages * block_n * (head_dim + head_dim_v) * 2
    return rows * head_dim * 2 + max(slots, warps_n * rows * (head_dim_v + 8 + 2) * 4)

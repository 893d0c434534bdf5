"""Attention in TileLang: many queries on the tensor cores in two schedules, few queries against a long cache split over blocks."""

import tilelang

from kerneldyno.backends.tilelang import _attention
from kerneldyno.backends.tilelang import _attention_prefill
from kerneldyno.backends.tilelang import _compile
from kerneldyno.backends.tilelang import _overlap
from kerneldyno.core import DTYPE_BYTES
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported


_MOST_DIM = 256
"""Columns of one wgmma, and of one box of a tensor map."""

_WORKING_REGISTERS = 40
"""Registers of a consuming thread beside its scores, weights and sums: counted on builds for sm_90a."""

_BLOCK_N = (32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)


def space(workload: Workload, device: Device) -> Space:
    """The knobs of one of two kernels: for many queries (prefill), or for at most 64 rows of queries a key head (decode).

    Args:
        workload: o = softmax(scale q k^T) v in bf16 or fp16.
        device: The GPU, for its shared memory and its multiprocessors.

    Raises:
        Unsupported: On a GPU without wgmma, in float32, or for heads that are no multiples of 16 up to 256.
    """
    if not device.arch.startswith("sm_90"):
        raise Unsupported(f"attention in TileLang is written for wgmma (sm_90a); {device.name} is {device.arch}")
    if workload.dtype == "fp32":
        raise Unsupported("attention in TileLang is for bf16 and fp16: the tensor cores would round float32 to TF32")
    attention = _attention.Attention.of(workload)
    for name, dim in (("head_dim", attention.dim), ("head_dim_v", attention.dim_v)):
        if dim % 16 or dim > _MOST_DIM:
            raise Unsupported(f"attention in TileLang: {name}={dim} is no multiple of 16 up to {_MOST_DIM}")
    return _space_prefill(attention, device)


_HAND = {"schedule": "specialised", "block_m": 128, "warpgroups": 2, "stages": 2}
_STARTS = (
    {**_HAND, "block_n": 128},
    {**_HAND, "block_n": 128, "turns": True},
    {**_HAND, "block_n": 176, "reuse_q": True},
    {**_HAND, "block_n": 160},
    {**_HAND, "block_m": 192, "block_n": 128, "warpgroups": 3},
    {**_HAND, "block_n": 80},
    {**_HAND, "block_n": 64, "stages": 3},
    {"schedule": "pipelined", "block_m": 128, "block_n": 128, "stages": 2, "warpgroups": 2},
    {"schedule": "pipelined", "block_m": 64, "block_n": 64, "stages": 2, "warpgroups": 1},
)
"""By the tiles of FlashAttention-3 (hopper/tile_size.h: 128 x 176 and 128 x 128 at 128 dims, 192 x 128 at 64, 128 x 80 at 256); not
measured."""


def _space_prefill(attention: _attention.Attention, device: Device) -> Space:
    limit = device.smem_per_block_bytes - _compile.STATIC_SMEM_BYTES
    seq_q, seq_kv, dim, dim_v = attention.seq_q, attention.seq_kv, attention.dim, attention.dim_v
    size = 2
    slices = attention.batch * attention.heads
    specialised = {"when": lambda schedule: schedule == "specialised"}
    panels = (8, 1, 2, 4, 16) if attention.causal else (1, 2, 4, 8, 16)
    return Space(
        [
            Param(
                "schedule",
                ("specialised", "pipelined"),
                "specialised: by hand, the next tile's scores are multiplied beside the softmax; pipelined: by the compiler",
            ),
            Param("block_m", (64, 128, 192, 256), "queries of a tile"),
            Param("block_n", _BLOCK_N, "keys of a tile"),
            Param("stages", (1, 2, 3, 4), "tiles of keys and of values in flight between global and shared memory"),
            Param("warpgroups", (1, 2, 3), "groups of 128 threads that compute; one that loads comes on top"),
            Param("panel", panels, "heads whose tiles are taken together, for the L2 cache; longest first where causal"),
            Param("blocks", (device.sm_count, 0), "blocks that take tiles in turn; 0: one block a tile", **specialised),
            Param(
                "turns",
                (False, True),
                "the warpgroups queue their products in turn, so that one's softmax runs beside the other's products",
                when=lambda schedule, warpgroups: schedule == "specialised" and warpgroups == 2,
            ),
            Param(
                "reuse_q",
                (False, True),
                "results leave through the queries' shared memory, at the price of loading the next queries later",
                when=lambda schedule, blocks: schedule == "specialised" and blocks > 0 and dim >= dim_v,
            ),
        ],
        [
            Constraint(
                lambda block_m: block_m == 64 or block_m < 2 * seq_q,
                f"a tile has less than twice as many queries as there are ({seq_q})",
            ),
            Constraint(
                lambda block_n: block_n == 32 or block_n < 2 * seq_kv,
                f"a tile has less than twice as many keys as there are ({seq_kv})",
            ),
            Constraint(
                lambda block_n: block_n >= 64 or seq_kv <= 64 or dim + dim_v >= 448,
                "a tile has at least 64 keys where shared memory allows: fewer keep the tensor cores waiting",
            ),
            Constraint(lambda panel: panel == 1 or panel < 2 * slices, f"at most the {slices} heads of all sequences go together"),
            Constraint(
                lambda schedule, stages: schedule == "pipelined" or stages >= 2,
                "by hand, a stage is freed only after the next one is in use",
            ),
            Constraint(
                lambda block_m, warpgroups: block_m % (64 * warpgroups) == 0,
                "a warpgroup has multiples of 64 queries of its own",
            ),
            Constraint(
                lambda block_m, block_n, warpgroups: (
                    block_m // warpgroups * (block_n + block_n // 2 + dim_v) // _overlap.WARPGROUP + _WORKING_REGISTERS
                    <= _overlap.registers(warpgroups)[1]
                ),
                "scores, weights and sums of a thread fit in its registers: 240, 160 where three warpgroups compute",
            ),
            Constraint(
                lambda block_m, block_n, stages: size * (block_m * max(dim, dim_v) + stages * block_n * (dim + dim_v)) <= limit,
                f"shared memory (queries and stages x tiles of keys and values) is at most {limit} bytes a block",
            ),
            Constraint(
                lambda block_m, block_n, stages, reuse_q: (
                    reuse_q or size * (block_m * (dim + dim_v) + stages * block_n * (dim + dim_v)) <= limit
                ),
                f"shared memory (queries, results and stages x tiles of keys and values) is at most {limit} bytes a block",
            ),
        ],
        _STARTS,
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration for an architecture such as "sm_90a"."""
    return _compile.build(program(workload, config), config, arch)


def program(workload: Workload, config: Config) -> _compile.Program:
    """Write the TileLang function of one configuration."""
    attention = _attention.Attention.of(workload)
    tile = {key: int(config[key]) for key in ("block_m", "block_n", "stages", "panel", "warpgroups")}
    # approximate exp2 has 2 units of error in the last place of float32: nothing beside weights in 16 bits
    passes = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
    if config["schedule"] == "pipelined":
        return _compile.Program(_attention_prefill.pipelined(attention, **tile), passes)
    function = _attention_prefill.specialised(
        attention,
        **tile,
        blocks=int(config["blocks"]),
        turns=bool(config.get("turns", False)),
        reuse_q=bool(config.get("reuse_q", attention.dim >= attention.dim_v)),
    )
    return _compile.Program(function, {**passes, **_overlap.PASSES})


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load what `build` made."""
    return _compile.load(artifact, ("q", "k", "v", "o", "lse") if workload.shape["lse"] else ("q", "k", "v", "o"))

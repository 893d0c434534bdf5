"""Attention in TileLang: many queries on the tensor cores in two schedules, few queries against a long cache split over blocks."""

from typing import Any

import tilelang

from kerneldyno.backends.tilelang import _attention
from kerneldyno.backends.tilelang import _attention_decode
from kerneldyno.backends.tilelang import _attention_prefill
from kerneldyno.backends.tilelang import _compile
from kerneldyno.backends.tilelang import _overlap
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


_MOST_DIM = 256
"""Columns of one wgmma, and of one box of a tensor map."""

_WORKING_REGISTERS = 24
_MOST_ADDRESSED = 192
_WINDOW_REGISTERS = 8
"""Registers of a computing thread beside its scores, weights and sums, and 1 more for each 8 dims of a head up to 192, which hold addresses
of parts of tiles. Builds for sm_90a spill where less is left: 20 bytes at 36 of 160 with 128 dims, 40 bytes at 32 of 240; none at 32 of 160
with 64 dims, at 44 of 240 with 128, at 52 of 240 with 256; with a window 8 bytes at 44 of 240 with 128."""

_ELEMENT_BYTES = 2
_MOST_REGISTERS = 255
_MOST_SPLITS = 128

_LEAST_IN_FLIGHT = 32_768
"""At 4.2 TB/s a multiprocessor takes 32 bytes in a nanosecond, and memory answers after about one microsecond."""

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
    return _space_decode(attention, device) if attention.decode else _space_prefill(attention, device)


def _registers(attention: _attention.Attention, block_n: int) -> int:
    """Registers that a computing thread needs for tiles of `block_n` keys: 64 rows of float32 and of 16-bit elements over 128 threads."""
    elements = _attention.ROWS * (block_n + block_n // 2 + attention.dim_v) // _overlap.WARPGROUP
    return elements + _WORKING_REGISTERS + min(attention.dim, _MOST_ADDRESSED) // 8 + _WINDOW_REGISTERS * (attention.window > 0)


_HAND = {"schedule": "specialised", "block_m": 128, "stages": 2}
_STARTS = (
    {**_HAND, "block_n": 128},
    {**_HAND, "block_n": 128, "turns": True},
    {**_HAND, "block_n": 176, "reuse_q": True},
    {**_HAND, "block_n": 160},
    {**_HAND, "block_m": 192, "block_n": 128},
    {**_HAND, "block_n": 80},
    {**_HAND, "block_n": 64, "stages": 3},
    {"schedule": "pipelined", "block_m": 128, "block_n": 128, "stages": 2},
    {"schedule": "pipelined", "block_m": 64, "block_n": 64, "stages": 2},
    {"schedule": "pipelined", "block_m": 64, "block_n": 32, "stages": 2},
)
"""By the tiles of FlashAttention-3 (hopper/tile_size.h: 128 x 176 and 128 x 128 at 128 dims, 192 x 128 at 64, 128 x 80 at 256); not
measured."""


def _space_prefill(attention: _attention.Attention, device: Device) -> Space:
    limit = device.smem_per_block_bytes - _compile.STATIC_SMEM_BYTES
    seq_q, seq_kv, dim, dim_v = attention.seq_q, attention.seq_kv, attention.dim, attention.dim_v
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
            Param(
                "block_m", (64, 128, 192), "queries of a tile: 64 for each group of 128 threads that computes; one that loads comes on top"
            ),
            Param("block_n", _BLOCK_N, "keys of a tile"),
            Param("stages", (1, 2, 3, 4), "tiles of keys and of values in flight between global and shared memory"),
            Param("panel", panels, "heads whose tiles are taken together, for the L2 cache; longest first where causal"),
            Param("blocks", (device.sm_count, 0), "blocks that take tiles in turn; 0: one block a tile", **specialised),
            Param(
                "turns",
                (False, True),
                "the warpgroups queue their products in turn, so that one's softmax runs beside the other's products",
                when=lambda schedule, block_m: schedule == "specialised" and block_m == 128,
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
                lambda schedule, block_n: schedule == "pipelined" or block_n < seq_kv,
                f"by hand there are several tiles of the {seq_kv} keys: TileLang 0.1.15 fails at one ('Cannot match type int32 vs handle')",
            ),
            Constraint(
                lambda schedule, stages: schedule == "pipelined" or stages >= 2,
                "by hand, a stage is freed only after the next one is in use",
            ),
            Constraint(
                lambda block_m, block_n: _registers(attention, block_n) <= _overlap.registers(block_m // _attention.ROWS)[1],
                "scores, weights and sums of a thread fit in its registers: 240, 160 where three warpgroups compute",
            ),
            Constraint(
                lambda block_m, block_n, stages: _ELEMENT_BYTES * (block_m * max(dim, dim_v) + stages * block_n * (dim + dim_v)) <= limit,
                f"shared memory (queries and stages x tiles of keys and values) is at most {limit} bytes a block",
            ),
            Constraint(
                lambda block_m, block_n, stages, reuse_q: (
                    reuse_q or _ELEMENT_BYTES * (block_m * (dim + dim_v) + stages * block_n * (dim + dim_v)) <= limit
                ),
                f"shared memory (queries, results and stages x tiles of keys and values) is at most {limit} bytes a block",
            ),
        ],
        _STARTS,
    )


_DECODE_STARTS = (
    {"block_n": 128, "stages": 3},
    {"block_n": 64, "stages": 3},
    {"block_n": 64, "stages": 6},
    {"block_n": 64, "stages": 2},
    {"block_n": 256, "stages": 4},
    {"block_n": 32, "stages": 2},
)
"""By the bytes that they keep on their way: 192 KB, then twice 96 KB, and 192 and 64 in smaller tiles at 128 dims. An H200 has them
within 3% of each other at batch 16 x 32k keys (docs/notes/attention.md)."""


def _space_decode(attention: _attention.Attention, device: Device) -> Space:
    limit = device.smem_per_block_bytes - _compile.STATIC_SMEM_BYTES
    slices = attention.batch * attention.kv_heads
    each = _ELEMENT_BYTES * (attention.dim + attention.dim_v)
    queries = _ELEMENT_BYTES * _attention.ROWS * attention.dim

    def tiles(block_n: int) -> int:
        low, end = _attention_decode.key_tiles(attention, block_n)
        return end - low

    # as many blocks as fill the multiprocessors, once or several times over
    even = [max(1, device.sm_count * times // slices) for times in (1, 2, 3, 4, 6, 8)]
    splits = sorted({1, *(count for count in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if count <= 2 * even[-1]), *even})
    splits = [count for count in splits if count <= min(_MOST_SPLITS, tiles(_BLOCK_N[0]))]
    # rounds of blocks over the multiprocessors, of the size of one split, and 1% for each split's results
    best = min(splits, key=lambda count: -(-slices * count // device.sm_count) / count * (1 + 0.01 * count))
    return Space(
        [
            Param("block_n", (32, 64, 96, 128, 160, 192, 256), "keys of a tile"),
            Param("stages", (1, 2, 3, 4, 5, 6, 8), "tiles of keys and of values in flight between global and shared memory"),
            Param(
                "num_splits",
                (best, *(count for count in splits if count != best)),
                "blocks that share the keys of one key head out; 1 writes straight out, more need a second kernel",
            ),
        ],
        [
            Constraint(
                lambda block_n: block_n == 32 or block_n < 2 * attention.seq_kv,
                f"a tile has less than twice as many keys as there are ({attention.seq_kv})",
            ),
            Constraint(
                lambda block_n: _registers(attention, block_n) <= _MOST_REGISTERS,
                f"scores, weights and sums of a thread fit in its {_MOST_REGISTERS} registers",
            ),
            Constraint(
                lambda block_n, stages: queries + stages * block_n * each <= limit,
                f"shared memory (queries and stages x tiles of keys and values) is at most {limit} bytes a block",
            ),
            Constraint(
                lambda block_n, stages: stages * block_n * each >= min(_LEAST_IN_FLIGHT, tiles(block_n) * block_n * each),
                f"a block keeps {_LEAST_IN_FLIGHT} bytes of keys and values on their way, or all",
            ),
            Constraint(
                lambda block_n, num_splits: num_splits == 1 or num_splits <= tiles(block_n),
                "a split has at least one tile of keys",
            ),
        ],
        _DECODE_STARTS,
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration for an architecture such as "sm_90a"."""
    return _compile.build(program(workload, config), config, arch)


def program(workload: Workload, config: Config) -> _compile.Program:
    """Write the TileLang function of one configuration."""
    attention = _attention.Attention.of(workload)
    # approximate exp2 has 2 units of error in the last place of float32: nothing beside weights in 16 bits
    passes: dict[str, Any] = {tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
    if attention.decode:
        function = _attention_decode.split(
            attention, block_n=int(config["block_n"]), stages=int(config["stages"]), splits=int(config["num_splits"])
        )
        return _compile.Program(function, {**passes, **_overlap.PASSES})
    tile = {key: int(config[key]) for key in ("block_m", "block_n", "stages", "panel")}
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
    names = ("q", "k", "v", "o", "lse") if workload.shape["lse"] else ("q", "k", "v", "o")
    attention = _attention.Attention.of(workload)
    splits = int(artifact.config["num_splits"]) if attention.decode else 1
    if splits == 1:
        return _compile.load(artifact, names)
    return _Split(_compile.load(artifact, (*names, *_PARTS)), _attention_decode.partial_shapes(attention, splits))


_PARTS = ("o_part", "lse_part")


class _Split:
    """A launch of both kernels, with the tensors between them."""

    def __init__(self, launch: Launch, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        self._launch = launch
        self._shapes = shapes
        self.run = launch.run

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind tensors and allocate the splits' results."""
        import torch

        device = outputs["o"].device
        parts = {name: torch.empty(shape, dtype=torch.float32, device=device) for name, shape in zip(_PARTS, self._shapes, strict=True)}
        self._launch.prepare(inputs, {**outputs, **parts})

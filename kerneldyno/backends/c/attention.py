"""o = softmax(scale q k^T) v in C: online softmax over blocks of keys, for every mask, head size, layout and length.

Prefill packs all keys and values once, as fp32, and deals out tiles of queries. Decode (up to 64 rows that share keys, as in the other
backends) reads keys and values where they lie and deals out parts of the sequence, which a second step combines.
"""

from typing import Any

import torch

from kerneldyno.backends.c._attention import DECODE
from kerneldyno.backends.c._attention import NUMBERS
from kerneldyno.backends.c._attention import PREFILL
from kerneldyno.backends.c._attention import SHAPE
from kerneldyno.backends.c._attention import TILE
from kerneldyno.backends.c._compile import CLaunch
from kerneldyno.backends.c._compile import build_library
from kerneldyno.backends.c._compile import threads_knob
from kerneldyno.backends.c._compile import vector_knob
from kerneldyno.backends.c._compile import vector_registers
from kerneldyno.backends.c._panels import DOTS
from kerneldyno.backends.c._panels import PACKING
from kerneldyno.backends.c._panels import ROWS
from kerneldyno.backends.c._vectors import EXP
from kerneldyno.backends.c._vectors import prelude
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Tensors
from kerneldyno.core import Workload


DECODE_ROWS = 64
"""Most queries that share keys for which they are packed into one tile."""

PAD = 16
"""Rows behind a decode tile, so that register tiles need no edge: at least as many as any has."""

SPLITS = (1, 2, 4, 8, 16, 32)

LOG2_E = 1.4426950408889634

SIZES = """
enum {{ MR = {mr}, NV = {nv}, NR = NV * W, BN = {block_n} / NR * NR, KU = 4 }};
"""

PREFILL_SIZES = "enum {{ BM = {block_m} / MR * MR, ROWS = BM }};\n"

DECODE_SIZES = "enum {{ DR = {dot_mr}, SPLITS = {num_splits}, PAD = {pad}, ROWS = {rows} + PAD }};\n"


def space(workload: Workload, device: Device) -> Space:
    """Return the knobs: of prefill, or of decode where at most `DECODE_ROWS` queries share their keys."""
    shape: dict[str, Any] = dict(workload.shape)
    rows = shape["seq_q"] * (shape["heads"] // shape["kv_heads"])
    return _decode_space(shape, rows, device) if rows <= DECODE_ROWS else _prefill_space(device)


def _team(device: Device) -> list[Param]:
    return [
        threads_knob(device),
        Param("schedule", ("dynamic", "static"), "how OpenMP deals out the tiles", when=lambda threads: threads > 1),
        vector_knob(device.arch),
    ]


def _fits(registers: int) -> Constraint:
    return Constraint(
        lambda mr, nv: mr * nv + nv + 1 <= registers,
        f"the tile (mr x nv), a row of keys or values (nv) and one weight fit the {registers} vector registers",
    )


def _prefill_space(device: Device) -> Space:
    registers, widest = vector_registers(device.arch)
    return Space(
        [
            *_team(device),
            Param("mr", (4, 6, 8, 12), "rows of the register tile"),
            Param("nv", (1, 2, 3, 4), "vectors in a row of the register tile"),
            Param("block_m", (24, 48, 96, 192), "queries of a tile; their sums are to stay in the L2 cache"),
            Param("block_n", (48, 96, 192, 384), "keys of a block; they and their values are to stay in the L2 cache"),
        ],
        [
            _fits(registers),
            Constraint(lambda mr, nv: mr * nv >= 8, "two FMA units of 4 cycles' latency need at least 8 sums in flight"),
        ],
        # the second is the best on a 2-core EPYC (AVX2), one thread, 2048 keys: 74 GFLOP/s at head_dim=128 in bf16
        # (torch: 76), 64 causal at head_dim=64 in fp32 (57); the first needs 32 registers and was not measured
        [
            {"threads": device.sm_count, **tile, "block_m": 96, "block_n": 96}
            for tile in (
                {"vector_bytes": widest, "mr": 12, "nv": 2},
                {"vector_bytes": min(widest, 32), "mr": 6, "nv": 2},
                {"vector_bytes": min(widest, 32), "mr": 8, "nv": 1},
            )
        ],
    )


def _decode_space(shape: dict[str, Any], rows: int, device: Device) -> Space:
    registers, widest = vector_registers(device.arch)
    pairs = shape["batch"] * shape["kv_heads"]
    enough = next((splits for splits in SPLITS if splits * pairs >= device.sm_count), SPLITS[-1])
    return Space(
        [
            *_team(device),
            Param("mr", (1, 2, 4, 6, 8), "rows of the register tile of the values"),
            Param("nv", (1, 2, 4, 8), "vectors in a row of the register tile of the values"),
            Param("dot_mr", (1, 2, 3, 4, 6), "rows of the register tile of 4 keys"),
            Param("block_n", (64, 128, 256), "keys of a block"),
            Param("num_splits", SPLITS, "parts of the sequence, combined at the end"),
        ],
        [
            _fits(registers),
            Constraint(
                lambda dot_mr: 4 * dot_mr + 4 <= registers,
                f"the tile (4 x dot_mr) and 4 keys fit the {registers} vector registers",
            ),
            Constraint(lambda mr: mr < 2 * rows, f"at most half of the register tile's rows are idle (there are {rows})"),
            Constraint(lambda dot_mr: dot_mr < 2 * rows, f"at most half of the register tile's rows are idle (there are {rows})"),
        ],
        # on a 2-core EPYC (AVX2), one thread, bf16: 14 GB/s with one row, 30 GFLOP/s with 4 or 8 (torch: 1.4 of either)
        [
            {"threads": device.sm_count, "vector_bytes": min(widest, 32), **tile, "block_n": 128, "num_splits": enough}
            for tile in ({"mr": 2, "nv": 4, "dot_mr": 2}, {"mr": 4, "nv": 2, "dot_mr": 3}, {"mr": 1, "nv": 4, "dot_mr": 1})
        ],
    )


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; it serves every shape of its kind (prefill or decode) and dtype."""
    knobs: dict[str, Any] = {"schedule": "static", **config, "pad": PAD, "rows": DECODE_ROWS}
    shared = [prelude(knobs["vector_bytes"], workload.dtype), EXP, SIZES.format(**knobs)]
    if "num_splits" in config:
        parts = [DECODE_SIZES.format(**knobs), PACKING, ROWS, DOTS, SHAPE, NUMBERS, TILE, DECODE.format(**knobs)]
    else:
        parts = [PREFILL_SIZES.format(**knobs), PACKING, ROWS, SHAPE, NUMBERS, TILE, PREFILL.format(**knobs)]
    return build_library("".join([*shared, *parts]), "attention", config, arch, knobs["threads"])


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load what `build` made; `prepare` allocates each thread's tile, and the packed keys and values or the parts of a split."""
    knobs: dict[str, Any] = dict(artifact.config)
    shape: dict[str, Any] = dict(workload.shape)
    batch, heads, kv_heads, seq_q, seq_kv, d, dv = (
        shape[key] for key in ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim", "head_dim_v")
    )
    panel = knobs["nv"] * knobs["vector_bytes"] // 4
    # 16 floats are a vector of 64 bytes and a cache line
    padded, width, block_n = _up(d, 16), _up(dv, panel), knobs["block_n"]
    tile_rows = DECODE_ROWS + PAD if "num_splits" in knobs else knobs["block_m"]
    memory = tile_rows * (padded + block_n + 16 + width)
    if "num_splits" in knobs:
        rows = seq_q * heads // kv_heads
        splits = knobs["num_splits"]
        memory += block_n * width
        shared = [batch * kv_heads * splits * rows * (width + 2) if splits > 1 else 0]
    else:
        lines = batch * kv_heads * _up(seq_kv, panel)
        shared = [lines * d, lines * width]
    pitch = _up(memory, 16)
    words = torch.tensor(
        [batch, heads, kv_heads, seq_q, seq_kv, d, dv, shape["causal"], shape["window"], shape["layout"] == "bhsd"], dtype=torch.int64
    )
    scale, cap = shape["scale"] or d**-0.5, shape["softcap"]
    # scores in powers of 2; with a cap they are divided by it first and multiplied by it after tanh
    numbers = torch.tensor([scale / cap, cap * LOG2_E] if cap else [scale * LOG2_E, 0.0], dtype=torch.float32)

    def arguments(inputs: Tensors, outputs: Tensors) -> tuple[Any, ...]:
        work = [torch.empty(size) for size in (*shared, pitch * knobs["threads"])]
        return inputs["q"], inputs["k"], inputs["v"], outputs["o"], outputs.get("lse", 0), words, numbers, *work, pitch

    return CLaunch(artifact, arguments)


def _up(count: int, step: int) -> int:
    """Return the least multiple of `step` from `count` on."""
    return (count + step - 1) // step * step

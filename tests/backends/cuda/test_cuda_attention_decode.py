"""The CUDA attention of few queries: numbers in the emulator for every variant, resources and instructions for sm_90a."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kerneldyno.backends.cuda import _attention_decode as attention_decode
from kerneldyno.core import Config
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported
from kerneldyno.testing.devices import H200


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SHAPE = {
    "batch": 1,
    "heads": 8,
    "kv_heads": 2,
    "seq_q": 1,
    "seq_kv": 90,
    "head_dim": 64,
    "head_dim_v": 64,
    "causal": False,
    "window": 0,
    "softcap": 0.0,
    "scale": 0.0,
    "layout": "bshd",
    "lse": True,
}


def _workload(dtype: str = "bf16", **dims: Any) -> Workload:
    return Workload("attention", {**SHAPE, **dims}, dtype)


def _config(block_n: int, warps_n: int, stages: int, num_splits: int) -> Config:
    return {"block_n": block_n, "warps_n": warps_n, "stages": stages, "num_splits": num_splits, "blocks_per_sm": 1}


def _right(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in float64 with all scores in memory; q, k, v and the answer [batch, heads, seq, dim]."""
    shape = workload.shape
    seq_q, seq_kv, window, cap = int(shape["seq_q"]), int(shape["seq_kv"]), int(shape["window"]), float(shape["softcap"])
    group = int(shape["heads"]) // int(shape["kv_heads"])
    k, v = (tensor.double().repeat_interleave(group, dim=1) for tensor in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * (float(shape["scale"]) or 1 / math.sqrt(int(shape["head_dim"])))
    if cap:
        scores = cap * torch.tanh(scores / cap)
    place, key = torch.arange(seq_q)[:, None] + seq_kv - seq_q, torch.arange(seq_kv)
    seen = key <= place if shape["causal"] else torch.ones(seq_q, seq_kv, dtype=torch.bool)
    if window:
        seen = seen & (key > place - window) & (key < place + window)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.clamp(min=-1e9)[..., None]) @ v, lse


@pytest.mark.parametrize(
    ("workload", "config"),
    [
        pytest.param(_workload(batch=2), _config(32, 2, 3, 1), id="gqa"),
        pytest.param(_workload(), _config(64, 4, 2, 2), id="gqa-splits"),
        pytest.param(_workload("fp16", layout="bhsd", lse=False), _config(16, 1, 5, 4), id="bhsd-many-splits"),
        pytest.param(_workload(seq_q=3, causal=True, heads=6, lse=False), _config(32, 2, 2, 1), id="three-queries-causal"),
        pytest.param(
            _workload(seq_q=5, causal=True, window=37, heads=7, kv_heads=1, softcap=2.5), _config(32, 1, 3, 2), id="window-softcap-mqa"
        ),
        pytest.param(_workload(seq_q=9, window=20, scale=0.3, heads=2, layout="bhsd"), _config(16, 1, 4, 1), id="window-both-sides"),
        pytest.param(_workload(heads=16, head_dim=48, head_dim_v=80, seq_kv=97), _config(96, 2, 2, 1), id="odd-dims"),
        pytest.param(
            _workload("fp16", heads=3, kv_heads=3, head_dim=192, head_dim_v=128, seq_kv=40), _config(32, 2, 2, 2), id="deepseek-mha"
        ),
        pytest.param(_workload(heads=2, kv_heads=1, seq_q=12, seq_kv=5, causal=True), _config(16, 1, 2, 1), id="rows-that-see-nothing"),
        pytest.param(_workload(heads=4, kv_heads=1, seq_q=2, seq_kv=1), _config(16, 1, 3, 1), id="one-key"),
        pytest.param(_workload(heads=1, kv_heads=1, head_dim=256, head_dim_v=256, seq_kv=70), _config(32, 2, 2, 3), id="widest"),
        pytest.param(_workload(heads=8, kv_heads=1, seq_q=8, causal=True), _config(32, 1, 3, 3), id="full-tile-of-rows"),
    ],
)
def test_numbers(emulate: Callable, workload: Workload, config: Config) -> None:
    assert not attention_decode.space(workload, H200).problems(config)
    shape, dtype = workload.shape, DTYPES[workload.dtype]
    batch, heads, kv_heads, seq_q, seq_kv, head_dim, head_dim_v = (int(shape[dim]) for dim in tuple(SHAPE)[:7])
    generator = torch.Generator().manual_seed(3)
    sizes = {"q": (heads, seq_q, head_dim), "k": (kv_heads, seq_kv, head_dim), "v": (kv_heads, seq_kv, head_dim_v)}
    drawn = {name: torch.randn(batch, *size, generator=generator).to(dtype) for name, size in sizes.items()}
    tensors = drawn if shape["layout"] == "bhsd" else {name: tensor.transpose(1, 2).contiguous() for name, tensor in drawn.items()}
    o = torch.full((*tensors["q"].shape[:-1], head_dim_v), math.nan, dtype=dtype)
    part = torch.full((int(config["num_splits"]), *o.shape), math.nan)
    outputs = {"o": o, "lse": torch.full((batch, heads, seq_q), math.nan), "part": part, "part_logs": part[..., 0].contiguous()}

    found = emulate(attention_decode.build(workload, config, "sm_90a"), {**tensors, **outputs})

    right, lse = _right(workload, drawn["q"], drawn["k"], drawn["v"])
    given = found.tensors["o"] if shape["layout"] == "bhsd" else found.tensors["o"].transpose(1, 2)
    # the powers are rounded to the dtype before they meet the values, up to 3 or 4, and the output once more
    torch.testing.assert_close(given.double(), right, rtol=0, atol={"fp16": 2.0**-9, "bf16": 2.0**-6}[workload.dtype])
    relative = (given.double() - right).norm() / right.norm().clamp(min=1e-30)
    assert relative <= {"fp16": 2.0**-11, "bf16": 2.0**-8}[workload.dtype]
    if shape["lse"]:
        torch.testing.assert_close(found.tensors["lse"].double(), lse, rtol=0, atol=1e-5)
    assert found.bank_conflicts == 0


@pytest.mark.parametrize(
    "dims",
    [
        {"batch": 16, "heads": 64, "kv_heads": 8, "seq_kv": 32768, "head_dim": 128, "head_dim_v": 128},
        {"batch": 8, "heads": 64, "kv_heads": 8, "seq_q": 8, "seq_kv": 8192, "head_dim": 128, "head_dim_v": 128, "causal": True},
        {"batch": 1, "heads": 64, "kv_heads": 8, "seq_kv": 131072, "window": 128, "softcap": 30.0},
    ],
)
def test_starts_do_not_spill(disassemble: Callable, dims: dict[str, Any]) -> None:
    workload = _workload(**dims)
    starts = attention_decode.space(workload, H200).starts
    assert len(starts) >= 3
    for config in starts[:2]:
        artifact = attention_decode.build(workload, config, "sm_90a")
        assert artifact.spill_bytes == 0
        assert artifact.registers * artifact.threads * int(config["blocks_per_sm"]) <= H200.registers_per_sm
    sass = disassemble(artifact.binary)
    assert "HMMA.16816.F32" in sass
    assert "LDGSTS.E.BYPASS.LTC128B.128" in sass


def test_splits_of_the_starts_fill_the_gpu() -> None:
    for batch, splits in ((16, 2), (1, 32), (64, 1)):
        workload = _workload(batch=batch, heads=64, kv_heads=8, seq_kv=32768, head_dim=128, head_dim_v=128)
        assert attention_decode.space(workload, H200).starts[0]["num_splits"] == splits


def test_a_sample_of_the_space_compiles() -> None:
    workload = _workload(heads=64, kv_heads=8, seq_q=2, seq_kv=4096, head_dim=128, head_dim_v=128, causal=True)
    space = attention_decode.space(workload, H200)
    rng = random.Random(5)
    for _ in range(3):
        artifact = attention_decode.build(workload, space.sample(rng), "sm_90a")
        assert artifact.registers * artifact.threads <= H200.registers_per_sm
        assert artifact.smem_bytes <= H200.smem_per_block_bytes


@pytest.mark.parametrize(("dtype", "head_dim", "reason"), [("fp32", 64, "no fp32 variant"), ("bf16", 72, "multiples of 16")])
def test_what_it_has_no_variant_for_is_refused(dtype: str, head_dim: int, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        attention_decode.space(_workload(dtype, head_dim=head_dim), H200)

"""The CUDA attention with many queries: numbers in the emulator, resources and instructions of its machine code for sm_90a."""

import math
import random
import re
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from kerneldyno.backends.cuda import _attention_prefill as prefill
from kerneldyno.core import Config
from kerneldyno.core import Value
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported
from kerneldyno.testing.devices import H200


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _workload(
    batch: int = 1,
    heads: int = 1,
    kv_heads: int = 1,
    seq: tuple[int, int] = (128, 128),
    head_dim: int = 64,
    head_dim_v: int = 0,
    dtype: str = "bf16",
    **rest: Value,
) -> Workload:
    shape: dict[str, Value] = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "seq_q": seq[0],
        "seq_kv": seq[1],
        "head_dim": head_dim,
        "head_dim_v": head_dim_v or head_dim,
        "causal": False,
        "window": 0,
        "softcap": 0.0,
        "scale": 0.0,
        "layout": "bshd",
        "lse": False,
    }
    assert not set(rest) - set(shape)
    return Workload("attention", {**shape, **rest}, dtype)


def _config(block_m: int, block_n: int, stages: int = 2, overlap: bool = True, pingpong: bool = True, group_heads: int = 1) -> Config:
    turns = {"pingpong": pingpong} if block_m > 64 else {}
    return {"block_m": block_m, "block_n": block_n, "stages": stages, "overlap": overlap, **turns, "group_heads": group_heads}


def _tensors(workload: Workload) -> dict[str, torch.Tensor]:
    shape = workload.shape
    generator = torch.Generator().manual_seed(5)

    def extent(heads: str, seq: str, width: str) -> tuple[int, ...]:
        batch, count, length, elements = (int(shape[key]) for key in ("batch", heads, seq, width))
        return (batch, length, count, elements) if shape["layout"] == "bshd" else (batch, count, length, elements)

    def draw(*extent: int) -> torch.Tensor:
        return torch.randn(extent, generator=generator).to(DTYPES[workload.dtype])

    tensors = {
        "q": draw(*extent("heads", "seq_q", "head_dim")),
        "k": draw(*extent("kv_heads", "seq_kv", "head_dim")),
        "v": draw(*extent("kv_heads", "seq_kv", "head_dim_v")),
        "o": torch.full(extent("heads", "seq_q", "head_dim_v"), float("nan"), dtype=DTYPES[workload.dtype]),
    }
    if shape["lse"]:
        tensors["lse"] = torch.full([int(shape[key]) for key in ("batch", "heads", "seq_q")], float("nan"))
    return tensors


def _right(workload: Workload, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o, in the workload's layout, and lse, both in float64."""
    shape = workload.shape
    flip = shape["layout"] == "bshd"
    q, k, v = (tensors[name].double().transpose(1, 2) if flip else tensors[name].double() for name in ("q", "k", "v"))
    group = int(shape["heads"]) // int(shape["kv_heads"])
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    scores = q @ k.mT * (float(shape["scale"]) or q.shape[-1] ** -0.5)
    if shape["softcap"]:
        scores = float(shape["softcap"]) * torch.tanh(scores / float(shape["softcap"]))
    position = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
    key = torch.arange(k.shape[2])[None, :]
    visible = torch.ones_like(scores[0, 0], dtype=torch.bool)
    if shape["causal"]:
        visible &= key <= position
    if shape["window"]:
        visible &= key > position - int(shape["window"])
        if not shape["causal"]:
            visible &= key < position + int(shape["window"])
    scores = scores.masked_fill(~visible, -math.inf)
    o = torch.softmax(scores, -1).nan_to_num(0.0) @ v
    return (o.transpose(1, 2) if flip else o), torch.logsumexp(scores, -1)


@pytest.mark.parametrize(
    ("workload", "config"),
    [
        pytest.param(_workload(2, 2, 1, (70, 200), 64, lse=True), _config(128, 80, 2, group_heads=2), id="ragged-mqa-lse"),
        pytest.param(_workload(1, 4, 2, (150, 150), causal=True, layout="bhsd", dtype="fp16"), _config(128, 64, 3), id="causal-gqa"),
        pytest.param(_workload(1, 1, 1, (100, 230), 128, causal=True), _config(128, 112, 1, pingpong=False), id="one-stage"),
        pytest.param(_workload(1, 1, 1, (230, 90), 64, causal=True, lse=True), _config(128, 64), id="causal-rows-that-see-nothing"),
        pytest.param(_workload(1, 1, 1, (300, 300), 64, causal=True, window=70, lse=True), _config(192, 64), id="causal-window"),
        pytest.param(_workload(1, 1, 1, (200, 260), 64, window=40), _config(64, 64, 2), id="window-both-sides"),
        pytest.param(_workload(1, 1, 1, (300, 90), 64, window=30, lse=True), _config(128, 96, overlap=False), id="window-that-most-miss"),
        pytest.param(_workload(1, 2, 1, (65, 130), softcap=3.0, scale=0.5, dtype="fp16"), _config(128, 64, overlap=False), id="softcap"),
        pytest.param(_workload(1, 1, 1, (129, 140), 192, 128, causal=True), _config(128, 64, overlap=False, pingpong=False), id="192-128"),
        pytest.param(_workload(1, 2, 2, (66, 100), 80, 96, layout="bhsd"), _config(64, 80, 1), id="dims-between-slabs"),
        pytest.param(_workload(1, 1, 1, (66, 70), 16, 16), _config(128, 64), id="small-dims"),
        pytest.param(_workload(1, 1, 1, (66, 90), 256), _config(64, 64, 1), id="long-dims"),
        pytest.param(_workload(1, 1, 1, (128, 352), 128), _config(128, 176, 2), id="even"),
    ],
)
def test_numbers(emulate: Callable, workload: Workload, config: Config) -> None:
    assert not [problem for problem in prefill.space(workload, H200).problems(config) if "group_heads" not in problem]
    tensors = _tensors(workload)
    found = emulate(prefill.build(workload, config, "sm_90a"), tensors).tensors

    o, lse = _right(workload, tensors)
    # probabilities and results are rounded to 16 bits: each about 2^-9 (bf16) of numbers up to 1 and 4
    atol = {"bf16": 2.0**-7, "fp16": 2.0**-10}[workload.dtype]
    torch.testing.assert_close(found["o"].double(), o, rtol=2 * atol, atol=atol)
    if workload.shape["lse"]:
        torch.testing.assert_close(found["lse"].double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "causal"),
    [(64, 64, True), (128, 128, False), (128, 128, True), (192, 128, True), (256, 256, False)],
)
def test_starts_neither_spill_nor_serialise(disassemble: Callable, head_dim: int, head_dim_v: int, causal: bool) -> None:
    workload = _workload(4, 16, 16, (4096, 4096), head_dim, head_dim_v, causal=causal)
    config = prefill.space(workload, H200).starts[0]
    artifact = prefill.build(workload, config, "sm_90a")
    assert artifact.spill_bytes == 0
    assert "serialized" not in artifact.texts["ptxas"]
    loop = _main_loop(disassemble(artifact.binary), head_dim // 16)
    # the softmax, an exponential for each score of a thread, runs while the values are multiplied
    first, second = (loop.index(f"WARPGROUP.DEPBAR.LE gsb0, {pending}") for pending in ("0x1", "0x0"))
    assert loop[first:second].count("MUFU.EX2") >= int(config["block_n"]) // 2


def _main_loop(sass: str, score_steps: int) -> str:
    """Return the text from the loop's first product on; before it are the products of the first scores."""
    return sass[[match.start() for match in re.finditer("HGMMA", sass)][score_steps] :]


def test_a_sample_of_the_space_compiles() -> None:
    workload = _workload(2, 16, 4, (3000, 3000), 128, causal=True, window=1024, softcap=30.0, lse=True, dtype="fp16")
    space = prefill.space(workload, H200)
    rng = random.Random(3)
    for _ in range(2):
        artifact = prefill.build(workload, space.sample(rng), "sm_90a")
        assert artifact.registers * artifact.threads <= H200.registers_per_sm
        assert artifact.smem_bytes <= H200.smem_per_block_bytes
        assert "serialized" not in artifact.texts["ptxas"]


@pytest.mark.parametrize("workload", [_workload(dtype="fp32"), _workload(head_dim=72), _workload(head_dim=64, head_dim_v=320)])
def test_what_has_no_variant_is_refused(workload: Workload) -> None:
    with pytest.raises(Unsupported, match="attention on cuda"):
        prefill.space(workload, H200)


def test_another_gpu_is_refused() -> None:
    with pytest.raises(Unsupported, match="wgmma"):
        prefill.space(_workload(), replace(H200, arch="sm_100a"))


def test_constraints_say_why() -> None:
    space = prefill.space(_workload(seq=(4096, 4096), head_dim=128), H200)
    assert "registers" in space.problems({**space.complete({}), "block_m": 192, "block_n": 128})[0]
    assert "232448 bytes a block" in space.problems({**space.complete({}), "block_n": 128, "stages": 4})[0]

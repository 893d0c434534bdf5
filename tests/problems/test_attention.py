"""Attention: the reference against the plain formula, what is visible counted one by one, and what the budget admits and refuses."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from kerneldyno.core import Device
from kerneldyno.core import Tensors
from kerneldyno.core import Workload
from kerneldyno.core.error import error_between
from kerneldyno.errors import RequestError
from kerneldyno.measure.device import cpu
from kerneldyno.problems import _attention_libraries
from kerneldyno.problems import _common
from kerneldyno.problems import attention as problem
from kerneldyno.problems._attention import Sizes
from kerneldyno.testing.devices import H200
from tests.contract.found import attention
from tests.drawn import drawn_attentions


MASKS = ({}, {"causal": True}, {"window": 5}, {"causal": True, "window": 5}, {"window": 1}, {"causal": True, "window": 1})
LENGTHS = ((37, 53), (53, 37), (20, 7), (1, 30), (9, 9), (30, 1), (1, 1))


def sees(sizes: Sizes, query: int, key: int) -> bool:
    """Say whether a query sees a key, word for word as the dims say it."""
    place = query + sizes.seq_kv - sizes.seq_q
    if sizes.causal and key > place:
        return False
    if not sizes.window:
        return True
    return key > place - sizes.window and (sizes.causal or key < place + sizes.window)


def visible(sizes: Sizes) -> torch.Tensor:
    return torch.tensor([[sees(sizes, query, key) for key in range(sizes.seq_kv)] for query in range(sizes.seq_q)])


def expanded(sizes: Sizes, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v as [batch, heads, seq, width] in float64, head by head from the layout."""
    heads_axis = 2 if sizes.layout == "bshd" else 1
    kv_head = [head // (sizes.heads // sizes.kv_heads) for head in range(sizes.heads)]
    q = torch.stack([inputs["q"].select(heads_axis, head) for head in range(sizes.heads)], dim=1)
    k, v = (torch.stack([inputs[name].select(heads_axis, head) for head in kv_head], dim=1) for name in ("k", "v"))
    return q.double(), k.double(), v.double()


def plain(sizes: Sizes, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute o and lse as [batch, heads, seq_q, ...] with all the scores at once."""
    q, k, v = expanded(sizes, inputs)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * sizes.scale
    if sizes.softcap:
        scores = sizes.softcap * torch.tanh(scores / sizes.softcap)
    scores = scores.masked_fill(~visible(sizes), -math.inf)
    powers = scores.exp()  # no largest is taken off: float64 holds these
    total = powers.sum(dim=-1, keepdim=True)
    o = torch.einsum("bhij,bhjd->bhid", powers, v) / torch.where(total == 0, 1.0, total)
    return o, total.squeeze(-1).log()


def assert_reference_is_plain(workload: Workload, tolerance: float) -> None:
    sizes = Sizes.of(workload)
    inputs = problem.inputs(workload, "cpu")
    reference = problem.reference(workload, inputs)
    o, lse = plain(sizes, inputs)
    answer = reference["o"].transpose(1, 2) if sizes.layout == "bshd" else reference["o"]
    torch.testing.assert_close(answer.double(), o, rtol=tolerance, atol=tolerance)
    if sizes.lse:
        torch.testing.assert_close(reference["lse"].double(), lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("seq_q", "seq_kv"), LENGTHS)
def test_reference_is_the_plain_formula(seq_q: int, seq_kv: int, mask: dict[str, int]) -> None:
    for softcap, layout, groups in ((0.0, "bshd", 2), (3.0, "bhsd", 1), (2.0, "bshd", 4)):
        others = {**mask, "softcap": softcap, "layout": layout, "head_dim_v": 24, "lse": True}
        assert_reference_is_plain(attention(2, 4, groups, seq_q, seq_kv, 16, "fp32", **others), 1e-12)


@pytest.mark.parametrize("workload", drawn_attentions(24), ids=lambda workload: workload.shape_text)
def test_reference_is_the_plain_formula_at_drawn_shapes(workload: Workload) -> None:
    shorter = {"seq_q": min(60, int(workload.shape["seq_q"])), "seq_kv": min(90, int(workload.shape["seq_kv"]))}
    assert_reference_is_plain(replace(workload, shape={**workload.shape, **shorter}), 1e-5)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_blocks_do_not_change_the_reference(mask: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    workload = attention(3, 4, 2, 12, 15, 8, "fp32", lse=True, **mask)
    inputs = problem.inputs(workload, "cpu")
    whole = problem.reference(workload, inputs)
    budget = problem.tolerance(workload, inputs, whole)
    for elements in (1, 100, 600):
        monkeypatch.setattr(_common, "BLOCK_ELEMENTS", elements)
        blocked = problem.reference(workload, inputs)
        assert error_between(blocked, whole).relative < 1e-14
        assert problem.tolerance(workload, inputs, whole).relative == pytest.approx(budget.relative, rel=1e-3)


def test_fully_masked_rows_are_zero_with_an_infinite_logarithm() -> None:
    workload = attention(1, 2, 2, 10, 4, 8, "fp32", causal=True, lse=True)
    reference = problem.reference(workload, problem.inputs(workload, "cpu"))
    assert Sizes.of(workload).blind
    assert bool((reference["o"][:, :6] == 0).all())
    assert bool((reference["lse"][:, :, :6] == -math.inf).all())
    assert bool(reference["lse"][:, :, 6:].isfinite().all())


@settings(max_examples=200)
@given(st.integers(1, 12), st.integers(1, 12), st.booleans(), st.integers(0, 14))
def test_pairs_and_keys_are_those_counted_one_by_one(seq_q: int, seq_kv: int, causal: bool, window: int) -> None:
    sizes = Sizes.of(attention(1, 1, 1, seq_q, seq_kv, 4, "bf16", causal=causal, window=window))
    seen = [(query, key) for query in range(seq_q) for key in range(seq_kv) if sees(sizes, query, key)]
    halves = sum(query + seq_kv - seq_q == key for query, key in seen) if causal and seq_q > 1 else 0
    assert sizes.pairs == len(seen) - halves / 2
    keys = {key for _, key in seen}
    assert set(range(*sizes.keys(0, seq_q - 1))) == keys
    assert sizes.blind == (len({query for query, _ in seen}) < seq_q)
    assert max(sum(query == one for one, _ in seen) for query in range(seq_q)) <= sizes.keys_seen
    hidden = sizes.hidden(0, seq_q - 1, 0, seq_kv, torch.device("cpu"))
    assert hidden.shape == (seq_q, seq_kv)
    assert torch.equal(~hidden, visible(sizes))


def test_work_of_known_cases() -> None:
    square = 2.0 * 2 * 3 * (64 + 64) * 100 * 100
    assert problem.work(attention(2, 3, 3, 100, 100, 64, "bf16")).flops == square
    assert problem.work(attention(2, 3, 3, 100, 100, 64, "bf16", causal=True)).flops == square / 2
    assert problem.work(attention(1, 16, 16, 16384, 16384, 128, "bf16")).flops == 4.0 * 16 * 16384**2 * 128
    # decode: causal hides nothing, the cache is read once, q and o are 8 rows of 64
    decode = problem.work(attention(2, 8, 2, 1, 1000, 64, "bf16", causal=True, lse=True))
    assert decode.flops == 4.0 * 2 * 8 * 64 * 1000
    assert decode.bytes == 2 * (2 * 2 * 1000 * 64 * 2 + 2 * 8 * 64 * 2 + 8 * 4)
    # a window's decode reads the window
    assert problem.work(attention(1, 8, 2, 1, 1000, 64, "bf16", window=128)).bytes == 2 * (2 * 128 * 64 * 2 + 2 * 8 * 64)
    # 10 queries that see 5 keys each, but the last 9 only: keys 91 - 4 to 99
    windowed = problem.work(attention(1, 1, 1, 10, 100, 64, "bf16", causal=True, window=5))
    assert windowed.flops == 4.0 * 64 * (10 * 5 - 10 / 2)
    assert windowed.bytes == 2 * 2 * 64 * (10 + 14)


def test_named_shapes() -> None:
    shapes = problem.shapes()
    suite = shapes["fa3-hd128-causal-4k"]
    assert (suite["batch"], suite["heads"], suite["seq_q"], suite["seq_kv"], suite["causal"]) == (4, 16, 4096, 4096, True)
    assert shapes["fa3-hd64-full-512"]["batch"] == 32
    assert shapes["fa3-hd64-full-512"]["heads"] == 32
    for label, shape in shapes.items():
        if label.startswith("fa3"):
            assert int(shape["batch"]) * int(shape["seq_q"]) == 16384
            assert int(shape["heads"]) * int(shape["head_dim"]) == 2048
    decode = shapes["llama3-70b-decode-16x32k"]
    assert [decode[key] for key in ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim")] == [16, 64, 8, 1, 32768, 128]
    deepseek = shapes["deepseek-v3-prefill-4k"]
    assert [deepseek[key] for key in ("heads", "kv_heads", "head_dim", "head_dim_v")] == [128, 128, 192, 128]
    assert shapes["gpt-oss-120b-window-prefill-4k"]["window"] == 128
    assert shapes["qwen3-235b-a22b-prefill-1k"]["kv_heads"] == 4
    assert "llama3-70b-decode-128x128k" not in shapes  # 64 GiB of cache; in fp32 more than a device holds
    assert "qwen3-235b-a22b-decode-128x128k" in shapes


@pytest.mark.parametrize(("heads", "kv_heads", "near"), [(8, 3, "kv_heads=2"), (12, 5, "kv_heads=4"), (4, 8, "kv_heads=4")])
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int, near: str) -> None:
    with pytest.raises(RequestError, match=near):
        problem.check(attention(1, heads, kv_heads, 16, 16, 64, "bf16"))


def test_a_cache_beyond_memory_is_refused() -> None:
    with pytest.raises(RequestError, match="at most 128 GiB"):
        problem.check(attention(128, 64, 64, 1, 131072, 128, "bf16", window=128))  # the window reads little, the cache is 512 GiB


def rounded(
    sizes: Sizes, inputs: Tensors, step: int, keep: Callable[[torch.Tensor], torch.Tensor] = lambda o: o
) -> dict[str, torch.Tensor]:
    """Compute as a flash kernel does: online over blocks of keys in float32, weights rounded to the dtype, o rounded once."""
    dtype = inputs["q"].dtype
    q, k, v = (tensor.float() for tensor in expanded(sizes, inputs))
    peak = torch.full((*q.shape[:3], 1), -math.inf)
    total, o = torch.zeros_like(peak), torch.zeros(*q.shape[:3], v.shape[3])
    hidden = ~visible(sizes)
    for start in range(0, sizes.seq_kv, step):
        keys = slice(start, start + step)
        scores = q @ k[:, :, keys].transpose(2, 3) * (sizes.scale * math.log2(math.e))
        if sizes.softcap:
            cap = sizes.softcap * math.log2(math.e)
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(hidden[:, keys], -math.inf)
        higher = torch.maximum(peak, scores.amax(dim=-1, keepdim=True))
        base = torch.where(higher == -math.inf, 0.0, higher)
        weights, shrink = torch.exp2(scores - base), torch.exp2(peak - base)
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        o = o * shrink + weights.to(dtype).float() @ v[:, :, keys]
        o = keep(o)
        peak = higher
    o = (o / torch.where(total == 0, 1.0, total)).to(dtype)
    found = {"o": o.transpose(1, 2) if sizes.layout == "bshd" else o}
    if sizes.lse:
        found["lse"] = ((torch.where(total == 0, 0.0, peak) + total.log2()) * math.log(2)).squeeze(-1)
    return found


FEATURES = (
    {},
    {"causal": True, "lse": True},
    {"window": 20, "softcap": 4.0, "layout": "bhsd"},
    {"scale": 1.0},
    {"causal": True, "window": 3},
)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("others", FEATURES, ids=str)
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(150, 150), (1, 400), (3, 5), (60, 20)])
def test_budget_admits_flash_kernels_of_any_block(seq_q: int, seq_kv: int, others: dict[str, int], dtype: str) -> None:
    for seed, (group, width) in enumerate(((1, 64), (4, 32), (1, 16))):
        workload = attention(1, 4, 4 // group, seq_q, seq_kv, width, dtype, seed=seed, **others)
        inputs = problem.inputs(workload, "cpu")
        reference = problem.reference(workload, inputs)
        budget = problem.tolerance(workload, inputs, reference)
        for step in (16, 64):
            error = error_between(rounded(Sizes.of(workload), inputs, step), reference)
            assert budget.admits(error), f"seed {seed}, blocks of {step}: {error} is beyond {budget}"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("others", FEATURES[:3], ids=str)
def test_budget_refuses_common_mistakes(others: dict[str, int], dtype: str) -> None:
    workload = attention(2, 4, 2, 150, 150, 64, dtype, **others)
    sizes, inputs = Sizes.of(workload), problem.inputs(workload, "cpu")
    reference = problem.reference(workload, inputs)
    budget = problem.tolerance(workload, inputs, reference)

    def admits(answer: dict[str, torch.Tensor]) -> bool:
        return budget.admits(error_between(answer, reference))

    assert admits(rounded(sizes, inputs, 32))
    if dtype != "fp32":  # an accumulator of 16 bits
        assert not admits(rounded(sizes, inputs, 16, keep=lambda o: o.to(inputs["q"].dtype).float()))
    assert not admits(rounded(replace(sizes, scale=sizes.scale * 1.05), inputs, 32))
    last = {**inputs, "k": inputs["k"].clone()}
    last["k"].select(1 if sizes.layout == "bshd" else 2, 5).zero_()  # one key is lost
    assert not admits(rounded(sizes, last, 32))
    if sizes.causal or sizes.window:
        assert not admits(rounded(replace(sizes, causal=False, window=0), inputs, 32))
    if sizes.window:
        assert not admits(rounded(replace(sizes, window=sizes.window + 1), inputs, 32))
    if sizes.softcap:
        assert not admits(rounded(replace(sizes, softcap=0.0), inputs, 32))
    if sizes.lse:
        wrong = rounded(sizes, inputs, 32)
        assert not admits({**wrong, "lse": wrong["lse"] / math.log(2)})  # in base two


def test_baselines_by_device_and_case() -> None:
    def names(*extent: int, **others: int) -> list[str]:
        return [label for label in problem.baselines(attention(*extent, "bf16", **others), H200) if label != "flash-attention-4"]

    assert names(4, 16, 16, 4096, 4096, 128) == ["cudnn", "flash", "efficient"]
    assert names(4, 16, 16, 4096, 4096, 128, causal=True, lse=True) == ["cudnn", "flash", "efficient"]
    assert names(16, 64, 8, 1, 32768, 128, causal=True) == ["cudnn", "flash", "copy"]
    assert names(1, 8, 8, 2048, 4096, 128, causal=True) == ["flash", "efficient", "flex"]  # cuDNN's mask begins at the first key
    assert names(1, 8, 2, 4096, 4096, 64, causal=True, window=128) == ["flash", "flex"]
    assert names(1, 8, 8, 4096, 4096, 192, head_dim_v=128) == ["cudnn", "efficient"]
    assert names(1, 8, 8, 4096, 4096, 128, softcap=20.0) == ["flex"]
    assert names(1, 8, 8, 64, 20, 64, causal=True, lse=True) == ["torch", "copy"]  # FlashAttention-2 gives +inf there
    assert names(1, 8, 8, 64, 64, 20) == ["flex", "copy"]
    workload = attention(1, 2, 2, 64, 64, 64, "fp32")
    assert list(problem.baselines(workload, cpu())) == ["torch", "copy"]
    assert list(problem.baselines(workload, Device("replay", "recorded", "sm_90a"))) == []


def test_returned_tensors_are_turned_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators' conventions, on what they would return: cuDNN's [batch, heads, ...], lse with a last axis or padded."""
    for layout, width in itertools.product(("bshd", "bhsd"), (1, 0)):
        workload = attention(2, 3, 3, 5, 5, 8, "bf16", lse=True, layout=layout)
        sizes, inputs = Sizes.of(workload), problem.inputs(workload, "cpu")
        reference = problem.reference(workload, inputs)
        o = sizes.heads_first(reference["o"]) if width else sizes.sequence_first(reference["o"])
        lse = reference["lse"].unsqueeze(-1) if width else torch.nn.functional.pad(reference["lse"], (0, 27))
        call = _attention_libraries._in_layout(sizes, lambda o=o, lse=lse: (o, lse, None), from_heads_first=bool(width))
        launch = _common.Returning(lambda _, call=call: call, ("o", "lse"))
        outputs = problem.outputs(workload, "cpu")
        launch.prepare(inputs, outputs)
        launch.run()
        launch.collect()
        torch.testing.assert_close(outputs["lse"], reference["lse"])
        torch.testing.assert_close(outputs["o"].float(), reference["o"], rtol=1e-2, atol=1e-2)


def test_drawn_workloads_have_every_feature() -> None:
    drawn = drawn_attentions(200)
    sizes = [Sizes.of(workload) for workload in drawn]
    assert len({(workload.shape_text, workload.dtype) for workload in drawn}) == 200
    for workload in drawn:
        problem.check(workload)
    for feature in (
        lambda one: one.seq_q == 1,
        lambda one: one.causal and one.seq_q < one.seq_kv,
        lambda one: one.blind,
        lambda one: one.window and not one.causal,
        lambda one: one.softcap and one.lse,
        lambda one: one.kv_heads == 1 and one.heads > 1,
        lambda one: one.group == 3,
        lambda one: one.layout == "bhsd",
        lambda one: one.head_dim != one.head_dim_v,
        lambda one: one.seq_q * one.group > 64 and one.head_dim in (64, 128),
    ):
        assert sum(bool(feature(one)) for one in sizes) >= 5

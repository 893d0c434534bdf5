"""Mixture of experts: the routing's properties, the reference row by row, what the budget admits, and the work of known cases."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from kerneldyno.core import Tensors
from kerneldyno.core.error import error_between
from kerneldyno.errors import RequestError
from kerneldyno.measure.device import cpu
from kerneldyno.problems import _common
from kerneldyno.problems import moe_gemm as problem
from kerneldyno.problems.moe_gemm import Sizes
from kerneldyno.testing.devices import H200
from tests.contract.found import moe_gemm
from tests.drawn import drawn_moe_gemms


ROUTINGS = ("uniform", "zipf", "one_hot")


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 40), st.data(), st.sampled_from(ROUTINGS), st.integers(0, 99))
def test_routing_gives_each_token_distinct_experts_sorted_and_stable(
    tokens: int, experts: int, data: st.DataObject, routing: str, seed: int
) -> None:
    top_k = data.draw(st.integers(1, experts))
    found = problem.route(moe_gemm(tokens, experts, top_k, 1, 1, "bf16", routing, seed=seed))
    assert found.choices.shape == (tokens, top_k)
    assert all(len(set(row)) == top_k for row in found.choices.tolist())
    assert found.choices.min() >= 0
    assert found.choices.max() < experts
    # the plain way to sort: expert by expert, token by token
    pairs = [(expert, token) for expert in range(experts) for token in range(tokens) if expert in found.choices[token]]
    assert found.index.tolist() == [token for _, token in pairs]
    assert found.offsets.tolist() == np.cumsum([sum(one == expert for one, _ in pairs) for expert in range(experts)]).tolist()
    assert found.offsets[-1] == tokens * top_k
    assert found.touched == len({expert for expert, _ in pairs})


def test_routings_have_the_shares_that_they_promise() -> None:
    def rows(routing: str, top_k: int, seed: int = 0) -> np.ndarray:
        return np.diff(problem.route(moe_gemm(20000, 16, top_k, 1, 1, "bf16", routing, seed=seed)).offsets, prepend=0)

    # 1250 rows each with a standard deviation of 34
    assert abs(rows("uniform", 1) - 20000 / 16).max() < 6 * 34
    shares = np.sort(rows("zipf", 1))[::-1] / 20000
    promised = (1 / np.arange(1, 17)) / (1 / np.arange(1, 17)).sum()
    assert abs(shares - promised).max() < 0.02
    assert (np.argsort(rows("zipf", 1)) != np.arange(16)[::-1]).any()  # the popular experts are scattered
    assert sorted(rows("one_hot", 3)) == [0] * 13 + [20000] * 3
    assert (rows("one_hot", 3) != rows("one_hot", 3, seed=1)).any()


def test_routing_is_the_same_for_every_dtype_and_gather_and_drawn_once() -> None:
    workload = moe_gemm(50, 8, 2, 16, 16, "bf16", "zipf", seed=5)
    other = moe_gemm(50, 8, 2, 99, 3, "fp32", "zipf", gather=True, seed=5)
    assert problem.route(workload) is problem.route(other)
    assert problem.route(workload) is not problem.route(replace(workload, seed=6))


def test_blocks_of_tokens_do_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "_DRAWN_SCORES", 64)
    found = problem._route.__wrapped__(40, 16, 4, "uniform", 0)
    assert found.choices.shape == (40, 4)
    assert len({tuple(row) for row in found.choices.tolist()}) > 30


@pytest.mark.parametrize("routing", ROUTINGS)
def test_reference_row_by_row(routing: str) -> None:
    answers = []
    for gather in (False, True):
        workload = moe_gemm(9, 5, 2, 4, 6, "fp32", routing, gather=gather)
        inputs = problem.inputs(workload, "cpu")
        c = problem.reference(workload, inputs)["c"]
        ends = inputs["offsets"].tolist()
        assert c.shape == (18, 4)
        for row in range(18):
            expert = next(one for one, end in enumerate(ends) if row < end)
            a = inputs["x"][int(inputs["index"][row])] if gather else inputs["a"][row]
            for column in range(4):
                wanted = sum(float(left) * float(right) for left, right in zip(a, inputs["w"][expert, column], strict=True))
                assert float(c[row, column]) == pytest.approx(wanted, rel=1e-12)
        answers.append(c)
    assert torch.equal(*answers)


def test_row_blocks_do_not_change_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = moe_gemm(70, 6, 3, 40, 50, "bf16", "zipf", gather=True)
    inputs = problem.inputs(workload, "cpu")
    whole = problem.reference(workload, inputs)
    monkeypatch.setattr(_common, "BLOCK_ELEMENTS", 300)
    torch.testing.assert_close(problem.reference(workload, inputs)["c"], whole["c"], rtol=1e-6, atol=1e-6)


def product(inputs: Tensors, step: int, accumulator: torch.dtype = torch.float32) -> torch.Tensor:
    """Sum `step` products at a time, expert by expert."""
    a = inputs["x"][inputs["index"]] if "x" in inputs else inputs["a"]
    w, begin, parts = inputs["w"], 0, []
    for expert, end in enumerate(inputs["offsets"].tolist()):
        total = torch.zeros(end - begin, w.shape[1], dtype=accumulator)
        for start in range(0, w.shape[2], step):
            piece = a[begin:end, start : start + step].float() @ w[expert, :, start : start + step].float().T
            total = (total.float() + piece).to(accumulator)
        parts.append(total)
        begin = end
    return torch.cat(parts).to(w.dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("extent", [(1, 4, 2, 3, 64), (40, 8, 2, 24, 1000), (7, 1, 1, 1, 33)])
def test_budget_admits_any_order_and_refuses_shortcuts(extent: tuple[int, int, int, int, int], dtype: str) -> None:
    for seed, gather in ((0, False), (1, True), (2, False), (3, False)):
        workload = moe_gemm(*extent, dtype, "zipf", gather=gather, seed=seed)
        inputs = problem.inputs(workload, "cpu")
        reference = problem.reference(workload, inputs)
        budget = problem.tolerance(workload, inputs, reference)

        def admits(c: torch.Tensor, budget=budget, reference=reference) -> bool:
            return budget.admits(error_between({"c": c}, reference))

        assert admits(product(inputs, 1 if extent[4] < 100 else 10))
        assert admits(product(inputs, 32))
        if dtype != "fp32" and extent[4] == 1000:
            assert not admits(product(inputs, 16, accumulator=inputs["w"].dtype))
        if extent[1] > 1:
            shifted = {**inputs, "w": inputs["w"].roll(1, dims=0)}
            assert not admits(product(shifted, 32))
            if extent[0] > 1:
                cut = {**inputs, "w": inputs["w"].clone()}
                cut["w"][:, :, -1] = 0
                assert not admits(product(cut, 32))


def test_work_counts_touched_experts_once_and_routed_rows() -> None:
    one_hot = problem.work(moe_gemm(100, 16, 3, 64, 32, "bf16", "one_hot"))
    assert one_hot.flops == 2 * 300 * 64 * 32
    assert one_hot.bytes == 2 * (300 * 32 + 3 * 64 * 32 + 300 * 64) + 4 * 16
    gathered = problem.work(moe_gemm(100, 16, 3, 64, 32, "bf16", "one_hot", gather=True))
    assert gathered.bytes == 2 * (100 * 32 + 3 * 64 * 32 + 300 * 64) + 4 * (16 + 300)
    few = moe_gemm(1, 256, 8, 4096, 7168, "bf16")
    assert problem.work(few).bytes == pytest.approx(8 * 4096 * 7168 * 2, rel=1e-2)
    touched = problem.route(moe_gemm(16, 256, 8, 1, 1, "bf16")).touched
    assert touched == pytest.approx(256 * (1 - (1 - 8 / 256) ** 16), abs=20)  # 102 of 256 at random


def test_named_shapes() -> None:
    shapes = problem.shapes()

    def sizes(label: str) -> list[object]:
        return [shapes[label][key] for key in ("tokens", "experts", "top_k", "n", "k")]

    assert sizes("mixtral-8x7b-up-4k") == [4096, 8, 2, 28672, 4096]
    assert sizes("qwen3-235b-a22b-up-4k") == [4096, 128, 8, 3072, 4096]
    assert sizes("deepseek-v3-up-16") == [16, 256, 8, 4096, 7168]
    assert sizes("deepseek-v3-down-8k") == [8192, 256, 8, 7168, 2048]
    assert sizes("qwen3-30b-a3b-down-1") == [1, 128, 8, 2048, 768]
    assert sizes("gpt-oss-20b-up-512") == [512, 32, 4, 5760, 2880]
    assert sizes("gpt-oss-120b-down-4k") == [4096, 128, 4, 2880, 2880]
    assert sizes("mixtral-8x22b-up-128") == [128, 8, 2, 32768, 6144]


def test_more_choices_than_experts_and_shapes_beyond_memory_are_refused() -> None:
    with pytest.raises(RequestError, match="top_k=4"):
        problem.check(moe_gemm(10, 4, 5, 8, 8, "bf16"))
    with pytest.raises(RequestError, match="tokens=268435455"):
        problem.check(moe_gemm(2**30, 8, 8, 1, 1, "bf16"))
    with pytest.raises(RequestError, match="at most 128 GiB"):
        problem.check(moe_gemm(10, 4096, 2, 8192, 8192, "bf16"))


def test_baselines_by_device_and_case() -> None:
    def names(*extent: int, dtype: str = "bf16", gather: bool = False) -> list[str]:
        return [label for label in problem.baselines(moe_gemm(*extent, dtype, gather=gather), H200) if label != "quack"]

    assert names(4096, 128, 8, 3072, 4096) == ["torch._grouped_mm", "cublas-loop", "routing"]
    assert names(16, 128, 8, 3072, 4096, gather=True) == ["torch._grouped_mm", "cublas-loop", "copy", "routing"]
    assert names(4096, 8, 2, 3072, 4096, dtype="fp16") == ["cublas-loop", "routing"]
    assert names(4096, 8, 2, 3071, 4096) == ["cublas-loop", "routing"]
    assert list(problem.baselines(moe_gemm(9, 4, 2, 8, 8, "fp32"), cpu())) == ["torch", "copy", "routing"]


@pytest.mark.parametrize("gather", [False, True])
def test_the_routing_step_makes_what_the_inputs_hold(gather: bool) -> None:
    workload = moe_gemm(30, 8, 3, 4, 5, "fp32", "zipf", gather=gather)
    inputs = problem.inputs(workload, "cpu")
    offsets, rows = problem._bind_routing(workload, inputs, problem.outputs(workload, "cpu"))()
    assert torch.equal(offsets, inputs["offsets"])
    if gather:
        assert torch.equal(rows, inputs["index"])
    else:
        assert rows.shape == inputs["a"].shape


def test_copy_moves_the_bytes_of_the_work() -> None:
    for size in (2, 1000, 3 * _common._COPIED_BYTES):
        launch = _common._Copy(size, "meta")
        launch.prepare({}, {})
        moved = sum(2 * call.func.__self__.numel() for call in launch._calls)
        assert moved == size


def test_drawn_workloads_have_every_feature() -> None:
    drawn = drawn_moe_gemms(200)
    sizes = [Sizes.of(workload) for workload in drawn]
    assert len({(workload.shape_text, workload.dtype) for workload in drawn}) == 200
    for workload in drawn:
        problem.check(workload)
    empty = [problem.route(workload).touched < one.experts for workload, one in zip(drawn, sizes, strict=True)]
    assert sum(empty) >= 50
    for feature in (
        lambda one: one.tokens == 1,
        lambda one: one.gather and one.routing == "zipf",
        lambda one: one.routing == "one_hot",
        lambda one: one.n % 8 and one.k % 8,
        lambda one: one.rows > 1000 and one.n % 8 == 0 and one.k % 8 == 0,
        lambda one: one.experts == one.top_k,
    ):
        assert sum(bool(feature(one)) for one in sizes) >= 5


def test_the_loop_follows_the_routing_of_the_inputs_that_it_is_given() -> None:
    workload = moe_gemm(30, 8, 3, 4, 5, "fp32", "zipf", gather=True)
    loop = problem.baselines(workload, cpu())["torch"].launch
    for seed in (0, 1):  # the comparison ends on another seed
        again = replace(workload, seed=seed)
        inputs, outputs = problem.inputs(again, "cpu"), problem.outputs(again, "cpu")
        loop.prepare(inputs, outputs)
        loop.run()
        assert error_between(outputs, problem.reference(again, inputs)).relative < 1e-6

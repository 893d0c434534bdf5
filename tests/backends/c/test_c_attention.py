import ctypes
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

from kerneldyno.backends.c import attention
from kerneldyno.backends.c._attention import NUMBERS
from kerneldyno.backends.c._compile import build_library
from kerneldyno.backends.c._compile import load_function
from kerneldyno.backends.c._vectors import EXP
from kerneldyno.backends.c._vectors import prelude
from kerneldyno.core import Workload
from kerneldyno.problems import attention as problem
from tests.backends.c import lab


TEAM = {"threads": lab.CORES, **({"schedule": "dynamic"} if lab.CORES > 1 else {}), "vector_bytes": 32}
PREFILL = {**TEAM, "mr": 6, "nv": 2, "block_m": 24, "block_n": 48}
"""Small tiles, so that small shapes have several."""

DECODE = {**TEAM, "mr": 4, "nv": 2, "dot_mr": 3, "block_n": 64, "num_splits": 4}
ONE_PART = {**DECODE, "num_splits": 1}

FUNCTIONS = """
void exp2_all(const element *x, element *y, int64_t n) { for (int64_t i = 0; i < n; i += W) store(y + i, exp2_vector(load(x + i))); }
void tanh_all(const element *x, element *y, int64_t n) { for (int64_t i = 0; i < n; i += W) store(y + i, tanh_vector(load(x + i))); }
"""


def workload(dtype: str = "fp32", **dims: Any) -> Workload:
    shape = {"batch": 1, "heads": 2, "kv_heads": 2, "seq_q": 70, "seq_kv": 70, "head_dim": 32, "head_dim_v": 32, "causal": False}
    shape |= {"window": 0, "softcap": 0.0, "scale": 0.0, "layout": "bshd", "lse": False}
    return Workload("attention", {**shape, **dims}, dtype)


MASKS = {
    "causal": strategies.booleans(),
    "window": strategies.sampled_from([0, 0, 1, 5, 40, 300]),
    "softcap": strategies.sampled_from([0.0, 0.0, 2.0, 30.0]),
    "scale": strategies.sampled_from([0.0, 0.3]),
    "layout": strategies.sampled_from(["bshd", "bhsd"]),
    "lse": strategies.booleans(),
}
SIZES = {
    "batch": strategies.integers(1, 2),
    "kv_heads": strategies.integers(1, 3),
    "seq_kv": strategies.integers(1, 260),
    "head_dim": strategies.integers(1, 140),
    "head_dim_v": strategies.integers(1, 140),
}


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@settings(max_examples=15, deadline=None)
@given(group=strategies.integers(1, 4), seq_q=strategies.integers(65, 150), dims=strategies.fixed_dictionaries({**SIZES, **MASKS}))
def test_every_prefill_is_right(dtype: str, group: int, seq_q: int, dims: dict[str, Any]) -> None:
    lab.check(attention, problem, workload(dtype, heads=group * dims["kv_heads"], seq_q=seq_q, **dims), PREFILL)


@pytest.mark.parametrize("config", [DECODE, ONE_PART], ids=["split", "one part"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@settings(max_examples=15, deadline=None)
@given(group=strategies.integers(1, 8), seq_q=strategies.integers(1, 8), dims=strategies.fixed_dictionaries({**SIZES, **MASKS}))
def test_every_decode_is_right(config: dict[str, Any], dtype: str, group: int, seq_q: int, dims: dict[str, Any]) -> None:
    lab.check(attention, problem, workload(dtype, heads=group * dims["kv_heads"], seq_q=seq_q, **dims), config)


@pytest.mark.parametrize("seq_q", [3, 100])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_sample_of_each_space_is_right(dtype: str, seq_q: int) -> None:
    cases = [
        workload(dtype, heads=4, seq_q=seq_q, seq_kv=417, causal=True, lse=True),
        workload(dtype, seq_q=seq_q, seq_kv=33, head_dim=192, head_dim_v=128, window=20, layout="bhsd"),
    ]
    space = attention.space(cases[0], lab.CPU)
    for config in random.Random(f"{dtype} {seq_q}").sample(space.configs, 2):
        for case in cases:
            lab.check(attention, problem, case, config)


def test_the_widest_head_is_right() -> None:
    lab.check(attention, problem, workload("bf16", head_dim=512, head_dim_v=512, lse=True), PREFILL)
    lab.check(attention, problem, workload("bf16", head_dim=512, head_dim_v=511, seq_q=2, lse=True), DECODE)


@pytest.mark.parametrize("seq_q", [5, 100])
def test_queries_that_see_no_key_give_zeros(seq_q: int) -> None:
    case = workload(seq_q=seq_q, seq_kv=3, causal=True, lse=True)
    answer = lab.answer(attention, problem, case, DECODE if seq_q == 5 else PREFILL)
    blind = seq_q - 3
    assert not answer["o"][:, :blind].any()
    assert (answer["lse"][..., :blind] == -float("inf")).all()
    assert answer["o"][:, blind:].all()
    assert answer["lse"][..., blind:].isfinite().all()


def test_large_scores_neither_overflow_nor_vanish() -> None:
    """Scores of thousands, rising and falling along the keys: exp of any would overflow."""
    for seq_q, config in ((5, DECODE), (100, PREFILL)):
        case = workload(seq_q=seq_q, seq_kv=300, lse=True)
        inputs = dict(problem.inputs(case, "cpu"))
        for rising in (1, -1):
            ramp = torch.linspace(1, 40, 300).view(1, 300, 1, 1)
            changed = {**inputs, "k": inputs["k"] * (ramp if rising > 0 else ramp.flip(1)) * 20}
            answer = lab.answer(attention, problem, case, config, changed)
            right = problem.reference(case, changed)
            torch.testing.assert_close(answer["lse"].double(), right["lse"], rtol=1e-5, atol=0)
            torch.testing.assert_close(answer["o"].double(), right["o"], rtol=0, atol=2e-2)


@pytest.mark.parametrize("config", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_second_run_gives_the_same_answer(config: dict[str, Any]) -> None:
    case = workload("bf16", seq_q=5 if config is DECODE else 100, seq_kv=200, causal=True)
    lab.check_again(attention, problem, case, config)


def test_exp2_and_tanh_are_within_three_units_in_the_last_place() -> None:
    """Exp2 over all of [-126, 0], below it 0; tanh from where it is x to where it is 1."""
    x = torch.cat([-torch.linspace(0, 126, 1 << 20), -torch.logspace(-30, -3, 1 << 10)])
    y = torch.empty_like(x)

    def apply(name: str) -> torch.Tensor:
        function = load_function(build_library(prelude(32, "fp32") + EXP + NUMBERS + FUNCTIONS, name, {}, lab.CPU.arch, 1))
        function(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(len(x)))
        return y.double()

    def units(found: torch.Tensor, right: torch.Tensor) -> float:
        return float(((found - right).abs() / 2.0 ** (right.abs().frexp().exponent - 24).double()).max())

    assert units(apply("exp2_all"), x.double().exp2()) < 3
    x /= -12
    assert units(apply("tanh_all"), x.double().tanh()) < 3
    x.neg_()
    assert units(apply("tanh_all"), x.double().tanh()) < 3
    x = torch.tensor([-126.1, -127.5, -150, -1e4, -1e30, -3.4e38, -float("inf"), -1e3])
    assert not apply("exp2_all")[:8].any()


def test_sixty_four_rows_that_share_keys_are_the_border_between_the_spaces() -> None:
    assert "num_splits" in attention.space(workload(heads=8, kv_heads=2, seq_q=16), lab.CPU).params
    assert "num_splits" not in attention.space(workload(heads=8, kv_heads=2, seq_q=17), lab.CPU).params

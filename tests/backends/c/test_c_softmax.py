import ctypes
import random

import pytest
import torch
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

from kerneldyno.backends.c import softmax
from kerneldyno.backends.c._compile import build_library
from kerneldyno.backends.c._compile import load_function
from kerneldyno.backends.c._vectors import EXP
from kerneldyno.backends.c._vectors import prelude
from kerneldyno.core import Workload
from kerneldyno.problems import softmax as problem
from tests.backends.c import lab


CONFIG = {
    "threads": lab.CORES,
    "method": "three-pass",
    "write": "stream",
    "prefetch": 1,
    "vector_bytes": 32,
    "unroll": 4,
    **({"schedule": "static", "rows": 4} if lab.CORES > 1 else {}),
}
"""The best of the space on AMD EPYC 7003 (2 cores, gcc 12)."""

EXP_ENTRY = """
void exp_all(const element *x, element *y, int64_t n) { for (int64_t i = 0; i < n; i += W) store(y + i, exp_vector(load(x + i))); }
"""


def workload(m: int, n: int, dtype: str) -> Workload:
    return Workload("softmax", {"m": m, "n": n}, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_sample_of_the_space_is_right(dtype: str) -> None:
    space = softmax.space(workload(1, 1, dtype), lab.CPU)
    for config in random.Random(dtype).sample(space.configs, 5):
        for m, n in ((1, 1), (3, 7), (5, 33), (9, 257), (2, 4099)):
            lab.check(softmax, problem, workload(m, n, dtype), config)


@pytest.mark.parametrize("method", ["three-pass", "online"])
@settings(max_examples=25, deadline=None)
@given(m=strategies.integers(1, 20), n=strategies.integers(1, 600))
def test_every_shape_is_right(method: str, m: int, n: int) -> None:
    lab.check(softmax, problem, workload(m, n, "fp32"), {**CONFIG, "method": method})


@pytest.mark.parametrize("method", ["three-pass", "online"])
def test_infinities_and_nan_are_torchs(method: str) -> None:
    inf, nan = float("inf"), float("nan")
    row = torch.linspace(-3, 3, 75)
    x = torch.stack(
        [row, row.where(row > 0, -inf), torch.full_like(row, -inf), row.where(row < 2, inf), row.where(row < 2, nan), row * 1e37]
    )
    x = torch.cat([x, -x[:1] * 3e37, torch.full((1, 75), -3e38)])
    y = lab.answer(softmax, problem, workload(len(x), 75, "fp32"), {**CONFIG, "method": method}, {"x": x})["y"]
    torch.testing.assert_close(y, torch.softmax(x, -1), rtol=2e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("vector_bytes", [16, 32])
def test_exp_is_within_two_units_in_the_last_place(vector_bytes: int) -> None:
    """Over all of [-86.5, 0] in 4 million steps, against fp64; below it is 0."""
    x = torch.cat([torch.linspace(-86.5, 0, 1 << 22), -torch.logspace(-30, -3, 1 << 12)])
    y = torch.empty_like(x)
    function = load_function(build_library(prelude(vector_bytes, "fp32") + EXP + EXP_ENTRY, "exp_all", {}, lab.CPU.arch, 1))
    function(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(len(x)))
    right = x.double().exp()
    unit = 2.0 ** (right.frexp().exponent - 24).double()
    assert float(((y.double() - right).abs() / unit).max()) < 2
    low = torch.tensor([-86.6, -87.4, -104, -1e4, -1e30, -3.4e38, -float("inf"), -1e3] * 2)
    function(ctypes.c_void_p(low.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(16))
    assert not y[:16].any()


def test_it_is_at_least_as_fast_as_torch() -> None:
    case = workload(4096, 4096, "fp32")
    x, y = problem.inputs(case, "cpu")["x"], problem.outputs(case, "cpu")["y"]
    launch = softmax.load(lab.built(softmax, case, CONFIG), case)
    launch.prepare({"x": x}, {"y": y})
    assert lab.ratio_to(lambda: torch.softmax(x, -1, out=y), launch.run, enough=1.0) <= 1.0

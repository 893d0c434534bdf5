import random

import pytest
import torch
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

from kerneldyno.backends.c import vector_add
from kerneldyno.core import Workload
from kerneldyno.problems import vector_add as problem
from tests.backends.c import lab


SPECIAL = [0.0, -0.0, 1.0, 65504.0, 1e-7, 6e-8, 3e-5, 1.5e-38, float("inf"), float("-inf"), float("nan"), 1 / 3, 1025 / 1024, 1 + 3 / 256]
CONFIG = {"threads": 2, "schedule": "dynamic", "block": 1024, "vector_bytes": 16, "write": "store"}


def workload(n: int, dtype: str) -> Workload:
    return Workload("vector_add", {"n": n}, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_sample_of_the_space_is_right(dtype: str) -> None:
    space = vector_add.space(workload(1, dtype), lab.CPU)
    for config in random.Random(dtype).sample(space.configs, 4):
        for n in (1, 15, 1024, 70_001):
            lab.check(vector_add, problem, workload(n, dtype), config)


@settings(max_examples=40, deadline=None)
@given(strategies.integers(1, 5000))
def test_every_length_is_right(n: int) -> None:
    lab.check(vector_add, problem, workload(n, "fp32"), CONFIG)


@pytest.mark.parametrize(("dtype", "word"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_rounding_and_special_numbers_are_torchs(dtype: str, word: torch.dtype) -> None:
    values = torch.tensor(SPECIAL, dtype=torch.float32).to(word)
    x, y = (part.reshape(-1).contiguous() for part in torch.meshgrid(values, values * 0.37, indexing="ij"))
    out = lab.answer(vector_add, problem, workload(len(x), dtype), CONFIG, {"x": x, "y": y})["out"]
    torch.testing.assert_close(out, x + y, rtol=0, atol=0, equal_nan=True)


def test_outputs_that_are_not_aligned_are_written_right() -> None:
    x, y, room = torch.randn(1001), torch.randn(1001), torch.full((1003,), float("nan"))
    launch = vector_add.load(lab.built(vector_add, workload(1001, "fp32"), {**CONFIG, "write": "stream"}), workload(1001, "fp32"))
    launch.prepare({"x": x, "y": y}, {"out": room[1:1002]})
    launch.run()
    assert torch.equal(room[1:1002], x + y)
    assert room[[0, 1002]].isnan().all()

import random

import pytest
import torch
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

from kerneldyno.backends.c import gemm
from kerneldyno.core import Workload
from kerneldyno.problems import gemm as problem
from tests.backends.c import lab


CONFIG = {
    "threads": lab.CORES,
    **({"deal": "tiles", "schedule": "static"} if lab.CORES > 1 else {}),
    "vector_bytes": 32,
    "mr": 6,
    "nv": 2,
    "mc": 48,
    "nc": 3072,
    "kc": 512,
    "unroll": 4,
}
"""Among the best of the space on AMD EPYC 7003 (2 cores, gcc 12)."""

SHALLOW = {**CONFIG, "kc": 128, "nc": 768}


def workload(m: int, n: int, k: int, dtype: str, layout: str) -> Workload:
    return Workload("gemm", {"m": m, "n": n, "k": k, "layout": layout}, dtype)


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_sample_of_the_space_is_right(dtype: str, layout: str) -> None:
    space = gemm.space(workload(1, 1, 1, dtype, layout), lab.CPU)
    for config in random.Random(f"{dtype} {layout}").sample(space.configs, 4):
        for m, n, k in ((1, 1, 1), (3, 7, 5), (97, 33, 257), (13, 100, 1030)):
            lab.check(gemm, problem, workload(m, n, k, dtype, layout), config)


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@settings(max_examples=25, deadline=None)
@given(m=strategies.integers(1, 120), n=strategies.integers(1, 120), k=strategies.integers(1, 300))
def test_every_shape_is_right(dtype: str, layout: str, m: int, n: int, k: int) -> None:
    lab.check(gemm, problem, workload(m, n, k, dtype, layout), SHALLOW)


@pytest.mark.parametrize("deal", ["tiles", "rows", "columns"] if lab.CORES > 1 else [])
def test_several_blocks_in_every_direction_are_right(deal: str) -> None:
    """More than one block of mc rows, nc columns and kc depth, none of them full."""
    for schedule in ("static", "dynamic"):
        lab.check(gemm, problem, workload(101, 1601, 300, "fp32", "nt"), {**SHALLOW, "deal": deal, "schedule": schedule})


def test_a_second_run_gives_the_same_answer() -> None:
    """Partial sums of the first run must not reach the second."""
    lab.check_again(gemm, problem, workload(50, 70, 400, "bf16", "nt"), SHALLOW)


def test_its_time_is_within_three_times_torchs() -> None:
    case = workload(1024, 1024, 1024, "fp32", "nt")
    inputs, outputs = problem.inputs(case, "cpu"), problem.outputs(case, "cpu")
    launch = gemm.load(lab.built(gemm, case, CONFIG), case)
    launch.prepare(inputs, outputs)
    right = inputs["b"].t()
    assert lab.ratio_to(lambda: torch.mm(inputs["a"], right, out=outputs["c"]), launch.run, enough=3.0) <= 3.0


def test_the_register_tile_is_bounded_by_the_register_file() -> None:
    problems = gemm.space(workload(1, 1, 1, "fp32", "nt"), lab.CPU).problems({**CONFIG, "mr": 12, "nv": 4})
    assert len(problems) == 1
    assert "vector registers" in problems[0]

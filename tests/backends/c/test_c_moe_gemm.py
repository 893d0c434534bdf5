import random

import pytest
import torch
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

from kerneldyno.backends.c import moe_gemm
from kerneldyno.core import Workload
from kerneldyno.problems import moe_gemm as problem
from tests.backends.c import lab


CONFIG = {
    "threads": lab.CORES,
    **({"schedule": "dynamic"} if lab.CORES > 1 else {}),
    "vector_bytes": 32,
    "mr": 6,
    "nv": 2,
    "mc": 48,
    "nc": 96,
    "kc": 256,
    "direct": 8,
    "direct_mr": 3,
}
"""Small blocks, so that small shapes have several of them, some packed and some not."""

PACKED = {key: value for key, value in CONFIG.items() if key != "direct_mr"} | {"direct": 0}


def workload(
    tokens: int, experts: int, top_k: int, n: int, k: int, dtype: str = "fp32", routing: str = "uniform", gather: bool = False
) -> Workload:
    shape = {"tokens": tokens, "experts": experts, "top_k": top_k, "n": n, "k": k, "routing": routing, "gather": gather}
    return Workload("moe_gemm", shape, dtype)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_sample_of_the_space_is_right(dtype: str, gather: bool) -> None:
    space = moe_gemm.space(workload(1, 1, 1, 1, 1, dtype), lab.CPU)
    for config in random.Random(f"{dtype} {gather}").sample(space.configs, 2):
        for shape in ((1, 1, 1, 1, 1), (5, 9, 3, 7, 5), (97, 4, 2, 33, 257), (60, 30, 2, 100, 1030)):
            lab.check(moe_gemm, problem, workload(*shape, dtype, gather=gather), config)


@pytest.mark.parametrize("config", [CONFIG, PACKED], ids=["direct", "packed"])
@pytest.mark.parametrize("gather", [False, True])
@settings(max_examples=15, deadline=None)
@given(
    tokens=strategies.integers(1, 70),
    experts=strategies.integers(1, 12),
    top_k=strategies.integers(1, 12),
    n=strategies.integers(1, 120),
    k=strategies.integers(1, 300),
    routing=strategies.sampled_from(["uniform", "zipf", "one_hot"]),
    dtype=strategies.sampled_from(["fp32", "bf16"]),
)
def test_every_shape_and_routing_is_right(
    gather: bool, config: dict, tokens: int, experts: int, top_k: int, n: int, k: int, routing: str, dtype: str
) -> None:
    lab.check(moe_gemm, problem, workload(tokens, experts, min(top_k, experts), n, k, dtype, routing, gather), config)


@pytest.mark.parametrize("schedule", ["static", "dynamic"] if lab.CORES > 1 else [])
def test_several_blocks_of_rows_and_columns_in_uneven_groups_are_right(schedule: str) -> None:
    """Groups of 0 to hundreds of rows: blocks that are full, short, and so short that they are not packed."""
    for case in (workload(301, 20, 2, 205, 300, routing="zipf"), workload(150, 7, 1, 389, 520, "bf16", "one_hot", gather=True)):
        lab.check(moe_gemm, problem, case, {**CONFIG, "schedule": schedule})


def test_another_routing_in_the_same_tensors_is_followed_at_once() -> None:
    """The offsets are read by the kernel: empty groups first, between and last, and groups of one row."""
    case = workload(40, 6, 1, 50, 70)
    inputs, outputs = problem.inputs(case, "cpu"), problem.outputs(case, "cpu")
    launch = moe_gemm.load(lab.built(moe_gemm, case, CONFIG), case)
    launch.prepare(inputs, outputs)
    for ends in ([0, 0, 1, 1, 40, 40], [40, 40, 40, 40, 40, 40], [1, 2, 3, 4, 5, 40], [0, 0, 0, 0, 0, 40]):
        inputs["offsets"].copy_(torch.tensor(ends))
        outputs["c"].fill_(float("nan"))
        launch.run()
        for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            right = inputs["a"][begin:end].double() @ inputs["w"][expert].double().T
            torch.testing.assert_close(outputs["c"][begin:end].double(), right, rtol=0, atol=1e-4)


def test_a_second_run_gives_the_same_answer() -> None:
    """Partial sums of the first run must not reach the second."""
    lab.check_again(moe_gemm, problem, workload(50, 3, 2, 70, 600, "bf16"), CONFIG)


def test_the_register_tiles_are_bounded_by_the_register_file() -> None:
    space = moe_gemm.space(workload(1, 1, 1, 1, 1), lab.CPU)
    for wide in ({"mr": 12, "nv": 4}, {"direct_mr": 6} if 28 > moe_gemm.vector_registers(lab.CPU.arch)[0] else {"mr": 12, "nv": 4}):
        problems = space.problems({**CONFIG, **wide})
        assert len(problems) == 1
        assert "vector registers" in problems[0]

"""The contracts themselves: each finds what it is there to find."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kerneldyno.core import Constraint
from kerneldyno.core import ErrorBudget
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Status
from kerneldyno.core import Work
from kerneldyno.measure.device import cpu
from kerneldyno.problems import vector_add as problem
from kerneldyno.registry import Ref
from kerneldyno.testing.lab import draw
from kerneldyno.testing.lab import ref_of
from kerneldyno.testing.lab import shared_lab
from kerneldyno.testing.problem import ProblemContract
from tests.contract.found import vector_add


PLANTED = Ref(file=str(Path(__file__).parents[1] / "planted.py"), attribute="KERNELS", item="vector_add.planted")
WORKLOAD = vector_add(1001, "fp32")


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("none", ""),
        ("wrong", "of the norm"),
        ("one_wrong", "in one element"),
        ("unwritten", "inf of the norm"),
        ("out_of_bounds", "out of bounds, beside output out"),
        ("changes_input", "changed its input x"),
        ("flaky", "at the second run"),
        ("segfault", "SIGSEGV"),
    ],
)
def test_a_faulty_kernel_is_found(fault: str, found: str) -> None:
    lab = shared_lab()
    key = lab.submit(PLANTED, WORKLOAD, {"fault": fault, "twin": 1}, cpu().arch)
    assert lab.built(key).status is Status.OK, lab.built(key).message
    wrong = lab.verify(ref_of(problem), WORKLOAD, cpu(), PLANTED, key)
    assert found in wrong
    assert bool(wrong) == bool(found)


def test_a_kernel_that_does_not_compile_is_found() -> None:
    lab = shared_lab()
    built = lab.built(lab.submit(PLANTED, WORKLOAD, {"fault": "syntax", "twin": 1}, cpu().arch))
    assert built.status is Status.BUILD_ERROR
    assert "this is not C" in built.message or "error" in built.message


def contract(**changes: Any) -> ProblemContract:
    """Apply the problem contract to vector_add with some functions replaced."""
    faulty = SimpleNamespace(**{**vars(problem), **changes})
    return type("Contract", (ProblemContract,), {"problem": faulty, "workloads": (WORKLOAD,)})()


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"tolerance": lambda *_: ErrorBudget(1.0, 1.0)}, lambda one: one.test_budget_refuses_one_wrong_element(WORKLOAD)),
        ({"tolerance": lambda *_: ErrorBudget(0.0, 0.0)}, lambda one: one.test_budget_admits_the_right_answer(WORKLOAD)),
        ({"tolerance": lambda _, inputs, __: inputs["x"].zero_()}, lambda one: one.test_outputs_match_the_reference(WORKLOAD)),
        ({"inputs": lambda workload, where: problem.inputs(WORKLOAD, where)}, lambda one: one.test_inputs_follow_the_seed(WORKLOAD)),
        ({"work": lambda _: Work(1.0, 1.0)}, lambda one: one.test_work_is_positive_and_counts_every_byte(WORKLOAD)),
        ({"shapes": lambda: {"small": {"m": 4}}}, lambda one: one.test_named_shapes_are_complete_and_legal()),
        ({"baselines": lambda *_: {}}, lambda one: one.test_baselines_run_and_the_libraries_are_right(WORKLOAD)),
    ],
    ids=["lax budget", "strict budget", "inputs changed", "seed ignored", "bytes wrong", "shape incomplete", "no baseline"],
)
def test_a_faulty_problem_is_found(changes: dict[str, Any], check: Callable[[ProblemContract], None]) -> None:
    with pytest.raises(AssertionError):
        check(contract(**changes))


def test_drawing_keeps_rules_and_conditions() -> None:
    space = Space(
        [
            Param("wide", (False, True), "a switch"),
            Param("width", (1, 2, 4), "only where wide", when=lambda wide: wide),
            Param("depth", tuple(range(100)), "a range"),
        ],
        [Constraint(lambda width, depth: width * depth <= 4, "width x depth is at most 4")],
    )
    rng = random.Random(0)
    drawn = [draw(space, rng) for _ in range(50)]
    assert all(config in space for config in drawn)
    assert {config["wide"] for config in drawn} == {False, True}
    # no try at all: the space is enumerated
    assert draw(space, rng, attempts=0) in space

"""What every problem keeps: inherit `ProblemContract` in your tests, name your problem, and run pytest."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

import pytest

from kerneldyno.core import DTYPE_BYTES
from kerneldyno.core import SOLVING_ROLES
from kerneldyno.core import Device
from kerneldyno.core import ErrorBudget
from kerneldyno.core import Tensors
from kerneldyno.core import Value
from kerneldyno.core import Workload
from kerneldyno.core.error import error_between
from kerneldyno.measure.device import cpu


if TYPE_CHECKING:
    import torch


class ProblemContract:
    """Checks a problem at a few small workloads.

    Attributes:
        problem: The problem: a module or an object.
        workloads: Workloads small enough for the device, odd sizes among them.
        torch_device: Where the tensors live ("cpu", "cuda:0").
        device: The same device as a record; None for this machine's CPU.
        unhurried: Baselines that are not run here, since they take long to prepare.
        partly_read: The problem can leave a part of its inputs unread (the weights of experts without rows), so that its work may be less.
    """

    problem: ClassVar[Any]
    workloads: ClassVar[tuple[Workload, ...]]
    torch_device: ClassVar[str] = "cpu"
    device: ClassVar[Device | None] = None
    unhurried: ClassVar[tuple[str, ...]] = ()
    partly_read: ClassVar[bool] = False

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test that takes `workload` once for each of them."""
        if "workload" in metafunc.fixturenames:
            metafunc.parametrize("workload", self.workloads, ids=lambda workload: f"{workload.shape_text} {workload.dtype}")

    def made(self, workload: Workload) -> tuple[Tensors, Tensors, ErrorBudget]:
        """Make the inputs, the reference and the budget of a workload."""
        inputs = self.problem.inputs(workload, self.torch_device)
        reference = self.problem.reference(workload, inputs)
        return inputs, reference, self.problem.tolerance(workload, inputs, reference)

    def test_dims_are_documented_and_their_defaults_legal(self) -> None:
        """A user reads the meaning in `tune list`, and gets the default without asking."""
        assert self.problem.dims
        for key, dim in self.problem.dims.items():
            assert dim.meaning.strip(), f"{key} has no meaning"
            _assert_legal(self.problem.dims, key, dim.default)
            _assert_legal(self.problem.dims, key, dim.default_on("cpu"))

    def test_dtypes_are_known(self) -> None:
        """Every dtype has a size, and there is at least one."""
        assert self.problem.dtypes
        assert set(self.problem.dtypes) <= set(DTYPE_BYTES)

    def test_named_shapes_are_complete_and_legal(self) -> None:
        """A named shape gives every dim, within its limits, and passes the problem's own check in every dtype."""
        for label, shape in self.problem.shapes().items():
            assert label == label.strip().lower(), f"'{label}' is awkward to type"
            assert not set(label) & set(" ,=[]{}'\""), f"'{label}' does not survive the command line"
            assert list(shape) == list(self.problem.dims), f"{label} does not give every dim in order"
            for key, value in shape.items():
                _assert_legal(self.problem.dims, key, value)
            for dtype in self.problem.dtypes:
                self.problem.check(Workload(self.problem.name, shape, dtype))

    def test_inputs_follow_the_seed(self, workload: Workload) -> None:
        """The same seed gives the same inputs, another seed others, all in the workload's dtype."""
        import torch

        first, again = (self.problem.inputs(workload, self.torch_device) for _ in range(2))
        other = self.problem.inputs(replace(workload, seed=workload.seed + 1), self.torch_device)
        size = DTYPE_BYTES[workload.dtype]
        for key, tensor in first.items():
            assert tensor.is_contiguous(), f"{key} is not contiguous"
            assert tensor.element_size() == size or not tensor.is_floating_point(), f"{key} is {tensor.dtype}, not {workload.dtype}"
            assert torch.equal(tensor, again[key]), f"{key} differs under the same seed"
            # a routing of one expert has but one form
            assert not (tensor.is_floating_point() and torch.equal(tensor, other[key])), f"{key} is the same under another seed"

    def test_outputs_match_the_reference(self, workload: Workload) -> None:
        """Outputs and reference have the same names and shapes; a reference is in float32 or float64, and finite (or -inf)."""
        import torch

        inputs = self.problem.inputs(workload, self.torch_device)
        held = {key: tensor.clone() for key, tensor in inputs.items()}
        outputs = self.problem.outputs(workload, self.torch_device)
        reference = self.problem.reference(workload, inputs)
        assert {key: tensor.shape for key, tensor in outputs.items()} == {key: tensor.shape for key, tensor in reference.items()}
        for key, tensor in reference.items():
            assert outputs[key].is_contiguous(), f"{key} is not contiguous"
            assert tensor.dtype in {torch.float32, torch.float64}, f"the reference of {key} is in {tensor.dtype}"
            # the logarithm of an empty sum is -inf
            assert not bool((tensor.isnan() | tensor.isposinf()).any()), f"the reference of {key} is not finite"
        kept = {key: tensor.clone() for key, tensor in reference.items()}
        self.problem.tolerance(workload, inputs, reference)
        for key, tensor in held.items():
            assert torch.equal(tensor, inputs[key]), f"the reference or the tolerance changed the input {key}"
        for key, tensor in kept.items():
            assert torch.equal(tensor, reference[key]), f"the tolerance changed the reference {key}"

    def test_budget_admits_the_right_answer(self, workload: Workload) -> None:
        """The reference, rounded once to the output's dtype, is right."""
        _, reference, budget = self.made(workload)
        outputs = self.problem.outputs(workload, self.torch_device)
        rounded = {key: tensor.to(outputs[key].dtype) for key, tensor in reference.items()}
        error = error_between(rounded, reference)
        assert budget.admits(error), f"{budget} refuses {error}"

    def test_budget_refuses_one_wrong_element(self, workload: Workload) -> None:
        """One element off by 1% of the largest, or not written at all, is found."""
        _, reference, budget = self.made(workload)
        outputs = self.problem.outputs(workload, self.torch_device)
        for key, tensor in reference.items():
            rounded = {other: value.to(outputs[other].dtype).double() for other, value in reference.items()}
            peak = float(tensor[tensor.isfinite()].abs().max())
            for position in {0, tensor.numel() // 2, tensor.numel() - 1}:
                # away from the reference, so that rounding does not hide a part of it
                step = 0.01 * peak * (1.0 if rounded[key].flatten()[position] >= tensor.flatten()[position] else -1.0)
                if bool(tensor.flatten()[position].isfinite()):
                    wrong = error_between(_with(rounded, key, position, step), reference)
                    assert not budget.admits(wrong), f"{key}[{position}] is off by 1%"
                unwritten = _with(rounded, key, position, float("nan"))
                assert not budget.admits(error_between(unwritten, reference)), f"{key}[{position}] is NaN"

    def test_work_is_positive_and_counts_every_byte(self, workload: Workload) -> None:
        """Bytes are those of the inputs and outputs, each moved once."""
        work = self.problem.work(workload)
        tensors = [*self.problem.inputs(workload, "cpu").values(), *self.problem.outputs(workload, "cpu").values()]
        assert work.flops > 0
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert work.bytes == size or (self.partly_read and 0 < work.bytes < size)

    def test_baselines_run_and_the_libraries_are_right(self, workload: Workload) -> None:
        """There is a library to compare with, first in the list; each baseline runs, and those that compute are within the budget."""
        inputs, reference, budget = self.made(workload)
        baselines = self.problem.baselines(workload, self.device or cpu())
        assert baselines
        assert next(iter(baselines.values())).role == "library"
        for label, baseline in baselines.items():
            assert baseline.role in {"library", "peer", "roof", "step"}
            assert baseline.meaning.strip(), f"{label} has no meaning"
            if label in self.unhurried:
                continue
            outputs = self.problem.outputs(workload, self.torch_device)
            for tensor in outputs.values():
                tensor.fill_(float("nan"))
            baseline.launch.prepare(inputs, outputs)
            if baseline.role in SOLVING_ROLES:
                assert all(bool(tensor.isnan().all()) for tensor in outputs.values()), f"{label} wrote its result in prepare"
            baseline.launch.run()
            collect = getattr(baseline.launch, "collect", None)
            if collect is not None:
                collect()
            if baseline.role in SOLVING_ROLES:
                error = error_between(outputs, reference)
                assert budget.admits(error), f"{label}: {error} is beyond {budget}"


def _assert_legal(dims: Mapping[str, Any], key: str, value: Value) -> None:
    dim = dims[key]
    assert type(value) is type(dim.default), f"{key}={value} is not a {type(dim.default).__name__}"
    if isinstance(value, str):
        assert value in dim.choices, f"{key}={value} is not one of {dim.choices}"
    elif not isinstance(value, bool):
        assert dim.minimum <= value <= dim.maximum, f"{key}={value} is not within {dim.minimum} to {dim.maximum}"


def _with(tensors: Tensors, key: str, position: int, step: float) -> "dict[str, torch.Tensor]":
    changed = tensors[key].clone()
    changed.view(-1)[position] += step
    return {**tensors, key: changed}

"""The distance between outputs and reference, against figures worked out by hand."""

import math

import pytest
import torch

from kerneldyno.core import error as error_module
from kerneldyno.core.error import error_between


def test_norm_and_largest_difference() -> None:
    reference = {"y": torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)}
    found = error_between({"y": torch.tensor([3.0, 0.5, 4.0])}, reference)
    assert found.relative == pytest.approx(0.5 / 5.0)
    assert found.max_abs == pytest.approx(0.5)


def test_worst_of_several_tensors() -> None:
    reference = {"a": torch.ones(4), "b": torch.full((2, 2), 10.0)}
    found = error_between({"a": torch.full((4,), 1.1), "b": torch.full((2, 2), 10.5)}, reference)
    assert found.relative == pytest.approx(0.1, rel=1e-6)
    assert found.max_abs == pytest.approx(0.5)


def test_blocks_do_not_change_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = {"y": torch.randn(37, 41, generator=generator, dtype=torch.float64)}
    outputs = {"y": reference["y"].bfloat16()}
    whole = error_between(outputs, reference)
    monkeypatch.setattr(error_module, "BLOCK_ELEMENTS", 100)
    blocked = error_between(outputs, reference)
    assert blocked.relative == pytest.approx(whole.relative, rel=1e-12)
    assert blocked.max_abs == whole.max_abs
    assert 1e-3 < whole.relative < 3e-3  # one rounding to bf16


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_not_finite_is_infinitely_wrong(poison: float) -> None:
    outputs = torch.zeros(8)
    outputs[5] = poison
    found = error_between({"y": outputs}, {"y": torch.zeros(8)})
    assert (found.relative, found.max_abs) == (math.inf, math.inf)


def test_zero_reference() -> None:
    reference = {"y": torch.zeros(3)}
    assert error_between({"y": torch.zeros(3)}, reference).relative == 0.0
    assert error_between({"y": torch.ones(3)}, reference).relative == math.inf


def test_other_names_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="do not match"):
        error_between({"y": torch.zeros(3)}, {"z": torch.zeros(3)})
    with pytest.raises(ValueError, match="has shape"):
        error_between({"y": torch.zeros(3)}, {"y": torch.zeros(4)})


def test_nothing_is_changed_in_place() -> None:
    outputs, reference = {"y": torch.full((3,), 2.0, dtype=torch.float64)}, {"y": torch.ones(3, dtype=torch.float64)}
    error_between(outputs, reference)
    assert outputs["y"].tolist() == [2.0, 2.0, 2.0]
    assert reference["y"].tolist() == [1.0, 1.0, 1.0]


def test_an_infinity_of_the_reference_must_be_met() -> None:
    """An empty sum has the logarithm -inf: the same is right, anything else infinitely wrong."""
    reference = {"y": torch.tensor([1.0, -math.inf, 2.0])}
    assert error_between({"y": torch.tensor([1.0, -math.inf, 2.0])}, reference).relative == 0.0
    near = error_between({"y": torch.tensor([1.0, -math.inf, 2.5])}, reference)
    assert (near.relative, near.max_abs) == (pytest.approx(0.5 / 5**0.5), 0.5)
    for other in (0.0, -1e30, math.inf, math.nan):
        found = error_between({"y": torch.tensor([1.0, other, 2.0])}, reference)
        assert (found.relative, found.max_abs) == (math.inf, math.inf)

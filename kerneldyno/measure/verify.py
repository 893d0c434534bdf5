"""Verification: guarded and poisoned tensors, and the check that a kernel may be timed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kerneldyno.core import Error
from kerneldyno.core import ErrorBudget
from kerneldyno.core import Tensors
from kerneldyno.core.error import error_between


if TYPE_CHECKING:
    import torch

ZONE_BYTES = 4096
"""Guard before and after each tensor: a multiple of the 512 bytes to which CUDA's allocator aligns, so the tensor stays aligned."""

FINGERPRINT_ELEMENTS = 2**26
"""Elements summed at once: torch widens them to int64 first, 512 MiB here; all of 15 GB of weights at once took 60 GB of an H200."""

_FILL = 0xFF
"""Every floating-point type reads bytes of 0xFF as NaN: a kernel that uses what lies beyond an input shows it."""


@dataclass(frozen=True)
class Guarded:
    """Tensors with a guard zone around each.

    Attributes:
        tensors: The tensors to hand to a kernel.
        blocks: Their whole allocations, zones included.
    """

    tensors: Tensors
    blocks: Mapping[str, "torch.Tensor"]

    def tampered(self) -> list[str]:
        """Name the tensors whose zones a kernel wrote to."""
        found: list[str] = []
        for name, block in self.blocks.items():
            if not bool((block[:ZONE_BYTES] == _FILL).all()) or not bool((block[-ZONE_BYTES:] == _FILL).all()):
                found.append(name)
        return found

    def poison(self) -> None:
        """Fill the tensors with NaN, so that an element that is not written is seen."""
        for tensor in self.tensors.values():
            tensor.fill_(float("nan"))


def guard(tensors: Tensors) -> Guarded:
    """Copy tensors into allocations with guard zones."""
    import torch

    guarded: dict[str, torch.Tensor] = {}
    blocks: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        block = torch.full((size + 2 * ZONE_BYTES,), _FILL, dtype=torch.uint8, device=tensor.device)
        view = block[ZONE_BYTES : ZONE_BYTES + size].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        guarded[name] = view
        blocks[name] = block
    return Guarded(guarded, blocks)


def fingerprint(tensors: Tensors) -> Mapping[str, int]:
    """Return a number a tensor that changes when the tensor does (the sum of its bytes' integer values, position-blind)."""
    import torch

    prints: dict[str, int] = {}
    for name, tensor in tensors.items():
        width = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()]
        parts = [part.sum(dtype=torch.int64) for part in tensor.view(width).view(-1).split(FINGERPRINT_ELEMENTS)]
        prints[name] = int(torch.stack(parts).sum()) if parts else 0
    return prints


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a launch's outputs are right.

    Attributes:
        error: Their distance from the reference.
        message: What is wrong, in words; empty where nothing is.
        spoilt: True where it wrote to an input or a guard zone, so that the tensors must be made anew.
    """

    error: Error
    message: str
    spoilt: bool

    @property
    def right(self) -> bool:
        """True where nothing is wrong."""
        return not self.message


def judge(inputs: Guarded, before: Mapping[str, int], outputs: Guarded, reference: Tensors, budget: ErrorBudget) -> Verdict:
    """Compare a finished launch's outputs with the reference, and look for writes where none belong.

    Args:
        inputs: The inputs it read.
        before: Their fingerprints before the launch.
        outputs: The outputs it wrote, poisoned before.
        reference: The right answer.
        budget: The error that is allowed.
    """
    error = error_between(outputs.tensors, reference)
    wrong: list[str] = []
    zones = [*(f"input {name}" for name in inputs.tampered()), *(f"output {name}" for name in outputs.tampered())]
    if zones:
        wrong.append(f"it wrote out of bounds, beside {', '.join(zones)}")
    after = fingerprint(inputs.tensors)
    changed = [name for name in before if before[name] != after[name]]
    if changed:
        wrong.append(f"it changed its input {', '.join(changed)}")
    if not budget.admits(error):
        wrong.append(
            f"error {error.relative:.3g} of the norm (at most {budget.relative:.3g}), "
            f"{error.max_abs:.3g} in one element (at most {budget.max_abs:.3g})"
        )
    return Verdict(error, "; ".join(wrong), spoilt=bool(zones or changed))

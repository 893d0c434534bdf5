"""How far outputs are from the reference: block by block in float64, on the outputs' device."""

import math
from typing import TYPE_CHECKING

from kerneldyno.core.protocols import Tensors
from kerneldyno.core.records import Error


if TYPE_CHECKING:
    import torch

BLOCK_ELEMENTS = 2**24
"""Elements compared at once: three float64 blocks of 128 MiB, so that checking needs little memory beside the tensors."""


def error_between(outputs: Tensors, reference: Tensors) -> Error:
    """Measure the distance of outputs from the reference; with several tensors, the worst of each figure.

    Args:
        outputs: What a kernel wrote, any dtype.
        reference: The plain answer, with the same names and shapes; moved block by block where it lies on another device.

    Returns:
        The error; both figures are infinite where an output element is not finite and the reference is not the same infinity.

    Raises:
        ValueError: Names or shapes differ.
    """
    if outputs.keys() != reference.keys():
        raise ValueError(f"outputs {sorted(outputs)} do not match the reference {sorted(reference)}")
    errors = [_tensor_error(name, outputs[name], reference[name]) for name in outputs]
    return Error(max(error.relative for error in errors), max(error.max_abs for error in errors))


def _tensor_error(name: str, output: "torch.Tensor", reference: "torch.Tensor") -> Error:
    if output.shape != reference.shape:
        raise ValueError(f"output {name} has shape {tuple(output.shape)}, the reference {tuple(reference.shape)}")
    figures = []
    for actual, expected in zip(output.flatten().split(BLOCK_ELEMENTS), reference.flatten().split(BLOCK_ELEMENTS), strict=True):
        wanted = expected.to(actual.device).double()
        apart = actual.double() - wanted  # double() of a float64 tensor is the tensor itself: nothing is changed in place
        unbounded = wanted.isinf()  # the logarithm of an empty sum; the same infinity is right, inf - inf would be NaN
        apart[unbounded & (actual == wanted)] = 0.0
        wanted = wanted.masked_fill(unbounded, 0.0)
        figures.append((apart.square().sum(), wanted.square().sum(), apart.abs_().max()))
    # the figures stay on the device until here: one wait for the whole tensor instead of three a block
    squares, scales, peaks = ([float(figure) for figure in column] for column in zip(*figures, strict=True))
    if not all(math.isfinite(square) for square in squares):
        return Error(math.inf, math.inf)
    norm, scale = math.sqrt(math.fsum(squares)), math.sqrt(math.fsum(scales))
    relative = norm / scale if scale else (math.inf if norm else 0.0)
    return Error(relative, max(peaks))

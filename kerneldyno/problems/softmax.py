"""y = exp(x - max) / sum of it over the last axis: one read and one write of memory, where a kernel is good."""

import functools
from collections.abc import Callable
from collections.abc import Mapping

from kerneldyno.core import DTYPE_BYTES
from kerneldyno.core import Baseline
from kerneldyno.core import Device
from kerneldyno.core import Dim
from kerneldyno.core import ErrorBudget
from kerneldyno.core import Shape
from kerneldyno.core import Tensors
from kerneldyno.core import Work
from kerneldyno.core import Workload
from kerneldyno.core.error import error_between
from kerneldyno.problems import _common
from kerneldyno.problems._models import MODELS


name = "softmax"
dtypes = _common.DTYPES
dims: Mapping[str, Dim] = {
    "m": Dim(default=4096, meaning="rows, each normalised on its own", unit="rows"),
    "n": Dim(default=4096, meaning="length of a row", unit="elements"),
}

_SWEEP = {
    "4k": (1024, 4096, 8192, 16384),
    "16k": (1024, 4096, 8192, 16384, 32768, 65536, 131072),
    "32k": (1024, 2048, 4096, 8192, 16384, 32768),
    "8k": (65536, 131072, 262144),
}
"""Row lengths by rows, "16k" for 16384 of them.

Source: QuACK's memory-bound suite (media/2025-07-10-membound-sol.md) runs 16k and 32k rows up to 262144 columns.
"""


def shapes() -> Mapping[str, Shape]:
    """A sweep ("16kx8k": 16384 rows of 8192), and the logits and router scores of real models for 4096 tokens."""
    sweep = {f"{rows}x{n // 1024}k": {"m": int(rows[:-1]) * 1024, "n": n} for rows, lengths in _SWEEP.items() for n in lengths}
    logits = {f"{model}-logits-4k": {"m": 4096, "n": sizes.vocab} for model, sizes in MODELS.items()}
    routers = {f"{model}-router-4k": {"m": 4096, "n": sizes.experts} for model, sizes in MODELS.items() if sizes.experts}
    return {**sweep, **logits, **routers}


def check(workload: Workload) -> None:
    """Refuse matrices that no single device holds. Raises `errors.RequestError`."""
    _common.check_size(workload, work(workload).bytes)


def inputs(workload: Workload, device: str) -> Tensors:
    """Draw x, [m, n], standard normal."""
    return _common.normal(workload, device, x=_extent(workload))


def outputs(workload: Workload, device: str) -> Tensors:
    """Allocate y, [m, n]."""
    return _common.empty(workload, device, y=_extent(workload))


def reference(workload: Workload, inputs: Tensors) -> Tensors:
    """Compute in float64 by row blocks; the largest of a row is taken off before exp, so extreme inputs do not overflow."""
    x = inputs["x"]
    y = x.new_empty(x.shape, dtype=_common.reference_dtype(workload))
    for block in _common.row_blocks(*_extent(workload)):
        y[block] = x[block].double().softmax(dim=-1)
    return {"y": y}


def tolerance(workload: Workload, inputs: Tensors, reference: Tensors) -> ErrorBudget:
    """Allow the library's error, the random walk of a float32 sum of n terms, and the rounding of the exponents.

    exp2(x log2 e - max log2 e) rounds each product to float32, so an element is off by the magnitude of x in units in the last place;
    the sum of a row, all positive, is off by about sqrt(n) of them. Both are relative to the result.
    """
    x, y = inputs["x"], reference["y"]
    rows, columns = _extent(workload)
    library = {"y": x.softmax(dim=-1)}
    largest = max(float(x[block].abs().max()) for block in _common.row_blocks(rows, columns))
    growth = _common.WALK_FACTOR * (columns**0.5 + largest)
    return _common.budget(error_between(library, reference), growth=growth, max_scale=float(y.max()))


def work(workload: Workload) -> Work:
    """Five operations an element: compare for the maximum, subtract, exp, add to the sum, scale. x is read once, y written once."""
    rows, columns = _extent(workload)
    return Work(flops=5.0 * rows * columns, bytes=2.0 * rows * columns * DTYPE_BYTES[workload.dtype])


def baselines(workload: Workload, device: Device) -> Mapping[str, Baseline]:
    """torch.softmax, torch.compile of it (CUDA), and a copy of x."""
    if device.kind == "replay":
        return {}
    found = {"torch": Baseline(_common.Call(_bind_softmax), "library", "torch.softmax(x, dim=-1, out=y)")}
    if device.kind == "cuda" and _common.can_compile():
        compiled = _common.Compiled(_softmax, ("x", "y"))
        found["torch.compile"] = Baseline(compiled, "library", "y.copy_(x.softmax(-1)) through torch.compile")
    found["copy"] = Baseline(_common.Call(_bind_copy), "roof", "y.copy_(x): moves the same bytes without computing")
    return found


def _extent(workload: Workload) -> tuple[int, int]:
    return int(workload.shape["m"]), int(workload.shape["n"])


def _softmax(x, y):  # noqa: ANN001, ANN202
    y.copy_(x.softmax(dim=-1))


def _bind_softmax(inputs: Tensors, outputs: Tensors) -> Callable[[], object]:
    import torch

    return functools.partial(torch.softmax, inputs["x"], dim=-1, out=outputs["y"])


def _bind_copy(inputs: Tensors, outputs: Tensors) -> Callable[[], object]:
    return functools.partial(outputs["y"].copy_, inputs["x"])

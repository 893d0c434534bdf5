"""out = x + y, element by element: the smallest problem, bound by memory alone."""

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


name = "vector_add"
dtypes = _common.DTYPES
dims: Mapping[str, Dim] = {"n": Dim(default=2**24, meaning="length of both vectors and of their sum", unit="elements")}


def shapes() -> Mapping[str, Shape]:
    """Powers of two from 2 MB of bf16 a vector (it fits every L2 cache) to 2 GB, and the residual adds of 4096 tokens."""
    powers = {f"{2 ** (exponent - 20)}m": {"n": 2**exponent} for exponent in (20, 22, 24, 26, 28, 30)}
    residuals = {f"{model}-residual-4k": {"n": 4096 * sizes.hidden} for model, sizes in MODELS.items()}
    return {**powers, **residuals}


def check(workload: Workload) -> None:
    """Refuse vectors that no single device holds. Raises `errors.RequestError`."""
    _common.check_size(workload, work(workload).bytes)


def inputs(workload: Workload, device: str) -> Tensors:
    """Draw x and y, each [n], standard normal."""
    n = int(workload.shape["n"])
    return _common.normal(workload, device, x=(n,), y=(n,))


def outputs(workload: Workload, device: str) -> Tensors:
    """Allocate out, [n]."""
    return _common.empty(workload, device, out=(int(workload.shape["n"]),))


def reference(workload: Workload, inputs: Tensors) -> Tensors:
    """Add in float64 (float32 sums of 16-bit numbers are rounded to float32 for keeping)."""
    x, y = inputs["x"], inputs["y"]
    out = x.new_empty(x.shape, dtype=_common.reference_dtype(workload))
    for block in _common.row_blocks(len(x), 1):
        out[block] = x[block].double() + y[block].double()
    return {"out": out}


def tolerance(workload: Workload, inputs: Tensors, reference: Tensors) -> ErrorBudget:
    """Allow the library's error plus one float32 rounding: a sum of two numbers has no order to differ in."""
    library = {"out": inputs["x"] + inputs["y"]}
    return _common.budget(error_between(library, reference), growth=1.0, max_scale=float(reference["out"].abs().max()))


def work(workload: Workload) -> Work:
    """One addition an element; x and y are read, out is written."""
    n = int(workload.shape["n"])
    return Work(flops=float(n), bytes=3.0 * n * DTYPE_BYTES[workload.dtype])


def baselines(workload: Workload, device: Device) -> Mapping[str, Baseline]:
    """torch.add, torch.compile of it (CUDA), and a copy that moves as many bytes."""
    if device.kind == "replay":
        return {}
    found = {"torch": Baseline(_common.Call(_bind_add), "library", "torch.add(x, y, out=out)")}
    if device.kind == "cuda" and _common.can_compile():
        compiled = _common.Compiled(_add, ("x", "y", "out"))
        found["torch.compile"] = Baseline(compiled, "library", "out.copy_(x + y) through torch.compile")
    found["copy"] = Baseline(_common.Call(_bind_copy), "roof", "a copy that moves as many bytes: 1.5 n elements read, 1.5 n written")
    return found


def _add(x, y, out):  # noqa: ANN001, ANN202
    out.copy_(x + y)


def _bind_add(inputs: Tensors, outputs: Tensors) -> Callable[[], object]:
    import torch

    return functools.partial(torch.add, inputs["x"], inputs["y"], out=outputs["out"])


def _bind_copy(inputs: Tensors, outputs: Tensors) -> Callable[[], object]:
    import torch

    x, y = inputs["x"], inputs["y"]
    source = torch.cat((x, y[: (len(y) + 1) // 2]))
    return functools.partial(torch.empty_like(source).copy_, source)

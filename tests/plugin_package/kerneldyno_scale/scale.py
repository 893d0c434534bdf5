"""y = a x: a problem that another package brings."""

from collections.abc import Callable
from collections.abc import Mapping
from functools import partial

import torch

from kerneldyno.core import DTYPE_EPSILON
from kerneldyno.core import Baseline
from kerneldyno.core import Device
from kerneldyno.core import Dim
from kerneldyno.core import ErrorBudget
from kerneldyno.core import Shape
from kerneldyno.core import Tensors
from kerneldyno.core import Work
from kerneldyno.core import Workload


name = "scale"
dtypes = ("fp32",)
dims: Mapping[str, Dim] = {
    "n": Dim(default=2**20, meaning="length of the vector", unit="elements"),
    "a": Dim(default=3, meaning="the factor", maximum=1000),
}


def shapes() -> Mapping[str, Shape]:
    """A vector that fits a cache and one that does not."""
    return {"small": {"n": 2**16}, "large": {"n": 2**24}}


def check(workload: Workload) -> None:
    """Every n and a go together."""


def inputs(workload: Workload, device: str) -> Tensors:
    """Draw x, [n], standard normal."""
    generator = torch.Generator(device=device).manual_seed(workload.seed)
    return {"x": torch.randn(int(workload.shape["n"]), generator=generator, device=device)}


def outputs(workload: Workload, device: str) -> Tensors:
    """Allocate y, [n]."""
    return {"y": torch.empty(int(workload.shape["n"]), device=device)}


def reference(workload: Workload, inputs: Tensors) -> Tensors:
    """Multiply in float64."""
    return {"y": inputs["x"].double() * workload.shape["a"]}


def tolerance(workload: Workload, inputs: Tensors, reference: Tensors) -> ErrorBudget:
    """One rounding to float32: half a unit in the last place, of the norm and of the largest element."""
    return ErrorBudget(DTYPE_EPSILON["fp32"], DTYPE_EPSILON["fp32"] * float(reference["y"].abs().max()))


def work(workload: Workload) -> Work:
    """One multiplication an element; x is read, y is written."""
    n = int(workload.shape["n"])
    return Work(flops=float(n), bytes=8.0 * n)


class _Call:
    def __init__(self, bind: Callable[[Tensors, Tensors], Callable[[], object]]) -> None:
        self._bind = bind

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        self.run = self._bind(inputs, outputs)

    def run(self) -> None:
        raise RuntimeError("prepare comes before run")


def baselines(workload: Workload, device: Device) -> Mapping[str, Baseline]:
    """torch.mul."""
    factor = workload.shape["a"]
    call = _Call(lambda inputs, outputs: partial(torch.mul, inputs["x"], factor, out=outputs["y"]))
    return {"torch": Baseline(call, "library", "torch.mul(x, a, out=y)")}

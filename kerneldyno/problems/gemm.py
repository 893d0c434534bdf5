"""c = a @ b with float32 accumulation: bound by arithmetic where m, n and k are large, by memory where one is small."""

import functools
from collections.abc import Callable
from collections.abc import Mapping
from typing import TYPE_CHECKING

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
from kerneldyno.problems._models import TOKENS


if TYPE_CHECKING:
    import torch

name = "gemm"
dtypes = _common.DTYPES
dims: Mapping[str, Dim] = {
    "m": Dim(default=4096, default_cpu=1024, meaning="rows of a and c; tokens, in a model", unit="rows"),
    "n": Dim(default=4096, default_cpu=1024, meaning="columns of c; output features", unit="columns"),
    "k": Dim(default=4096, default_cpu=1024, meaning="length of the sums; input features", unit="elements"),
    "layout": Dim(default="nt", meaning="how b is stored: nt [n, k] as a linear layer's weight, nn [k, n]", choices=("nt", "nn")),
}


def shapes() -> Mapping[str, Shape]:
    """Linear layers of real models by tokens ("llama3-70b-gate-up-4k"), squares, and 8192 x 8192 with a short k."""
    layers = {
        f"{model}-{layer}-{suffix}": _shape(tokens, *features)
        for model, sizes in MODELS.items()
        for layer, features in sizes.linears.items()
        for suffix, tokens in TOKENS.items()
    }
    squares = {f"square-{size // 1024}k": _shape(size, size, size) for size in (1024, 2048, 4096, 8192, 16384)}
    skinny = {f"skinny-k-{k}": _shape(8192, 8192, k) for k in (256, 512, 1024, 2048)}
    return {**squares, **skinny, **layers}


def check(workload: Workload) -> None:
    """Refuse matrices that no single device holds. Raises `errors.RequestError`."""
    _common.check_size(workload, work(workload).bytes)


def inputs(workload: Workload, device: str) -> Tensors:
    """Draw a, [m, k], and b, [n, k] (nt) or [k, n] (nn), standard normal."""
    m, n, k = _extent(workload)
    return _common.normal(workload, device, a=(m, k), b=(n, k) if workload.shape["layout"] == "nt" else (k, n))


def outputs(workload: Workload, device: str) -> Tensors:
    """Allocate c, [m, n]."""
    m, n, _ = _extent(workload)
    return _common.empty(workload, device, c=(m, n))


def reference(workload: Workload, inputs: Tensors) -> Tensors:
    """Multiply in float64, by row blocks."""
    m, n, k = _extent(workload)
    a, b = inputs["a"], _columns(workload, inputs).double()
    c = a.new_empty((m, n), dtype=_common.reference_dtype(workload))
    for block in _common.row_blocks(m, max(n, k)):
        c[block] = a[block].double() @ b
    return {"c": c}


def tolerance(workload: Workload, inputs: Tensors, reference: Tensors) -> ErrorBudget:
    """Allow the library's error and the random walk of a float32 sum of k products in any order.

    The walk is scaled by what is summed where that is more than the result, as products cancel: its norm is
    sqrt(sum_l |a_l|^2 |b_l|^2) over the columns of a and the rows of b (the norm that c has if the signs are random), its largest
    element at most max |a_i|_4 max |b_j|_4 over the rows of a and the columns of b (Cauchy-Schwarz on the squares).
    """
    _, _, k = _extent(workload)
    a, b, c = inputs["a"], _columns(workload, inputs), reference["c"]
    with _common.float32_accumulation():
        library = {"c": a @ b}
    a_squares, b_squares = _squares(a), _squares(b)
    summed_norm = float((a_squares.sum(dim=0) * b_squares.sum(dim=1)).sum().sqrt())
    summed_max = float((a_squares.square().sum(dim=1).max() * b_squares.square().sum(dim=0).max()).sqrt().sqrt())
    # torch's norm of a float32 tensor is itself a float32 sum: good to 1e-4 or so, and only a scale here
    norm, largest = float(c.norm()), float(c.abs().max())
    return _common.budget(
        error_between(library, reference),
        growth=_common.WALK_FACTOR * k**0.5,
        norm_scale=max(1.0, summed_norm / norm) if norm else 1.0,
        max_scale=max(summed_max, largest),
    )


def work(workload: Workload) -> Work:
    """One multiplication and one addition for each of m n k products; a and b are read, c is written."""
    m, n, k = _extent(workload)
    return Work(flops=2.0 * m * n * k, bytes=float(m * k + k * n + m * n) * DTYPE_BYTES[workload.dtype])


def baselines(workload: Workload, device: Device) -> Mapping[str, Baseline]:
    """Compare with cuBLAS through torch.matmul ("torch" on a CPU), and on CUDA what torch.compile finds when it may search.

    torch.compile in its default mode calls cuBLAS too, so it would be the same row twice; max-autotune-no-cudagraphs compares cuBLAS
    with its own Triton kernels while it compiles, which takes some ten seconds in `prepare`. No copy: a product is not bound by it.
    """
    if device.kind == "replay":
        return {}
    call = _common.Call(functools.partial(_bind_matmul, workload))
    if device.kind == "cpu":
        return {"torch": Baseline(call, "library", "torch.matmul(a, b, out=c)")}
    found = {"cublas": Baseline(call, "library", "cuBLAS through torch.matmul(a, b, out=c), sums in float32")}
    if _common.can_compile():
        product = _product_nt if workload.shape["layout"] == "nt" else _product_nn
        compiled = _common.Compiled(product, ("a", "b"), output="c", mode="max-autotune-no-cudagraphs")
        found["torch.compile"] = Baseline(compiled, "library", "a @ b through torch.compile, max-autotune-no-cudagraphs")
    return found


def _shape(m: int, n: int, k: int) -> Shape:
    return {"m": m, "n": n, "k": k, "layout": "nt"}


def _extent(workload: Workload) -> tuple[int, int, int]:
    return int(workload.shape["m"]), int(workload.shape["n"]), int(workload.shape["k"])


def _columns(workload: Workload, inputs: Tensors) -> "torch.Tensor":
    """Return b as [k, n], a view."""
    return inputs["b"].T if workload.shape["layout"] == "nt" else inputs["b"]


def _squares(matrix: "torch.Tensor") -> "torch.Tensor":
    return matrix.float().square()


def _product_nt(a, b):  # noqa: ANN001, ANN202
    return a @ b.T


def _product_nn(a, b):  # noqa: ANN001, ANN202
    return a @ b


def _bind_matmul(workload: Workload, inputs: Tensors, outputs: Tensors) -> Callable[[], object]:
    import torch

    return functools.partial(torch.matmul, inputs["a"], _columns(workload, inputs), out=outputs["c"])

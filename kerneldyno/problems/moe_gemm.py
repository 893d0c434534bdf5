"""c = a @ w[expert].T over rows sorted by expert: the products of a mixture of experts, as one ragged batch."""

import functools
import itertools
import math
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

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
from kerneldyno.errors import RequestError
from kerneldyno.problems import _common
from kerneldyno.problems._models import MODELS


if TYPE_CHECKING:
    import numpy
    import torch

name = "moe_gemm"
dtypes = _common.DTYPES
dims: Mapping[str, Dim] = {
    "tokens": Dim(default=4096, default_cpu=64, meaning="tokens that are routed", unit="rows"),
    "experts": Dim(default=128, default_cpu=8, meaning="experts, each with a weight of its own", unit="experts", maximum=65536),
    "top_k": Dim(
        default=8, default_cpu=2, meaning="distinct experts of a token; there are tokens x top_k rows", unit="experts", maximum=65536
    ),
    "n": Dim(default=3072, default_cpu=1024, meaning="columns of c; output features of an expert", unit="columns"),
    "k": Dim(default=4096, default_cpu=1024, meaning="length of the sums; input features", unit="elements"),
    "routing": Dim(
        default="uniform",
        meaning="experts that the tokens choose: uniform, zipf (popularity 1 / rank) or one_hot (all tokens the same top_k)",
        choices=("uniform", "zipf", "one_hot"),
    ),
    "gather": Dim(default=False, meaning="false: a holds the rows sorted by expert; true: the kernel reads tokens through an index"),
}

_TOKENS = {"1": 1, "16": 16, "128": 128, "512": 512, "4k": 4096, "8k": 8192}

_DRAWN_SCORES = 2**24
"""Scores of a routing that are drawn at once: 128 MiB."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A workload's shape with types, for kernels and tests alike."""

    tokens: int
    experts: int
    top_k: int
    n: int
    k: int
    routing: str
    gather: bool

    @classmethod
    def of(cls, workload: Workload) -> "Sizes":
        """Read a workload."""
        values: dict[str, Any] = dict(workload.shape)
        return cls(**values)

    @property
    def rows(self) -> int:
        """Rows of a and c: one for each expert of each token."""
        return self.tokens * self.top_k


@dataclass(frozen=True)
class Routing:
    """Which rows each expert gets. The arrays are shared: do not write to them.

    Attributes:
        choices: [tokens, top_k] int32, the experts of each token, in no order.
        index: [rows] int32, the token of each row, sorted by expert, tokens ascending within an expert.
        offsets: [experts] int32, the row after each expert's last.
    """

    choices: "numpy.ndarray"
    index: "numpy.ndarray"
    offsets: "numpy.ndarray"

    @property
    def touched(self) -> int:
        """Experts that have rows."""
        import numpy as np

        return int(np.count_nonzero(np.diff(self.offsets, prepend=0)))


def route(workload: Workload) -> Routing:
    """Draw the routing of a workload: the same on every device, and for gather true and false."""
    sizes = Sizes.of(workload)
    return _route(sizes.tokens, sizes.experts, sizes.top_k, sizes.routing, workload.seed)


@functools.lru_cache(maxsize=16)
def _route(tokens: int, experts: int, top_k: int, routing: str, seed: int) -> Routing:
    """Draw `top_k` distinct experts for each token, with chances as their popularity.

    The largest `top_k` of log(popularity) plus Gumbel noise are a draw without replacement. NumPy draws it and not torch, whose
    generators differ between devices: `work` counts the touched experts from the same routing as the inputs hold.

    Source: W. Kool, H. van Hoof, M. Welling, Stochastic Beams and Where to Find Them (the Gumbel-top-k trick), ICML 2019.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    order = rng.permutation(experts)
    if routing == "one_hot":
        choices = np.broadcast_to(order[:top_k].astype(np.int32), (tokens, top_k))
    else:
        logs = np.zeros(experts)
        if routing == "zipf":
            logs[order] = -np.log(np.arange(1, experts + 1))
        parts = []
        step = max(1, _DRAWN_SCORES // experts)
        for start in range(0, tokens, step):
            scores = logs - np.log(-np.log(rng.random((min(step, tokens - start), experts))))
            parts.append(np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k].astype(np.int32))
        choices = np.concatenate(parts)
    by_expert = np.argsort(choices.ravel(), kind="stable")
    index = (by_expert // top_k).astype(np.int32)
    offsets = np.bincount(choices.ravel(), minlength=experts).cumsum().astype(np.int32)
    return Routing(choices, index, offsets)


def shapes() -> Mapping[str, Shape]:
    """The two products of the experts of real models by tokens: "deepseek-v3-up-16" (gate and up in one), "mixtral-8x7b-down-4k"."""
    return {
        f"{model}-{layer}-{suffix}": {
            "tokens": tokens,
            "experts": sizes.experts,
            "top_k": sizes.top_k,
            "n": n,
            "k": k,
            "routing": "uniform",
            "gather": False,
        }
        for model, sizes in MODELS.items()
        if sizes.experts
        for layer, n, k in (("up", 2 * sizes.expert_ffn, sizes.hidden), ("down", sizes.hidden, sizes.expert_ffn))
        for suffix, tokens in _TOKENS.items()
    }


def check(workload: Workload) -> None:
    """Refuse more choices than experts and tensors that no single device holds. Raises `errors.RequestError`."""
    sizes = Sizes.of(workload)
    if sizes.top_k > sizes.experts:
        reason = f"top_k={sizes.top_k} is above experts={sizes.experts}: the experts of a token are distinct."
        raise RequestError(f"{reason} Choose shape.top_k={sizes.experts}.")
    if sizes.rows >= 2**31:
        most = (2**31 - 1) // sizes.top_k
        raise RequestError(f"tokens x top_k is {sizes.rows}, and rows are counted in int32. Choose shape.tokens={most} or less.")
    _common.check_size(workload, _bytes(sizes, workload.dtype, sizes.experts))


def inputs(workload: Workload, device: str) -> Tensors:
    """Draw the tokens and w, [experts, n, k], standard normal, and the routing.

    With gather=true they are x, [tokens, k], and index, [rows] int32, the token of each row; else a, [rows, k], is x[index]. Both have
    offsets, [experts] int32, the row after each expert's last.
    """
    import torch

    sizes = Sizes.of(workload)
    routing = route(workload)
    drawn = _common.normal(workload, device, x=(sizes.tokens, sizes.k), w=(sizes.experts, sizes.n, sizes.k))
    index = torch.tensor(routing.index, dtype=torch.int32, device=device)
    offsets = torch.tensor(routing.offsets, dtype=torch.int32, device=device)
    if sizes.gather:
        return {"x": drawn["x"], "index": index, "w": drawn["w"], "offsets": offsets}
    return {"a": drawn["x"][index], "w": drawn["w"], "offsets": offsets}


def outputs(workload: Workload, device: str) -> Tensors:
    """Allocate c, [rows, n], in sorted order."""
    sizes = Sizes.of(workload)
    return _common.empty(workload, device, c=(sizes.rows, sizes.n))


def reference(workload: Workload, inputs: Tensors) -> Tensors:
    """Multiply in float64, by row blocks of each expert."""
    sizes = Sizes.of(workload)
    c = inputs["w"].new_empty((sizes.rows, sizes.n), dtype=_common.reference_dtype(workload))
    for expert, begin, end in _bounds(inputs):
        weight = inputs["w"][expert].double().T
        for block in _common.row_blocks(end - begin, max(sizes.n, sizes.k)):
            rows = slice(begin + block.start, begin + block.stop)
            c[rows] = _rows(sizes, inputs, rows).double() @ weight
    return {"c": c}


def tolerance(workload: Workload, inputs: Tensors, reference: Tensors) -> ErrorBudget:
    """Allow the library's error, of a product for each expert, and the random walk of a float32 sum of k products in any order.

    The walk is scaled as in `gemm`, for each expert: by the norm that its rows of c have if the signs are random, and by the largest
    element that they can have.
    """
    sizes = Sizes.of(workload)
    c = reference["c"]
    library = c.new_empty(c.shape, dtype=inputs["w"].dtype)
    squares, peaks = [], []
    with _common.float32_accumulation():
        for expert, begin, end in _bounds(inputs):
            a, weight = _rows(sizes, inputs, slice(begin, end)), inputs["w"][expert]
            library[begin:end] = a @ weight.T
            a_squares, w_squares = a.float().square(), weight.float().square()
            squares.append((a_squares.sum(dim=0) * w_squares.sum(dim=0)).sum())
            peaks.append(a_squares.square().sum(dim=1).max() * w_squares.square().sum(dim=1).max())
    summed_norm, summed_max = math.sqrt(sum(map(float, squares))), max(map(float, peaks)) ** 0.25
    norm, largest = float(c.norm()), float(c.abs().max())
    return _common.budget(
        error_between({"c": library}, reference),
        growth=_common.WALK_FACTOR * sizes.k**0.5,
        norm_scale=max(1.0, summed_norm / norm) if norm else 1.0,
        max_scale=max(summed_max, largest),
    )


def work(workload: Workload) -> Work:
    """One multiplication and one addition for each of rows n k products; the weights of experts without rows are not read."""
    sizes = Sizes.of(workload)
    return Work(
        flops=2.0 * sizes.rows * sizes.n * sizes.k,
        bytes=_bytes(sizes, workload.dtype, route(workload).touched),
    )


def baselines(workload: Workload, device: Device) -> Mapping[str, Baseline]:
    """torch._grouped_mm (bf16), a loop of cuBLAS products ("torch" on a CPU), QuACK where installed, a copy, and the sorting as a step.

    Only the sorting is not in the others' time: with gather=true they gather (torch) or read through the index (QuACK).
    """
    sizes = Sizes.of(workload)
    if device.kind == "replay":
        return {}
    found: dict[str, Baseline] = {}
    gathers = "x[index], then " if sizes.gather else ""
    if device.kind == "cpu":
        found["torch"] = Baseline(_common.Call(_bind_loop), "library", f"{gathers}torch.mm for each expert that has rows")
    else:
        vectors = sizes.n % 8 == 0 and sizes.k % 8 == 0  # rows of 16 bytes
        if workload.dtype == "bf16" and vectors:
            grouped = _common.Returning(functools.partial(_bind_grouped, sizes), ("c",))
            found["torch._grouped_mm"] = Baseline(grouped, "library", f"{gathers}torch._grouped_mm(a, w, offs=offsets)")
        meaning = f"{gathers}cuBLAS for each expert that has rows, which the host knows beforehand"
        found["cublas-loop"] = Baseline(_common.Call(_bind_loop), "library", meaning)
        if workload.dtype != "fp32" and vectors and _common.installed("quack.gemm_interface"):
            quack = _common.Returning(functools.partial(_bind_quack, sizes), ("c",))
            found["quack"] = Baseline(quack, "peer", "QuACK (CuTe DSL), quack.gemm_interface.gemm(cu_seqlens_m=...), not tuned")
    found |= _common.copy_roof(work(workload), device)
    sorting = "top-k ids to sorted rows: sort, offsets, index" + ("" if sizes.gather else ", a = x[index]")
    found["routing"] = Baseline(_common.Call(functools.partial(_bind_routing, workload)), "step", f"{sorting}; in no other row's time")
    return found


def _bytes(sizes: Sizes, dtype: str, touched: int) -> float:
    """Count the bytes of everything, with the weights of `touched` experts."""
    elements = (sizes.tokens if sizes.gather else sizes.rows) * sizes.k + touched * sizes.n * sizes.k + sizes.rows * sizes.n
    return float(elements) * DTYPE_BYTES[dtype] + 4.0 * (sizes.experts + sizes.gather * sizes.rows)


def _bounds(inputs: Tensors) -> list[tuple[int, int, int]]:
    """List (expert, first row, one past its last) of the experts that have rows."""
    ends = inputs["offsets"].tolist()
    return [(expert, begin, end) for expert, (begin, end) in enumerate(itertools.pairwise([0, *ends])) if begin < end]


def _rows(sizes: Sizes, inputs: Tensors, rows: slice) -> "torch.Tensor":
    """Return sorted rows of a."""
    return inputs["x"][inputs["index"][rows]] if sizes.gather else inputs["a"][rows]


def _bind_loop(inputs: Tensors, outputs: Tensors) -> Callable[[], object]:
    import torch

    w, c = inputs["w"], outputs["c"]
    calls: list[Callable[[], object]] = []
    if "x" in inputs:
        a = torch.empty((len(c), w.shape[2]), dtype=w.dtype, device=w.device)
        calls.append(functools.partial(torch.index_select, inputs["x"], 0, inputs["index"], out=a))
    else:
        a = inputs["a"]
    for expert, begin, end in _bounds(inputs):
        calls.append(functools.partial(torch.mm, a[begin:end], w[expert].T, out=c[begin:end]))

    def run() -> None:
        for call in calls:
            call()

    return run


def _bind_grouped(sizes: Sizes, inputs: Tensors) -> Callable[[], object]:
    from torch import _grouped_mm  # pyright: ignore[reportPrivateImportUsage]

    weights, offsets = inputs["w"].transpose(1, 2), inputs["offsets"]
    if not sizes.gather:
        return functools.partial(_grouped_mm, inputs["a"], weights, offs=offsets)
    x, index = inputs["x"], inputs["index"]
    return lambda: _grouped_mm(x.index_select(0, index), weights, offs=offsets)


def _bind_quack(sizes: Sizes, inputs: Tensors) -> Callable[[], object]:
    import torch
    from quack.gemm_interface import gemm  # pyright: ignore[reportMissingImports]

    ends = torch.nn.functional.pad(inputs["offsets"], (1, 0))
    a, index = (inputs["x"], inputs["index"]) if sizes.gather else (inputs["a"], None)
    return functools.partial(gemm, a, inputs["w"].transpose(1, 2), cu_seqlens_m=ends, A_idx=index, tuned=False)


def _bind_routing(workload: Workload, inputs: Tensors, outputs: Tensors) -> Callable[[], object]:
    """Bind what a server does with the router's choices before the product, without a wait for the device."""
    import torch

    sizes = Sizes.of(workload)
    device = inputs["w"].device
    choices = torch.tensor(route(workload).choices, dtype=torch.int32, device=device).flatten()
    experts = torch.arange(sizes.experts, dtype=torch.int32, device=device)
    tokens = None if sizes.gather else inputs["a"][: sizes.tokens]  # as many rows as x has; which numbers they are takes no time

    def run() -> object:
        by_expert, order = choices.sort(stable=True)
        offsets = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        index = (order // sizes.top_k).int()
        return offsets, index if tokens is None else tokens.index_select(0, index)

    return run

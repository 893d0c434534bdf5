"""o = softmax(scale q k^T) v without the scores in memory: prefill is bound by arithmetic, decode by reading the KV cache."""

import itertools
import math
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import astuple
from dataclasses import dataclass
from dataclasses import replace
from typing import TYPE_CHECKING

from kerneldyno.core import DTYPE_BYTES
from kerneldyno.core import DTYPE_EPSILON
from kerneldyno.core import Baseline
from kerneldyno.core import Device
from kerneldyno.core import Dim
from kerneldyno.core import Error
from kerneldyno.core import ErrorBudget
from kerneldyno.core import Shape
from kerneldyno.core import Tensors
from kerneldyno.core import Work
from kerneldyno.core import Workload
from kerneldyno.core.error import error_between
from kerneldyno.errors import RequestError
from kerneldyno.problems import _common
from kerneldyno.problems._attention import Sizes
from kerneldyno.problems._attention_libraries import libraries
from kerneldyno.problems._models import MODELS


if TYPE_CHECKING:
    import torch

name = "attention"
dtypes = _common.DTYPES
dims: Mapping[str, Dim] = {
    "batch": Dim(default=4, default_cpu=1, meaning="sequences", unit="sequences"),
    "heads": Dim(default=16, default_cpu=8, meaning="query heads", unit="heads", maximum=65536),
    "kv_heads": Dim(
        default=16,
        default_cpu=8,
        meaning="key and value heads; query head h reads h // (heads // kv_heads)",
        unit="heads",
        maximum=65536,
        like="heads",
    ),
    "seq_q": Dim(default=4096, default_cpu=1024, meaning="queries of a sequence; 1 to decode a token", unit="rows"),
    "seq_kv": Dim(default=4096, default_cpu=1024, meaning="keys of a sequence", unit="rows", like="seq_q"),
    "head_dim": Dim(default=128, default_cpu=64, meaning="length of a query and of a key", unit="elements", maximum=512),
    "head_dim_v": Dim(default=128, default_cpu=64, meaning="length of a value", unit="elements", maximum=512, like="head_dim"),
    "causal": Dim(default=False, meaning="query i sees keys up to i + seq_kv - seq_q: the last query sees all"),
    "window": Dim(default=0, meaning="keys seen back from the query's own place (and ahead, if not causal); 0: all", minimum=0),
    "softcap": Dim(default=0.0, meaning="c > 0 bends the scores: c tanh(score / c); 0: none", minimum=0, maximum=1e6),
    "scale": Dim(default=0.0, meaning="factor of the scores; 0: 1 / sqrt(head_dim)", minimum=0, maximum=1e6),
    "layout": Dim(default="bshd", meaning="order of all tensors' axes: batch, sequence, head, element or bhsd", choices=("bshd", "bhsd")),
    "lse": Dim(default=False, meaning="also write the natural logarithm of the sum of exp of a row's scores, float32"),
}

_SUITE = {"512": 512, "1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192, "16k": 16384}
"""Lengths of FlashAttention-3's benchmark: 16384 tokens in all, heads x head_dim = 2048.

Source: J. Shah et al., FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision, 2024, section 4.1.
"""

_PREFILLS = {"1k": 1024, "4k": 4096, "16k": 16384}
_DECODERS = ("llama3-8b", "llama3-70b", "qwen3-235b-a22b", "gpt-oss-120b")
_DECODE_BATCHES = (1, 8, 16, 32, 64, 128)
_DECODE_KEYS = {"1k": 1024, "4k": 4096, "8k": 8192, "32k": 32768, "128k": 131072}

_MEAN_ROUNDING = 0.42
"""Root mean square of a rounding error over its largest, u: evenly spread within the unit, 1 / sqrt(3), and with the number evenly spread
over the logarithm of its octave, sqrt(3 / (8 ln 2)), since the unit is u to 2 u of it."""

_DEVIATIONS = 3.0
"""Standard deviations of the sampled error that a kernel may be off: 3 is passed once in 700 workloads that are all noise."""

_MASKED_ROWS = 1024
"""Most queries of a block where a mask cuts: the keys that none of them sees are left out, with 16k causal keys 47% of them."""


def shapes() -> Mapping[str, Shape]:
    """Give FlashAttention-3's suite ("fa3-hd128-causal-4k"), prefills of one sequence and decode batches ("llama3-70b-decode-16x32k")."""
    suite = {
        f"fa3-hd{width}-{mask}-{suffix}": _shape(16384 // seq, 2048 // width, 2048 // width, seq, seq, width, causal=mask == "causal")
        for width in (64, 128, 256)
        for mask in ("full", "causal")
        for suffix, seq in _SUITE.items()
    }
    found: dict[str, Shape] = dict(suite)
    for model, sizes in MODELS.items():
        heads, widths = (sizes.heads, sizes.kv_heads), (sizes.head_dim, sizes.head_dim_v)
        for suffix, seq in _PREFILLS.items():
            found[f"{model}-prefill-{suffix}"] = _shape(1, *heads, seq, seq, *widths, causal=True)
            if sizes.window:
                found[f"{model}-window-prefill-{suffix}"] = _shape(1, *heads, seq, seq, *widths, causal=True, window=sizes.window)
    for model in _DECODERS:
        sizes = MODELS[model]
        for batch, (suffix, seq) in itertools.product(_DECODE_BATCHES, _DECODE_KEYS.items()):
            shape = _shape(batch, sizes.heads, sizes.kv_heads, 1, seq, sizes.head_dim)
            if _size_bytes(Sizes.of(Workload(name, shape, "fp32")), "fp32") <= _common.LARGEST_BYTES:
                found[f"{model}-decode-{batch}x{suffix}"] = shape
    return found


def check(workload: Workload) -> None:
    """Refuse heads that do not divide and tensors that no single device holds. Raises `errors.RequestError`."""
    sizes = Sizes.of(workload)
    if sizes.heads % sizes.kv_heads:
        divisors = [count for count in range(1, sizes.heads + 1) if sizes.heads % count == 0]
        near = min(divisors, key=lambda count: abs(count - sizes.kv_heads))
        raise RequestError(f"heads={sizes.heads} is not a multiple of kv_heads={sizes.kv_heads}. Choose shape.kv_heads={near}.")
    _common.check_size(workload, _size_bytes(sizes, workload.dtype))


def inputs(workload: Workload, device: str) -> Tensors:
    """Draw q, k and v, standard normal: [batch, seq, heads, head_dim] (bshd) or [batch, heads, seq, head_dim] (bhsd)."""
    sizes = Sizes.of(workload)
    return _common.normal(
        workload,
        device,
        q=sizes.extent(sizes.heads, sizes.seq_q, sizes.head_dim),
        k=sizes.extent(sizes.kv_heads, sizes.seq_kv, sizes.head_dim),
        v=sizes.extent(sizes.kv_heads, sizes.seq_kv, sizes.head_dim_v),
    )


def outputs(workload: Workload, device: str) -> Tensors:
    """Allocate o in q's layout, head_dim_v wide, and with lse=true lse, [batch, heads, seq_q] in float32."""
    import torch

    sizes = Sizes.of(workload)
    found = dict(_common.empty(workload, device, o=sizes.extent(sizes.heads, sizes.seq_q, sizes.head_dim_v)))
    if sizes.lse:
        found["lse"] = torch.empty((sizes.batch, sizes.heads, sizes.seq_q), dtype=torch.float32, device=device)
    return found


def reference(workload: Workload, inputs: Tensors) -> Tensors:
    """Compute in float32 (16-bit inputs; sums of their exact products) or float64 (fp32), by blocks of heads and queries."""
    sizes = Sizes.of(workload)
    q = inputs["q"]
    dtype = _common.reference_dtype(workload)
    o = q.new_zeros(sizes.extent(sizes.heads, sizes.seq_q, sizes.head_dim_v), dtype=dtype)
    lse = q.new_full((sizes.batch, sizes.heads, sizes.seq_q), -float("inf"), dtype=dtype)
    answer = sizes.heads_first(o)
    with _common.float32_accumulation():
        for block in _blocks(sizes, inputs, dtype):
            weights, total, peak = _exponentials(block.scores)
            answer[block.place] = block.by_head((weights @ block.values) / _or_one(total))
            lse[block.place] = block.by_head(peak + total.log()).squeeze(-1)
    return {"o": o, "lse": lse} if sizes.lse else {"o": o}


def tolerance(workload: Workload, inputs: Tensors, reference: Tensors) -> ErrorBudget:
    """Allow the error of the flash method in the workload's dtype on these inputs, and its walk in float32.

    The method rounds exp(score - largest) to the 16-bit dtype before the product with v, and o once at the end, as FlashAttention,
    cuDNN and torch's efficient backend do. It is computed here, plainly and by blocks: which of them torch would choose, and whether
    that one has the window, the alignment or the softcap, differs by device and version.

    Which weights are rounded up depends on the largest score so far, so two right kernels round differently, and where there are few
    outputs one sample says little of another. So the rounding is also modelled. With u half a unit in the last place of 1, roundings are
    `_MEAN_ROUNDING` u in the root of their mean square, so independent ones of the weights p put o_id off by that times spread_id,
    spread_id^2 = sum_j p_ij^2 v_jd^2, and the rounding of o by that times |o_id|. The norm of both gets `_DEVIATIONS` standard deviations
    for the number of rows, up to what one rounding can do, u. One element may be off by half a unit in the last place of the largest |o|
    and by u times the largest spread, 2.4 standard deviations, and all that the rounding of a single weight can do.

    In float32 a score is off by up to the largest |q| |k| scale in units in the last place (a dot product of d normal numbers walks
    over sqrt(d), and |q| |k| is sqrt(d) times a usual score), and its exponential by as much, relative to it; sums over n keys are off by
    sqrt(n). Both scale with spread in o, and with 1 in the logarithm, which adds a unit of its own magnitude.
    """
    sizes = Sizes.of(workload)
    o, dtype = reference["o"], inputs["q"].dtype
    library = {key: tensor.clone() for key, tensor in reference.items()}
    answer = sizes.heads_first(library["o"])
    squares, peaks = [o.new_zeros(())], [o.new_zeros(())]
    with _common.float32_accumulation():
        for block in _blocks(sizes, inputs, o.dtype):
            weights, total, _ = _exponentials(block.scores)
            total = _or_one(total)
            answer[block.place] = block.by_head((weights.to(dtype).to(o.dtype) @ block.values) / total).to(dtype).to(o.dtype)
            spread = weights.div_(total).square_() @ block.values.square()
            squares.append(spread.sum())
            peaks.append(spread.max())
    spread_norm, spread_max = math.sqrt(sum(map(float, squares))), math.sqrt(max(map(float, peaks)))
    o_norm, o_max = float(o.norm()), float(o.abs().max())
    measured, unit = error_between(library, reference), DTYPE_EPSILON[workload.dtype] / 2
    sampling = min(1 + _DEVIATIONS / math.sqrt(2 * sizes.batch * sizes.heads * sizes.seq_q), 1 / _MEAN_ROUNDING)
    modelled = Error(
        relative=sampling * _MEAN_ROUNDING * unit * math.hypot(spread_norm, o_norm) / o_norm,
        max_abs=unit * (2.0 ** math.floor(math.log2(o_max)) + spread_max),
    )
    lse = reference["lse"] if sizes.lse else o.new_zeros(0)
    lse = lse[lse.isfinite()]
    growth = math.sqrt(sizes.keys_seen) + _largest_product(inputs) * sizes.scale + (float(lse.abs().max()) if len(lse) else 0.0)
    return _common.budget(
        # the factor of the budget is for measured errors
        Error(*(max(one, other / _common.LIBRARY_FACTOR) for one, other in zip(astuple(measured), astuple(modelled), strict=True))),
        growth=_common.WALK_FACTOR * growth,
        norm_scale=max(1.0, spread_norm / o_norm, math.sqrt(lse.numel()) / float(lse.norm()) if len(lse) else 0.0),
        max_scale=max(spread_max, o_max, 1.0 if sizes.lse else 0.0),
    )


def work(workload: Workload) -> Work:
    """Count a multiplication and an addition for each element of q k^T and p v that is visible; k and v are read where any query looks.

    A causal square counts as half of the full one: a query and the key at its own place count half where there are several queries.

    Source: FLOPs of the benchmarks of FlashAttention-2 and -3: 4 x seq^2 x head_dim x heads, halved for causal (T. Dao,
    FlashAttention-2, ICLR 2024, section 4.1; J. Shah et al., FlashAttention-3, 2024, section 4.1).
    """
    sizes = Sizes.of(workload)
    low, high = sizes.keys(0, sizes.seq_q - 1)
    return Work(
        flops=2.0 * sizes.batch * sizes.heads * (sizes.head_dim + sizes.head_dim_v) * sizes.pairs,
        bytes=_size_bytes(replace(sizes, seq_kv=high - low), workload.dtype),
    )


def baselines(workload: Workload, device: Device) -> Mapping[str, Baseline]:
    """cuDNN's, flash's and the efficient backend of torch, each where it has the case, FlashAttention-4 where installed, and a copy."""
    return {**libraries(workload, device), **_common.copy_roof(work(workload), device)}


def _shape(
    batch: int,
    heads: int,
    kv_heads: int,
    seq_q: int,
    seq_kv: int,
    head_dim: int,
    head_dim_v: int = 0,
    causal: bool = False,
    window: int = 0,
) -> Shape:
    return {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "seq_q": seq_q,
        "seq_kv": seq_kv,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v or head_dim,
        "causal": causal,
        "window": window,
        "softcap": 0.0,
        "scale": 0.0,
        "layout": "bshd",
        "lse": False,
    }


def _size_bytes(sizes: Sizes, dtype: str) -> float:
    """Count the bytes of all inputs and outputs."""
    rows = sizes.heads * sizes.seq_q + sizes.kv_heads * sizes.seq_kv
    logarithms = 4 * sizes.heads * sizes.seq_q if sizes.lse else 0
    return float(sizes.batch * (rows * (sizes.head_dim + sizes.head_dim_v) * DTYPE_BYTES[dtype] + logarithms))


@dataclass(frozen=True, slots=True)
class _Block:
    """Some sequences' heads at some queries.

    Attributes:
        place: Index of its queries in a [batch, heads, seq_q, ...] tensor.
        scores: [batches, kv heads, group x queries, keys], masked keys at -inf; only keys that some query of the block sees.
        values: [batches, kv heads, keys, head_dim_v].
    """

    place: tuple[slice, slice, slice]
    scores: "torch.Tensor"
    values: "torch.Tensor"

    def by_head(self, rows: "torch.Tensor") -> "torch.Tensor":
        """Turn [batches, kv heads, group x queries, width] into [batches, heads, queries, width]."""
        queries = self.place[2].stop - self.place[2].start
        return rows.unflatten(2, (-1, queries)).flatten(1, 2)


def _blocks(sizes: Sizes, inputs: Tensors, dtype: "torch.dtype") -> Iterator[_Block]:
    """Compute the scores in `dtype` by blocks of at most `BLOCK_ELEMENTS` scores, or of one head and one query."""
    q, k, v = (sizes.heads_first(inputs[name]) for name in ("q", "k", "v"))
    rows = min(sizes.seq_q, _MASKED_ROWS) if sizes.causal or sizes.window else sizes.seq_q
    while rows > 1 and sizes.group * rows * _widest(sizes, rows) > _common.BLOCK_ELEMENTS:
        rows = (rows + 1) // 2
    cell = _widest(sizes, rows) * (sizes.group * rows + sizes.head_dim + sizes.head_dim_v)
    cells = max(1, _common.BLOCK_ELEMENTS // cell)
    for batches in _slices(sizes.batch, max(1, cells // sizes.kv_heads)):
        for kv_heads in _slices(sizes.kv_heads, cells):
            heads = slice(kv_heads.start * sizes.group, kv_heads.stop * sizes.group)
            for queries in _slices(sizes.seq_q, rows):
                low, high = sizes.keys(queries.start, queries.stop - 1)
                if low == high:
                    continue  # all masked: nothing is added to the zeros
                query = q[batches, heads, queries].to(dtype).unflatten(1, (-1, sizes.group)).flatten(2, 3)
                scores = query @ k[batches, kv_heads, low:high].to(dtype).transpose(2, 3)
                scores *= sizes.scale
                if sizes.softcap:
                    scores.div_(sizes.softcap).tanh_().mul_(sizes.softcap)
                if sizes.causal or sizes.window:
                    hidden = sizes.hidden(queries.start, queries.stop - 1, low, high, scores.device)
                    scores.unflatten(2, (sizes.group, -1)).masked_fill_(hidden, -float("inf"))
                yield _Block((batches, heads, queries), scores, v[batches, kv_heads, low:high].to(dtype))


def _widest(sizes: Sizes, rows: int) -> int:
    """Return the most keys that a block of `rows` queries sees."""
    return min(sizes.seq_kv, rows + 2 * sizes.window) if sizes.window else sizes.seq_kv


def _slices(count: int, step: int) -> Iterator[slice]:
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _largest_product(inputs: Tensors) -> float:
    """Return the largest |q| times the largest |k|, which no dot product of the two passes."""
    import torch

    lengths = [torch.linalg.vector_norm(inputs[name], dim=-1, dtype=torch.float32).max() for name in ("q", "k")]
    return float(lengths[0] * lengths[1])


def _exponentials(scores: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """Return exp(score - largest), its sums over the keys, and the largest (0 in rows that are masked altogether)."""
    peak = scores.amax(dim=-1, keepdim=True)
    peak = peak.masked_fill(peak.isinf(), 0.0)
    weights = scores.sub_(peak).exp_()
    return weights, weights.sum(dim=-1, keepdim=True), peak


def _or_one(total: "torch.Tensor") -> "torch.Tensor":
    """Return the sums, 1 where a row is masked altogether, so that its zeros stay zeros."""
    return total.masked_fill(total == 0, 1.0)

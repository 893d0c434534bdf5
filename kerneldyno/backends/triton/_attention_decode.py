"""Attention of few queries over many keys in Triton: split over the keys, then combined.

The query heads that share a key head are the rows of one tile, so each key and value is read once; what bounds it is memory.
Source: FlashDecoding (Dao, Haziza, Massa, Sizov 2023, pytorch.org/blog/flash-decoding) for the split and the combination.
"""

import triton
import triton.language as tl

from kerneldyno.backends.triton import _attention
from kerneldyno.backends.triton import _compile
from kerneldyno.backends.triton._attention import LN_2
from kerneldyno.backends.triton._attention import LOWEST
from kerneldyno.backends.triton._attention import multiply_keys
from kerneldyno.backends.triton._attention import seen
from kerneldyno.backends.triton._attention import tile
from kerneldyno.backends.triton._attention import weigh
from kerneldyno.core import DTYPE_BYTES
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Workload


@triton.jit
def _query_rows(
    batch: tl.tensor,
    head_kv: tl.tensor,
    row: tl.tensor,
    kv_heads: tl.tensor,
    GROUP: tl.constexpr,
    SEQ_Q: tl.constexpr,
    HEADS_OUTER: tl.constexpr,
) -> tl.tensor:
    """Where the query of a row of the tile is among all rows of q (and of o): the rows are a group's heads, each with its queries."""
    heads = kv_heads * GROUP
    head = head_kv * GROUP + row // SEQ_Q
    query = row % SEQ_Q
    return (batch * heads + head) * SEQ_Q + query if HEADS_OUTER else (batch * SEQ_Q + query) * heads + head


@triton.jit
def _load_queries(q: tl.tensor, at: tl.tensor, inside: tl.tensor, WIDTH: tl.constexpr, FROM: tl.constexpr, DIM: tl.constexpr) -> tl.tensor:
    """Read rows of q, WIDTH columns from FROM on; 0 outside."""
    columns = FROM + tl.arange(0, WIDTH)
    return tl.load(q + at[:, None] * DIM + columns[None, :], mask=inside[:, None] & (columns < DIM)[None, :], other=0.0)


@triton.jit
def _store_rows(
    to: tl.tensor, at: tl.tensor, inside: tl.tensor, values: tl.tensor, WIDTH: tl.constexpr, FROM: tl.constexpr, DIM: tl.constexpr
) -> None:
    """Write rows of DIM columns, WIDTH columns from FROM on."""
    columns = FROM + tl.arange(0, WIDTH)
    address = to + at[:, None] * DIM + columns[None, :]
    tl.store(address, values.to(to.dtype.element_ty), mask=inside[:, None] & (columns < DIM)[None, :])


@triton.jit
def attention_decode(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    o: tl.tensor,
    lse: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    kv_heads: tl.tensor,
    seq_kv: tl.tensor,
    splits: tl.tensor,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    DIM_V: tl.constexpr,
    MAIN_V: tl.constexpr,
    REST_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    HEADS_OUTER: tl.constexpr,
    LSE: tl.constexpr,
    GROUP: tl.constexpr,
    SEQ_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAPS: tl.constexpr,
    MASKED: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """One split of the keys for the GROUP x SEQ_Q queries of one key head; where not SPLIT, all keys and the final result.

    partial [splits, batch, kv_heads, GROUP * SEQ_Q, DIM_V] fp32 takes each split's result, partial_lse [the same without DIM_V] fp32
    the log2 of its sum. Key heads change fastest over the programs: those that run together read neighbouring memory.
    """
    ROWS: tl.constexpr = GROUP * SEQ_Q
    # the last query sees the last key, in every mask
    low = max(0, seq_kv - SEQ_Q - WINDOW + 1) if WINDOW > 0 else 0
    tiles = tl.cdiv(seq_kv - low, BLOCK_N)
    head_kv = tl.program_id(0) % kv_heads
    split = tl.program_id(0) // kv_heads % splits
    batch = (tl.program_id(0) // (kv_heads * splits)).to(tl.int64)
    begin = (split.to(tl.int64) * tiles // splits).to(tl.int32)
    finish = ((split + 1).to(tl.int64) * tiles // splits).to(tl.int32)
    start = low + begin * BLOCK_N
    stop = min(low + finish * BLOCK_N, seq_kv)
    if HEADS_OUTER:
        pitch_k, pitch_v = DIM, DIM_V
        row_kv = (batch * kv_heads + head_kv) * seq_kv
    else:
        pitch_k, pitch_v = kv_heads * DIM, kv_heads * DIM_V
        row_kv = batch * seq_kv * kv_heads + head_kv
    k += row_kv * DIM
    v += row_kv * DIM_V
    k_at, k_rest_at, v_at, v_rest_at = k, k, v, v
    if MAPS:
        k_at = tl.make_tensor_descriptor(k, [seq_kv, DIM], [pitch_k, 1], [BLOCK_N, MAIN])
        v_at = tl.make_tensor_descriptor(v, [seq_kv, DIM_V], [pitch_v, 1], [BLOCK_N, MAIN_V])
        if REST > 0:
            k_rest_at = tl.make_tensor_descriptor(k, [seq_kv, DIM], [pitch_k, 1], [BLOCK_N, REST])
        if REST_V > 0:
            v_rest_at = tl.make_tensor_descriptor(v, [seq_kv, DIM_V], [pitch_v, 1], [BLOCK_N, REST_V])
    row = tl.arange(0, BLOCK_M)
    inside = row < ROWS
    at = _query_rows(batch, head_kv, row, kv_heads, GROUP, SEQ_Q, HEADS_OUTER)
    q_main = _load_queries(q, at, inside, MAIN, 0, DIM)
    q_rest = q_main
    if REST > 0:
        q_rest = _load_queries(q, at, inside, REST, MAIN, DIM)
    places = row % SEQ_Q + (seq_kv - SEQ_Q)

    high = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    summed = tl.zeros((BLOCK_M, MAIN_V), tl.float32)
    summed_rest = tl.zeros((BLOCK_M, REST_V if REST_V > 0 else 16), tl.float32)
    for here in tl.range(start, stop, BLOCK_N):
        products = multiply_keys(q_main, q_rest, k_at, k_rest_at, 0, 0, here, stop, pitch_k, DIM, MAIN, REST, BLOCK_N, MAPS, MASKED)
        visible = seen(places, here, stop, BLOCK_N, CAUSAL, WINDOW, True) if MASKED else None
        weights, factor, high, total = weigh(products, visible, high, total, SCALE, SOFTCAP, MASKED)
        values = tile(v_at, 0, 0, here, stop, pitch_v, BLOCK_N, MAIN_V, 0, DIM_V, MAPS, MASKED)
        weights = weights.to(values.dtype)
        summed = tl.dot(weights, values, summed * factor[:, None])
        if REST_V > 0:
            values_rest = tile(v_rest_at, 0, 0, here, stop, pitch_v, BLOCK_N, REST_V, MAIN_V, DIM_V, MAPS, MASKED)
            summed_rest = tl.dot(weights, values_rest, summed_rest * factor[:, None])

    inverse = tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
    logarithm = tl.where(total > 0.0, high + tl.log2(total), float("-inf"))
    if SPLIT:
        slices = tl.num_programs(0) // splits
        line = (split.to(tl.int64) * slices + batch * kv_heads + head_kv) * ROWS + row
        _store_rows(partial, line, inside, summed * inverse, MAIN_V, 0, DIM_V)
        if REST_V > 0:
            _store_rows(partial, line, inside, summed_rest * inverse, REST_V, MAIN_V, DIM_V)
        tl.store(partial_lse + line, logarithm, mask=inside)
    else:
        _store_rows(o, at, inside, summed * inverse, MAIN_V, 0, DIM_V)
        if REST_V > 0:
            _store_rows(o, at, inside, summed_rest * inverse, REST_V, MAIN_V, DIM_V)
        if LSE:
            tl.store(lse + (batch * kv_heads + head_kv) * ROWS + row, logarithm * LN_2, mask=inside)


@triton.jit
def attention_combine(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    o: tl.tensor,
    lse: tl.tensor,
    lines: tl.tensor,
    kv_heads: tl.tensor,
    SPLITS: tl.constexpr,
    SPLITS_WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    DIM_V: tl.constexpr,
    WIDTH_V: tl.constexpr,
    HEADS_OUTER: tl.constexpr,
    LSE: tl.constexpr,
    GROUP: tl.constexpr,
    SEQ_Q: tl.constexpr,
) -> None:
    """One row of O from its SPLITS partial results, each weighed by its share of the sum; `lines` are all rows of O."""
    ROWS: tl.constexpr = GROUP * SEQ_Q
    line = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_WIDTH)
    logarithms = tl.load(partial_lse + split.to(tl.int64) * lines + line, mask=split < SPLITS, other=float("-inf"))
    high = tl.maximum(tl.max(logarithms, 0), LOWEST)
    total = tl.sum(tl.exp2(logarithms - high), 0)
    columns = tl.arange(0, WIDTH_V)
    summed = tl.zeros((WIDTH_V,), tl.float32)
    for first in tl.static_range(0, SPLITS, CHUNK):
        chunk = first + tl.arange(0, CHUNK)
        there = chunk.to(tl.int64) * lines + line
        weights = tl.exp2(tl.load(partial_lse + there, mask=chunk < SPLITS, other=float("-inf")) - high)
        mask = (chunk < SPLITS)[:, None] & (columns < DIM_V)[None, :]
        summed += tl.sum(weights[:, None] * tl.load(partial + there[:, None] * DIM_V + columns[None, :], mask=mask, other=0.0), 0)
    summed = summed * tl.where(total > 0.0, 1.0 / total, 0.0)
    batch, head_kv = line // ROWS // kv_heads, line // ROWS % kv_heads
    at = _query_rows(batch, head_kv, line % ROWS, kv_heads, GROUP, SEQ_Q, HEADS_OUTER)
    tl.store(o + at * DIM_V + columns, summed.to(o.dtype.element_ty), mask=columns < DIM_V)
    if LSE:
        tl.store(lse + line, tl.where(total > 0.0, (high + tl.log2(total)) * LN_2, float("-inf")))


def group(workload: Workload) -> int:
    """Query heads that share a key head."""
    return workload.shape["heads"] // workload.shape["kv_heads"]


def keys(workload: Workload) -> tuple[int, int]:
    """The keys that some query sees: the first, and their number."""
    shape = workload.shape
    low = max(0, shape["seq_kv"] - shape["seq_q"] - shape["window"] + 1) if shape["window"] else 0
    return low, shape["seq_kv"] - low


def programs(workload: Workload, config: Config) -> list[_compile.Program]:
    """What a configuration compiles, in the order of its launches: the splits, and what combines them where there are several."""
    shape, splits, block_n = workload.shape, config["num_splits"], config["block_n"]
    slices = shape["batch"] * shape["kv_heads"]
    rows = group(workload) * shape["seq_q"]
    common = _attention.arithmetic(workload)
    uneven = keys(workload)[1] % block_n != 0
    constants = {
        **common,
        "GROUP": group(workload),
        "SEQ_Q": shape["seq_q"],
        "BLOCK_M": max(16, triton.next_power_of_2(rows)),
        "BLOCK_N": block_n,
        "MAPS": config["access"] == "descriptor",
        "MASKED": uneven or (shape["seq_q"] > 1 and (shape["causal"] or shape["window"] > 0)),
        "SPLIT": splits > 1,
    }
    # an argument that is not there is the constant None
    absent = dict.fromkeys(("o", "lse") if splits > 1 else ("partial", "partial_lse"))
    if not shape["lse"]:
        absent["lse"] = None
    first = _compile.Program(
        function=attention_decode,
        dtype=workload.dtype,
        sizes={"kv_heads": shape["kv_heads"], "seq_kv": shape["seq_kv"], "splits": splits},
        constants={**constants, **absent},
        grid=lambda sm_count: (slices * splits, 1, 1),
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        dtypes={"lse": "fp32", "partial": "fp32", "partial_lse": "fp32"},
    )
    if splits == 1:
        return [first]
    second = _compile.Program(
        function=attention_combine,
        dtype=workload.dtype,
        sizes={"lines": slices * rows, "kv_heads": shape["kv_heads"]},
        constants={
            "SPLITS": splits,
            "SPLITS_WIDTH": triton.next_power_of_2(splits),
            "CHUNK": min(16, triton.next_power_of_2(splits)),
            "DIM_V": shape["head_dim_v"],
            "WIDTH_V": triton.next_power_of_2(shape["head_dim_v"]),
            **{name: constants[name] for name in ("HEADS_OUTER", "LSE", "GROUP", "SEQ_Q")},
            **({} if shape["lse"] else {"lse": None}),
        },
        grid=lambda sm_count: (slices * rows, 1, 1),
        num_warps=4,
        dtypes={"lse": "fp32", "partial": "fp32", "partial_lse": "fp32"},
    )
    return [first, second]


def workspaces(workload: Workload, config: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of the fp32 tensors, by argument, that carry the results of the splits; none where there is one split."""
    shape, splits = workload.shape, config["num_splits"]
    if splits == 1:
        return {}
    lines = (splits, shape["batch"], shape["kv_heads"], group(workload) * shape["seq_q"])
    return {"partial": (*lines, shape["head_dim_v"]), "partial_lse": lines}


_STARTS = (
    {"access": "descriptor", "block_n": 64, "num_warps": 4, "num_stages": 4},
    {"access": "pointer", "block_n": 64, "num_warps": 4, "num_stages": 4},
    {"access": "descriptor", "block_n": 128, "num_warps": 8, "num_stages": 4},
    {"access": "pointer", "block_n": 128, "num_warps": 8, "num_stages": 3},
    {"access": "descriptor", "block_n": 32, "num_warps": 2, "num_stages": 4},
)
"""With head_dim 128 they hold 128 KB to 192 KB of keys and values in flight on a multiprocessor, which takes 32 KB each microsecond at
4.2 TB/s: enough for a latency of 4 microseconds, four times that of an idle device."""

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# barriers and the exchange of maxima and weights between warps beside the tiles
_SMEM_MARGIN_BYTES = 2048
# programs a multiprocessor beyond which splits only add to what is combined
_PROGRAMS_PER_SM_MAX = 16
# from here on a device that is not filled costs more than a combination
_SMALL_BYTES = 32 * 2**20


def _split_counts(workload: Workload, device: Device) -> tuple[int, ...]:
    """Numbers of splits that give each a tile of keys, and the multiprocessors enough programs and not too many."""
    shape = workload.shape
    slices, count = shape["batch"] * shape["kv_heads"], keys(workload)[1]
    read = slices * count * (shape["head_dim"] + shape["head_dim_v"]) * DTYPE_BYTES[workload.dtype]
    possible = [
        splits for splits in _SPLITS if splits == 1 or (splits * 32 <= count and splits * slices <= _PROGRAMS_PER_SM_MAX * device.sm_count)
    ]
    filling = [splits for splits in possible if splits * slices >= device.sm_count // 2]
    if read <= _SMALL_BYTES:
        return tuple(possible)
    return tuple(filling or possible[-1:])


def space(workload: Workload, device: Device) -> Space:
    """The knobs: tile of keys, splits, warps, pipeline depth, and how tiles are loaded.

    Source: the limits on registers and shared memory come from cross-compiling for sm_90a with Triton 3.6 and 3.9.
    """
    shape = workload.shape
    key, value = _attention.parts(shape["head_dim"]), _attention.parts(shape["head_dim_v"])
    width, width_v = key.width, value.width
    least_stages = _attention.least_stages(key, value)
    block_m = max(16, triton.next_power_of_2(group(workload) * shape["seq_q"]))
    count = keys(workload)[1]
    size = DTYPE_BYTES[workload.dtype]
    counts = _split_counts(workload, device)
    slices = shape["batch"] * shape["kv_heads"]
    # two programs a multiprocessor first, which is what shared memory holds of the starts
    starts = [
        {
            **start,
            "num_splits": max(
                (n for n in counts if n * slices <= 2 * device.sm_count and n * start["block_n"] <= count), default=counts[0]
            ),
        }
        for start in _STARTS
    ]
    params = [
        Param("access", ("descriptor", "pointer"), "tiles by tensor maps (TMA) or by addresses (cp.async)"),
        Param("block_n", (32, 64, 128, 256), "keys of a tile"),
        Param("num_warps", (2, 4, 8), "warps of a program"),
        Param("num_stages", (1, 2, 3, 4, 5), "tiles of keys and values in flight"),
        Param("num_splits", counts, "parts of the keys that programs of their own take, and a second kernel combines"),
    ]
    limit = device.smem_per_block_bytes

    def buffers(num_stages: int) -> int:
        # mma.sync takes its operands to registers, and frees their stage, before the next load begins; wgmma reads them in place
        return num_stages if block_m >= 64 else max(1, num_stages - 1)

    constraints = [
        Constraint(lambda num_stages: num_stages >= least_stages, _attention.PIPELINED),
        Constraint(lambda block_n: block_n == 32 or block_n < 2 * count, f"a tile is not twice as wide as the keys seen ({count})"),
        Constraint(
            lambda block_n, num_splits: num_splits == 1 or num_splits * block_n <= count,
            f"every split has a tile of keys of its own ({count} keys)",
        ),
        Constraint(
            lambda block_n, num_stages: (
                (block_n * buffers(num_stages) * (width + width_v) + block_m * (width + block_n)) * size + _SMEM_MARGIN_BYTES <= limit
            ),
            f"queries, weights and the tiles of keys and values in flight take at most {limit:,} B of shared memory",
        ),
        Constraint(
            lambda block_n, num_warps: block_m * (width_v + 1.5 * block_n) <= 160 * 32 * num_warps,
            "a thread holds at most 160 registers of results and products: more spill",
        ),
        Constraint(
            lambda access, block_n, num_warps: access == "descriptor" or block_n * (width + width_v) <= 32 * 8 * 32 * num_warps,
            "at most 32 loads of keys and values a thread, of 16 B each: their addresses fill the registers",
        ),
        Constraint(
            lambda num_stages, block_n: num_stages == 1 or num_stages - 1 <= triton.cdiv(count, block_n),
            f"no more tiles in flight than there are ({count} keys)",
        ),
    ]
    return Space(params, constraints, starts)

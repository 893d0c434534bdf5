"""Attention over many queries in Triton: each tile of queries goes over the keys that it sees, the softmax taken online.

Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691); Triton's tutorial 06-fused-attention for warp specialisation of one loop.
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
def _sweep(
    start: tl.tensor,
    stop: tl.tensor,
    q: tl.tensor,
    q_rest: tl.tensor,
    k: tl.tensor,
    k_rest: tl.tensor,
    v: tl.tensor,
    v_rest: tl.tensor,
    row_kv: tl.tensor,
    column_k: tl.tensor,
    column_v: tl.tensor,
    pitch_k: tl.tensor,
    pitch_v: tl.tensor,
    seq_kv: tl.tensor,
    places: tl.tensor,
    high: tl.tensor,
    total: tl.tensor,
    summed: tl.tensor,
    summed_rest: tl.tensor,
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
    BLOCK_N: tl.constexpr,
    MAPS: tl.constexpr,
    MASKED: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Take the tiles of keys that begin in [start, stop) into a tile of queries; MASKED: not every query sees every key of them."""
    # a causal query of this sequence sees no key beyond the last
    EDGE: tl.constexpr = MASKED and not CAUSAL
    for at in tl.range(start, stop, BLOCK_N, warp_specialize=WARP_SPECIALIZE):
        products = multiply_keys(
            q, q_rest, k, k_rest, row_kv, column_k, at, seq_kv, pitch_k, DIM, MAIN, REST, BLOCK_N, MAPS, MASKED
        )  # fmt: skip
        visible = seen(places, at, seq_kv, BLOCK_N, CAUSAL, WINDOW, EDGE) if MASKED else None
        weights, factor, high, total = weigh(products, visible, high, total, SCALE, SOFTCAP, MASKED)
        values = tile(v, row_kv, column_v, at, seq_kv, pitch_v, BLOCK_N, MAIN_V, 0, DIM_V, MAPS, MASKED)
        weights = weights.to(values.dtype)
        summed = tl.dot(weights, values, summed * factor[:, None])
        if REST_V > 0:
            values_rest = tile(v_rest, row_kv, column_v, at, seq_kv, pitch_v, BLOCK_N, REST_V, MAIN_V, DIM_V, MAPS, MASKED)
            summed_rest = tl.dot(weights, values_rest, summed_rest * factor[:, None])
    return high, total, summed, summed_rest


@triton.jit
def _store(
    o: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    values: tl.tensor,
    first: tl.tensor,
    seq_q: tl.tensor,
    pitch: tl.tensor,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    FROM: tl.constexpr,
    DIM: tl.constexpr,
    MAPS: tl.constexpr,
) -> None:
    """Write BLOCK_M rows from `first` on, WIDTH columns from FROM on; `o` is a tensor map or an address, as in `tile`."""
    if MAPS:
        o.store([row + first, column + FROM], values)
    else:
        rows = tl.arange(0, BLOCK_M)
        columns = FROM + tl.arange(0, WIDTH)
        at = o + tl.cast(first, tl.int64) * pitch + rows[:, None] * pitch + columns[None, :]
        tl.store(at, values, mask=(rows < seq_q - first)[:, None] & (columns < DIM)[None, :])


@triton.jit
def _attend(
    first: tl.tensor,
    q: tl.tensor,
    q_rest: tl.tensor,
    k: tl.tensor,
    k_rest: tl.tensor,
    v: tl.tensor,
    v_rest: tl.tensor,
    o: tl.tensor,
    o_rest: tl.tensor,
    lse: tl.tensor,
    row_q: tl.tensor,
    row_kv: tl.tensor,
    column_q: tl.tensor,
    column_k: tl.tensor,
    column_v: tl.tensor,
    column_o: tl.tensor,
    pitch_q: tl.tensor,
    pitch_k: tl.tensor,
    pitch_v: tl.tensor,
    pitch_o: tl.tensor,
    seq_q: tl.tensor,
    seq_kv: tl.tensor,
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
    LSE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAPS: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    PERSISTENT: tl.constexpr,
    EVEN_N: tl.constexpr,
) -> None:
    """Attention of BLOCK_M queries of one head, from `first` on; `lse` is the address of the head's first."""
    q_main = tile(q, row_q, column_q, first, seq_q, pitch_q, BLOCK_M, MAIN, 0, DIM, MAPS, True)
    q_last = q_main
    if REST > 0:
        q_last = tile(q_rest, row_q, column_q, first, seq_q, pitch_q, BLOCK_M, REST, MAIN, DIM, MAPS, True)
    # a query's own place among the keys: the last query stands at the last key
    place_first = first + seq_kv - seq_q
    place_last = min(first + BLOCK_M, seq_q) - 1 + seq_kv - seq_q
    places = place_first + tl.arange(0, BLOCK_M)
    # keys that some query of the tile sees, and those that all see
    low, full_low, stop, full_stop = 0, 0, seq_kv, seq_kv
    if CAUSAL:
        stop = min(seq_kv, place_last + 1)
        full_stop = place_first + 1
    if WINDOW > 0:
        low = max(0, place_first - WINDOW + 1)
        full_low = place_last - WINDOW + 1
        if not CAUSAL:
            stop = min(seq_kv, place_last + WINDOW)
            full_stop = min(seq_kv, place_first + WINDOW)
        if PERSISTENT:
            # no tile reaches over the end, where the next sequence begins
            low = low // BLOCK_N * BLOCK_N

    high = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    summed = tl.zeros((BLOCK_M, MAIN_V), tl.float32)
    summed_rest = tl.zeros((BLOCK_M, REST_V if REST_V > 0 else 16), tl.float32)
    # only a window longer than two tiles leaves a whole tile of keys to all the queries
    ALL_SEE: tl.constexpr = WINDOW == 0 or (WINDOW if CAUSAL else 2 * WINDOW) - BLOCK_M >= BLOCK_N
    if EVEN_N or WARP_SPECIALIZE or not ALL_SEE:
        high, total, summed, summed_rest = _sweep(
            low, stop, q_main, q_last, k, k_rest, v, v_rest, row_kv, column_k, column_v, pitch_k, pitch_v, seq_kv, places,
            high, total, summed, summed_rest, DIM, MAIN, REST, DIM_V, MAIN_V, REST_V, CAUSAL, WINDOW, SOFTCAP, SCALE, BLOCK_N, MAPS,
            not EVEN_N, WARP_SPECIALIZE and not PERSISTENT,
        )  # fmt: skip
    else:
        whole = low
        if WINDOW > 0:
            whole = low + tl.cdiv(max(full_low - low, 0), BLOCK_N) * BLOCK_N
            high, total, summed, summed_rest = _sweep(
                low, min(whole, stop), q_main, q_last, k, k_rest, v, v_rest, row_kv, column_k, column_v, pitch_k, pitch_v, seq_kv, places,
                high, total, summed, summed_rest, DIM, MAIN, REST, DIM_V, MAIN_V, REST_V, CAUSAL, WINDOW, SOFTCAP, SCALE, BLOCK_N, MAPS,
                True, False,
            )  # fmt: skip
        tail = whole + max(full_stop - whole, 0) // BLOCK_N * BLOCK_N
        high, total, summed, summed_rest = _sweep(
            whole, tail, q_main, q_last, k, k_rest, v, v_rest, row_kv, column_k, column_v, pitch_k, pitch_v, seq_kv, places,
            high, total, summed, summed_rest, DIM, MAIN, REST, DIM_V, MAIN_V, REST_V, CAUSAL, WINDOW, SOFTCAP, SCALE, BLOCK_N, MAPS,
            False, False,
        )  # fmt: skip
        high, total, summed, summed_rest = _sweep(
            tail, stop, q_main, q_last, k, k_rest, v, v_rest, row_kv, column_k, column_v, pitch_k, pitch_v, seq_kv, places,
            high, total, summed, summed_rest, DIM, MAIN, REST, DIM_V, MAIN_V, REST_V, CAUSAL, WINDOW, SOFTCAP, SCALE, BLOCK_N, MAPS,
            True, False,
        )  # fmt: skip

    inverse = tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
    _store(o, row_q, column_o, (summed * inverse).to(DTYPE), first, seq_q, pitch_o, BLOCK_M, MAIN_V, 0, DIM_V, MAPS)
    if REST_V > 0:
        _store(o_rest, row_q, column_o, (summed_rest * inverse).to(DTYPE), first, seq_q, pitch_o, BLOCK_M, REST_V, MAIN_V, DIM_V, MAPS)
    if LSE:
        queries = tl.arange(0, BLOCK_M)
        logarithm = tl.where(total > 0.0, (high + tl.log2(total)) * LN_2, float("-inf"))
        tl.store(lse + first + queries, logarithm, mask=queries < seq_q - first)


@triton.jit
def _place(
    index: tl.tensor, slices: tl.tensor, tiles: tl.tensor, GROUP_HEADS: tl.constexpr, CAUSAL: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Slice and tile of a place in the order: head by head, or in bands of GROUP_HEADS; causal tiles that see most keys come first."""
    band = index // (GROUP_HEADS * tiles)
    inside = index % (GROUP_HEADS * tiles)
    height = min(slices - band * GROUP_HEADS, GROUP_HEADS)
    number = inside // height
    if CAUSAL:
        number = tiles - 1 - number
    return band * GROUP_HEADS + inside % height, number


@triton.jit
def attention_prefill(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    o: tl.tensor,
    lse: tl.tensor,
    slices: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    seq_q: tl.tensor,
    seq_kv: tl.tensor,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    MAPS: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    EVEN_N: tl.constexpr,
) -> None:
    """O = softmax(Q K^T) V, one tile of BLOCK_M queries of one head a program; `slices` is batch times heads.

    Tensor maps are of the head alone: what they read beyond its last row or column is 0, and what they write there is dropped.
    """
    part, number = _place(tl.program_id(0), slices, tl.cdiv(seq_q, BLOCK_M), GROUP_HEADS, CAUSAL)
    batch = (part // heads).to(tl.int64)
    head = part % heads
    head_kv = head // (heads // kv_heads)
    if HEADS_OUTER:
        pitch_q, pitch_k, pitch_v, pitch_o = DIM, DIM, DIM_V, DIM_V
        row_q = (batch * heads + head) * seq_q
        row_kv = (batch * kv_heads + head_kv) * seq_kv
    else:
        pitch_q, pitch_k, pitch_v, pitch_o = heads * DIM, kv_heads * DIM, kv_heads * DIM_V, heads * DIM_V
        row_q = batch * seq_q * heads + head
        row_kv = batch * seq_kv * kv_heads + head_kv
    q += row_q * DIM
    k += row_kv * DIM
    v += row_kv * DIM_V
    o += row_q * DIM_V
    DTYPE: tl.constexpr = o.dtype.element_ty
    if LSE:
        lse += (batch * heads + head) * seq_q
    q_at, q_rest, k_at, k_rest, v_at, v_rest, o_at, o_rest = q, q, k, k, v, v, o, o
    if MAPS:
        q_at = tl.make_tensor_descriptor(q, [seq_q, DIM], [pitch_q, 1], [BLOCK_M, MAIN])
        k_at = tl.make_tensor_descriptor(k, [seq_kv, DIM], [pitch_k, 1], [BLOCK_N, MAIN])
        v_at = tl.make_tensor_descriptor(v, [seq_kv, DIM_V], [pitch_v, 1], [BLOCK_N, MAIN_V])
        o_at = tl.make_tensor_descriptor(o, [seq_q, DIM_V], [pitch_o, 1], [BLOCK_M, MAIN_V])
        if REST > 0:
            q_rest = tl.make_tensor_descriptor(q, [seq_q, DIM], [pitch_q, 1], [BLOCK_M, REST])
            k_rest = tl.make_tensor_descriptor(k, [seq_kv, DIM], [pitch_k, 1], [BLOCK_N, REST])
        if REST_V > 0:
            v_rest = tl.make_tensor_descriptor(v, [seq_kv, DIM_V], [pitch_v, 1], [BLOCK_N, REST_V])
            o_rest = tl.make_tensor_descriptor(o, [seq_q, DIM_V], [pitch_o, 1], [BLOCK_M, REST_V])
    _attend(
        number * BLOCK_M, q_at, q_rest, k_at, k_rest, v_at, v_rest, o_at, o_rest, lse, 0, 0, 0, 0, 0, 0,
        pitch_q, pitch_k, pitch_v, pitch_o, seq_q, seq_kv, DIM, MAIN, REST, DIM_V, MAIN_V, REST_V,
        CAUSAL, WINDOW, SOFTCAP, SCALE, LSE, DTYPE, BLOCK_M, BLOCK_N, MAPS, WARP_SPECIALIZE, False, EVEN_N,
    )  # fmt: skip


@triton.jit
def attention_prefill_persistent(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    o: tl.tensor,
    lse: tl.tensor,
    slices: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    seq_q: tl.tensor,
    seq_kv: tl.tensor,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    EVEN_N: tl.constexpr,
) -> None:
    """The same by programs that each take several tiles, warp-specialised: the next tile is loaded while this one is multiplied.

    Tensor maps are of the whole tensors as matrices, made once. So no tile may reach over the end of a sequence or of a head's dims.
    """
    batch_all = slices // heads
    DTYPE: tl.constexpr = o.dtype.element_ty
    if HEADS_OUTER:
        rows_q, rows_kv = slices * seq_q, batch_all * kv_heads * seq_kv
        width_q, width_k, width_v, width_o = DIM, DIM, DIM_V, DIM_V
    else:
        rows_q, rows_kv = batch_all * seq_q, batch_all * seq_kv
        width_q, width_k, width_v, width_o = heads * DIM, kv_heads * DIM, kv_heads * DIM_V, heads * DIM_V
    q_at = tl.make_tensor_descriptor(q, [rows_q, width_q], [width_q, 1], [BLOCK_M, MAIN])
    k_at = tl.make_tensor_descriptor(k, [rows_kv, width_k], [width_k, 1], [BLOCK_N, MAIN])
    v_at = tl.make_tensor_descriptor(v, [rows_kv, width_v], [width_v, 1], [BLOCK_N, MAIN_V])
    o_at = tl.make_tensor_descriptor(o, [rows_q, width_o], [width_o, 1], [BLOCK_M, MAIN_V])
    q_rest, k_rest, v_rest, o_rest = q_at, k_at, v_at, o_at
    if REST > 0:
        q_rest = tl.make_tensor_descriptor(q, [rows_q, width_q], [width_q, 1], [BLOCK_M, REST])
        k_rest = tl.make_tensor_descriptor(k, [rows_kv, width_k], [width_k, 1], [BLOCK_N, REST])
    if REST_V > 0:
        v_rest = tl.make_tensor_descriptor(v, [rows_kv, width_v], [width_v, 1], [BLOCK_N, REST_V])
        o_rest = tl.make_tensor_descriptor(o, [rows_q, width_o], [width_o, 1], [BLOCK_M, REST_V])
    tiles = tl.cdiv(seq_q, BLOCK_M)
    count = tiles * slices
    programs = tl.num_programs(0)
    for turn in tl.range(tl.program_id(0), count, programs, warp_specialize=True):
        index = turn
        if CAUSAL:
            # every other round goes backwards, for those that began with a long tile to end with a short one
            begin = turn // programs * programs
            backwards = (turn // programs % 2 == 1) & (begin + programs <= count)
            index = tl.where(backwards, 2 * begin + programs - 1 - turn, turn)
        part, number = _place(index, slices, tiles, GROUP_HEADS, CAUSAL)
        batch = part // heads
        head = part % heads
        head_kv = head // (heads // kv_heads)
        if HEADS_OUTER:
            row_q, row_kv = part * seq_q, (batch * kv_heads + head_kv) * seq_kv
            column_q, column_k, column_v, column_o = 0, 0, 0, 0
        else:
            row_q, row_kv = batch * seq_q, batch * seq_kv
            column_q, column_k, column_v, column_o = head * DIM, head_kv * DIM, head_kv * DIM_V, head * DIM_V
        lse_at = lse
        if LSE:
            lse_at = lse + part.to(tl.int64) * seq_q
        _attend(
            number * BLOCK_M, q_at, q_rest, k_at, k_rest, v_at, v_rest, o_at, o_rest, lse_at, row_q, row_kv,
            column_q, column_k, column_v, column_o, width_q, width_k, width_v, width_o, seq_q, seq_kv,
            DIM, MAIN, REST, DIM_V, MAIN_V, REST_V, CAUSAL, WINDOW, SOFTCAP, SCALE, LSE, DTYPE, BLOCK_M, BLOCK_N, True, True, True, EVEN_N,
        )  # fmt: skip


def program(workload: Workload, config: Config) -> _compile.Program:
    """What a configuration compiles and launches."""
    shape = workload.shape
    block_m, block_n = config["block_m"], config["block_n"]
    slices = shape["batch"] * shape["heads"]
    tiles = triton.cdiv(shape["seq_q"], block_m) * slices
    persistent = config.get("persistent", False)
    constants = {
        **_attention.arithmetic(workload),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "GROUP_HEADS": config["group_heads"],
        "EVEN_N": not shape["causal"] and not shape["window"] and shape["seq_kv"] % block_n == 0,
    }
    if not persistent:
        constants |= {"MAPS": config["access"] == "descriptor", "WARP_SPECIALIZE": config.get("warp_specialize", False)}
    if not shape["lse"]:
        constants["lse"] = None
    return _compile.Program(
        function=attention_prefill_persistent if persistent else attention_prefill,
        dtype=workload.dtype,
        sizes={"slices": slices, **{name: shape[name] for name in ("heads", "kv_heads", "seq_q", "seq_kv")}},
        constants=constants,
        grid=lambda sm_count: (min(tiles, sm_count) if persistent else tiles, 1, 1),
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        dtypes={"lse": "fp32"},
    )


# barriers and the scratch of reductions beside the tiles: at most 1,100 B seen with Triton 3.6 and 3.9
_SMEM_MARGIN_BYTES = 2048
# tensor-map coordinates are 32-bit; the margin keeps the far edge of the last tile in range
_MAP_EXTENT_MAX = 2**31 - 2**20
# of 255; the rest is for addresses, rows and what is in conversion
_REGISTERS_MAX = 176
_REGISTERS_MAX_POINTER = 128

_SPECIALISED = {"access": "descriptor", "block_m": 128, "num_warps": 4, "warp_specialize": True}
_STARTS = (
    {**_SPECIALISED, "block_n": 128, "num_stages": 2, "persistent": True},
    {**_SPECIALISED, "block_n": 128, "num_stages": 2},
    {"access": "descriptor", "block_m": 128, "block_n": 128, "num_warps": 8, "num_stages": 2},
    {**_SPECIALISED, "block_n": 64, "num_stages": 2, "persistent": True},
    {"access": "descriptor", "block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3},
    {"access": "pointer", "block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3},
    {**_SPECIALISED, "block_n": 64, "num_stages": 1},
    {"access": "descriptor", "block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2},
    {"access": "descriptor", "block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2},
)
"""Tiles that compile for sm_90a without spills. Specialised, two groups of warps halve the queries: one multiplies while the other takes
exponents; persistent, the keys of the next tile are loaded meanwhile, which else takes some 6 us of the 20 us to 160 us of a tile."""


def space(workload: Workload, device: Device) -> Space:
    """The knobs: tile, order of the tiles, warps, pipeline depth, and how tiles are loaded and scheduled.

    Source: the limits on registers and shared memory come from cross-compiling for sm_90a with Triton 3.6 and 3.9.
    """
    shape = workload.shape
    key, value = _attention.parts(shape["head_dim"]), _attention.parts(shape["head_dim_v"])
    width, width_v = key.width, value.width
    least_stages = _attention.least_stages(key, value)
    slices = shape["batch"] * shape["heads"]
    rows = slices * max(shape["seq_q"], shape["seq_kv"])
    # tensor maps of whole tensors cut off neither a head's dims nor a sequence
    exact = (key.main, value.main) == (shape["head_dim"], shape["head_dim_v"]) and rows <= _MAP_EXTENT_MAX
    params = [
        Param("access", ("descriptor", "pointer"), "tiles by tensor maps (TMA) or by addresses (cp.async)"),
        Param("block_m", (64, 128, 256), "queries of a tile"),
        Param("block_n", (32, 64, 128, 256), "keys of a tile"),
        Param("num_warps", (4, 8), "warps of a program, before the compiler adds those of warp specialisation"),
        Param("num_stages", (1, 2, 3, 4), "tiles of keys and values in flight"),
        Param(
            "warp_specialize",
            # with a head in two parts (96, 192) specialised programs of Triton 3.6.0 leave parts of O unwritten (docs/notes/attention.md)
            (False, True) if not (key.rest or value.rest) else (False,),
            "one group of 4 warps loads, two take half of the queries each; masks are then evaluated on every tile",
            when=lambda access: access == "descriptor",
        ),
        Param(
            "persistent",
            (False, True) if exact else (False,),
            "one program a multiprocessor, which loads its next tile while this one is multiplied",
            when=lambda warp_specialize: warp_specialize,
        ),
        Param("group_heads", (1, 2, 4, 8, 16), "heads in a band whose tiles of the same queries follow each other"),
    ]

    def registers(block_m: int, block_n: int, threads: int) -> float:
        # accumulators, products in fp32, and the weights in 16 bits
        return block_m * (width_v + 1.5 * block_n) / threads

    def smem_bytes(block_m: int, block_n: int, num_stages: int, queries: int = 1, outputs: int = 0) -> int:
        elements = block_m * (queries * width + outputs * width_v) + block_n * num_stages * (width + width_v)
        return elements * DTYPE_BYTES[workload.dtype] + _SMEM_MARGIN_BYTES

    limit = device.smem_per_block_bytes
    too_many = f"a thread holds at most {_REGISTERS_MAX} registers of results, products and weights: more spill"
    constraints = [
        Constraint(lambda num_stages: num_stages >= least_stages, _attention.PIPELINED),
        Constraint(
            lambda block_m: block_m == 64 or block_m <= triton.next_power_of_2(shape["seq_q"]),
            f"a tile is not twice as high as the queries ({shape['seq_q']})",
        ),
        Constraint(
            lambda block_n: block_n == 32 or block_n <= triton.next_power_of_2(shape["seq_kv"]),
            f"a tile is not twice as wide as the keys ({shape['seq_kv']})",
        ),
        Constraint(
            lambda block_m, num_warps: block_m * 2 >= 32 * num_warps,
            "a group of 4 warps multiplies 64 queries: 8 warps share 128 or more",
        ),
        Constraint(
            lambda block_m, block_n, num_stages: smem_bytes(block_m, block_n, num_stages) <= limit,
            f"queries and the tiles of keys and values in flight take at most {limit:,} B of shared memory",
        ),
        Constraint(
            lambda block_m, block_n, num_stages, warp_specialize: (
                not warp_specialize or smem_bytes(block_m, block_n, num_stages, outputs=1) <= limit
            ),
            f"groups of warps end at different times: O and all other tiles take at most {limit:,} B of shared memory",
        ),
        Constraint(
            lambda block_m, block_n, num_stages, persistent: (
                not persistent or smem_bytes(block_m, block_n, num_stages, queries=num_stages, outputs=1) <= limit
            ),
            f"a persistent program holds as many tiles of queries as of keys, in {limit:,} B of shared memory with that of O",
        ),
        Constraint(
            lambda num_stages, persistent: not persistent or num_stages <= 2,
            "with 3 tiles in flight a persistent program of Triton 3.6.0 leaves parts of O unwritten (H200, docs/notes/attention.md)",
        ),
        Constraint(
            lambda block_m, block_n, persistent: not persistent or (shape["seq_q"] % block_m == 0 and shape["seq_kv"] % block_n == 0),
            f"tiles of a persistent program end where sequences do ({shape['seq_q']} queries, {shape['seq_kv']} keys)",
        ),
        Constraint(
            lambda block_m, persistent: not persistent or triton.cdiv(shape["seq_q"], block_m) * slices > device.sm_count,
            f"a persistent grid has more tiles to do than the {device.sm_count} multiprocessors",
        ),
        Constraint(
            lambda access, block_m, block_n, num_warps: (
                access == "descriptor" or registers(block_m, block_n, 32 * num_warps) <= _REGISTERS_MAX_POINTER
            ),
            f"a thread that computes addresses holds at most {_REGISTERS_MAX_POINTER} results, products and weights: more spill",
        ),
        Constraint(
            lambda block_m, block_n, num_warps, warp_specialize: (
                registers(block_m, block_n, 32 * num_warps * (2 if warp_specialize else 1)) <= _REGISTERS_MAX
            ),
            too_many,
        ),
        Constraint(
            lambda access, block_m, block_n, num_warps: (
                access == "descriptor" or max(block_m * width, block_n * (width + width_v)) <= 32 * 8 * 32 * num_warps
            ),
            "at most 32 loads of 16 B a thread: their addresses fill the registers",
        ),
        Constraint(
            lambda num_warps, warp_specialize: num_warps == 4 or not warp_specialize,
            "warp specialisation starts from 4 warps: with 8 the compiler ignores it without a word",
        ),
        Constraint(
            lambda block_m, warp_specialize: block_m >= 128 or not warp_specialize,
            "two groups of 4 warps take half of the queries each, of which wgmma takes 64 or more",
        ),
        Constraint(
            lambda num_stages, block_n: num_stages == 1 or num_stages - 1 <= triton.cdiv(shape["seq_kv"], block_n),
            f"no more tiles in flight than there are ({shape['seq_kv']} keys)",
        ),
        Constraint(lambda group_heads: group_heads == 1 or group_heads <= slices, f"a band has no more heads than there are ({slices})"),
    ]
    return Space(params, constraints, _STARTS)

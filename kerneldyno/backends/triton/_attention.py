"""What the two attention kernels in Triton share: parts of a head, the tiles they read, masks, the online softmax.

Source: the online softmax with a finite start follows FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithm 1).
"""

import math
from dataclasses import dataclass

import triton
import triton.language as tl

from kerneldyno.core import Workload


LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# a maximum to start from that is finite: exp2(x - x) is then 1 and not NaN, and exp2(-inf - x) is 0, in rows that see no key
LOWEST = tl.constexpr(-2.3e38)

# up to here 2^-24 of it, the rounding of 1 - x, is 1.5e-5 of a score at most
_SOFTCAP_FINE = tl.constexpr(256.0)
# a tile's least depth, and its least rows and columns: tl.dot takes no less
_DOT_MIN = 16


PIPELINED = "with parts of a head of 32 columns or fewer, 2 tiles or more in flight: Triton 3.6.0 is wrong without a pipeline"


@dataclass(frozen=True, slots=True)
class Parts:
    """A head's dims as one or two powers of two, which is what Triton's tiles are: 192 = 128 + 64, where 256 would read a third more.

    Attributes:
        main: Columns of the first part.
        rest: Columns of the second part; 0 where the first holds all. It may reach over the end, and is 0 there.
    """

    main: int
    rest: int

    @property
    def width(self) -> int:
        """Columns of both."""
        return self.main + self.rest


def least_stages(*widths: Parts) -> int:
    """Fewest tiles in flight with which Triton 3.6.0 is right.

    Without a pipeline, products with a part of 32 columns or fewer read shared memory that is not written yet: head_dim 96 gave NaN or an
    illegal access in 4 of 4 such cases on an H200, in none of 14 with 2 stages or more (docs/notes/attention.md).
    """
    narrowest = min(part for width in widths for part in (width.main, width.rest) if part)
    return 2 if narrowest < 64 else 1


def parts(dim: int) -> Parts:
    """Split a head's dims."""
    main = max(_DOT_MIN, 1 << (dim.bit_length() - 1))
    return Parts(main, max(_DOT_MIN, triton.next_power_of_2(dim - main)) if dim > main else 0)


def arithmetic(workload: Workload) -> dict[str, float | int | bool]:
    """The constants by which both kernels compute and address."""
    shape = workload.shape
    key, value = parts(shape["head_dim"]), parts(shape["head_dim_v"])
    return {
        "DIM": shape["head_dim"],
        "MAIN": key.main,
        "REST": key.rest,
        "DIM_V": shape["head_dim_v"],
        "MAIN_V": value.main,
        "REST_V": value.rest,
        "CAUSAL": shape["causal"],
        "WINDOW": shape["window"],
        "SOFTCAP": shape["softcap"],
        "SCALE": shape["scale"] or 1.0 / math.sqrt(shape["head_dim"]),
        "HEADS_OUTER": shape["layout"] == "bhsd",
        "LSE": shape["lse"],
    }


@triton.jit
def capped(products: tl.tensor, SCALE: tl.constexpr, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Products as scores in units of log2: scaled, and where SOFTCAP is not 0 bent by softcap * tanh(score / softcap).

    tanh(x) = 1 - 2 / (exp(2 x) + 1) is right at both ends, where the exponential is 0 or infinite.
    """
    if SOFTCAP == 0.0:
        scores = products * (SCALE * LOG2_E)
    else:
        twice = tl.exp2(products * (2.0 * SCALE / SOFTCAP * LOG2_E))
        bent = 1.0 - 2.0 / (twice + 1.0)
        if SOFTCAP > _SOFTCAP_FINE:
            # a rounding error of 1 counts SOFTCAP times: near 0 by the series, whose next term is 17/315 x^7, 1e-9 of x at most
            x = products * (SCALE / SOFTCAP)
            bent = tl.where(tl.abs(x) < 0.05, x - x * x * x * (0.3333333333 - 0.1333333333 * x * x), bent)
        scores = bent * (SOFTCAP * LOG2_E)
    return scores


@triton.jit
def weigh(
    products: tl.tensor,
    visible: tl.tensor,
    high: tl.tensor,
    total: tl.tensor,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Take a tile of products [rows, keys] into each row's maximum and sum.

    Returns the weights of the keys, the factor of what was summed with the maximum before, the new maximum and the new sum.
    """
    # a positive scale commutes with the maximum, and is then applied in the multiply-add that subtracts it
    LATE: tl.constexpr = SOFTCAP == 0.0 and SCALE > 0.0
    STEP: tl.constexpr = SCALE * LOG2_E if LATE else 1.0
    scores = products if LATE else capped(products, SCALE, SOFTCAP)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(high, tl.max(scores, 1) * STEP)
    weights = tl.exp2(scores * STEP - higher[:, None])
    factor = tl.exp2(high - higher)
    return weights, factor, higher, total * factor + tl.sum(weights, 1)


@triton.jit
def seen(
    rows: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    EDGE: tl.constexpr,
) -> tl.tensor:
    """Say which of the BLOCK_N keys from `start` on the queries see whose own places among the keys are `rows`; EDGE: keys may end here."""
    key = tl.arange(0, BLOCK_N)[None, :]
    place = (rows - start)[:, None]
    visible = key >= 0
    if EDGE:
        visible = visible & (key < end - start)
    if CAUSAL:
        visible = visible & (key <= place)
    if WINDOW > 0:
        visible = visible & (key > place - WINDOW)
        if not CAUSAL:
            visible = visible & (key < place + WINDOW)
    return visible


@triton.jit
def tile(
    base: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    pitch: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    FROM: tl.constexpr,
    DIM: tl.constexpr,
    MAPS: tl.constexpr,
    EDGE: tl.constexpr,
) -> tl.tensor:
    """Read ROWS rows from `start` on, WIDTH columns from FROM on, out of `end` rows of DIM columns; what lies outside is 0.

    `base` is a tensor map in which they begin at `row` and `column`, or where not MAPS their address; EDGE: rows may lie outside.
    """
    if MAPS:
        read = base.load([row + start, column + FROM])
    else:
        rows = tl.arange(0, ROWS)
        columns = FROM + tl.arange(0, WIDTH)
        at = base + tl.cast(start, tl.int64) * pitch + rows[:, None] * pitch + columns[None, :]
        if FROM + WIDTH > DIM:
            inside = (columns < DIM)[None, :]
            if EDGE:
                inside = inside & (rows < end - start)[:, None]
            read = tl.load(at, mask=inside, other=0.0)
        elif EDGE:
            read = tl.load(at, mask=(rows < end - start)[:, None], other=0.0)
        else:
            read = tl.load(at)
    return read


@triton.jit
def multiply_keys(
    q: tl.tensor,
    q_rest: tl.tensor,
    k: tl.tensor,
    k_rest: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    pitch: tl.tensor,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAPS: tl.constexpr,
    EDGE: tl.constexpr,
) -> tl.tensor:
    """Products of the queries with BLOCK_N keys from `start` on, by the parts of the head's dims."""
    products = tl.dot(q, tile(k, row, column, start, end, pitch, BLOCK_N, MAIN, 0, DIM, MAPS, EDGE).T)
    if REST > 0:
        products = tl.dot(q_rest, tile(k_rest, row, column, start, end, pitch, BLOCK_N, REST, MAIN, DIM, MAPS, EDGE).T, products)
    return products

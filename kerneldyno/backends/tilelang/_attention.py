"""What the attention kernels of this folder share: sizes, slices of the tensors, which keys a tile sees, and the softmax's steps."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kerneldyno.backends.tilelang import _compile
from kerneldyno.backends.tilelang import _overlap
from kerneldyno.core import Workload


LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
WARP = 32

ROWS = 64
"""Rows of queries of a warpgroup: those of one wgmma."""

LOWEST = -1e30
"""Where a running maximum starts: finite, so that no -inf is subtracted from -inf, also after a scale of up to 1e6."""


@dataclass(frozen=True, slots=True)
class Attention:
    """A workload's shape with types; `dtype` is TileLang's name of the elements' type, `scale` is resolved."""

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_kv: int
    dim: int
    dim_v: int
    causal: bool
    window: int
    softcap: float
    scale: float
    heads_outer: bool
    lse: bool
    dtype: str

    @classmethod
    def of(cls, workload: Workload) -> "Attention":
        """Read a workload."""
        shape = workload.shape
        return cls(
            batch=int(shape["batch"]),
            heads=int(shape["heads"]),
            kv_heads=int(shape["kv_heads"]),
            seq_q=int(shape["seq_q"]),
            seq_kv=int(shape["seq_kv"]),
            dim=int(shape["head_dim"]),
            dim_v=int(shape["head_dim_v"]),
            causal=bool(shape["causal"]),
            window=int(shape["window"]),
            softcap=float(shape["softcap"]),
            scale=float(shape["scale"]) or int(shape["head_dim"]) ** -0.5,
            heads_outer=shape["layout"] == "bhsd",
            lse=bool(shape["lse"]),
            dtype=_compile.DTYPES[workload.dtype],
        )

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def decode(self) -> bool:
        """Whether the queries of one key head fit in one tile."""
        return self.seq_q * self.group <= 64

    @property
    def offset(self) -> int:
        """Place of query 0 among the keys."""
        return self.seq_kv - self.seq_q

    @property
    def masked(self) -> bool:
        """Whether which keys are seen depends on the query."""
        return self.causal or self.window > 0

    @property
    def factor(self) -> float:
        """What scores are multiplied with on their way into exp2: capped ones have their scale already."""
        return LOG2_E * (1.0 if self.softcap else self.scale)

    def extent(self, heads: int, seq: int, dim: int) -> tuple[int, int, int, int]:
        """Shape of a tensor."""
        return (self.batch, heads, seq, dim) if self.heads_outer else (self.batch, seq, heads, dim)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors."""
        return {
            "q": self.extent(self.heads, self.seq_q, self.dim),
            "k": self.extent(self.kv_heads, self.seq_kv, self.dim),
            "v": self.extent(self.kv_heads, self.seq_kv, self.dim_v),
            "o": self.extent(self.heads, self.seq_q, self.dim_v),
            "lse": (self.batch, self.heads, self.seq_q),
        }

    def element(self, tensor: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        """One element of a tensor."""
        return tensor[batch, head, row, column] if self.heads_outer else tensor[batch, row, head, column]

    def rows(self, tensor: Any, batch: Any, head: Any, first: Any, count: int) -> Any:
        """Rows `first` to `first + count` of one head of a tensor."""
        if self.heads_outer:
            return tensor[batch, head, first : first + count, :]
        return tensor[batch, first : first + count, head, :]

    def sees(self, row: Any, key: Any) -> Any:
        """Say whether a query whose own place among the keys is `row` sees a key."""
        seen = key < self.seq_kv
        if self.causal:
            seen = T.And(seen, key <= row)
        if self.window:
            seen = T.And(seen, key > row - self.window)
            if not self.causal:
                seen = T.And(seen, key < row + self.window)
        return seen

    def span(self, first: Any, rows: int, block_n: int) -> tuple[Any, Any, Any, Any]:
        """Tiles of keys that query rows `first` to `first + rows` see: the first, one past the last, and the same of those seen whole.

        There is always at least one tile, if only one that none of the rows sees: their sums are 0 then.
        """
        low, high = 0, self.seq_kv
        whole_low, whole_high = 0, self.seq_kv
        row_first, row_last = first + self.offset, first + rows - 1 + self.offset
        if self.causal:
            high, whole_high = T.min(self.seq_kv, row_last + 1), T.min(self.seq_kv, row_first + 1)
        elif self.window:
            high, whole_high = T.min(self.seq_kv, row_last + self.window), T.min(self.seq_kv, row_first + self.window)
        if self.window:
            low, whole_low = T.max(0, row_first - self.window + 1), T.max(0, row_last - self.window + 1)
        tile_low = low // block_n
        tile_high = T.max(tile_low + 1, (T.max(high, 0) + block_n - 1) // block_n)
        whole_end = T.max(whole_high, 0) // block_n
        whole_start = T.min((whole_low + block_n - 1) // block_n, whole_end)
        return tile_low, tile_high, whole_start, whole_end


@dataclass(frozen=True, slots=True)
class Ring:
    """Tiles of keys and of values in flight between a loading warp and the threads that compute.

    Attributes:
        attention: The sizes.
        block_n: Keys of a tile.
        stages: Tiles of keys, and as many of values.
        warpgroups: Groups of 128 threads that compute, each with 64 rows of queries.
    """

    attention: Attention
    block_n: int
    stages: int
    warpgroups: int

    @property
    def threads(self) -> int:
        """Threads that compute."""
        return self.warpgroups * _overlap.WARPGROUP

    @property
    def arrivals(self) -> int:
        """Arrivals that free a tile: one thread of each computing warp."""
        return self.threads // WARP

    @property
    def scores_each(self) -> int:
        """Scores of a thread."""
        return ROWS * self.block_n // _overlap.WARPGROUP

    @property
    def sums_each(self) -> int:
        """Sums of a thread."""
        return ROWS * self.attention.dim_v // _overlap.WARPGROUP


def allocating(ring: Ring) -> Any:
    """Make a function that allocates, inside a kernel, the tiles (keys, values) and their barriers (full and empty of keys, of values)."""
    attention, stages = ring.attention, ring.stages

    def allocate() -> tuple[tuple[Any, Any], tuple[Any, Any, Any, Any]]:
        tiles = (
            T.alloc_shared((stages, ring.block_n, attention.dim), attention.dtype),
            T.alloc_shared((stages, ring.block_n, attention.dim_v), attention.dtype),
        )
        counts = ([WARP] * stages, [ring.arrivals] * stages) * 2
        return tiles, tuple(T.alloc_barrier(count) for count in counts)

    return allocate


def filling(ring: Ring) -> Any:
    """Make the loading warp's macro: `fill(tensor, tiles, full, empty, count, batch, head, first)` loads a tile of keys or of values.

    `count` is the number of such tiles that were loaded before, `first` the tile's first key.
    """
    attention, stages, block_n = ring.attention, ring.stages, ring.block_n

    @T.macro
    def fill(tensor, tiles, full, empty, count, batch, head, first):  # noqa: ANN001, ANN202
        slot = count % stages
        T.barrier_wait(empty[slot], count // stages % 2 ^ 1)
        T.tma_copy(attention.rows(tensor, batch, head, first, block_n), tiles[slot, :, :], barrier=full[slot], leader_scope_threads=WARP)
        T.barrier_arrive(full[slot])

    return fill


@T.macro
def release(barriers, slot, thread):  # noqa: ANN001, ANN202
    """Arrive for the thread's warp."""
    if thread % WARP == 0:
        T.mbarrier_arrive(barriers[slot])


def multiplying(ring: Ring) -> tuple[Any, Any]:
    """Make the macros that queue the products of tile number `count`: with its keys, and with its values."""
    stages = ring.stages

    @T.macro
    def multiply_keys(q_tile, k_tiles, scores, k_full, count):  # noqa: ANN001, ANN202
        T.barrier_wait(k_full[count % stages], count // stages % 2)
        T.wgmma_gemm(q_tile, k_tiles[count % stages, :, :], scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)

    @T.macro
    def multiply_values(weights, v_tiles, sums, v_full, count):  # noqa: ANN001, ANN202
        T.barrier_wait(v_full[count % stages], count // stages % 2)
        T.wgmma_gemm(weights, v_tiles[count % stages, :, :], sums, policy=T.GemmWarpPolicy.FullRow)

    return multiply_keys, multiply_values


@dataclass(frozen=True, slots=True)
class State:
    """What computing threads keep in registers: of each row of queries, or of each row and key or column."""

    scores: Any
    weights: Any
    sums: Any
    high: Any
    before: Any
    factor: Any
    part: Any
    total: Any

    @classmethod
    def allocate(cls, attention: Attention, rows: int, block_n: int) -> "State":
        """Allocate it, inside a kernel."""
        return cls(
            scores=T.alloc_fragment((rows, block_n), "float32"),
            weights=T.alloc_fragment((rows, block_n), attention.dtype),
            sums=T.alloc_fragment((rows, attention.dim_v), "float32"),
            **{name: T.alloc_fragment((rows,), "float32") for name in ("high", "before", "factor", "part", "total")},
        )


@T.macro
def start(state):  # noqa: ANN001, ANN202
    """Begin with no keys seen."""
    T.clear(state.sums)
    T.clear(state.total)
    T.fill(state.high, LOWEST)


def softening(attention: Attention, rows: int, block_n: int, packed: int = 1) -> Any:
    """Make the macro `soften(state, row, key, masked)`: raw scores go into the running maximum and sum and become weights, in place.

    `row` and `key` are the places among the keys of the tile's first query and first key, `packed` rows belong to one query; the state's
    `factor` becomes what earlier sums are to be multiplied with.
    """
    fold = attention.factor
    softcap, scale = attention.softcap, attention.scale

    @T.macro
    def soften(state, row, key, masked):  # noqa: ANN001, ANN202
        scores, high, before, factor, part, total = state.scores, state.high, state.before, state.factor, state.part, state.total
        if softcap > 0.0:
            # softcap * tanh(x), where tanh(x) = 1 - 2 / (exp(2 x) + 1) is right at both ends: the exponential may be 0 or infinite
            for i, j in T.Parallel(rows, block_n):
                scores[i, j] = softcap - 2.0 * softcap / (T.exp2(scores[i, j] * (2.0 * scale / softcap * LOG2_E)) + 1.0)
        if masked:
            for i, j in T.Parallel(rows, block_n):
                scores[i, j] = T.if_then_else(attention.sees(row + i // packed, key + j), scores[i, j], -T.infinity("float32"))
        T.copy(high, before)
        T.reduce_max(scores, high, dim=1, clear=False)
        for i in T.Parallel(rows):
            factor[i] = T.exp2((before[i] - high[i]) * fold)
        for i, j in T.Parallel(rows, block_n):
            scores[i, j] = T.exp2(scores[i, j] * fold - high[i] * fold)
        T.reduce_sum(scores, part, dim=1)
        for i in T.Parallel(rows):
            total[i] = total[i] * factor[i] + part[i]

    return soften


def normalising(attention: Attention, rows: int) -> Any:
    """Make the macro that divides the sums by the sum of their weights; rows that saw no key become 0."""

    @T.macro
    def normalise(state):  # noqa: ANN001, ANN202
        sums, part, total = state.sums, state.part, state.total
        for i in T.Parallel(rows):
            part[i] = T.if_then_else(total[i] > 0.0, 1.0 / total[i], 0.0)
        for i, j in T.Parallel(rows, attention.dim_v):
            sums[i, j] *= part[i]

    return normalise


def storing(attention: Attention) -> Any:
    """Make the macro `store(tensor, batch, head, row, column, value)` that rounds a float32 to the tensor's dtype."""

    @T.macro
    def store(tensor, batch, head, row, column, value):  # noqa: ANN001, ANN202
        if attention.heads_outer:
            tensor[batch, head, row, column] = T.cast(value, attention.dtype)
        else:
            tensor[batch, row, head, column] = T.cast(value, attention.dtype)

    return store


def logarithm(attention: Attention, high: Any, total: Any) -> Any:
    """Natural logarithm of the sum of a row's exponentials; -inf where it saw no key."""
    return T.if_then_else(total > 0.0, (high * attention.factor + T.log2(total)) * LN_2, -T.infinity("float32"))


def kernel(attention: Attention, body: Any, blocks: int, threads: int) -> T.PrimFunc:
    """Make the function around a macro `body(q, k, v, o, lse, block)`; the tensor lse exists only where it is asked for."""
    dtype, shapes = attention.dtype, attention.shapes

    if attention.lse:

        @T.prim_func
        def with_lse(  # noqa: ANN202
            q: T.Tensor(shapes["q"], dtype),
            k: T.Tensor(shapes["k"], dtype),
            v: T.Tensor(shapes["v"], dtype),
            o: T.Tensor(shapes["o"], dtype),
            lse: T.Tensor(shapes["lse"], "float32"),
        ):
            with T.Kernel(blocks, threads=threads) as block:
                body(q, k, v, o, lse, block)

        return with_lse

    @T.prim_func
    def without_lse(  # noqa: ANN202
        q: T.Tensor(shapes["q"], dtype), k: T.Tensor(shapes["k"], dtype), v: T.Tensor(shapes["v"], dtype), o: T.Tensor(shapes["o"], dtype)
    ):
        with T.Kernel(blocks, threads=threads) as block:
            body(q, k, v, o, None, block)

    return without_lse

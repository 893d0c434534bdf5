"""Products of ragged groups of rows in TileLang, each group with a matrix of its own, in one launch.

Every kernel takes the tiles of `core.RaggedTiles` as tensors and skips those that are not needed. A tile loads `block_m` rows from its
first on, whoever's they are, and stores those of its group. With `swap` the group's matrix is the left operand of the tensor cores, whose
least is 64 rows, and the tile's rows the right one, whose least is 8: for groups of few rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import tilelang.language as T

from kerneldyno.backends.tilelang import _overlap


@dataclass(frozen=True, slots=True)
class Grouped:
    """C [rows, n]: row r is A's row r, or where `gather` row index[r], times the transpose of W [groups, n, k] of r's group.

    Attributes:
        rows: Rows of all groups together.
        a_rows: Rows of A.
        groups: Matrices.
        n: Columns of C.
        k: Columns of A.
        tiles_m: Tiles of rows there is room for.
        gather: A's rows are read through an index.
        dtype: TileLang's name of the elements' type.
    """

    rows: int
    a_rows: int
    groups: int
    n: int
    k: int
    tiles_m: int
    gather: bool
    dtype: str

    @property
    def index_shape(self) -> tuple[int]:
        """Shape of the index; where there is none the groups' ends stand in its place, unread."""
        return (self.rows if self.gather else self.groups,)


_ROW, _COLUMN, _END, _GROUP = range(4)
"""What a thread knows of its tile: its first row, its column of tiles, the row after its group's last, its group."""

_COUNTED_COPIES: Mapping[str, bool] = {"parallel_prefer_async": True, "parallel_async_without_async_commit_wait": True}
"""Copies that land by themselves and are counted by a barrier: no group of copies, and no wait for one, of the compiler's.

Source: the annotations that TileLang 0.1.15 sets on a producer's copies (src/cuda/transform/producer_consumer_ws.cc)."""


def pipelined(
    product: Grouped,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int,
    panel: int,
    warpgroups: int,
    swap: bool,
) -> T.PrimFunc:
    """One tile of C a block; the compiler makes the pipeline, with a producer warpgroup and tensor maps where it may."""
    rows, n, k, dtype = product.rows, product.n, product.k, product.dtype

    @T.prim_func
    def moe_gemm(  # noqa: ANN202
        a: T.Tensor((product.a_rows, k), dtype),
        w: T.Tensor((product.groups, n, k), dtype),
        offsets: T.Tensor((product.groups,), "int32"),
        groups: T.Tensor((product.tiles_m,), "int32"),
        starts: T.Tensor((product.tiles_m,), "int32"),
        index: T.Tensor(product.index_shape, "int32"),
        c: T.Tensor((rows, n), dtype),
    ):
        with T.Kernel(T.ceildiv(n, block_n), product.tiles_m, threads=warpgroups * _overlap.WARPGROUP) as (column, row):
            a_tile = T.alloc_shared((block_m, block_k), dtype)
            w_tile = T.alloc_shared((block_n, block_k), dtype)
            c_tile = T.alloc_shared((block_m, block_n), dtype)
            sums = T.alloc_fragment((block_n, block_m) if swap else (block_m, block_n), "float32")
            T.use_swizzle(panel, enable=panel > 1)
            group = groups[row]
            start = starts[row]
            if group >= 0:
                T.clear(sums)
                if product.gather:
                    token = T.alloc_shared((block_m,), "int32")
                    for i in T.Parallel(block_m):
                        token[i] = index[T.min(start + i, rows - 1)]
                for step in T.Pipelined(T.ceildiv(k, block_k), num_stages=stages):
                    if product.gather:
                        for i, j in T.Parallel(block_m, block_k):
                            a_tile[i, j] = a[token[i], step * block_k + j]
                    else:
                        T.copy(a[start, step * block_k], a_tile)
                    T.copy(
                        w[group, column * block_n : (column + 1) * block_n, step * block_k : (step + 1) * block_k],
                        w_tile,
                    )
                    if swap:
                        T.gemm(w_tile, a_tile, sums, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    else:
                        T.gemm(a_tile, w_tile, sums, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                if swap:
                    for i, j in T.Parallel(block_n, block_m):
                        c_tile[j, i] = sums[i, j]
                else:
                    T.copy(sums, c_tile)
                for i, j in T.Parallel(block_m, block_n):
                    if start + i < offsets[group]:
                        c[start + i, column * block_n + j] = c_tile[i, j]

    return moe_gemm


def overlapped(
    product: Grouped,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int,
    panel: int,
    warpgroups: int,
    swap: bool,
    blocks: int,
    pieces: int,
) -> T.PrimFunc:
    """Tiles of C in turn on `blocks` blocks (0: one a tile), as `_overlap` schedules them.

    The consumers share the left operand's rows out. Unless `swap`, one whose rows are all beyond the group's end waits out the tile, and
    they are not loaded: a tile of 128 rows for two consumers costs a group of 64 rows the tensor cores' time of 64. They write a tile in
    `pieces` column pieces through shared memory, by a tensor map where all rows are the group's.

    Needs row pitches that are multiples of 16 bytes. All synchronisation is written here: the compiler's own is to be left out.
    """
    rows, n, k, gather, dtype = product.rows, product.n, product.k, product.gather, product.dtype
    tiles_m, tiles_n = product.tiles_m, -(-n // block_n)
    tiles = tiles_m * tiles_n
    grid = min(tiles, blocks or tiles)
    rounds = -(-tiles // grid)
    steps = -(-k // block_k)
    consumers = warpgroups
    high = (block_n if swap else block_m) // consumers
    # of one consumer's piece of C
    c_high, c_wide = (block_m, high) if swap else (high, block_n // pieces)
    pipe = _overlap.Pipeline(stages, steps, consumers, high, block_m if swap else block_n, fenced=gather)
    multiply = _overlap.multiplying(pipe)
    producer_registers, consumer_registers = _overlap.registers(consumers, gather)

    @T.macro
    def place(tile, tiles_of, at):  # noqa: ANN001, ANN202
        groups, starts, offsets = tiles_of
        row, column = _overlap.place(tile, tiles_m, tiles_n, panel)
        at[_ROW] = starts[row]
        at[_COLUMN] = column
        at[_GROUP] = groups[row]
        at[_END] = offsets[T.max(at[_GROUP], 0)]

    @T.macro
    def load(operands, step, slot):  # noqa: ANN001, ANN202
        a, w, left, right, tokens, full, at = operands
        if swap:
            for consumer in T.unroll(consumers):
                T.tma_copy(
                    w[
                        at[_GROUP],
                        at[_COLUMN] * block_n + consumer * high : at[_COLUMN] * block_n + (consumer + 1) * high,
                        step * block_k : (step + 1) * block_k,
                    ],
                    left[consumer, slot, :, :],
                    barrier=full[slot],
                )
        else:
            T.tma_copy(
                w[at[_GROUP], at[_COLUMN] * block_n : (at[_COLUMN] + 1) * block_n, step * block_k : (step + 1) * block_k],
                right[slot, :, :],
                barrier=full[slot],
            )
        if swap and gather:
            for i, j in T.Parallel(block_m, block_k, annotations=_COUNTED_COPIES):
                right[slot, i, j] = a[tokens[i], step * block_k + j]
        elif swap:
            T.tma_copy(a[at[_ROW] : at[_ROW] + block_m, step * block_k : (step + 1) * block_k], right[slot, :, :], barrier=full[slot])
        else:
            for consumer in T.unroll(consumers):
                if at[_ROW] + consumer * high < at[_END]:
                    if gather:
                        for i, j in T.Parallel(high, block_k, annotations=_COUNTED_COPIES):
                            left[consumer, slot, i, j] = a[tokens[consumer * high + i], step * block_k + j]
                    else:
                        T.tma_copy(
                            a[at[_ROW] + consumer * high : at[_ROW] + (consumer + 1) * high, step * block_k : (step + 1) * block_k],
                            left[consumer, slot, :, :],
                            barrier=full[slot],
                        )
        if gather:
            T.cp_async_barrier_noinc(full[slot])
        else:
            T.barrier_arrive(full[slot])

    fill = _overlap.filling(pipe, load)

    @T.macro
    def find_rows(index, tokens, at, thread):  # noqa: ANN001, ANN202
        # the producer's threads meet before and after: one may still copy rows of the tile before
        T.sync_threads(barrier_id=_overlap.FIRST_FREE_BARRIER + consumers, arrive_count=_overlap.WARPGROUP)
        for part in T.serial(-(-block_m // _overlap.WARPGROUP)):
            if part * _overlap.WARPGROUP + thread < block_m:
                tokens[part * _overlap.WARPGROUP + thread] = index[T.min(at[_ROW] + part * _overlap.WARPGROUP + thread, rows - 1)]
        T.sync_threads(barrier_id=_overlap.FIRST_FREE_BARRIER + consumers, arrive_count=_overlap.WARPGROUP)

    @T.macro
    def produce(operands, index, tiles_of, empty, done, block, thread):  # noqa: ANN001, ANN202
        tokens, at = operands[4], operands[-1]
        T.dec_max_nreg(producer_registers)
        done[0] = T.uint32(0)
        for turn in T.serial(rounds):
            if turn * grid + block < tiles:
                place(turn * grid + block, tiles_of, at)
                if at[_GROUP] >= 0:
                    if gather:
                        find_rows(index, tokens, at, thread)
                    fill(operands, empty, done[0])
                    done[0] = done[0] + T.uint32(steps)

    @T.macro
    def write(c, c_tile, sums, at, consumer):  # noqa: ANN001, ANN202
        for piece in T.unroll(pieces):
            # the piece before was read
            T.sync_threads(barrier_id=_overlap.FIRST_FREE_BARRIER + consumer, arrive_count=_overlap.WARPGROUP)
            if swap:
                for i, j in T.Parallel(high, block_m):
                    c_tile[j, i] = sums[i, j]
            elif pieces == 1:
                T.copy(sums, c_tile)
            else:
                T.copy(sums[:, piece * c_wide : (piece + 1) * c_wide], c_tile)
            T.fence_proxy_async()
            T.sync_threads(barrier_id=_overlap.FIRST_FREE_BARRIER + consumer, arrive_count=_overlap.WARPGROUP)
            # no names for these sums: the compiler would no longer see that columns are multiples of 8
            if at[_ROW] + (0 if swap else consumer * high) + c_high <= at[_END]:
                T.copy(
                    c_tile,
                    c[at[_ROW] + (0 if swap else consumer * high), at[_COLUMN] * block_n + (consumer * high if swap else piece * c_wide)],
                )
            else:
                for i, j in T.Parallel(c_high, c_wide):
                    if at[_ROW] + (0 if swap else consumer * high) + i < at[_END]:
                        c[
                            at[_ROW] + (0 if swap else consumer * high) + i,
                            at[_COLUMN] * block_n + (consumer * high if swap else piece * c_wide) + j,
                        ] = c_tile[i, j]

    @T.macro
    def wait_out(full, empty, first, thread):  # noqa: ANN001, ANN202
        for step in T.serial(steps):
            slot = T.cast((first + step) % stages, "int32")
            T.barrier_wait(full[slot], T.cast((first + step) // stages % 2, "int32"))
            # no lane is to miss a phase because another has freed the stage already
            T.sync_warp()
            if thread % 32 == 0:
                T.mbarrier_arrive(empty[slot])

    @T.macro
    def consume(operands, thread, consumer):  # noqa: ANN001, ANN202
        c, tiles_of, left, right, c_tiles, sums, full, empty, at, done, block = operands
        T.inc_max_nreg(consumer_registers)
        done[0] = T.uint32(0)
        for turn in T.serial(rounds):
            if turn * grid + block < tiles:
                place(turn * grid + block, tiles_of, at)
                if at[_GROUP] >= 0:
                    if swap or at[_ROW] + consumer * high < at[_END]:
                        multiply(left, right, sums[consumer], full, empty, done[0], thread, consumer)
                        write(c, c_tiles[consumer], sums[consumer], at, consumer)
                    else:
                        wait_out(full, empty, done[0], thread)
                    done[0] = done[0] + T.uint32(steps)

    share_out = _overlap.sharing_out(pipe, consume)

    @T.prim_func
    def moe_gemm(  # noqa: ANN202
        a: T.Tensor((product.a_rows, k), dtype),
        w: T.Tensor((product.groups, n, k), dtype),
        offsets: T.Tensor((product.groups,), "int32"),
        groups: T.Tensor((product.tiles_m,), "int32"),
        starts: T.Tensor((product.tiles_m,), "int32"),
        index: T.Tensor(product.index_shape, "int32"),
        c: T.Tensor((rows, n), dtype),
    ):
        with T.Kernel(grid, threads=pipe.threads) as block:
            left = T.alloc_shared((consumers, stages, high, block_k), dtype)
            right = T.alloc_shared((stages, pipe.columns, block_k), dtype)
            c_tiles = [T.alloc_shared((c_high, c_wide), dtype) for _ in range(consumers)]
            tokens = T.alloc_shared((block_m,), "int32")
            sums = [T.alloc_fragment((high, pipe.columns), "float32") for _ in range(consumers)]
            full = T.alloc_barrier(pipe.full_arrivals)
            empty = T.alloc_barrier(pipe.empty_arrivals)
            at = T.alloc_local((4,), "int32")
            # steps of the tiles before, of which some may have been skipped
            done = T.alloc_local((1,), "uint32")
            thread = T.get_thread_binding()
            if thread < _overlap.WARPGROUP:
                produce((a, w, left, right, tokens, full, at), index, (groups, starts, offsets), empty, done, block, thread)
            else:
                share_out((c, (groups, starts, offsets), left, right, c_tiles, sums, full, empty, at, done, block), thread, 0)

    return moe_gemm

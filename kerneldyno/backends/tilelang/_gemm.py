"""The matrix products in TileLang: pipelined by the compiler, scheduled by hand around tensor maps, and plain float32."""

from collections.abc import Mapping
from dataclasses import dataclass

import tilelang.language as T


_WARPGROUP = 128
"""Threads that issue one wgmma together."""

_PRODUCER_REGISTERS = 24

_CONSUMER_REGISTERS: Mapping[int, int] = {1: 240, 2: 240, 3: 160}
"""Registers a thread by consumer warpgroups: with the producer's 24 at most 512 for one thread of each, a register file over 128."""

_FIRST_FREE_BARRIER = 8
"""Named barriers below are the compiler's."""


@dataclass(frozen=True, slots=True)
class Product:
    """C [m, n] = A [m, k] times B, which is [n, k] where `nt`, else [k, n]; `dtype` is TileLang's name of the elements' type."""

    m: int
    n: int
    k: int
    nt: bool
    dtype: str

    @property
    def b_shape(self) -> tuple[int, int]:
        """Shape of B."""
        return (self.n, self.k) if self.nt else (self.k, self.n)

    def b_tile(self, block_n: int, block_k: int) -> tuple[int, int]:
        """Shape of a tile of B."""
        return (block_n, block_k) if self.nt else (block_k, block_n)


def pipelined(
    product: Product,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int,
    panel: int,
    warpgroups: int,
    policy: str,
    c_shared: bool,
) -> T.PrimFunc:
    """One tile of C a block; the compiler makes the pipeline, with a producer warpgroup and tensor maps where it may.

    Sizes that are no multiples of a tile are right: tensor maps fill with zeros and clip, and other copies are predicated.
    """
    m, n, k, nt, dtype = product.m, product.n, product.k, product.nt, product.dtype
    warps = {"rows": T.GemmWarpPolicy.FullRow, "columns": T.GemmWarpPolicy.FullCol}[policy]

    @T.prim_func
    def gemm(a: T.Tensor((m, k), dtype), b: T.Tensor(product.b_shape, dtype), c: T.Tensor((m, n), dtype)):  # noqa: ANN202
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=warpgroups * _WARPGROUP) as (column, row):
            a_tile = T.alloc_shared((block_m, block_k), dtype)
            b_tile = T.alloc_shared(product.b_tile(block_n, block_k), dtype)
            sums = T.alloc_fragment((block_m, block_n), "float32")
            T.use_swizzle(panel, enable=panel > 1)
            T.clear(sums)
            for step in T.Pipelined(T.ceildiv(k, block_k), num_stages=stages):
                T.copy(a[row * block_m, step * block_k], a_tile)
                if nt:
                    T.copy(b[column * block_n, step * block_k], b_tile)
                else:
                    T.copy(b[step * block_k, column * block_n], b_tile)
                T.gemm(a_tile, b_tile, sums, transpose_B=nt, policy=warps)
            if c_shared:
                c_tile = T.alloc_shared((block_m, block_n), dtype)
                T.copy(sums, c_tile)
                T.copy(c_tile, c[row * block_m, column * block_n])
            else:
                T.copy(sums, c[row * block_m, column * block_n])

    return gemm


def overlapped(
    product: Product,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int,
    panel: int,
    consumers: int,
    blocks: int,
    pieces: int,
) -> T.PrimFunc:
    """Tiles of C in turn on `blocks` blocks (0: one a tile): a producer warpgroup loads, the consumers share the rows out.

    A consumer keeps one group of wgmma in flight: it frees a stage when the next stage's products are queued. The producer runs
    ahead into the next tile while the consumers write the last, in `pieces` column pieces through shared memory.

    Needs row pitches that are multiples of 16 bytes, and shared memory that the compiler does not reuse: the consumers meet only
    at the pipeline's barriers.

    Source: the roles and register counts follow CUTLASS's cooperative and ping-pong kernels for sm_90; the order of tiles is that
    of Triton's tutorial 03-matrix-multiplication.
    """
    m, n, k, nt, dtype = product.m, product.n, product.k, product.nt, product.dtype
    tiles_m, tiles_n = -(-m // block_m), -(-n // block_n)
    tiles = tiles_m * tiles_n
    grid = min(tiles, blocks or tiles)
    rounds = -(-tiles // grid)
    steps = -(-k // block_k)
    rows = block_m // consumers
    width = block_n // pieces
    threads = _WARPGROUP * (consumers + 1)

    @T.macro
    def place(tile, at):  # noqa: ANN001, ANN202
        # column by column inside bands of `panel` rows, so that blocks in flight share rows of A and B in L2
        band = tile // (panel * tiles_n)
        height = T.min(tiles_m - band * panel, panel)
        at[0] = (band * panel + tile % (panel * tiles_n) % height) * block_m
        at[1] = tile % (panel * tiles_n) // height * block_n

    @T.macro
    def produce(a, b, a_tiles, b_tiles, full, empty, at, block):  # noqa: ANN001, ANN202
        T.dec_max_nreg(_PRODUCER_REGISTERS)
        for turn in T.serial(rounds):
            if turn * grid + block < tiles:
                place(turn * grid + block, at)
                for step in T.serial(steps):
                    load = turn * steps + step
                    slot = load % stages
                    T.barrier_wait(empty[slot], load // stages % 2 ^ 1)
                    for consumer in T.unroll(consumers):
                        T.tma_copy(
                            a[at[0] + consumer * rows : at[0] + (consumer + 1) * rows, step * block_k : (step + 1) * block_k],
                            a_tiles[consumer, slot, :, :],
                            barrier=full[slot],
                        )
                    if nt:
                        T.tma_copy(
                            b[at[1] : at[1] + block_n, step * block_k : (step + 1) * block_k], b_tiles[slot, :, :], barrier=full[slot]
                        )
                    else:
                        T.tma_copy(
                            b[step * block_k : (step + 1) * block_k, at[1] : at[1] + block_n], b_tiles[slot, :, :], barrier=full[slot]
                        )
                    T.barrier_arrive(full[slot])

    @T.macro
    def consume(c, a_tiles, b_tiles, c_tiles, sums, full, empty, at, block, thread, consumer):  # noqa: ANN001, ANN202
        T.inc_max_nreg(_CONSUMER_REGISTERS[consumers])
        for turn in T.serial(rounds):
            if turn * grid + block < tiles:
                place(turn * grid + block, at)
                for step in T.serial(steps):
                    load = turn * steps + step
                    T.barrier_wait(full[load % stages], load // stages % 2)
                    T.wgmma_gemm(
                        a_tiles[consumer, load % stages, :, :],
                        b_tiles[load % stages, :, :],
                        sums[consumer],
                        transpose_B=nt,
                        policy=T.GemmWarpPolicy.FullRow,
                        clear_accum=(step == 0),
                    )
                    if step > 0:
                        T.wait_wgmma(1)
                        if thread % 32 == 0:
                            T.mbarrier_arrive(empty[(load - 1) % stages])
                T.wait_wgmma(0)
                if thread % 32 == 0:
                    T.mbarrier_arrive(empty[(turn * steps + steps - 1) % stages])
                T.warpgroup_fence_operand(sums[consumer], num_regs=rows * block_n // _WARPGROUP)
                for piece in T.unroll(pieces):
                    if pieces == 1:
                        T.copy(sums[consumer], c_tiles[consumer])
                    else:
                        T.copy(sums[consumer][:, piece * width : (piece + 1) * width], c_tiles[consumer])
                    T.fence_proxy_async()
                    T.sync_threads(barrier_id=_FIRST_FREE_BARRIER + consumer, arrive_count=_WARPGROUP)
                    T.copy(c_tiles[consumer], c[at[0] + consumer * rows, at[1] + piece * width])

    @T.macro
    def share_out(c, a_tiles, b_tiles, c_tiles, sums, full, empty, at, block, thread, consumer):  # noqa: ANN001, ANN202
        if consumer == consumers - 1:
            consume(c, a_tiles, b_tiles, c_tiles, sums, full, empty, at, block, thread, consumer)
        else:
            if thread < _WARPGROUP * (consumer + 2):
                consume(c, a_tiles, b_tiles, c_tiles, sums, full, empty, at, block, thread, consumer)
            else:
                share_out(c, a_tiles, b_tiles, c_tiles, sums, full, empty, at, block, thread, consumer + 1)

    @T.prim_func
    def gemm(a: T.Tensor((m, k), dtype), b: T.Tensor(product.b_shape, dtype), c: T.Tensor((m, n), dtype)):  # noqa: ANN202
        with T.Kernel(grid, threads=threads) as block:
            a_tiles = T.alloc_shared((consumers, stages, rows, block_k), dtype)
            b_tiles = T.alloc_shared((stages, *product.b_tile(block_n, block_k)), dtype)
            c_tiles = [T.alloc_shared((rows, width), dtype) for _ in range(consumers)]
            sums = [T.alloc_fragment((rows, block_n), "float32") for _ in range(consumers)]
            full = T.alloc_barrier([_WARPGROUP] * stages)
            # one thread of each consuming warp frees a stage
            empty = T.alloc_barrier([_WARPGROUP // 32 * consumers] * stages)
            at = T.alloc_local((2,), "int32")
            thread = T.get_thread_binding()
            if thread < _WARPGROUP:
                produce(a, b, a_tiles, b_tiles, full, empty, at, block)
            else:
                share_out(c, a_tiles, b_tiles, c_tiles, sums, full, empty, at, block, thread, 0)

    return gemm


def plain(product: Product, *, block_m: int, block_n: int, block_k: int, stages: int, panel: int) -> T.PrimFunc:
    """One tile of C a block in float32 on the ordinary cores: the tensor cores would round the inputs to TF32.

    256 threads in 16 rows and 16 columns; a thread sums block_m / 16 rows of its own by columns that are 16 apart (B is [n, k]) or
    quadruples 64 apart (B is [k, n]), so that its reads of shared memory are 16 bytes wide and spread over the banks.
    """
    m, n, k, nt = product.m, product.n, product.k, product.nt
    high, wide = block_m // 16, block_n // 16
    # a pitch of 4 more than a multiple of 8 puts the 16-byte reads of 8 rows into different banks
    pitch = block_k + 4
    b_pitch = pitch if nt else block_n

    @T.prim_func
    def gemm(a: T.Tensor((m, k), "float32"), b: T.Tensor(product.b_shape, "float32"), c: T.Tensor((m, n), "float32")):  # noqa: ANN202
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=256) as (column, row):
            a_tile = T.alloc_shared((block_m, block_k), "float32")
            b_tile = T.alloc_shared(product.b_tile(block_n, block_k), "float32")
            T.annotate_layout(
                {
                    a_tile: T.Layout((block_m, block_k), lambda i, j: i * pitch + j),
                    b_tile: T.Layout(product.b_tile(block_n, block_k), lambda i, j: i * b_pitch + j),
                }
            )
            left = T.alloc_local((high, 4), "float32")
            right = T.alloc_local((wide, 4), "float32")
            sums = T.alloc_local((high, wide), "float32")
            thread = T.get_thread_binding()
            T.use_swizzle(panel, enable=panel > 1)
            for i, j in T.grid(high, wide):
                sums[i, j] = 0.0
            for step in T.Pipelined(T.ceildiv(k, block_k), num_stages=stages):
                T.copy(a[row * block_m, step * block_k], a_tile)
                if nt:
                    T.copy(b[column * block_n, step * block_k], b_tile)
                else:
                    T.copy(b[step * block_k, column * block_n], b_tile)
                for inner in T.serial(block_k // 4):
                    for i in T.unroll(high):
                        for v in T.vectorized(4):
                            left[i, v] = a_tile[thread // 16 * high + i, inner * 4 + v]
                    if nt:
                        for j in T.unroll(wide):
                            for v in T.vectorized(4):
                                right[j, v] = b_tile[thread % 16 + j * 16, inner * 4 + v]
                    else:
                        for j in T.unroll(wide):
                            for v in T.vectorized(4):
                                right[j, v] = b_tile[inner * 4 + j % 4, j // 4 * 64 + thread % 16 * 4 + v]
                    for v in T.unroll(4):
                        for i in T.unroll(high):
                            for j in T.unroll(wide):
                                if nt:
                                    sums[i, j] += left[i, v] * right[j, v]
                                else:
                                    sums[i, j] += left[i, v] * right[j // 4 * 4 + v, j % 4]
            for i in T.unroll(high):
                for j in T.unroll(wide):
                    at_m = row * block_m + thread // 16 * high + i
                    at_n = column * block_n + (thread % 16 + j * 16 if nt else j // 4 * 64 + thread % 16 * 4 + j % 4)
                    if at_m < m and at_n < n:
                        c[at_m, at_n] = sums[i, j]

    return gemm

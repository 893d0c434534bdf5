"""The matrix products in TileLang: pipelined by the compiler, scheduled by hand around tensor maps, and plain float32."""

from dataclasses import dataclass

import tilelang.language as T

from kerneldyno.backends.tilelang import _overlap


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
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=warpgroups * _overlap.WARPGROUP) as (column, row):
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
    """Tiles of C in turn on `blocks` blocks (0: one a tile), as `_overlap` schedules them; the consumers share a tile's rows out.

    The consumers write a tile in `pieces` column pieces through shared memory. Needs row pitches that are multiples of 16 bytes.
    """
    m, n, k, nt, dtype = product.m, product.n, product.k, product.nt, product.dtype
    tiles_m, tiles_n = -(-m // block_m), -(-n // block_n)
    tiles = tiles_m * tiles_n
    grid = min(tiles, blocks or tiles)
    rounds = -(-tiles // grid)
    steps = -(-k // block_k)
    rows = block_m // consumers
    width = block_n // pieces
    pipe = _overlap.Pipeline(stages, steps, consumers, rows, block_n, nt)
    multiply = _overlap.multiplying(pipe)
    producer_registers, consumer_registers = _overlap.registers(consumers)

    @T.macro
    def place(tile, at):  # noqa: ANN001, ANN202
        row, column = _overlap.place(tile, tiles_m, tiles_n, panel)
        at[0] = row * block_m
        at[1] = column * block_n

    @T.macro
    def load(operands, step, slot):  # noqa: ANN001, ANN202
        a, b, a_tiles, b_tiles, full, at = operands
        for consumer in T.unroll(consumers):
            T.tma_copy(
                a[at[0] + consumer * rows : at[0] + (consumer + 1) * rows, step * block_k : (step + 1) * block_k],
                a_tiles[consumer, slot, :, :],
                barrier=full[slot],
            )
        if nt:
            T.tma_copy(b[at[1] : at[1] + block_n, step * block_k : (step + 1) * block_k], b_tiles[slot, :, :], barrier=full[slot])
        else:
            T.tma_copy(b[step * block_k : (step + 1) * block_k, at[1] : at[1] + block_n], b_tiles[slot, :, :], barrier=full[slot])
        T.barrier_arrive(full[slot])

    fill = _overlap.filling(pipe, load)

    @T.macro
    def produce(operands, empty, at, block):  # noqa: ANN001, ANN202
        T.dec_max_nreg(producer_registers)
        for turn in T.serial(rounds):
            if turn * grid + block < tiles:
                place(turn * grid + block, at)
                fill(operands, empty, turn * steps)

    @T.macro
    def consume(operands, thread, consumer):  # noqa: ANN001, ANN202
        c, a_tiles, b_tiles, c_tiles, sums, full, empty, at, block = operands
        T.inc_max_nreg(consumer_registers)
        for turn in T.serial(rounds):
            if turn * grid + block < tiles:
                place(turn * grid + block, at)
                multiply(a_tiles, b_tiles, sums[consumer], full, empty, turn * steps, thread, consumer)
                for piece in T.unroll(pieces):
                    if pieces == 1:
                        T.copy(sums[consumer], c_tiles[consumer])
                    else:
                        T.copy(sums[consumer][:, piece * width : (piece + 1) * width], c_tiles[consumer])
                    T.fence_proxy_async()
                    T.sync_threads(barrier_id=_overlap.FIRST_FREE_BARRIER + consumer, arrive_count=_overlap.WARPGROUP)
                    T.copy(c_tiles[consumer], c[at[0] + consumer * rows, at[1] + piece * width])

    share_out = _overlap.sharing_out(pipe, consume)

    @T.prim_func
    def gemm(a: T.Tensor((m, k), dtype), b: T.Tensor(product.b_shape, dtype), c: T.Tensor((m, n), dtype)):  # noqa: ANN202
        with T.Kernel(grid, threads=pipe.threads) as block:
            a_tiles = T.alloc_shared((consumers, stages, rows, block_k), dtype)
            b_tiles = T.alloc_shared((stages, *product.b_tile(block_n, block_k)), dtype)
            c_tiles = [T.alloc_shared((rows, width), dtype) for _ in range(consumers)]
            sums = [T.alloc_fragment((rows, block_n), "float32") for _ in range(consumers)]
            full = T.alloc_barrier(pipe.full_arrivals)
            empty = T.alloc_barrier(pipe.empty_arrivals)
            at = T.alloc_local((2,), "int32")
            thread = T.get_thread_binding()
            if thread < _overlap.WARPGROUP:
                produce((a, b, a_tiles, b_tiles, full, at), empty, at, block)
            else:
                share_out((c, a_tiles, b_tiles, c_tiles, sums, full, empty, at, block), thread, 0)

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

"""Attention over many queries in TileLang: a tile of queries against the tiles of keys that it sees, the softmax taken online.

Source: FlashAttention-2 (T. Dao 2023, arXiv 2307.08691) for the order of the loops; FlashAttention-3 (J. Shah et al. 2024, arXiv
2407.08608, sections 3.1 and 3.2) for the producer, the turns that warpgroups take at the tensor cores, and the scores of the next tile
that are multiplied before the values of this one.
"""

from typing import Any

import tilelang.language as T

from kerneldyno.backends.tilelang import _attention
from kerneldyno.backends.tilelang import _overlap


_FIRST_TURN = _overlap.FIRST_FREE_BARRIER
_TILE_WRITTEN = _FIRST_TURN + 4


def place(attention: _attention.Attention, tiles: int, panel: int, index: Any) -> tuple[Any, Any, Any]:
    """Batch, head and tile of the queries: the tiles of `panel` heads go together, so that they share keys in L2; longest first."""
    slices = attention.batch * attention.heads
    band = index // (panel * tiles)
    height = T.min(slices - band * panel, panel)
    inside = index % (panel * tiles)
    tile = inside // height
    if attention.causal:
        tile = tiles - 1 - tile
    slot = band * panel + inside % height
    return slot // attention.heads, slot % attention.heads, tile


def pipelined(attention: _attention.Attention, *, block_m: int, block_n: int, stages: int, panel: int) -> T.PrimFunc:
    """One tile of queries a block; the compiler makes the pipeline, with a producer warpgroup and tensor maps where it may."""
    seq_q, dtype = attention.seq_q, attention.dtype
    group, offset = attention.group, attention.offset
    tiles = -(-seq_q // block_m)
    rows_policy = T.GemmWarpPolicy.FullRow
    soften = _attention.softening(attention, block_m, block_n)
    normalise = _attention.normalising(attention, block_m)
    masked = attention.masked or attention.seq_kv % block_n != 0

    @T.macro
    def attend(q, k, v, o, lse, index):  # noqa: ANN001, ANN202
        q_tile = T.alloc_shared((block_m, attention.dim), dtype)
        k_tile = T.alloc_shared((block_n, attention.dim), dtype)
        v_tile = T.alloc_shared((block_n, attention.dim_v), dtype)
        o_tile = T.alloc_shared((block_m, attention.dim_v), dtype)
        state = _attention.State.allocate(attention, block_m, block_n)
        # a variable: where loops end by an expression of the block's index, TileLang 0.1.15 may conclude that threads diverge in them, and
        # fail ("Cannot lower a required shared-memory sync inside a divergent region")
        tile = T.alloc_var("int32", init=0)
        batch, head, nth = place(attention, tiles, panel, index)
        tile = nth
        low, end, _, _ = attention.span(tile * block_m, block_m, block_n)
        T.copy(attention.rows(q, batch, head, tile * block_m, block_m), q_tile)
        _attention.start(state)
        for step in T.Pipelined(end - low, num_stages=stages):
            T.copy(attention.rows(k, batch, head // group, (low + step) * block_n, block_n), k_tile)
            T.gemm(q_tile, k_tile, state.scores, transpose_B=True, policy=rows_policy, clear_accum=True)
            soften(state, tile * block_m + offset, (low + step) * block_n, masked)
            T.copy(state.scores, state.weights)
            for i, j in T.Parallel(block_m, attention.dim_v):
                state.sums[i, j] *= state.factor[i]
            T.copy(attention.rows(v, batch, head // group, (low + step) * block_n, block_n), v_tile)
            T.gemm(state.weights, v_tile, state.sums, policy=rows_policy)
        normalise(state)
        T.copy(state.sums, o_tile)
        T.copy(o_tile, attention.rows(o, batch, head, tile * block_m, block_m))
        if attention.lse:
            for i in T.Parallel(block_m):
                if tile * block_m + i < seq_q:
                    lse[batch, head, tile * block_m + i] = _attention.logarithm(attention, state.high[i], state.total[i])

    return _attention.kernel(attention, attend, attention.batch * attention.heads * tiles, block_m // _attention.ROWS * _overlap.WARPGROUP)


def specialised(
    attention: _attention.Attention,
    *,
    block_m: int,
    block_n: int,
    stages: int,
    panel: int,
    blocks: int,
    turns: bool,
    reuse_q: bool,
) -> T.PrimFunc:
    """Tiles of queries in turn on `blocks` blocks (0: one a tile): one warp loads, each warpgroup has 64 queries of its own.

    A consumer multiplies the scores of the next tile of keys before the values of this one, and takes the next softmax while the tensor
    cores do the latter. With `turns` the consumers queue their products one after the other, so that one's softmax runs beside the other's
    products. A tile of keys or values has its own barriers: `stages` of each are in flight. With `reuse_q` results leave through the
    shared memory of the queries.
    """
    dim_v, dtype = attention.dim_v, attention.dtype
    group, offset = attention.group, attention.offset
    tiles_m = -(-attention.seq_q // block_m)
    tiles = attention.batch * attention.heads * tiles_m
    grid = min(tiles, blocks or tiles)
    rounds = -(-tiles // grid)
    warpgroups = block_m // _attention.ROWS
    ring = _attention.Ring(attention, block_n, stages, warpgroups)
    fill = _attention.filling(ring)
    multiply_keys, multiply_values = _attention.multiplying(ring)
    allocate = _attention.allocating(ring)
    soften = _attention.softening(attention, block_m, block_n)
    normalise = _attention.normalising(attention, block_m)
    ragged = attention.seq_kv % block_n != 0
    producer_registers, consumer_registers = _overlap.registers(warpgroups)

    @T.macro
    def produce(tensors, q_tile, key_tiles, q_gates, gates, block):  # noqa: ANN001, ANN202
        q, k, v = tensors
        q_full, q_empty = q_gates
        k_full, k_empty, v_full, v_empty = gates
        k_tiles, v_tiles = key_tiles
        count = T.alloc_var("int32", init=0)
        for turn in T.serial(rounds):
            if turn * grid + block < tiles:
                batch, head, tile = place(attention, tiles_m, panel, turn * grid + block)
                low, end, _, _ = attention.span(tile * block_m, block_m, block_n)
                T.barrier_wait(q_empty[0], turn % 2 ^ 1)
                T.tma_copy(
                    attention.rows(q, batch, head, tile * block_m, block_m), q_tile, barrier=q_full[0], leader_scope_threads=_attention.WARP
                )
                T.barrier_arrive(q_full[0])
                # in the order in which they are used: the next keys before these values
                fill(k, k_tiles, k_full, k_empty, count, batch, head // group, (end - 1) * block_n)
                for step in T.serial(end - 1 - low):
                    fill(k, k_tiles, k_full, k_empty, count + 1, batch, head // group, (end - 2 - step) * block_n)
                    fill(v, v_tiles, v_full, v_empty, count, batch, head // group, (end - 1 - step) * block_n)
                    count = count + 1
                fill(v, v_tiles, v_full, v_empty, count, batch, head // group, low * block_n)
                count = count + 1

    @T.macro
    def advance(q_tile, key_tiles, gates, state, count, thread, row, key, masked):  # noqa: ANN001, ANN202
        k_full, k_empty, v_full, v_empty = gates
        if turns:
            T.sync_threads(barrier_id=_FIRST_TURN + thread // _overlap.WARPGROUP - 1, arrive_count=2 * _overlap.WARPGROUP)
        multiply_keys(q_tile, key_tiles[0], state.scores, k_full, count)
        multiply_values(state.weights, key_tiles[1], state.sums, v_full, count - 1)
        if turns:
            T.named_barrier_arrive(_FIRST_TURN + thread // _overlap.WARPGROUP % warpgroups, 2 * _overlap.WARPGROUP)
        T.wait_wgmma(1)
        T.warpgroup_fence_operand(state.scores, num_regs=ring.scores_each)
        _attention.release(k_empty, count % stages, thread)
        soften(state, row, key, masked)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(state.sums, num_regs=ring.sums_each)
        T.warpgroup_fence_operand(state.scores, num_regs=ring.scores_each)
        _attention.release(v_empty, (count - 1) % stages, thread)
        for i, j in T.Parallel(block_m, dim_v):
            state.sums[i, j] *= state.factor[i]
        T.copy(state.scores, state.weights)

    @T.macro
    def consume(tensors, q_tile, o_tile, key_tiles, q_gates, gates, block, thread):  # noqa: ANN001, ANN202
        o, lse = tensors
        q_full, q_empty = q_gates
        k_full, k_empty, v_full, v_empty = gates
        state = _attention.State.allocate(attention, block_m, block_n)
        count = T.alloc_var("int32", init=0)
        tile = T.alloc_var("int32", init=0)  # see `pipelined`
        if turns:
            # the first warpgroup begins
            if thread < 2 * _overlap.WARPGROUP:
                T.named_barrier_arrive(_FIRST_TURN, 2 * _overlap.WARPGROUP)
        for turn in T.serial(rounds):
            if turn * grid + block < tiles:
                batch, head, nth = place(attention, tiles_m, panel, turn * grid + block)
                tile = nth
                row = tile * block_m + offset
                low, end, whole_low, whole_end = attention.span(tile * block_m, block_m, block_n)
                _attention.start(state)
                T.barrier_wait(q_full[0], turn % 2)
                multiply_keys(q_tile, key_tiles[0], state.scores, k_full, count)
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(state.scores, num_regs=ring.scores_each)
                _attention.release(k_empty, count % stages, thread)
                soften(state, row, (end - 1) * block_n, attention.masked or ragged)
                T.copy(state.scores, state.weights)
                count = count + 1
                # from the last tile down: those that a mask cuts, those that are seen whole, and those that a window cuts
                cut = T.max(low, T.min(end - 1, whole_end))
                if attention.masked:
                    for step in T.serial(end - 1 - cut):
                        advance(q_tile, key_tiles, gates, state, count, thread, row, (end - 2 - step) * block_n, True)
                        count = count + 1
                bottom = T.min(cut, T.max(low, whole_low)) if attention.window else low
                for step in T.serial(cut - bottom):
                    advance(q_tile, key_tiles, gates, state, count, thread, row, (cut - 1 - step) * block_n, False)
                    count = count + 1
                if attention.window:
                    for step in T.serial(bottom - low):
                        advance(q_tile, key_tiles, gates, state, count, thread, row, (bottom - 1 - step) * block_n, True)
                        count = count + 1
                multiply_values(state.weights, key_tiles[1], state.sums, v_full, count - 1)
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(state.sums, num_regs=ring.sums_each)
                _attention.release(v_empty, (count - 1) % stages, thread)
                if not reuse_q:
                    _attention.release(q_empty, 0, thread)
                normalise(state)
                T.copy(state.sums, o_tile[:, 0:dim_v])
                T.fence_proxy_async()
                T.sync_threads(barrier_id=_TILE_WRITTEN, arrive_count=ring.threads)
                T.copy(o_tile[:, 0:dim_v], attention.rows(o, batch, head, tile * block_m, block_m))
                if attention.lse:
                    for i in T.Parallel(block_m):
                        if tile * block_m + i < attention.seq_q:
                            lse[batch, head, tile * block_m + i] = _attention.logarithm(attention, state.high[i], state.total[i])
                if reuse_q:
                    T.sync_warp()
                    _attention.release(q_empty, 0, thread)
        if turns:
            # the last warpgroup passed a turn on that nobody takes
            if thread < 2 * _overlap.WARPGROUP:
                T.sync_threads(barrier_id=_FIRST_TURN, arrive_count=2 * _overlap.WARPGROUP)

    @T.macro
    def attend(q, k, v, o, lse, block):  # noqa: ANN001, ANN202
        q_tile = T.alloc_shared((block_m, attention.dim), dtype)
        o_tile = q_tile if reuse_q else T.alloc_shared((block_m, dim_v), dtype)
        key_tiles, gates = allocate()
        q_gates = (T.alloc_barrier([_attention.WARP]), T.alloc_barrier([ring.arrivals]))
        thread = T.get_thread_binding()
        if thread < _overlap.WARPGROUP:
            T.dec_max_nreg(producer_registers)
            if thread < _attention.WARP:
                produce((q, k, v), q_tile, key_tiles, q_gates, gates, block)
        else:
            T.inc_max_nreg(consumer_registers)
            consume((o, lse), q_tile, o_tile, key_tiles, q_gates, gates, block, thread)

    return _attention.kernel(attention, attend, grid, ring.threads + _overlap.WARPGROUP)

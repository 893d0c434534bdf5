"""Attention of few queries in TileLang: the query heads of a key head are the rows of one tile, and blocks share the keys out.

Source: Flash-Decoding (T. Dao, D. Haziza, F. Massa, G. Sizov 2023, pytorch.org/blog/flash-decoding) for the split of the keys.
"""

import tilelang.language as T

from kerneldyno.backends.tilelang import _attention
from kerneldyno.backends.tilelang import _overlap


_COMBINING = 128


def key_tiles(attention: _attention.Attention, block_n: int) -> tuple[int, int]:
    """Return the first tile of keys that a query sees and one past the last; there is at least one."""
    low = max(0, attention.offset - attention.window + 1) // block_n if attention.window else 0
    return min(low, (attention.seq_kv - 1) // block_n), -(-attention.seq_kv // block_n)


def partial_shapes(attention: _attention.Attention, splits: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the float32 results of the splits: o, and the base-2 logarithms of the sums of its weights."""
    rows = attention.seq_q * attention.group
    return (splits, attention.batch, attention.kv_heads, rows, attention.dim_v), (splits, attention.batch, attention.kv_heads, rows)


def split(attention: _attention.Attention, *, block_n: int, stages: int, splits: int) -> T.PrimFunc:
    """A block takes the queries of one key head and one of `splits` parts of the keys; a second kernel combines the parts.

    One warp loads tiles of keys and of values, `stages` of each, through tensor maps, and one warpgroup computes.
    """
    batch_size, kv_heads, group, seq_q = attention.batch, attention.kv_heads, attention.group, attention.seq_q
    dim, dim_v, dtype = attention.dim, attention.dim_v, attention.dtype
    rows = seq_q * group
    low, end = key_tiles(attention, block_n)
    each = -(-(end - low) // splits)
    ring = _attention.Ring(attention, block_n, stages, 1)
    fill = _attention.filling(ring)
    multiply_keys, multiply_values = _attention.multiplying(ring)
    allocate = _attention.allocating(ring)
    soften = _attention.softening(attention, _attention.ROWS, block_n, packed=group)
    normalise = _attention.normalising(attention, _attention.ROWS)
    store = _attention.storing(attention)
    # the last query sees every key that is there unless a window ends it, so that masks cut only the ends of what is seen
    first_whole = -(-max(0, attention.offset + seq_q - attention.window) // block_n) if attention.window else low
    last_whole = (attention.offset + 1 if attention.causal else attention.seq_kv) // block_n
    if attention.window and not attention.causal:
        last_whole = min(attention.seq_kv, attention.offset + attention.window) // block_n
    cut = first_whole > low or last_whole < end
    o_shape, lse_shape = partial_shapes(attention, splits)

    @T.macro
    def take(q, k, v, o, lse, o_part, lse_part, block):  # noqa: ANN001, ANN202
        q_tile = T.alloc_shared((_attention.ROWS, dim), dtype)
        tiles, gates = allocate()
        thread = T.get_thread_binding()
        part = block % splits
        head = block // splits % kv_heads
        batch = block // splits // kv_heads
        first = low + part * each
        count = T.max(0, T.min(each, end - first))
        k_full, k_empty, v_full, v_empty = gates
        if thread < _overlap.WARPGROUP:
            if thread < _attention.WARP:
                for step in T.serial(count):
                    fill(k, tiles[0], k_full, k_empty, step, batch, head, (first + step) * block_n)
                    fill(v, tiles[1], v_full, v_empty, step, batch, head, (first + step) * block_n)
        else:
            state = _attention.State.allocate(attention, _attention.ROWS, block_n)
            _attention.start(state)
            for i, j in T.Parallel(_attention.ROWS, dim):
                q_tile[i, j] = T.if_then_else(
                    i < rows, attention.element(q, batch, head * group + i % group, T.min(i // group, seq_q - 1), j), T.cast(0, dtype)
                )
            T.fence_proxy_async()
            T.sync_threads(barrier_id=_overlap.FIRST_FREE_BARRIER, arrive_count=_overlap.WARPGROUP)
            for step in T.serial(count):
                tile = first + step
                multiply_keys(q_tile, tiles[0], state.scores, k_full, step)
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(state.scores, num_regs=ring.scores_each)
                _attention.release(k_empty, step % stages, thread)
                soften(state, attention.offset, tile * block_n, T.Or(tile < first_whole, tile >= last_whole) if cut else False)
                for i, j in T.Parallel(_attention.ROWS, dim_v):
                    state.sums[i, j] *= state.factor[i]
                T.copy(state.scores, state.weights)
                multiply_values(state.weights, tiles[1], state.sums, v_full, step)
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(state.sums, num_regs=ring.sums_each)
                _attention.release(v_empty, step % stages, thread)
            normalise(state)
            if splits == 1:
                for i, j in T.Parallel(_attention.ROWS, dim_v):
                    if i < rows:
                        store(o, batch, head * group + i % group, i // group, j, state.sums[i, j])
                if attention.lse:
                    for i in T.Parallel(_attention.ROWS):
                        if i < rows:
                            lse[batch, head * group + i % group, i // group] = _attention.logarithm(
                                attention, state.high[i], state.total[i]
                            )
            else:
                for i, j in T.Parallel(_attention.ROWS, dim_v):
                    if i < rows:
                        o_part[part, batch, head, i, j] = state.sums[i, j]
                for i in T.Parallel(_attention.ROWS):
                    if i < rows:
                        lse_part[part, batch, head, i] = _attention.logarithm(attention, state.high[i], state.total[i]) * _attention.LOG2_E

    @T.macro
    def combine(o, lse, o_part, lse_part, index):  # noqa: ANN001, ANN202
        row = index % rows
        head = index // rows % kv_heads
        batch = index // rows // kv_heads
        logs = T.alloc_shared((splits,), "float32")
        sums = T.alloc_fragment((dim_v,), "float32")
        peak = T.alloc_var("float32", init=_attention.LOWEST)
        total = T.alloc_var("float32", init=0.0)
        for s in T.Parallel(splits):
            logs[s] = lse_part[s, batch, head, row]
        for s in T.serial(splits):
            peak = T.max(peak, logs[s])
        for s in T.serial(splits):
            total = total + T.exp2(logs[s] - peak)
        T.clear(sums)
        for s in T.serial(splits):
            for j in T.Parallel(dim_v):
                sums[j] += o_part[s, batch, head, row, j] * T.exp2(logs[s] - peak)
        for j in T.Parallel(dim_v):
            # where no split saw a key every sum is 0
            store(o, batch, head * group + row % group, row // group, j, sums[j] / T.max(total, 1e-30))
        if attention.lse:
            if T.get_thread_binding() == 0:
                lse[batch, head * group + row % group, row // group] = T.if_then_else(
                    total > 0.0, (peak + T.log2(total)) * _attention.LN_2, -T.infinity("float32")
                )

    if splits == 1:

        @T.macro
        def attend(q, k, v, o, lse, block):  # noqa: ANN001, ANN202
            take(q, k, v, o, lse, None, None, block)

        return _attention.kernel(attention, attend, batch_size * kv_heads, 2 * _overlap.WARPGROUP)

    shapes = attention.shapes
    blocks, outputs = batch_size * kv_heads * splits, batch_size * kv_heads * rows

    if attention.lse:

        @T.prim_func
        def with_lse(  # noqa: ANN202
            q: T.Tensor(shapes["q"], dtype),
            k: T.Tensor(shapes["k"], dtype),
            v: T.Tensor(shapes["v"], dtype),
            o: T.Tensor(shapes["o"], dtype),
            lse: T.Tensor(shapes["lse"], "float32"),
            o_part: T.Tensor(o_shape, "float32"),
            lse_part: T.Tensor(lse_shape, "float32"),
        ):
            with T.Kernel(blocks, threads=2 * _overlap.WARPGROUP) as block:
                take(q, k, v, o, lse, o_part, lse_part, block)
            with T.Kernel(outputs, threads=_COMBINING) as index:
                combine(o, lse, o_part, lse_part, index)

        return with_lse

    @T.prim_func
    def without_lse(  # noqa: ANN202
        q: T.Tensor(shapes["q"], dtype),
        k: T.Tensor(shapes["k"], dtype),
        v: T.Tensor(shapes["v"], dtype),
        o: T.Tensor(shapes["o"], dtype),
        o_part: T.Tensor(o_shape, "float32"),
        lse_part: T.Tensor(lse_shape, "float32"),
    ):
        with T.Kernel(blocks, threads=2 * _overlap.WARPGROUP) as block:
            take(q, k, v, o, None, o_part, lse_part, block)
        with T.Kernel(outputs, threads=_COMBINING) as index:
            combine(o, None, o_part, lse_part, index)

    return without_lse

// O = softmax(scale * Q K^T, softcap, mask) V on Hopper: copies by tensor map, wgmma, warpgroups with roles.
// Constants: BATCH, HEADS, KV_HEADS, SEQ_Q, SEQ_KV, HEAD_DIM, HEAD_DIM_V, CAUSAL, WINDOW (0: none), SOFTCAPPED, BLOCK_M,
// BLOCK_N, STAGES, OVERLAP, PINGPONG, GROUP_HEADS. Macros: SCALE_LOG2 (what a score, or its tanh, is multiplied by, log2(e)
// folded in), SOFTCAP_SCALE (scale / softcap), LSE (1: the logarithms of the sums are written too).
//
// A block computes BLOCK_M rows of one head. One warp copies: Q once, then tiles of K and V, each into STAGES slots that two
// barriers a slot pass back and forth. Each other warpgroup has 64 rows, with scores, probabilities and results in registers.
// With OVERLAP the scores of tile i + 1 are multiplied before the values of tile i, so that the tensor cores have the values
// to do during the softmax of i + 1; with PINGPONG the warpgroups take turns at the tensor cores.
// Source of the schedule: Shah et al., "FlashAttention-3", arXiv 2407.08608.

constexpr int CONSUMERS = BLOCK_M / 64, THREADS = 128 * (CONSUMERS + 1);
constexpr int PRODUCER_REGISTERS = CONSUMERS == 1 ? 56 : CONSUMERS == 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 1 ? 256 : CONSUMERS == 2 ? 240 : 160;
constexpr int M_TILES = (SEQ_Q + BLOCK_M - 1) / BLOCK_M;
constexpr int OFFSET = SEQ_KV - SEQ_Q;  // query i stands at key position i + OFFSET
constexpr int SLABS = (HEAD_DIM + 63) / 64, V_SLABS = (HEAD_DIM_V + 63) / 64;  // 64 elements of each row of a tile: one pattern wide
constexpr int SCORE_STEPS = HEAD_DIM / 16, VALUE_STEPS = BLOCK_N / 16;
constexpr int SCORES = BLOCK_N / 8, RESULTS = V_SLABS * 8;  // 64 x 8 parts of a warpgroup's sums
constexpr int WARPGROUP_ROWS = 64 * SWIZZLE_ROW;            // bytes of a slab that are one warpgroup's
constexpr int Q_SLAB = BLOCK_M * SWIZZLE_ROW, KV_SLAB = BLOCK_N * SWIZZLE_ROW;
constexpr int Q_BYTES = SLABS * Q_SLAB, K_BYTES = SLABS * KV_SLAB, V_BYTES = V_SLABS * KV_SLAB;
constexpr int O_BYTES = V_SLABS * Q_SLAB;  // O takes the place of Q
constexpr int K_AT = Q_BYTES > O_BYTES ? Q_BYTES : O_BYTES, V_AT = K_AT + STAGES * K_BYTES, BARRIERS_AT = V_AT + STAGES * V_BYTES;

enum SlotBarrier { Q_FULL, K_FULL, K_EMPTY = K_FULL + STAGES, V_FULL = K_EMPTY + STAGES, V_EMPTY = V_FULL + STAGES, BARRIERS = V_EMPTY + STAGES };
enum NamedBarrier { TURN = 1, STORE = TURN + CONSUMERS };  // one of each a warpgroup

constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int greatest(int a, int b) { return a > b ? a : b; }

// The keys that a query at `position` sees: from first_key to before end_key.
__device__ inline int first_key(int position) { return WINDOW > 0 ? greatest(0, position - WINDOW + 1) : 0; }

__device__ inline int end_key(int position) { return CAUSAL ? least(SEQ_KV, position + 1) : WINDOW > 0 ? least(SEQ_KV, position + WINDOW) : SEQ_KV; }

// What a block computes, and the tiles of keys that any of its rows sees, of which the last comes first.
struct Task {
    int batch, head, first_row, first_tile, tiles;

    __device__ Task(int block) {
        // blocks that run together share GROUP_HEADS heads, so that keys and values stay in L2; of these the rows with most to see come first
        constexpr int ALL_HEADS = BATCH * HEADS;
        const int first = block / (GROUP_HEADS * M_TILES) * GROUP_HEADS, heads = least(GROUP_HEADS, ALL_HEADS - first);
        const int place = block % (GROUP_HEADS * M_TILES), m_tile = place / heads;
        batch = (first + place % heads) / HEADS;
        head = (first + place % heads) % HEADS;
        first_row = (CAUSAL ? M_TILES - 1 - m_tile : m_tile) * BLOCK_M;
        const int begin = first_key(first_row + OFFSET), end = end_key(least(first_row + BLOCK_M, SEQ_Q) - 1 + OFFSET);
        first_tile = begin / BLOCK_N;
        tiles = end > begin ? (end - 1) / BLOCK_N + 1 - first_tile : 0;
    }

    __device__ int tile(int i) const { return first_tile + tiles - 1 - i; }
};

template <int COUNT, int ROWS>
__device__ inline void copy_slabs(unsigned shared, const TensorMap& map, unsigned barrier, int row, int head, int batch) {
    barrier_expect(barrier, COUNT * ROWS * SWIZZLE_ROW);
#pragma unroll
    for (int slab = 0; slab < COUNT; slab++) copy_box(shared + slab * ROWS * SWIZZLE_ROW, map, barrier, slab * 64, row, head, batch);
}

__device__ inline void produce(const Task& task, unsigned shared, const TensorMap& q, const TensorMap& k, const TensorMap& v) {
    const auto barrier = [&](int index) { return shared + BARRIERS_AT + index * 8; };
    const int kv_head = task.head / (HEADS / KV_HEADS);
    Ring k_ring, v_ring;
    const auto copy_k = [&](int i) {
        barrier_wait(barrier(K_EMPTY + k_ring.slot), k_ring.parity ^ 1);
        copy_slabs<SLABS, BLOCK_N>(shared + K_AT + k_ring.slot * K_BYTES, k, barrier(K_FULL + k_ring.slot), task.tile(i) * BLOCK_N, kv_head, task.batch);
        k_ring.advance();
    };
    if (task.tiles == 0) return;
    copy_slabs<SLABS, BLOCK_M>(shared, q, barrier(Q_FULL), task.first_row, task.head, task.batch);
    copy_k(0);
#pragma unroll 1
    for (int i = 0; i < task.tiles; i++) {
        if (i + 1 < task.tiles) copy_k(i + 1);  // is needed before the values of i
        barrier_wait(barrier(V_EMPTY + v_ring.slot), v_ring.parity ^ 1);
        copy_slabs<V_SLABS, BLOCK_N>(shared + V_AT + v_ring.slot * V_BYTES, v, barrier(V_FULL + v_ring.slot), task.tile(i) * BLOCK_N, kv_head, task.batch);
        v_ring.advance();
    }
}

__device__ inline void consume(const Task& task, unsigned shared, int warpgroup, const TensorMap& o, float* lse) {
    const auto barrier = [&](int index) { return shared + BARRIERS_AT + index * 8; };
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const int warpgroup_row = task.first_row + warpgroup * 64, thread_row = thread / 32 * 16 + lane / 4;  // and the row 8 below
    float scores[SCORES][4], results[RESULTS][4] = {};
    unsigned probabilities[VALUE_STEPS][4];
    Rows rows = no_rows();
    Ring k_ring, v_ring;

    const auto multiply_scores = [&] {
        barrier_wait(barrier(K_FULL + k_ring.slot), k_ring.parity);
        const uint64 q_at = rows_descriptor(hold_register(shared + warpgroup * WARPGROUP_ROWS));
        const uint64 k_at = rows_descriptor(hold_register(shared + K_AT + k_ring.slot * K_BYTES));
        hold_registers(scores);
        warpgroup_fence();
#pragma unroll
        for (int step = 0; step < SCORE_STEPS; step++) {
            const int slab = step / 4, byte = step % 4 * 32;
            const uint64 a = descriptor_after(q_at, slab * Q_SLAB + byte), b = descriptor_after(k_at, slab * KV_SLAB + byte);
            if (step == 0) {
                multiply_shared<BLOCK_N, false, false>(scores, a, b);
            } else {
                multiply_shared<BLOCK_N, true, false>(scores, a, b);
            }
        }
        warpgroup_commit();
    };
    const auto multiply_values = [&] {
        barrier_wait(barrier(V_FULL + v_ring.slot), v_ring.parity);
        const uint64 v_at = columns_descriptor(hold_register(shared + V_AT + v_ring.slot * V_BYTES), KV_SLAB);
        hold_registers(results);
        warpgroup_fence();
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++) {
            multiply_registers<RESULTS * 8, true, true>(results, probabilities[step], descriptor_after(v_at, step * 2 * SWIZZLE_ATOM));
        }
        warpgroup_commit();
    };
    const auto scores_done = [&] {
        hold_registers(scores);
        if (lane == 0) barrier_arrive(barrier(K_EMPTY + k_ring.slot));
        k_ring.advance();
    };
    const auto values_done = [&] {
        hold_registers(results);
        if (lane == 0) barrier_arrive(barrier(V_EMPTY + v_ring.slot));
        v_ring.advance();
    };
    const auto mask = [&](int i) {
        const int first = task.tile(i) * BLOCK_N, lowest = warpgroup_row + OFFSET, highest = lowest + 63;
        if (first + BLOCK_N <= end_key(lowest) && (WINDOW == 0 || first >= first_key(highest))) return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int position = lowest + thread_row + half * 8, column = first + lane % 4 * 2;
            const int begin = first_key(position) - column, end = end_key(position) - column;
#pragma unroll
            for (int part = 0; part < SCORES; part++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    if (part * 8 + j >= end || (WINDOW > 0 && part * 8 + j < begin)) scores[part][half * 2 + j] = minus_infinity();
                }
            }
        }
    };
    const auto softmax = [&](int i, float(&factor)[2]) {
        if constexpr (SOFTCAPPED) {
#pragma unroll
            for (int part = 0; part < SCORES; part++) {
#pragma unroll
                for (int j = 0; j < 4; j++) scores[part][j] = tanh_fast(scores[part][j] * SOFTCAP_SCALE);
            }
        }
        mask(i);
        update_rows(scores, SCALE_LOG2, rows, factor);
    };
    const auto round_probabilities = [&] {
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++) powers_as_a(probabilities[step], scores, step);
    };
    const auto take_turn = [&] {
        if constexpr (PINGPONG) threads_sync(TURN + warpgroup, 256);
    };
    const auto pass_turn = [&](int i) {
        if constexpr (PINGPONG) {
            const bool last = warpgroup == CONSUMERS - 1;
            if (!last || i + 1 < task.tiles) threads_arrive(TURN + (last ? 0 : warpgroup + 1), 256);
        }
    };

    if (task.tiles > 0) {
        float factor[2];
        if constexpr (PINGPONG) {
            if (warpgroup == CONSUMERS - 1) threads_arrive(TURN, 256);
        }
        barrier_wait(barrier(Q_FULL), 0);
        if constexpr (OVERLAP) {
            take_turn();
            multiply_scores();
            pass_turn(0);
            warpgroup_wait<0>();
            scores_done();
            softmax(0, factor);
            round_probabilities();
#pragma unroll 1
            for (int i = 1; i < task.tiles; i++) {
                take_turn();
                multiply_scores();
                multiply_values();
                pass_turn(i);
                warpgroup_wait<1>();
                scores_done();
                softmax(i, factor);
                stay_before(rows.total[0] + rows.total[1], shared);  // else the softmax is put after the wait for the values
                warpgroup_wait<0>();
                values_done();
                scale_rows(results, factor);
                round_probabilities();
            }
            multiply_values();
            warpgroup_wait<0>();
            values_done();
        } else {
#pragma unroll 1
            for (int i = 0; i < task.tiles; i++) {
                take_turn();
                multiply_scores();
                warpgroup_wait<0>();
                scores_done();
                pass_turn(i);
                softmax(i, factor);
                scale_rows(results, factor);
                round_probabilities();
                multiply_values();
                warpgroup_wait<0>();
                values_done();
            }
        }
    }

    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float total = row_sum(rows.total[half]);
        inverse[half] = row_factor(total);
#if LSE
        const int row = warpgroup_row + thread_row + half * 8;
        float* const target = lse + (task.batch * HEADS + task.head) * static_cast<long long>(SEQ_Q) + row;
        if (lane % 4 == 0 && row < SEQ_Q) *target = row_log_sum(rows.maximum[half], total, SCALE_LOG2);
#endif
    }
    scale_rows(results, inverse);
    // O goes where this warpgroup's rows of Q were, once all its warps are done with them, and out by tensor map
    const unsigned o_at = shared + warpgroup * WARPGROUP_ROWS;
    threads_sync(STORE + warpgroup, 128);
#pragma unroll
    for (int part = 0; part < RESULTS; part++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const unsigned place = swizzled_place(thread_row + half * 8, part % 8 * 16 + lane % 4 * 4);
            store_shared(o_at + part / 8 * Q_SLAB + place, pack_pair(results[part][half * 2], results[part][half * 2 + 1]));
        }
    }
    copy_fence();
    threads_sync(STORE + warpgroup, 128);
    if (thread == 0 && warpgroup_row < SEQ_Q) {
#pragma unroll
        for (int slab = 0; slab < V_SLABS; slab++) store_box(o, o_at + slab * Q_SLAB, slab * 64, warpgroup_row, task.head, task.batch);
        store_box_wait();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_prefill(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o
#if LSE
    , float* __restrict__ lse
#endif
) {
#if !LSE
    float* const lse = nullptr;
#endif
    const unsigned shared = shared_address(shared_memory());
    if (threadIdx.x == 0) {
        tensor_map_prefetch(q);
        tensor_map_prefetch(k);
        tensor_map_prefetch(v);
        // a slot is full when the copying thread has arrived and all bytes have, empty when every warp that multiplies has
        for (int index = 0; index < BARRIERS; index++) {
            const bool empty = (index >= K_EMPTY && index < V_FULL) || index >= V_EMPTY;
            barrier_init(shared + BARRIERS_AT + index * 8, empty ? CONSUMERS * 4 : 1);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const Task task(blockIdx.x);
    const int role = from_first_lane(threadIdx.x / 128);  // the compiler then knows it to be the same in a warp
    if (role == 0) {
        registers_give<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(task, shared, q, k, v);
    } else {
        registers_take<CONSUMER_REGISTERS>();
        consume(task, shared, role - 1, o, lse);
    }
}

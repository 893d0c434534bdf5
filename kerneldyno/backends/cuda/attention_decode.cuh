// O = softmax(scale * Q @ K.T) @ V for few queries over a long cache of keys and values: limited by reading the cache once.
// Constants: BATCH, HEADS, KV_HEADS, SEQ_Q, SEQ_KV, HEAD_DIM, HEAD_DIM_V, CAUSAL, WINDOW (0: none), SOFTCAP (whether), LSE,
// HEADS_FIRST (true: [batch, heads, seq, dim]; false: [batch, seq, heads, dim]), BLOCK_N, WARPS_N, STAGES, NUM_SPLITS,
// BLOCKS_PER_SM; macros PRE_SCALE (what a score is multiplied by before tanh) and SCALE (what takes it to powers of two).
//
// A block takes one kv head of one batch entry, and one of NUM_SPLITS parts of the keys. All queries of all query heads that
// read this kv head are the rows of one tile of Q: row r is query r / GROUP of head r % GROUP. Tiles of BLOCK_N keys stream
// through STAGES slots of shared memory; each warp takes 16 rows and its slice of the keys of every tile, with a softmax and
// sums of its own, which the block merges at its end. With more than one split it writes its part in fp32, and the logarithm
// of its sum; `combine` then merges the parts.
// Source of the split: Dao et al., "Flash-Decoding for long-context inference", crfm.stanford.edu/2023/10/12/flashdecoding.html.

constexpr int GROUP = HEADS / KV_HEADS, ROWS = SEQ_Q * GROUP, WARPS_M = (ROWS + 15) / 16, PADDED_ROWS = WARPS_M * 16;
constexpr int THREADS = WARPS_M * WARPS_N * 32;
constexpr int SLICE = BLOCK_N / WARPS_N;
constexpr int OFFSET = SEQ_KV - SEQ_Q;  // the key at which the first query stands
constexpr int FIRST_KEY = WINDOW > 0 && OFFSET - WINDOW + 1 > 0 ? OFFSET - WINDOW + 1 : 0;
constexpr int TILES = (SEQ_KV - FIRST_KEY + BLOCK_N - 1) / BLOCK_N;
constexpr int Q_BYTES = PADDED_ROWS * HEAD_DIM * 2, K_BYTES = BLOCK_N * HEAD_DIM * 2, STAGE_BYTES = K_BYTES + BLOCK_N * HEAD_DIM_V * 2;
constexpr bool HOLD_Q = HEAD_DIM <= 128;  // in registers; else it is read from shared memory again for every tile
constexpr int MERGE_PITCH = HEAD_DIM_V + 8;  // floats; the 8 put the rows that a warp writes at once in different banks

// Which row of a tensor [.., dim] belongs to an entry of the batch, a position in a sequence of `length`, and a head of `heads`.
__device__ inline long long row_index(int batch, int position, int head, int length, int heads) {
    return HEADS_FIRST ? (static_cast<long long>(batch) * heads + head) * length + position : (static_cast<long long>(batch) * length + position) * heads + head;
}

__device__ inline bool visible(int query, int key) {
    const int place = query + OFFSET;
    if (key >= SEQ_KV || (CAUSAL && key > place)) return false;
    return WINDOW == 0 || (key > place - WINDOW && (CAUSAL || key < place + WINDOW));
}

// Whether some row of the tile that begins at `key` does not see some key of it.
__device__ inline bool needs_mask(int key) {
    const bool beyond = key + BLOCK_N > SEQ_KV || (CAUSAL && key + BLOCK_N - 1 > OFFSET);
    return beyond || (WINDOW > 0 && (key <= SEQ_KV - 1 - WINDOW || (!CAUSAL && key + BLOCK_N - 1 >= OFFSET + WINDOW)));
}

// Addresses in one slot of what this thread copies or loads of K and V, carried from slot to slot.
struct Slot {
    unsigned k, v;
    int number;

    __device__ void next() {
        number = number + 1 == STAGES ? 0 : number + 1;
        const unsigned step = number == 0 ? -(STAGES - 1) * STAGE_BYTES : STAGE_BYTES;
        k += step;
        v += step;
    }
};

#if NUM_SPLITS == 1
typedef element Result;
#else
typedef float Result;
#endif

__device__ inline void store_result(element* target, const float (&value)[8]) { store_packet<Store::cached>(target, pack(value)); }

__device__ inline void store_result(float* target, const float (&value)[8]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Packet p;
#pragma unroll
        for (int i = 0; i < 4; i++) p.word[i] = float_as_word(value[half * 4 + i]);
        store_packet<Store::cached>(target + half * 4, p);
    }
}

// With one split `result` is O and `logs`, where LSE, its lse [batch, heads, seq]. Else `result` is [splits, rows of O, dim],
// and `logs` [splits, rows of O] the logarithms of the sums to base 2.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
attention_decode(const element* __restrict__ q, const element* __restrict__ k, const element* __restrict__ v, Result* __restrict__ result, float* __restrict__ logs) {
    unsigned char* const shared = shared_memory();
    const unsigned q_tile = shared_address(shared), slots = q_tile + Q_BYTES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_row = warp / WARPS_N * 16, slice = warp % WARPS_N;

    // neighbouring blocks take the heads of the same keys, which lie beside each other where the heads are not first
    const int kv_head = blockIdx.x % KV_HEADS, split = blockIdx.x / KV_HEADS % NUM_SPLITS, batch = blockIdx.x / (KV_HEADS * NUM_SPLITS);
    const int first_tile = static_cast<long long>(TILES) * split / NUM_SPLITS, end_tile = static_cast<long long>(TILES) * (split + 1) / NUM_SPLITS;

    typedef Copies<THREADS, PADDED_ROWS, HEAD_DIM> CopiesQ;
    typedef Copies<THREADS, BLOCK_N, HEAD_DIM> CopiesK;
    typedef Copies<THREADS, BLOCK_N, HEAD_DIM_V> CopiesV;
    constexpr long long KEYS_APART = HEADS_FIRST ? 1 : KV_HEADS;  // rows
    const long long first_key_row = row_index(batch, FIRST_KEY, kv_head, SEQ_KV, KV_HEADS);
    const EvenRows<CopiesK, KEYS_APART * HEAD_DIM, true> rows_of_k(k + first_key_row * HEAD_DIM, SEQ_KV - FIRST_KEY);
    const EvenRows<CopiesV, KEYS_APART * HEAD_DIM_V, true> rows_of_v(v + first_key_row * HEAD_DIM_V, SEQ_KV - FIRST_KEY);
    Slot write = {slots + CopiesK::first_place(), slots + K_BYTES + CopiesV::first_place(), 0};
    const auto copy = [&](int tile) {
        copy_tile<CopiesK, HEAD_DIM, 1>(write.k, rows_of_k.after(tile * BLOCK_N), 0, 0);
        copy_tile<CopiesV, HEAD_DIM_V, 1>(write.v, rows_of_v.after(tile * BLOCK_N), 0, 0);
    };

    // Q travels with the first tile; every tile is one group of copies, an empty one past the last
    const auto row_of_q = [&](int i) {
        const int row = CopiesQ::row(i);
        const long long index = row_index(batch, row / GROUP, kv_head * GROUP + row % GROUP, SEQ_Q, HEADS);
        return Source{q + index * HEAD_DIM + CopiesQ::chunk(i) * 8, row < ROWS};
    };
    copy_tile<CopiesQ, HEAD_DIM, 1>(q_tile + CopiesQ::first_place(), row_of_q, 0, 0);
#pragma unroll
    for (int ahead = 0; ahead < STAGES - 1; ahead++) {
        if (first_tile + ahead < end_tile) copy(first_tile + ahead);
        copy_async_commit();
        write.next();
    }

    const unsigned q_place = q_tile + place_a<HEAD_DIM>(warp_row);
    Slot read = {slots + place_b_rows<HEAD_DIM>(slice * SLICE), slots + K_BYTES + place_b_columns<HEAD_DIM_V>(slice * SLICE, 0), 0};
    unsigned held[HOLD_Q ? HEAD_DIM / 16 : 1][4];
    float sum[HEAD_DIM_V / 8][4] = {};
    Rows rows = no_rows();
#pragma unroll 1
    for (int tile = first_tile; tile < end_tile; tile++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();  // the tile has arrived for all, and all are done with the one before it, whose slot may be filled
        if (tile + STAGES - 1 < end_tile) copy(tile + STAGES - 1);
        copy_async_commit();
        write.next();
        if constexpr (HOLD_Q) {
            if (tile == first_tile) {
#pragma unroll
                for (int step = 0; step < HEAD_DIM / 16; step++) load_operand<HEAD_DIM>(held[step], q_place, 0, step * 16);
            }
        }

        float score[SLICE / 8][4] = {};
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++) {
            unsigned a[4], b[4];
            if constexpr (!HOLD_Q) load_operand<HEAD_DIM>(a, q_place, 0, step * 16);
#pragma unroll
            for (int j = 0; j < SLICE / 16; j++) {
                load_operand<HEAD_DIM>(b, read.k, j * 16, step * 16);
#pragma unroll
                for (int half = 0; half < 2; half++) multiply_add(score[j * 2 + half], HOLD_Q ? held[HOLD_Q ? step : 0] : a, b[half * 2], b[half * 2 + 1]);
            }
        }

        if constexpr (SOFTCAP) {
#pragma unroll
            for (int j = 0; j < SLICE / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) score[j][i] = tanh_fast(score[j][i] * PRE_SCALE);
            }
        }
        const int first_key = FIRST_KEY + tile * BLOCK_N;
        if (needs_mask(first_key)) {
#pragma unroll
            for (int j = 0; j < SLICE / 8; j++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int query = (warp_row + lane / 4 + i / 2 * 8) / GROUP, key = first_key + slice * SLICE + j * 8 + lane % 4 * 2 + i % 2;
                    if (!visible(query, key)) score[j][i] = minus_infinity();
                }
            }
        }
        float correction[2];
        update_rows(score, SCALE, rows, correction);
        scale_rows(sum, correction);

#pragma unroll
        for (int step = 0; step < SLICE / 16; step++) {
            unsigned a[4], b[4];
            powers_as_a(a, score, step);
#pragma unroll
            for (int j = 0; j < HEAD_DIM_V / 16; j++) {
                load_operand_transposed<HEAD_DIM_V>(b, read.v, step * 16, j * 16);
#pragma unroll
                for (int half = 0; half < 2; half++) multiply_add(sum[j * 2 + half], a, b[half * 2], b[half * 2 + 1]);
            }
        }
        read.next();
    }

    // the warps of the same rows bring their sums to their common maximum; the slots are free for that
    copy_async_wait<0>();
    __syncthreads();
    float(*const merged)[PADDED_ROWS][MERGE_PITCH] = reinterpret_cast<float(*)[PADDED_ROWS][MERGE_PITCH]>(shared + Q_BYTES);
    float(*const maxima)[PADDED_ROWS] = reinterpret_cast<float(*)[PADDED_ROWS]>(merged + WARPS_N);
    float(*const totals)[PADDED_ROWS] = maxima + WARPS_N;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = warp_row + half * 8 + lane / 4;
        const float total = row_sum(rows.total[half]);
        if (lane % 4 == 0) {
            maxima[slice][row] = rows.maximum[half];
            totals[slice][row] = total;
        }
#pragma unroll
        for (int j = 0; j < HEAD_DIM_V / 8; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) merged[slice][row][j * 8 + lane % 4 * 2 + i] = sum[j][half * 2 + i];
        }
    }
    __syncthreads();

#pragma unroll 1
    for (int index = threadIdx.x; index < ROWS * (HEAD_DIM_V / 8); index += THREADS) {
        const int row = index / (HEAD_DIM_V / 8), column = index % (HEAD_DIM_V / 8) * 8;
        float maximum = minus_infinity(), total = 0.0f, value[8] = {};
#pragma unroll
        for (int part = 0; part < WARPS_N; part++) maximum = fmaxf(maximum, maxima[part][row]);
        const float base = exponent_base(maximum, SCALE);
#pragma unroll
        for (int part = 0; part < WARPS_N; part++) {
            const float factor = exp2_fast(maxima[part][row] * SCALE - base);
            total += totals[part][row] * factor;
#pragma unroll
            for (int i = 0; i < 8; i++) value[i] += merged[part][row][column + i] * factor;
        }
        const float factor = row_factor(total);
#pragma unroll
        for (int i = 0; i < 8; i++) value[i] *= factor;
        const int query = row / GROUP, head = kv_head * GROUP + row % GROUP;
        const long long place = (NUM_SPLITS == 1 ? 0 : static_cast<long long>(split) * BATCH * SEQ_Q * HEADS) + row_index(batch, query, head, SEQ_Q, HEADS);
        store_result(result + place * HEAD_DIM_V + column, value);
        if (column == 0) {
            if constexpr (NUM_SPLITS > 1) {
                logs[place] = total > 0.0f ? base + log2f(total) : minus_infinity();
            } else if constexpr (LSE) {
                logs[(static_cast<long long>(batch) * HEADS + head) * SEQ_Q + query] = row_log_sum(maximum, total, SCALE);
            }
        }
    }
}

#if NUM_SPLITS > 1
constexpr int COMBINE_WARPS = 4;

// O as the mean of the splits' parts, weighted by their sums; a warp takes a row.
extern "C" __global__ void __launch_bounds__(COMBINE_WARPS * 32)
combine(const float* __restrict__ part, const float* __restrict__ logs, element* __restrict__ o, float* __restrict__ lse) {
    constexpr int ALL_ROWS = BATCH * SEQ_Q * HEADS, PAIRS = HEAD_DIM_V / 2, TURNS = (PAIRS + 31) / 32;
    const int row = blockIdx.x * COMBINE_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= ALL_ROWS) return;
    float maximum = minus_infinity();
#pragma unroll 8
    for (int split = 0; split < NUM_SPLITS; split++) maximum = fmaxf(maximum, logs[static_cast<long long>(split) * ALL_ROWS + row]);
    const float base = exponent_base(maximum, 1.0f);
    float total = 0.0f, first[TURNS] = {}, second[TURNS] = {};
#pragma unroll 8
    for (int split = 0; split < NUM_SPLITS; split++) {
        const long long place = static_cast<long long>(split) * ALL_ROWS + row;
        const float weight = exp2_fast(logs[place] - base);
        total += weight;
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            const int pair = turn * 32 + lane;
            if (PAIRS % 32 != 0 && pair >= PAIRS) continue;
            first[turn] += weight * part[place * HEAD_DIM_V + pair * 2];
            second[turn] += weight * part[place * HEAD_DIM_V + pair * 2 + 1];
        }
    }
    const float factor = row_factor(total);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int pair = turn * 32 + lane;
        if (PAIRS % 32 != 0 && pair >= PAIRS) continue;
        *reinterpret_cast<unsigned*>(o + static_cast<long long>(row) * HEAD_DIM_V + pair * 2) = pack_pair(first[turn] * factor, second[turn] * factor);
    }
    if constexpr (LSE) {
        const int batch = row / (SEQ_Q * HEADS), query = HEADS_FIRST ? row % SEQ_Q : row / HEADS % SEQ_Q, head = HEADS_FIRST ? row / SEQ_Q % HEADS : row % HEADS;
        if (lane == 0) lse[(static_cast<long long>(batch) * HEADS + head) * SEQ_Q + query] = row_log_sum(maximum, total, 1.0f);
    }
}
#endif

// y = softmax(x) over the last axis. Constants: ROWS, COLUMNS, THREADS, ROW_THREADS, CLUSTER, PACKETS, ONLINE, HOLD_EXP,
// BLOCKS_PER_SM, LOAD, STORE.
//
// ROW_THREADS threads of a block (and of the CLUSTER - 1 other blocks of its cluster) share a row. They read it in packets
// of 16 bytes counted from the start of the tensor, so that every access is aligned whatever the length of a row; a packet
// that two rows share is read and written one element at a time.
//
// Each thread keeps the maximum of its own elements and the sum of their exponentials below that maximum; one reduction of
// the pair (maximum, sum) then gives the row's. Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.
//
// The row is held in registers, read once and written once; with ONLINE it is read a second time instead.

constexpr int ROWS_PER_BLOCK = THREADS / ROW_THREADS;
constexpr int LANES = ROW_THREADS < 32 ? ROW_THREADS : 32;  // threads of a warp that share a row
constexpr int ROW_WARPS = ROW_THREADS < 32 ? 1 : ROW_THREADS / 32;
constexpr long long N = COLUMNS;
constexpr bool ALIGNED = N % VECTOR == 0;
constexpr bool EVEN = ALIGNED && ROWS % ROWS_PER_BLOCK == 0 && N / VECTOR == static_cast<long long>(PACKETS) * ROW_THREADS * CLUSTER;
constexpr float LOG2_E = 1.4426950408889634f;
#if DTYPE_FP32
constexpr unsigned MINUS_INFINITY = 0xff800000u;
#elif DTYPE_FP16
constexpr unsigned MINUS_INFINITY = 0xfc00fc00u;
#else
constexpr unsigned MINUS_INFINITY = 0xff80ff80u;
#endif

__device__ inline float minus_infinity() { return word_as_float(0xff800000u); }

// e^(x - shift), where shift may be minus infinity only if x is: the difference is then defined as minus infinity.
__device__ inline float exp_below(float x, float shift) {
#if DTYPE_FP32
    return exp_exact(x - shift);
#else
    return exp2_fast((x - shift) * LOG2_E);
#endif
}

__device__ inline float finite_shift(float maximum) { return maximum == minus_infinity() ? 0.0f : maximum; }

// Part of a tensor that holds one row: elements [begin, end).
struct Row {
    long long begin, end;

    __device__ bool whole(long long first) const { return ALIGNED ? first < end : first >= begin && first + VECTOR <= end; }

    __device__ bool has(long long index) const { return index >= begin && index < end; }
};

// Reads the packet that starts at element `first` (a multiple of VECTOR); what is not of the row becomes minus infinity.
__device__ inline Packet read(const element* x, const Row& row, long long first) {
    if (EVEN || row.whole(first)) return load_packet<LOAD>(x + first);
    Packet p = {{MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY}};
    if constexpr (!ALIGNED) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            if (row.has(first + i)) set_element(p, i, x[first + i]);
        }
    }
    return p;
}

__device__ inline void write(element* y, const Row& row, long long first, const Packet& p) {
    if (EVEN || row.whole(first)) {
        store_packet<STORE>(y + first, p);
    } else if constexpr (!ALIGNED) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            if (row.has(first + i)) y[first + i] = get_element(p, i);
        }
    }
}

struct Partial {
    float maximum, sum;
};

template <int WIDTH>
__device__ inline Partial reduce_lanes(Partial part) {
    float maximum = part.maximum;
#pragma unroll
    for (int mask = WIDTH / 2; mask > 0; mask /= 2) maximum = fmaxf(maximum, shuffle_xor(maximum, mask));
    float sum = part.sum * exp_below(part.maximum, finite_shift(maximum));
#pragma unroll
    for (int mask = WIDTH / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    return {maximum, sum};
}

// Combines the pairs of all threads that share a row; every one of them gets the result.
__device__ inline Partial reduce_row(Partial part) {
    part = reduce_lanes<LANES>(part);
    if constexpr (ROW_WARPS * CLUSTER > 1) {
        // one entry a warp: [row of the block][block of the cluster][warp of the row]
        constexpr int ENTRIES = ROW_WARPS * CLUSTER;
        Partial* entries = reinterpret_cast<Partial*>(shared_memory());
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if constexpr (CLUSTER > 1) {
            Partial* mine = entries + blockIdx.x % CLUSTER * ROW_WARPS + warp;
            cluster_wait();  // every block of the cluster has started, so its shared memory is there
            if (lane < CLUSTER) store_to_block(shared_address(mine), lane, part.maximum, part.sum);
            cluster_arrive();
            cluster_wait();
        } else {
            if (lane == 0) entries[warp] = part;
            __syncthreads();
            entries += warp / ROW_WARPS * ROW_WARPS;
        }
        part = {minus_infinity(), 0.0f};
#pragma unroll
        for (int i = 0; i < ENTRIES; i += 32) {
            if (i + lane < ENTRIES) part.maximum = fmaxf(part.maximum, entries[i + lane].maximum);
        }
#pragma unroll
        for (int i = 0; i < ENTRIES; i += 32) {
            if (i + lane < ENTRIES) part.sum += entries[i + lane].sum * exp_below(entries[i + lane].maximum, finite_shift(part.maximum));
        }
        part = reduce_lanes<32>(part);
    }
    return part;
}

template <int COUNT>
__device__ inline float greatest(const Packet (&packets)[COUNT]) {
    Packet all = packets[0];
#pragma unroll
    for (int i = 1; i < COUNT; i++) all = greater(all, packets[i]);
    float value[VECTOR];
    unpack(all, value);
    float maximum = value[0];
#pragma unroll
    for (int j = 1; j < VECTOR; j++) maximum = fmaxf(maximum, value[j]);
    return maximum;
}

// Adds packets to a thread's pair.
template <int COUNT>
__device__ inline void accumulate(Partial& part, const Packet (&packets)[COUNT]) {
    const float maximum = fmaxf(part.maximum, greatest(packets)), shift = finite_shift(maximum);
    float sum = part.sum * exp_below(part.maximum, shift);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        float value[VECTOR];
        unpack(packets[i], value);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) sum += exp_below(value[j], shift);
    }
    part = {maximum, sum};
}

// e^(x - maximum) / sum for a packet of x.
__device__ inline Packet normalise(const Packet& p, float shift, float scale) {
    float value[VECTOR];
    unpack(p, value);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) value[j] = exp_below(value[j], shift) * scale;
    return pack(value);
}

// The row stays in registers as it was read.
__device__ inline void softmax_raw(const element* x, element* y, const Row& row, long long first) {
    constexpr long long STRIDE = static_cast<long long>(ROW_THREADS) * CLUSTER * VECTOR;
    Packet packets[PACKETS];
#pragma unroll
    for (int i = 0; i < PACKETS; i++) packets[i] = read(x, row, first + i * STRIDE);
    Partial part = {minus_infinity(), 0.0f};
    accumulate(part, packets);
    part = reduce_row(part);
    const float shift = finite_shift(part.maximum), scale = 1.0f / part.sum;
    // zero, since a sum is never negative; the compiler does not know, and so cannot keep the numbers unpacked across the
    // reduction, in twice the registers (4 packets in 40 registers: no spill, where there were 32 bytes)
    const unsigned zero = float_as_word(part.sum) >> 31;
#pragma unroll
    for (int i = 0; i < PACKETS; i++) {
#pragma unroll
        for (int word = 0; word < 4; word++) packets[i].word[word] ^= zero;
        write(y, row, first + i * STRIDE, normalise(packets[i], shift, scale));
    }
}

// The row's exponentials stay in registers in fp32: each is computed once, at twice the registers for a 16-bit dtype.
__device__ inline void softmax_exp(const element* x, element* y, const Row& row, long long first) {
    constexpr long long STRIDE = static_cast<long long>(ROW_THREADS) * CLUSTER * VECTOR;
    float value[PACKETS][VECTOR];
    Packet packets[PACKETS];
#pragma unroll
    for (int i = 0; i < PACKETS; i++) packets[i] = read(x, row, first + i * STRIDE);
    Partial part = {greatest(packets), 0.0f};
    const float own_maximum = part.maximum, own_shift = finite_shift(own_maximum);
#pragma unroll
    for (int i = 0; i < PACKETS; i++) {
        unpack(packets[i], value[i]);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            value[i][j] = exp_below(value[i][j], own_shift);
            part.sum += value[i][j];
        }
    }
    part = reduce_row(part);
    const float scale = exp_below(own_maximum, finite_shift(part.maximum)) / part.sum;
#pragma unroll
    for (int i = 0; i < PACKETS; i++) {
#pragma unroll
        for (int j = 0; j < VECTOR; j++) value[i][j] *= scale;
        write(y, row, first + i * STRIDE, pack(value[i]));
    }
}

// The row is read twice, PACKETS packets a thread at a time; backwards the second time, since its end is the freshest in L2.
__device__ inline void softmax_online(const element* x, element* y, const Row& row, long long first) {
    constexpr long long STRIDE = static_cast<long long>(ROW_THREADS) * VECTOR, STEP = STRIDE * PACKETS;
    const long long steps = row.end > first ? (row.end - first + STEP - 1) / STEP : 0;
    Partial part = {minus_infinity(), 0.0f};
    for (long long step = 0; step < steps; step++) {
        Packet packets[PACKETS];
#pragma unroll
        for (int i = 0; i < PACKETS; i++) packets[i] = read(x, row, first + step * STEP + i * STRIDE);
        accumulate(part, packets);
    }
    part = reduce_row(part);
    const float shift = finite_shift(part.maximum), scale = 1.0f / part.sum;
    for (long long step = steps - 1; step >= 0; step--) {
        Packet packets[PACKETS];
#pragma unroll
        for (int i = 0; i < PACKETS; i++) packets[i] = read(x, row, first + step * STEP + i * STRIDE);
#pragma unroll
        for (int i = 0; i < PACKETS; i++) write(y, row, first + step * STEP + i * STRIDE, normalise(packets[i], shift, scale));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) CLUSTER_DIMS softmax(const element* __restrict__ x, element* __restrict__ y) {
    if constexpr (CLUSTER > 1) cluster_arrive();
    const long long index = static_cast<long long>(blockIdx.x / CLUSTER) * ROWS_PER_BLOCK + threadIdx.x / ROW_THREADS;
    const long long begin = index * N;
    const Row row = {begin, index < ROWS ? begin + N : begin};
    // this thread's first packet: the tensor's packet that holds the row's first element, plus the thread's place in the row
    const long long place = blockIdx.x % CLUSTER * ROW_THREADS + threadIdx.x % ROW_THREADS;
    const long long first = (begin / VECTOR + place) * VECTOR;
    if constexpr (ONLINE) {
        softmax_online(x, y, row, first);
    } else if constexpr (HOLD_EXP) {
        softmax_exp(x, y, row, first);
    } else {
        softmax_raw(x, y, row, first);
    }
}

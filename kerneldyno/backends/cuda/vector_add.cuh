// out = x + y, added in fp32 and rounded once. Constants: N, THREADS, BYTES (of one access: 4, 8 or 16), ITEMS, LOAD, STORE.
// A block owns THREADS * ITEMS words of BYTES bytes; all loads of a thread are issued before its first store.

constexpr int PER_WORD = BYTES / sizeof(element);

struct alignas(BYTES) Word {
    element value[PER_WORD];
};

__device__ inline Word load_word(const element* address) {
    if constexpr (BYTES == 16) {
        const Packet p = load_packet<LOAD>(address);
        Word word;
#pragma unroll
        for (int i = 0; i < PER_WORD; i++) word.value[i] = get_element(p, i);
        return word;
    } else {
        return *reinterpret_cast<const Word*>(address);
    }
}

__device__ inline void store_word(element* address, const Word& word) {
    if constexpr (BYTES == 16) {
        Packet p = {};
#pragma unroll
        for (int i = 0; i < PER_WORD; i++) set_element(p, i, word.value[i]);
        store_packet<STORE>(address, p);
    } else {
        *reinterpret_cast<Word*>(address) = word;
    }
}

__device__ inline element add(element a, element b) {
#if DTYPE_FP32
    return a + b;
#else
    float first, second, unused;
    unpack_pair(a, first, unused);
    unpack_pair(b, second, unused);
    return static_cast<element>(pack_pair(first + second, 0.0f) & 0xffffu);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) vector_add(const element* __restrict__ x, const element* __restrict__ y, element* __restrict__ out) {
    constexpr long long WHOLE = N / PER_WORD * PER_WORD;  // elements in whole words
    constexpr long long STRIDE = static_cast<long long>(THREADS) * PER_WORD;
    const long long first = blockIdx.x * (STRIDE * ITEMS) + threadIdx.x * PER_WORD;
    Word left[ITEMS], right[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if (first + i * STRIDE < WHOLE) {
            left[i] = load_word(x + first + i * STRIDE);
            right[i] = load_word(y + first + i * STRIDE);
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if (first + i * STRIDE < WHOLE) {
#pragma unroll
            for (int j = 0; j < PER_WORD; j++) left[i].value[j] = add(left[i].value[j], right[i].value[j]);
            store_word(out + first + i * STRIDE, left[i]);
        }
    }
    // the last elements, fewer than a word, one a thread of the first block
    const long long last = WHOLE + threadIdx.x;
    if (WHOLE < N && blockIdx.x == 0 && last < N) out[last] = add(x[last], y[last]);
}

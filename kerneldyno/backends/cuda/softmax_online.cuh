// Online softmax over rows of scores that lie in tensor-core accumulators: of a 16 x (8 * TILES) piece a thread holds
// score[j][i], row lane / 4 + 8 * (i / 2), column 8 * j + 2 * (lane % 4) + i % 2. So it is for mma.sync, and for each
// warp's 16 rows of a wgmma. Scores stay as the product gave them: `scale`, positive, takes them to powers of two.
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867; Dao, "FlashAttention-2",
// arXiv 2307.08691, algorithm 1.

// What is known of a thread's two rows so far. `total` counts this thread's columns alone, until `finish_rows`.
struct Rows {
    float maximum[2], total[2];
};

__device__ inline float minus_infinity() { return word_as_float(0xff800000u); }

__device__ inline Rows no_rows() { return {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}}; }

// The greatest and the sum among the four threads that share a row.
__device__ inline float row_maximum(float x) {
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
}

__device__ inline float row_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// The exponent to subtract, in powers of two. A row without any visible score has none: with 0 its powers are 0, not NaN.
__device__ inline float exponent_base(float maximum, float scale) { return maximum == minus_infinity() ? 0.0f : maximum * scale; }

// Takes one more piece of scores, and turns them into 2^(scale * (score - maximum)). What was summed by earlier maxima,
// here and in the accumulators of P @ V, must be multiplied by `correction`.
template <int TILES>
__device__ inline void update_rows(float (&score)[TILES][4], float scale, Rows& rows, float (&correction)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float maximum = rows.maximum[half];
#pragma unroll
        for (int j = 0; j < TILES; j++) maximum = fmaxf(maximum, fmaxf(score[j][half * 2], score[j][half * 2 + 1]));
        maximum = row_maximum(maximum);
        const float base = exponent_base(maximum, scale);
        correction[half] = exp2_fast(rows.maximum[half] * scale - base);
        float total = 0.0f;
#pragma unroll
        for (int j = 0; j < TILES; j++) {
#pragma unroll
            for (int i = half * 2; i < half * 2 + 2; i++) {
                score[j][i] = exp2_fast(score[j][i] * scale - base);
                total += score[j][i];
            }
        }
        rows.maximum[half] = maximum;
        rows.total[half] = rows.total[half] * correction[half] + total;
    }
}

// Multiplies accumulators of the same rows by the factors of the two rows.
template <int TILES>
__device__ inline void scale_rows(float (&sum)[TILES][4], const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < TILES; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sum[j][i] *= factor[i / 2];
    }
}

// Columns 16 * step ... of the powers as the 16x16 operand A of a product in 16 bits.
template <int TILES>
__device__ inline void powers_as_a(unsigned (&a)[4], const float (&power)[TILES][4], int step) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = pack_pair(power[step * 2 + i / 2][i % 2 * 2], power[step * 2 + i / 2][i % 2 * 2 + 1]);
}

// What to multiply a row of P @ V by at the end, by the sum over the whole row: 0 where no score is visible.
__device__ inline float row_factor(float total) { return total > 0.0f ? 1.0f / total : 0.0f; }

// The natural logarithm of the sum of a row's exponentials: -infinity where no score is visible.
__device__ inline float row_log_sum(float maximum, float total, float scale) {
    return total > 0.0f ? (maximum * scale + log2f(total)) * 0.693147180559945309f : minus_infinity();
}

// tanh with an absolute error of about 2^-22, by one power and one reciprocal.
__device__ inline float tanh_fast(float x) { return 1.0f - 2.0f * reciprocal_fast(1.0f + exp2_fast(x * 2.88539008177792681f)); }

// C[m, n] = A[m, k] @ B in fp32 on the ordinary cores (FFMA). Constants: M, N, K, B_TRANSPOSED (true: B is [n, k]; false:
// [k, n]), BLOCK_M, BLOCK_N, BLOCK_K, THREAD_M, THREAD_N, GROUP_M.
//
// A block computes a BLOCK_M x BLOCK_N tile of C, a thread THREAD_M x THREAD_N of it in groups of 4 x 4. Two slots of shared
// memory hold the tiles of A and B with k as the slow axis; the next tiles wait in registers while the current are multiplied.

constexpr int THREADS_M = BLOCK_M / THREAD_M, THREADS_N = BLOCK_N / THREAD_N, THREADS = THREADS_M * THREADS_N;
constexpr int K_TILES = (K + BLOCK_K - 1) / BLOCK_K;
constexpr int TILES_M = (M + BLOCK_M - 1) / BLOCK_M, TILES_N = (N + BLOCK_N - 1) / BLOCK_N;
constexpr int A_PITCH = BLOCK_M + 4, B_PITCH = BLOCK_N + 4;  // floats; keeps rows 16-byte aligned and spreads the banks
constexpr int SLOT = BLOCK_K * (A_PITCH + B_PITCH);          // floats

// Numbers in one access that is aligned in every row of a contiguous tensor with rows of `pitch` floats.
constexpr int access_floats(long long pitch) { return pitch % 4 == 0 ? 4 : pitch % 2 == 0 ? 2 : 1; }

// A ROWS x COLUMNS tile of a row-major tensor [HEIGHT, WIDTH] on its way to shared memory, spread over the threads.
template <int ROWS, int COLUMNS, long long HEIGHT, long long WIDTH>
struct Tile {
    static constexpr int ACCESS = access_floats(WIDTH), CHUNKS = COLUMNS / ACCESS, TOTAL = ROWS * CHUNKS;
    static constexpr int COUNT = (TOTAL + THREADS - 1) / THREADS;
    struct alignas(ACCESS * 4) Chunk {
        float value[ACCESS];
    };
    Chunk chunks[COUNT];

    // Reads the tile at (first_row, first_column); what lies outside the tensor becomes zero.
    __device__ void read(const float* tensor, int first_row, int first_column) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int index = threadIdx.x + i * THREADS;
            const int row = first_row + index / CHUNKS, column = first_column + index % CHUNKS * ACCESS;
            chunks[i] = {};
            if ((TOTAL % THREADS == 0 || index < TOTAL) && row < HEIGHT && column < WIDTH) {
                chunks[i] = *reinterpret_cast<const Chunk*>(tensor + row * WIDTH + column);
            }
        }
    }

    // Writes the tile to shared memory with `pitch` floats a row, rows and columns exchanged if TRANSPOSE.
    template <bool TRANSPOSE>
    __device__ void write(float* shared, int pitch) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int index = threadIdx.x + i * THREADS;
            const int row = index / CHUNKS, column = index % CHUNKS * ACCESS;
            if (TOTAL % THREADS != 0 && index >= TOTAL) continue;
#pragma unroll
            for (int j = 0; j < ACCESS; j++) shared[TRANSPOSE ? (column + j) * pitch + row : row * pitch + column + j] = chunks[i].value[j];
        }
    }
};

// Reads COUNT numbers of a thread, in groups of 4 that lie 4 * THREADS_ACROSS apart.
template <int COUNT, int THREADS_ACROSS>
__device__ inline void read_groups(float (&value)[COUNT], const float* row, int thread) {
#pragma unroll
    for (int group = 0; group < COUNT / 4; group++) {
        const Packet p = *reinterpret_cast<const Packet*>(row + (group * THREADS_ACROSS + thread) * 4);
#pragma unroll
        for (int i = 0; i < 4; i++) value[group * 4 + i] = word_as_float(p.word[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c) {
    float* const shared = reinterpret_cast<float*>(shared_memory());
    const int thread_m = threadIdx.x / THREADS_N, thread_n = threadIdx.x % THREADS_N;

    // blocks that run together share GROUP_M rows of tiles, so that their parts of A and B stay in L2
    const int block = blockIdx.x, first_of_group = block / (GROUP_M * TILES_N) * GROUP_M;
    const int group_rows = TILES_M - first_of_group < GROUP_M ? TILES_M - first_of_group : GROUP_M;
    const int place = block % (GROUP_M * TILES_N);
    const int first_row = (first_of_group + place % group_rows) * BLOCK_M, first_column = place / group_rows * BLOCK_N;

    Tile<BLOCK_M, BLOCK_K, M, K> tile_a;
    Tile<B_TRANSPOSED ? BLOCK_N : BLOCK_K, B_TRANSPOSED ? BLOCK_K : BLOCK_N, B_TRANSPOSED ? N : K, B_TRANSPOSED ? K : N> tile_b;
    const auto read = [&](int k_tile) {
        tile_a.read(a, first_row, k_tile * BLOCK_K);
        tile_b.read(b, B_TRANSPOSED ? first_column : k_tile * BLOCK_K, B_TRANSPOSED ? k_tile * BLOCK_K : first_column);
    };
    const auto write = [&](int k_tile) {
        float* slot = shared + k_tile % 2 * SLOT;
        tile_a.template write<true>(slot, A_PITCH);
        tile_b.template write<B_TRANSPOSED>(slot + BLOCK_K * A_PITCH, B_PITCH);
    };

    read(0);
    write(0);
    __syncthreads();
    float sum[THREAD_M][THREAD_N] = {};
#pragma unroll 1
    for (int k_tile = 0; k_tile < K_TILES; k_tile++) {
        if (k_tile + 1 < K_TILES) read(k_tile + 1);
        const float* slot = shared + k_tile % 2 * SLOT;
#pragma unroll
        for (int k = 0; k < BLOCK_K; k++) {
            float left[THREAD_M], right[THREAD_N];
            read_groups<THREAD_M, THREADS_M>(left, slot + k * A_PITCH, thread_m);
            read_groups<THREAD_N, THREADS_N>(right, slot + BLOCK_K * A_PITCH + k * B_PITCH, thread_n);
#pragma unroll
            for (int i = 0; i < THREAD_M; i++) {
#pragma unroll
                for (int j = 0; j < THREAD_N; j++) sum[i][j] += left[i] * right[j];
            }
        }
        // the other slot was last read before the previous barrier
        if (k_tile + 1 < K_TILES) write(k_tile + 1);
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < THREAD_M; i++) {
        const int row = first_row + (i / 4 * THREADS_M + thread_m) * 4 + i % 4;
        if (row >= M) continue;
#pragma unroll
        for (int group = 0; group < THREAD_N / 4; group++) {
            const int column = first_column + (group * THREADS_N + thread_n) * 4;
            float* target = c + static_cast<long long>(row) * N + column;
            if constexpr (N % 4 == 0) {
                const float four[4] = {sum[i][group * 4], sum[i][group * 4 + 1], sum[i][group * 4 + 2], sum[i][group * 4 + 3]};
                if (column < N) store_packet<Store::cached>(target, pack(four));
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (column + j < N) target[j] = sum[i][group * 4 + j];
                }
            }
        }
    }
}

// C[m, n] = A[m, k] @ B on the tensor cores with mma.sync, fp32 accumulation, 16-bit in and out. Constants: M, N, K,
// B_TRANSPOSED (true: B is [n, k]; false: [k, n]), BLOCK_M, BLOCK_N, BLOCK_K, WARPS_M, WARPS_N, STAGES, GROUP_M,
// FRAGMENT_SETS, BLOCKS_PER_SM, SHARED_EPILOGUE.
//
// A block computes a BLOCK_M x BLOCK_N tile of C. Tiles of A and B stream through STAGES slots of shared memory with
// cp.async; each warp multiplies its part with ldmatrix and mma.sync. With two sets of fragments the next load while the
// tensor cores work on the current; with one, that is left to the other warps of the multiprocessor, at fewer registers.
// Source of the schedule: CUTLASS, include/cutlass/gemm/threadblock/mma_multistage.h.

constexpr int THREADS = WARPS_M * WARPS_N * 32;
constexpr int WARP_M = BLOCK_M / WARPS_M, WARP_N = BLOCK_N / WARPS_N;
constexpr int MMA_M = WARP_M / 16, MMA_N = WARP_N / 8;  // 16x8 products of a warp
constexpr int STEPS = BLOCK_K / 16;                     // a multiple of 2: fragments alternate between two sets
constexpr int K_TILES = (K + BLOCK_K - 1) / BLOCK_K;
constexpr int TILES_M = (M + BLOCK_M - 1) / BLOCK_M, TILES_N = (N + BLOCK_N - 1) / BLOCK_N;
constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2, B_BYTES = BLOCK_N * BLOCK_K * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int C_PITCH = BLOCK_N + 8;  // elements; the 16 bytes put the 8 rows that a warp writes at once in different banks

// Largest access, in bytes, that is aligned in every row of a contiguous tensor with rows of `pitch` 16-bit elements.
constexpr int access_bytes(long long pitch) { return pitch % 8 == 0 ? 16 : pitch % 4 == 0 ? 8 : pitch % 2 == 0 ? 4 : 2; }

// Place in bytes of a 16-byte chunk in a tile of COLUMNS elements a row. The chunks of a row are permuted by an exclusive
// or with the row, so that both the 8 chunks of a row and one chunk of 8 rows lie in the 32 banks without conflict.
template <int COLUMNS>
__device__ inline unsigned swizzled(int row, int chunk) {
    constexpr int CHUNKS = COLUMNS / 8;
    const int key = CHUNKS >= 8 ? row % 8 : row / (8 / CHUNKS) % CHUNKS;
    return (row * CHUNKS + (chunk ^ key)) * 16;
}

// Starts copying chunks PART, PART + PARTS, ... of each thread of a ROWS x COLUMNS tile that begins at (first_row,
// first_column) of a row-major tensor [HEIGHT, WIDTH]; what lies outside becomes zero.
template <int ROWS, int COLUMNS, long long HEIGHT, long long WIDTH, int PARTS>
__device__ inline void copy_tile(unsigned shared, const element* tensor, int first_row, int first_column, int part) {
    constexpr int CHUNKS = COLUMNS / 8, TOTAL = ROWS * CHUNKS, ACCESS = access_bytes(WIDTH);
#pragma unroll
    for (int i = 0; i < (TOTAL + THREADS - 1) / THREADS; i++) {
        const int index = threadIdx.x + i * THREADS;
        if (i % PARTS != part || (TOTAL % THREADS != 0 && index >= TOTAL)) continue;
        // where THREADS is a multiple of CHUNKS, the second forms leave all but a constant to be computed once
        const int local_row = THREADS % CHUNKS == 0 ? threadIdx.x / CHUNKS + i * (THREADS / CHUNKS) : index / CHUNKS;
        const int chunk = THREADS % CHUNKS == 0 ? threadIdx.x % CHUNKS : index % CHUNKS;
        const int row = first_row + local_row, column = first_column + chunk * 8;
        const bool row_valid = HEIGHT % ROWS == 0 || row < HEIGHT;
        const element* source = tensor + row * WIDTH + column;
        const unsigned target = shared + swizzled<COLUMNS>(local_row, chunk);
        if constexpr (ACCESS >= 4) {
#pragma unroll
            for (int piece = 0; piece < 8; piece += ACCESS / 2) {
                const bool valid = row_valid && (WIDTH % COLUMNS == 0 || column + piece < WIDTH);
                copy_async<ACCESS>(target + piece * 2, valid ? source + piece : tensor, valid);
            }
        } else {  // cp.async copies no less than 4 aligned bytes
            Packet p = {};
#pragma unroll
            for (int piece = 0; piece < 8; piece++) {
                if (row_valid && column + piece < WIDTH) set_element(p, piece, source[piece]);
            }
            store_shared(target, p);
        }
    }
}

struct Fragments {
    unsigned a[MMA_M][4];
    unsigned b[MMA_N / 2][4];  // two 16x8 operands each
};

__device__ inline void load_fragments(Fragments& fragments, unsigned stage, int step, int warp_row, int warp_column, int lane) {
#pragma unroll
    for (int i = 0; i < MMA_M; i++) {
        load_matrices(fragments.a[i], stage + swizzled<BLOCK_K>(warp_row + i * 16 + lane % 16, step * 2 + lane / 16));
    }
    const unsigned b = stage + A_BYTES;
#pragma unroll
    for (int j = 0; j < MMA_N / 2; j++) {
        if constexpr (B_TRANSPOSED) {
            const int row = warp_column + j * 16 + lane / 16 * 8 + lane % 8;
            load_matrices(fragments.b[j], b + swizzled<BLOCK_K>(row, step * 2 + lane / 8 % 2));
        } else {
            load_matrices_transposed(fragments.b[j], b + swizzled<BLOCK_N>(step * 16 + lane % 16, (warp_column + j * 16) / 8 + lane / 16));
        }
    }
}

__device__ inline void store_pair(element* c, int row, int column, unsigned pair) {
    if (M % BLOCK_M != 0 && row >= M) return;
    element* target = c + static_cast<long long>(row) * N + column;
    if constexpr (N % 2 == 0) {
        if (N % BLOCK_N == 0 || column < N) *reinterpret_cast<unsigned*>(target) = pair;
    } else {
        if (column < N) target[0] = static_cast<element>(pair & 0xffffu);
        if (column + 1 < N) target[1] = static_cast<element>(pair >> 16);
    }
}

// Copies the tile from shared memory to C in accesses as wide as the rows of C allow.
__device__ inline void store_tile(element* c, const unsigned char* tile, int first_row, int first_column) {
    constexpr int CHUNKS = BLOCK_N / 8, ACCESS = access_bytes(N);
#pragma unroll 4
    for (int index = threadIdx.x; index < BLOCK_M * CHUNKS; index += THREADS) {
        const int local_row = index / CHUNKS, chunk = index % CHUNKS;
        const int row = first_row + local_row, column = first_column + chunk * 8;
        if (M % BLOCK_M != 0 && row >= M) break;
        const Packet p = *reinterpret_cast<const Packet*>(tile + (local_row * C_PITCH + chunk * 8) * 2);
        element* target = c + static_cast<long long>(row) * N + column;
        if constexpr (ACCESS == 16) {
            if (N % BLOCK_N == 0 || column < N) store_packet<Store::cached>(target, p);
        } else if constexpr (ACCESS >= 4) {
#pragma unroll
            for (int word = 0; word < 4; word++) {
                if (column + word * 2 < N) *reinterpret_cast<unsigned*>(target + word * 2) = p.word[word];
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (column + i < N) target[i] = get_element(p, i);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) gemm(const element* __restrict__ a, const element* __restrict__ b, element* __restrict__ c) {
    unsigned char* const shared = shared_memory();
    const unsigned shared_base = shared_address(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_row = warp / WARPS_N * WARP_M, warp_column = warp % WARPS_N * WARP_N;

    // blocks that run together share GROUP_M rows of tiles, so that their parts of A and B stay in L2
    const int block = blockIdx.x, first_of_group = block / (GROUP_M * TILES_N) * GROUP_M;
    const int group_rows = TILES_M - first_of_group < GROUP_M ? TILES_M - first_of_group : GROUP_M;
    const int place = block % (GROUP_M * TILES_N);
    const int first_row = (first_of_group + place % group_rows) * BLOCK_M, first_column = place / group_rows * BLOCK_N;

    constexpr int PARTS = STEPS - 1;  // the copies of one tile are spread over all steps but the last
    const auto copy = [&](int k_tile, int part) {
        const unsigned stage = shared_base + k_tile % STAGES * STAGE_BYTES;
        copy_tile<BLOCK_M, BLOCK_K, M, K, PARTS>(stage, a, first_row, k_tile * BLOCK_K, part);
        if constexpr (B_TRANSPOSED) {
            copy_tile<BLOCK_N, BLOCK_K, N, K, PARTS>(stage + A_BYTES, b, first_column, k_tile * BLOCK_K, part);
        } else {
            copy_tile<BLOCK_K, BLOCK_N, K, N, PARTS>(stage + A_BYTES, b, k_tile * BLOCK_K, first_column, part);
        }
    };

    // every tile is one group of copies, an empty one past the last, so that the count of pending groups is constant
#pragma unroll
    for (int k_tile = 0; k_tile < STAGES - 1; k_tile++) {
        if (k_tile < K_TILES) {
#pragma unroll
            for (int part = 0; part < PARTS; part++) copy(k_tile, part);
        }
        copy_async_commit();
    }

    float sum[MMA_M][MMA_N][4] = {};
    Fragments fragments[FRAGMENT_SETS];
    const auto load = [&](int set, int k_tile, int step) {
        const unsigned stage = shared_base + k_tile % STAGES * STAGE_BYTES;
        load_fragments(fragments[set], stage, step, warp_row, warp_column, lane);
    };
    // tile k_tile has arrived for all threads, and all are done with the tile before it, whose slot may take a new one
    const auto wait = [] {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
    };
    if constexpr (FRAGMENT_SETS == 2) {
        wait();
        load(0, 0, 0);
    }
#pragma unroll 1
    for (int k_tile = 0; k_tile < K_TILES; k_tile++) {
        if constexpr (FRAGMENT_SETS == 1) wait();
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const bool last = step == STEPS - 1;
            if constexpr (FRAGMENT_SETS == 2) {
                if (last) wait();
                load((step + 1) % 2, k_tile + last, (step + 1) % STEPS);
            } else {
                load(0, k_tile, step);
            }
            if (!last && k_tile + STAGES - 1 < K_TILES) copy(k_tile + STAGES - 1, step);
            if (step == STEPS - 2) copy_async_commit();
            const Fragments& operands = fragments[step % FRAGMENT_SETS];
#pragma unroll
            for (int i = 0; i < MMA_M; i++) {
#pragma unroll
                for (int j = 0; j < MMA_N; j++) {
                    multiply_add(sum[i][j], operands.a[i], operands.b[j / 2][j % 2 * 2], operands.b[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }

    if constexpr (SHARED_EPILOGUE) {
        copy_async_wait<0>();
        __syncthreads();  // the slots are free: the tile of C takes their place
    }
#pragma unroll
    for (int i = 0; i < MMA_M; i++) {
#pragma unroll
        for (int j = 0; j < MMA_N; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = warp_row + i * 16 + half * 8 + lane / 4, column = warp_column + j * 8 + lane % 4 * 2;
                const unsigned pair = pack_pair(sum[i][j][half * 2], sum[i][j][half * 2 + 1]);
                if constexpr (SHARED_EPILOGUE) {
                    *reinterpret_cast<unsigned*>(shared + (row * C_PITCH + column) * 2) = pair;
                } else {
                    store_pair(c, first_row + row, first_column + column, pair);
                }
            }
        }
    }
    if constexpr (SHARED_EPILOGUE) {
        __syncthreads();
        store_tile(c, shared, first_row, first_column);
    }
}

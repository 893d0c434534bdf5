// One block's tile of a product C = A @ B with mma.sync: what gemm and moe_gemm share. Constants: N, K, B_TRANSPOSED
// (true: B is [n, k]; false: [k, n]), BLOCK_M, BLOCK_N, BLOCK_K, WARPS_M, WARPS_N, STAGES, FRAGMENT_SETS, SHARED_EPILOGUE.
//
// Tiles of A and B stream through STAGES slots of shared memory with cp.async; each warp multiplies its part with ldmatrix
// and mma.sync. With two sets of fragments the next load while the tensor cores work on the current; with one, that is left
// to the other warps of the multiprocessor, at fewer registers.
// Source of the schedule: CUTLASS, include/cutlass/gemm/threadblock/mma_multistage.h.

constexpr int THREADS = WARPS_M * WARPS_N * 32;
constexpr int WARP_M = BLOCK_M / WARPS_M, WARP_N = BLOCK_N / WARPS_N;
constexpr int MMA_M = WARP_M / 16, MMA_N = WARP_N / 8;  // 16x8 products of a warp
constexpr int STEPS = BLOCK_K / 16;                     // a multiple of 2: fragments alternate between two sets
constexpr int K_TILES = (K + BLOCK_K - 1) / BLOCK_K;
constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2, B_BYTES = BLOCK_N * BLOCK_K * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int C_PITCH = BLOCK_N + 8;  // elements; the 16 bytes put the 8 rows that a warp writes at once in different banks
constexpr int PARTS = STEPS - 1;      // the copies of one tile are spread over all steps but the last

struct Fragments {
    unsigned a[MMA_M][4];
    unsigned b[MMA_N / 2][4];  // two 16x8 operands each
};

typedef float Sums[MMA_M][MMA_N][4];

typedef Copies<THREADS, BLOCK_M, BLOCK_K> CopiesA;
typedef Copies<THREADS, B_TRANSPOSED ? BLOCK_N : BLOCK_K, B_TRANSPOSED ? BLOCK_K : BLOCK_N> CopiesB;

__device__ inline int warp_row() { return threadIdx.x / 32 / WARPS_N * WARP_M; }

__device__ inline int warp_column() { return threadIdx.x / 32 % WARPS_N * WARP_N; }

// Addresses in one slot, of this thread's copies and of its operands. They are carried from slot to slot: computed anew from
// the number of the tile they would take twice the instructions that the products do.
struct Slot {
    unsigned begin, a, b;

    __device__ void next(unsigned first, unsigned end) {
        const unsigned step = begin + STAGE_BYTES == end ? first - begin : STAGE_BYTES;
        begin += step;
        a += step;
        b += step;
    }
};

__device__ inline void load_fragments(Fragments& fragments, const Slot& slot, int step) {
#pragma unroll
    for (int i = 0; i < MMA_M; i++) load_operand<BLOCK_K>(fragments.a[i], slot.a, i * 16, step * 16);
#pragma unroll
    for (int j = 0; j < MMA_N / 2; j++) {
        if constexpr (B_TRANSPOSED) {
            load_operand<BLOCK_K>(fragments.b[j], slot.b, j * 16, step * 16);
        } else if constexpr (power_of_two(WARP_N)) {
            load_operand_transposed<BLOCK_N>(fragments.b[j], slot.b, step * 16, j * 16);
        } else {  // the warp's first column and j * 16 have bits in common
            load_matrices_transposed(fragments.b[j], slot.begin + A_BYTES + place_b_columns<BLOCK_N>(step * 16, warp_column() + j * 16));
        }
    }
}

// Adds the whole product to this warp's part of the sums. copy(a, b, k_tile, part) starts one part of the copies of a tile of A
// to the target `a`, and of B to `b`.
template <typename CopyPart>
__device__ inline void multiply_tiles(Sums& sum, unsigned shared_base, const CopyPart& copy) {
    const unsigned end = shared_base + STAGES * STAGE_BYTES;
    Slot write = {shared_base, shared_base + CopiesA::first_place(), shared_base + A_BYTES + CopiesB::first_place()};
    // every tile is one group of copies, an empty one past the last, so that the count of pending groups is constant
#pragma unroll
    for (int k_tile = 0; k_tile < STAGES - 1; k_tile++) {
        if (k_tile < K_TILES) {
#pragma unroll
            for (int part = 0; part < PARTS; part++) copy(write.a, write.b, k_tile, part);
        }
        copy_async_commit();
        write.next(shared_base, end);
    }

    const unsigned place_b = B_TRANSPOSED ? place_b_rows<BLOCK_K>(warp_column()) : place_b_columns<BLOCK_N>(0, warp_column());
    Slot read = {shared_base, shared_base + place_a<BLOCK_K>(warp_row()), shared_base + A_BYTES + place_b};
    Fragments fragments[FRAGMENT_SETS];
    // tile k_tile has arrived for all threads, and all are done with the tile before it, whose slot may take a new one
    const auto wait = [] {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
    };
    if constexpr (FRAGMENT_SETS == 2) {
        wait();
        load_fragments(fragments[0], read, 0);
    }
#pragma unroll 1
    for (int k_tile = 0; k_tile < K_TILES; k_tile++) {
        if constexpr (FRAGMENT_SETS == 1) wait();
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const bool last = step == STEPS - 1;
            if constexpr (FRAGMENT_SETS == 2) {
                if (last) {
                    wait();
                    read.next(shared_base, end);
                }
                load_fragments(fragments[(step + 1) % 2], read, (step + 1) % STEPS);
            } else {
                load_fragments(fragments[0], read, step);
            }
            if (!last && k_tile + STAGES - 1 < K_TILES) copy(write.a, write.b, k_tile + STAGES - 1, step);
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
        if constexpr (FRAGMENT_SETS == 1) read.next(shared_base, end);
        write.next(shared_base, end);
    }
}

// Writes the sums to the rows [first_row, end_row) of C, a tensor of rows N elements long; CHECK_ROWS where the tile may
// reach past the last.
template <bool CHECK_ROWS>
__device__ inline void store_sums(element* c, unsigned char* shared, const Sums& sum, int first_row, int end_row, int first_column) {
    const int lane = threadIdx.x % 32;
    const auto row_of = [&](int local_row) { return c + static_cast<long long>(first_row + local_row) * N; };
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
                const int row = warp_row() + i * 16 + half * 8 + lane / 4, column = warp_column() + j * 8 + lane % 4 * 2;
                const unsigned pair = pack_pair(sum[i][j][half * 2], sum[i][j][half * 2 + 1]);
                if constexpr (SHARED_EPILOGUE) {
                    *reinterpret_cast<unsigned*>(shared + (row * C_PITCH + column) * 2) = pair;
                } else {
                    if (!CHECK_ROWS || first_row + row < end_row) store_pair<N, BLOCK_N>(row_of(row), first_column + column, pair);
                }
            }
        }
    }
    if constexpr (SHARED_EPILOGUE) {
        constexpr int CHUNKS = BLOCK_N / 8;
        __syncthreads();
#pragma unroll 4
        for (int index = threadIdx.x; index < BLOCK_M * CHUNKS; index += THREADS) {
            const int row = index / CHUNKS, column = index % CHUNKS * 8;
            if (CHECK_ROWS && first_row + row >= end_row) break;
            store_chunk<N, BLOCK_N>(row_of(row), first_column + column, *reinterpret_cast<const Packet*>(shared + (row * C_PITCH + column) * 2));
        }
    }
}

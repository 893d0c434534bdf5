// C[r] = A[r] @ W[e].T for the rows r of each expert e, on the tensor cores with mma.sync. Row r of A is x[index[r]] where
// GATHER, else a[r]. Constants: CAPACITY (tiles of rows there is room for), TOKENS (rows of x), GATHER, GROUP_M,
// BLOCKS_PER_SM, and those of multistage.cuh, which computes a block's BLOCK_M x BLOCK_N tile of C.
//
// A block takes one of the tiles that the layout lists: its expert, or -1 past the last, and its first row. A tile ends where
// its expert's rows do: the rows beyond are zeros in shared memory, read from nowhere, and are not written.

constexpr int TILES_N = (N + BLOCK_N - 1) / BLOCK_N;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
moe_gemm(const element* __restrict__ a, const int* __restrict__ index, const element* __restrict__ w, const int* __restrict__ offsets,
         const int* __restrict__ tile_experts, const int* __restrict__ tile_starts, element* __restrict__ c) {
    unsigned char* const shared = shared_memory();

    // blocks that run together share GROUP_M tiles of rows, mostly of one expert: its weights and their rows stay in L2
    const int block = blockIdx.x, first_of_group = block / (GROUP_M * TILES_N) * GROUP_M;
    const int group_rows = CAPACITY - first_of_group < GROUP_M ? CAPACITY - first_of_group : GROUP_M;
    const int place = block % (GROUP_M * TILES_N);
    const int tile = first_of_group + place % group_rows, first_column = place / group_rows * BLOCK_N;

    const int expert = tile_experts[tile];
    if (expert < 0) return;
    const int first_row = tile_starts[tile], expert_end = offsets[expert];
    const int end_row = expert_end - first_row < BLOCK_M ? expert_end : first_row + BLOCK_M;
    const long long first_weight = static_cast<long long>(expert) * N + first_column;
    const EvenRows<CopiesB, K, N % BLOCK_N != 0> rows_of_w(w + first_weight * K, N - first_column);

    float sum[MMA_M][MMA_N][4] = {};
    const auto multiply = [&](const auto& rows_of_a) {
        multiply_tiles(sum, shared_address(shared), [&](unsigned target_a, unsigned target_b, int k_tile, int part) {
            copy_tile<CopiesA, K, PARTS>(target_a, rows_of_a, k_tile * BLOCK_K, part);
            copy_tile<CopiesB, K, PARTS>(target_b, rows_of_w, k_tile * BLOCK_K, part);
        });
    };
    if constexpr (GATHER) {
        // where each copy of this thread comes from, the same for every tile of K; -1: from nowhere
        int source[CopiesA::EACH];
#pragma unroll
        for (int i = 0; i < CopiesA::EACH; i++) {
            const int row = first_row + CopiesA::row(i);
            source[i] = row < end_row ? index[row] : -1;
        }
        multiply([&](int i) { return Source{a + static_cast<long long>(source[i]) * K + CopiesA::chunk(i) * 8, source[i] >= 0}; });
    } else {
        multiply(EvenRows<CopiesA, K, true>(a + static_cast<long long>(first_row) * K, end_row - first_row));
    }
    store_sums<true>(c, shared, sum, first_row, end_row, first_column);
}

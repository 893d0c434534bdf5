// C[m, n] = A[m, k] @ B on the tensor cores with mma.sync, fp32 accumulation, 16-bit in and out. Constants: M, GROUP_M,
// BLOCKS_PER_SM, and those of multistage.cuh, which computes a block's BLOCK_M x BLOCK_N tile of C.

constexpr int TILES_M = (M + BLOCK_M - 1) / BLOCK_M, TILES_N = (N + BLOCK_N - 1) / BLOCK_N;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) gemm(const element* __restrict__ a, const element* __restrict__ b, element* __restrict__ c) {
    unsigned char* const shared = shared_memory();

    // blocks that run together share GROUP_M rows of tiles, so that their parts of A and B stay in L2
    const int block = blockIdx.x, first_of_group = block / (GROUP_M * TILES_N) * GROUP_M;
    const int group_rows = TILES_M - first_of_group < GROUP_M ? TILES_M - first_of_group : GROUP_M;
    const int place = block % (GROUP_M * TILES_N);
    const int first_row = (first_of_group + place % group_rows) * BLOCK_M, first_column = place / group_rows * BLOCK_N;

    const EvenRows<CopiesA, K, M % BLOCK_M != 0> rows_of_a(a + static_cast<long long>(first_row) * K, M - first_row);
    float sum[MMA_M][MMA_N][4] = {};
    if constexpr (B_TRANSPOSED) {
        const EvenRows<CopiesB, K, N % BLOCK_N != 0> rows_of_b(b + static_cast<long long>(first_column) * K, N - first_column);
        multiply_tiles(sum, shared_address(shared), [&](unsigned target_a, unsigned target_b, int k_tile, int part) {
            copy_tile<CopiesA, K, PARTS>(target_a, rows_of_a, k_tile * BLOCK_K, part);
            copy_tile<CopiesB, K, PARTS>(target_b, rows_of_b, k_tile * BLOCK_K, part);
        });
    } else {
        const EvenRows<CopiesB, N, K % BLOCK_K != 0> rows_of_b(b, K);
        multiply_tiles(sum, shared_address(shared), [&](unsigned target_a, unsigned target_b, int k_tile, int part) {
            copy_tile<CopiesA, K, PARTS>(target_a, rows_of_a, k_tile * BLOCK_K, part);
            copy_tile<CopiesB, N, PARTS>(target_b, rows_of_b.after(k_tile * BLOCK_K), first_column, part);
        });
    }
    store_sums<M % BLOCK_M != 0>(c, shared, sum, first_row, M, first_column);
}

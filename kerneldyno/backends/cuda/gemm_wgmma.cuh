// C[m, n] = A[m, k] @ B on the tensor cores with wgmma, fp32 accumulation, 16-bit in and out. Constants: M, BLOCKS_PER_SM, and
// those of warpgroups.cuh, which works through a block's tiles of C.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
#if C_MAPPED
     const __grid_constant__ TensorMap c) {
    const Output output = {&c, nullptr};
#else
     element* __restrict__ c) {
    const Output output = {nullptr, c};
#endif
    const auto tile_at = [&](int index) {
        const Place place(index);
        const int first_row = place.row * BLOCK_M;
        return Tile{0, first_row, M - first_row < BLOCK_M ? M : first_row + BLOCK_M, place.column * BLOCK_N};
    };
    multiply_tiles(tile_at, a, b, output);
}

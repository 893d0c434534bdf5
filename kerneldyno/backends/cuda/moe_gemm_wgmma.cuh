// C[r] = A[r] @ W[e].T for the rows r of each expert e, on the tensor cores with wgmma. Constants: BLOCKS_PER_SM, and those of
// warpgroups.cuh, which works through a block's tiles of C. The tensor C is there twice: by map, and as `c_rows` for the
// tiles that end where their expert's rows do.
//
// The layout lists the tiles of rows: their expert, or -1 past the last, and their first row. A tile reads BLOCK_M rows,
// whoever's they are, and writes those of its expert; a warpgroup that has none of these waits the tile out.

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
moe_gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap w, const int* __restrict__ offsets,
         const int* __restrict__ tile_experts, const int* __restrict__ tile_starts, element* __restrict__ c_rows
#if C_MAPPED
         , const __grid_constant__ TensorMap c) {
    const Output output = {&c, c_rows};
#else
) {
    const Output output = {nullptr, c_rows};
#endif
    const auto tile_at = [&](int index) {
        const Place place(index);
        const int expert = tile_experts[place.row], first_row = tile_starts[place.row];
        if (expert < 0) return Tile{0, 0, 0, 0};
        const int expert_end = offsets[expert];
        return Tile{expert, first_row, expert_end - first_row < BLOCK_M ? expert_end : first_row + BLOCK_M, place.column * BLOCK_N};
    };
    multiply_tiles(tile_at, a, w, output);
}

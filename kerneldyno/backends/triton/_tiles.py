"""The order in which programs take tiles, shared by the kernels of this folder."""

import triton
import triton.language as tl


@triton.jit
def place(tile: tl.tensor, tiles_m: tl.tensor, tiles_n: tl.tensor, GROUP_M: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Row and column of a tile: column by column inside bands of GROUP_M rows, so that programs in flight share rows of B in L2.

    Source: Triton's tutorial 03-matrix-multiplication.
    """
    band = tile // (GROUP_M * tiles_n)
    inside = tile % (GROUP_M * tiles_n)
    height = min(tiles_m - band * GROUP_M, GROUP_M)
    return band * GROUP_M + inside % height, inside // height

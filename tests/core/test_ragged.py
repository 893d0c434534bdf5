"""Tiles over ragged groups, against the plain loop."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kerneldyno.core.ragged import RaggedTiles
from kerneldyno.core.ragged import most_tiles


def plain(sizes: list[int], block_m: int) -> list[tuple[int, int]]:
    tiles: list[tuple[int, int]] = []
    begin = 0
    for group, size in enumerate(sizes):
        tiles += [(group, begin + start) for start in range(0, size, block_m)]
        begin += size
    return tiles


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any), st.sampled_from([1, 3, 16, 128]))
def test_tiles_are_those_of_the_plain_loop_and_the_rest_is_marked(sizes: list[int], block_m: int) -> None:
    tiles = RaggedTiles(sum(sizes), len(sizes), block_m, "cpu")
    tiles.fill(torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32))
    wanted = plain(sizes, block_m)
    padding = [(-1, 0)] * (tiles.capacity - len(wanted))
    assert list(zip(tiles.groups.tolist(), tiles.starts.tolist(), strict=True)) == wanted + padding


@given(st.integers(1, 5000), st.integers(1, 300), st.sampled_from([1, 16, 64, 128]))
def test_the_capacity_is_reached_by_the_worst_routing(rows: int, groups: int, block_m: int) -> None:
    full = min(groups, rows)
    sizes = [1] * (full - 1) + [rows - full + 1]  # groups of one row waste the most
    assert len(plain(sizes, block_m)) <= most_tiles(rows, groups, block_m) <= -(-rows // block_m) + full

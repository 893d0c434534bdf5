"""Tiles over ragged groups of rows, for kernels that multiply each group by a matrix of its own in one launch."""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch


def most_tiles(rows: int, groups: int, block_m: int) -> int:
    """Return how many tiles of `block_m` rows `rows` rows in `groups` groups can need at most: each group's last may be short.

    Args:
        rows: Rows of all groups together.
        groups: Groups, empty ones among them.
        block_m: Rows of a tile.
    """
    return (rows + min(groups, rows) * (block_m - 1)) // block_m


class RaggedTiles:
    """Which rows each block of a grouped product takes; no tile spans two groups.

    It is made once for the shape, so that addresses and grid stay, and filled for each routing: a few torch operations on the
    device, without a wait, that a CUDA graph can hold.

    Args:
        rows: Rows of all groups together.
        groups: Groups, empty ones among them.
        block_m: Rows of a tile.
        device: Where the tiles are needed.

    Attributes:
        capacity: Tiles there is room for, `most_tiles`; a grid of as many covers every routing.
        groups: [capacity] int32, the group of each tile; -1 in the tiles that are not needed, which come last.
        starts: [capacity] int32, the first row of each tile; it ends after `block_m` rows or where its group does. 0 where not needed.
    """

    def __init__(self, rows: int, groups: int, block_m: int, device: "torch.device | str") -> None:
        import torch

        self.capacity = most_tiles(rows, groups, block_m)
        self.groups = torch.empty(self.capacity, dtype=torch.int32, device=device)
        self.starts = torch.empty(self.capacity, dtype=torch.int32, device=device)
        self._block_m = block_m
        self._count = torch.arange(self.capacity, dtype=torch.int32, device=device)

    def fill(self, offsets: "torch.Tensor") -> None:
        """Lay the tiles out for a routing.

        Args:
            offsets: [groups] int32, the row after each group's last; group g begins where g - 1 ends, the first at 0.
        """
        import torch

        begins = torch.nn.functional.pad(offsets[:-1], (1, 0))
        needed = (offsets - begins + (self._block_m - 1)) // self._block_m
        ends = needed.cumsum(0, dtype=torch.int32)
        group = torch.searchsorted(ends, self._count, right=True, out_int32=True)
        used = self._count < ends[-1]
        inside = group.clamp(max=offsets.numel() - 1)
        nth = self._count - (ends - needed)[inside]
        self.groups.copy_(torch.where(used, group, -1))
        self.starts.copy_(torch.where(used, begins[inside] + nth * self._block_m, 0))

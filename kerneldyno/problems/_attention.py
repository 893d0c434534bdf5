"""The shape of an attention with types: who sees whom, and how many pairs that makes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

from kerneldyno.core import Workload


if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Sizes:
    """A workload's shape with types, for kernels and tests alike."""

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window: int
    softcap: float
    scale: float
    layout: str
    lse: bool

    @classmethod
    def of(cls, workload: Workload) -> "Sizes":
        """Read a workload; `scale` is resolved: 1 / sqrt(head_dim) where it is 0."""
        values: dict[str, Any] = dict(workload.shape)
        return cls(**{**values, "scale": values["scale"] or values["head_dim"] ** -0.5})

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def offset(self) -> int:
        """Place of query 0 among the keys; negative where there are more queries than keys."""
        return self.seq_kv - self.seq_q

    @property
    def keys_seen(self) -> int:
        """Most keys that one query sees."""
        return min(self.seq_kv, 2 * self.window or self.seq_kv)

    def keys(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of keys, first and one past the last, that queries `first` to `last` (both included) see between them."""
        low = first + self.offset - self.window + 1 if self.window else 0
        high = self.seq_kv
        if self.causal:
            high = last + self.offset + 1
        elif self.window:
            high = last + self.offset + self.window
        low, high = (min(max(end, 0), self.seq_kv) for end in (low, high))
        return low, max(low, high)

    @property
    def blind(self) -> bool:
        """Whether some query sees no key: causal with more queries than keys, or a window that ends before the first key."""
        low, high = self.keys(0, 0)
        return low == high

    def extent(self, heads: int, seq: int, width: int) -> tuple[int, int, int, int]:
        """Return the shape of a tensor in the workload's layout."""
        return (self.batch, seq, heads, width) if self.layout == "bshd" else (self.batch, heads, seq, width)

    def heads_first(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Return a [batch, heads, seq, width] view of a tensor in the workload's layout."""
        return tensor.transpose(1, 2) if self.layout == "bshd" else tensor

    def sequence_first(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Return a [batch, seq, heads, width] view of a tensor in the workload's layout."""
        return tensor if self.layout == "bshd" else tensor.transpose(1, 2)

    def hidden(self, first: int, last: int, low: int, high: int, device: "torch.device") -> "torch.Tensor":
        """Say which of keys `low` to `high` (excluded) queries `first` to `last` (included) do not see: [queries, keys], true where not."""
        import torch

        place = torch.arange(first, last + 1, device=device).unsqueeze(1) + self.offset
        key = torch.arange(low, high, device=device)
        hidden = key > place if self.causal else torch.zeros((last + 1 - first, high - low), dtype=torch.bool, device=device)
        if self.window:
            hidden = hidden | (key <= place - self.window)
            if not self.causal:
                hidden = hidden | (key >= place + self.window)
        return hidden

    @property
    def pairs(self) -> float:
        """Count the visible pairs of a query and a key; of several causal queries the key at their own place counts half."""

        def summed(shift: int) -> int:
            """Sum min(max(i + shift, 0), seq_kv) over the queries i: the keys below a bound that moves with the query."""

            def below(place: int) -> int:
                inside = min(max(place, 0), self.seq_kv)
                return inside * (inside + 1) // 2 + max(place - self.seq_kv, 0) * self.seq_kv

            return below(shift + self.seq_q - 1) - below(shift - 1)

        high = self.seq_q * self.seq_kv
        if self.causal:
            high = summed(self.offset + 1)
        elif self.window:
            high = summed(self.offset + self.window)
        low = summed(self.offset - self.window + 1) if self.window else 0
        halved = min(self.seq_q, self.seq_kv) if self.causal and self.seq_q > 1 else 0
        return high - low - halved / 2

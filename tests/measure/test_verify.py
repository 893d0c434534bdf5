"""Fingerprints of tensors: the same for the same tensor, another for a changed one, and block by block."""

import pytest
import torch

from kerneldyno.measure import verify
from kerneldyno.measure.verify import fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_a_changed_element_shows_whatever_the_blocks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1001).remainder(97).to(dtype)
    before = fingerprint({"x": tensor, "empty": tensor[:0]})
    assert before["empty"] == 0
    for elements in (1, 7, 1001, 5000):
        monkeypatch.setattr(verify, "FINGERPRINT_ELEMENTS", elements)
        assert fingerprint({"x": tensor, "empty": tensor[:0]}) == before
        changed = tensor.clone()
        changed[500] += 1
        assert fingerprint({"x": changed})["x"] != before["x"]

"""A private artifact cache for each test."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELDYNO_CACHE", str(tmp_path / "cache"))

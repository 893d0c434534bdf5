"""The artifact cache: what goes in comes out, and damage counts as absence."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kerneldyno.core import Artifact
from kerneldyno.core import Environment
from kerneldyno.core import Workload
from kerneldyno.measure.cache import ArtifactCache
from kerneldyno.measure.cache import artifact_key
from kerneldyno.measure.cache import cache_root


ARTIFACT = Artifact(
    config={"block_m": 128, "swizzle": True},
    arch="sm_90a",
    source="__global__ void f() {}\n",
    entry="f",
    binary=bytes(range(256)) * 40,
    payload={"grid": [1, 2, 3]},
    registers=168,
    smem_bytes=196_608,
    spill_bytes=0,
    threads=256,
    texts={"ptx": ".version 9.0"},
    compile_s=1.5,
)


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path)


def test_round_trip(cache: ArtifactCache) -> None:
    assert cache.get("ab12") is None
    cache.put("ab12", ARTIFACT)
    assert cache.get("ab12") == ARTIFACT


@pytest.mark.parametrize("keep", [0, 10, 200, -1])
def test_a_torn_file_counts_as_absent_and_goes(cache: ArtifactCache, keep: int) -> None:
    cache.put("ab12", ARTIFACT)
    path = cache.path("ab12")
    path.write_bytes(path.read_bytes()[:keep])
    assert cache.get("ab12") is None
    assert not path.exists()
    cache.put("ab12", ARTIFACT)
    assert cache.get("ab12") == ARTIFACT


def test_a_changed_byte_is_found(cache: ArtifactCache) -> None:
    cache.put("ab12", ARTIFACT)
    path = cache.path("ab12")
    body = bytearray(path.read_bytes())
    body[-5] ^= 1
    path.write_bytes(body)
    assert cache.get("ab12") is None


def test_killed_while_writing(tmp_path: Path) -> None:
    # a process that writes without pause is killed at several instants: a reader finds whole artifacts or none
    script = (
        "import sys; from pathlib import Path; from kerneldyno.core import Artifact; from kerneldyno.measure.cache import ArtifactCache\n"
        "cache = ArtifactCache(Path(sys.argv[1]))\n"
        "while True:\n"
        "    for i in range(20):\n"
        "        cache.put(f'k{i}', Artifact({}, 'a', 's', 'e', binary=bytes([i]) * 2_000_000)); print(i, flush=True)\n"
    )
    for delay in (0.0, 0.013, 0.037):
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        found = {i: ArtifactCache(tmp_path).get(f"k{i}") for i in range(20)}
        assert found[0] is not None
        assert all(artifact is None or artifact.binary == bytes([i]) * 2_000_000 for i, artifact in found.items())


def test_the_key_depends_on_all_that_changes_code_and_not_on_the_seed() -> None:
    workload = Workload("gemm", {"m": 1, "n": 2, "k": 3, "layout": "nt"}, "bf16", seed=0)
    environment = Environment({"triton": "3.6.0"})
    base = artifact_key(workload, "triton", "d", {"a": 1}, "sm_90a", environment)
    assert base == artifact_key(replace(workload, seed=5), "triton", "d", {"a": 1}, "sm_90a", environment)
    others = {
        artifact_key(replace(workload, dtype="fp16"), "triton", "d", {"a": 1}, "sm_90a", environment),
        artifact_key(replace(workload, shape={**workload.shape, "m": 2}), "triton", "d", {"a": 1}, "sm_90a", environment),
        artifact_key(workload, "cuda", "d", {"a": 1}, "sm_90a", environment),
        artifact_key(workload, "triton", "e", {"a": 1}, "sm_90a", environment),
        artifact_key(workload, "triton", "d", {"a": 2}, "sm_90a", environment),
        artifact_key(workload, "triton", "d", {"a": 1}, "sm_100a", environment),
        artifact_key(workload, "triton", "d", {"a": 1}, "sm_90a", Environment({"triton": "3.9.0"})),
    }
    assert len(others | {base}) == 8


def test_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNELDYNO_CACHE", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
    monkeypatch.delenv("KERNELDYNO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "kerneldyno"

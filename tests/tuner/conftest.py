"""A private artifact cache and database for each test, and the command run as a user runs it."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


PLANTED = Path(__file__).parents[1] / "planted.py"

SOFTMAX = ("problem=softmax", "backend=c", "shape.m=64", "shape.n=256", "trials=6", "seed=1")
VECTOR_ADD = ("problem=vector_add", "backend=planted", "shape.n=1000", "dtype=fp32", f"plugin={PLANTED}", "sampler=random")

Tune = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with an empty cache and no GPU."""
    return {**os.environ, "KERNELDYNO_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def command() -> list[str]:
    """The words before the request: on one core, since a team of threads waits for a scheduler tick where tests share the cores."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(cores)]
    return ["taskset", "--cpu-list", str(core), sys.executable, "-m", "kerneldyno"]


@pytest.fixture
def tune(tmp_path: Path, environ: dict[str, str], command: list[str]) -> Tune:
    """Run the command in a folder of its own and return what it printed."""

    def run(*words: str, more: Mapping[str, str] | None = None, expect: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, env={**environ, **(more or {})}, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == expect, done.stderr + done.stdout
        assert "Traceback" not in done.stderr
        return done

    return run


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """The JSON rows of a comparison by backend or baseline."""
    return {row["name"]: row for row in json.loads(done.stdout)}


def trials(database: Path) -> dict[tuple[int, int], tuple[str, str]]:
    """Every finished trial by study and number; none where the tables were not made yet."""
    if not database.exists():
        return {}
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        if not connection.execute("select 1 from sqlite_master where name = 'trial'").fetchone():
            return {}
        found = connection.execute("select study_id, number, config, status from trial order by 1, 2").fetchall()
    return {(study, number): (config, status) for study, number, config, status in found}

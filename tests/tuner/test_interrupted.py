"""Searches that are interrupted, killed, started from scripts and run beside each other: real processes on a CPU."""

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.tuner.conftest import SOFTMAX
from tests.tuner.conftest import VECTOR_ADD
from tests.tuner.conftest import Tune
from tests.tuner.conftest import rows
from tests.tuner.conftest import trials


def test_ctrl_c_keeps_what_is_finished_and_prints_it(tmp_path: Path, environ: dict[str, str], command: list[str]) -> None:
    more = {"PLANTED": "none wrong one_wrong unwritten", "PLANTED_BUILD_S": "1"}
    process = subprocess.Popen(
        [*command, *VECTOR_ADD, "trials=8"],
        cwd=tmp_path,
        env={**environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if re.search(r"planted [1-9]\d*/8", line):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert 0 < len(trials(tmp_path / "results.db")) < 8
    assert "vector_add" in out
    assert not workers_of(environ)


def workers_of(environ: dict[str, str]) -> list[int]:
    """Worker processes of this test (they carry its cache in their environment) that are still there."""
    mark = f"KERNELDYNO_CACHE={environ['KERNELDYNO_CACHE']}".encode()
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def test_killed_at_random_instants(tune: Tune, tmp_path: Path, environ: dict[str, str], command: list[str]) -> None:
    """No finished trial is lost, no process is left, and the study ends with the configurations of one that was never killed."""
    request = ("problem=vector_add", "backend=c", "shape.n=4096", "dtype=fp32", "trials=16", "seed=5", "sampler=random")
    tune(*request, "db=whole.db")
    rng = random.Random(20)
    before: dict[tuple[int, int], tuple[str, str]] = {}
    environ["KERNELDYNO_CACHE"] = str(tmp_path / "second-cache")  # else nothing would be left to build
    for attempt in range(20):
        process = subprocess.Popen(
            [*command, *request, "db=killed.db"], cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(rng.uniform(0.3, 4.0))
        victims = [process.pid, *workers_of(environ)] if attempt % 2 else [process.pid]
        rng.shuffle(victims)
        for victim in victims:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
        deadline = time.monotonic() + 10
        while (left := workers_of(environ)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"attempt {attempt} left {left}"
        now = trials(tmp_path / "killed.db")
        assert before.items() <= now.items(), f"attempt {attempt} lost a trial"
        before = now
    tune(*request, "db=killed.db")
    assert list(trials(tmp_path / "killed.db").values()) == list(trials(tmp_path / "whole.db").values())
    assert rows(tune("compare", "db=killed.db", "format=json"))["c"]["counts"] == {"ok": 16}


@pytest.mark.parametrize("how", ["script", "stdin"])
def test_a_script_without_a_main_guard(tmp_path: Path, environ: dict[str, str], command: list[str], how: str) -> None:
    words = [*SOFTMAX[:4], "trials=2", "seed=1"]
    code = f"from kerneldyno.cli import main\ncode = main({words!r})\nraise SystemExit(code)\n"
    (tmp_path / "script.py").write_text(code)
    arguments = {"script": ["script.py"], "stdin": ["-"]}[how]
    done = subprocess.run(
        [*command[:-2], *arguments], input=code, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert len(trials(tmp_path / "results.db")) == 2


def test_two_commands_share_a_database(tmp_path: Path, environ: dict[str, str], command: list[str]) -> None:
    requests = [(*SOFTMAX[:4], "trials=4", f"seed={seed}", "sampler=random") for seed in (1, 2)]
    running = [subprocess.Popen([*command, *request], cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL) for request in requests]
    assert [process.wait(timeout=200) for process in running] == [0, 0]
    kept = trials(tmp_path / "results.db")
    assert all(status == "ok" for _, status in kept.values())
    assert 4 <= len(kept) <= 8  # a configuration that both asked for may have been measured once

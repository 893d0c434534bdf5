"""The whole path on a CPU, as a user runs it: search, failures, repeats, budgets, Ctrl-C, kills."""

import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from tests.tuner.conftest import PLANTED
from tests.tuner.conftest import Tune
from tests.tuner.conftest import rows


SOFTMAX = ("problem=softmax", "backend=c", "shape.m=64", "shape.n=256", "trials=6", "seed=1")
VECTOR_ADD = ("problem=vector_add", "backend=planted", "shape.n=1000", "dtype=fp32", f"plugin={PLANTED}", "sampler=random")


def trials(database: Path) -> dict[tuple[int, int], tuple[str, str]]:
    """Every finished trial by study and number; none where the tables were not made yet."""
    if not database.exists():
        return {}
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        if not connection.execute("select 1 from sqlite_master where name = 'trial'").fetchone():
            return {}
        found = connection.execute("select study_id, number, config, status from trial order by 1, 2").fetchall()
    return {(study, number): (config, status) for study, number, config, status in found}


def test_search_then_compare_then_nothing_new(tune: Tune, tmp_path: Path) -> None:
    first = tune(*SOFTMAX)
    assert "softmax" in first.stdout
    kept = trials(tmp_path / "results.db")
    assert len(kept) == 6
    compared = rows(tune("compare", "problem=softmax", "format=json"))
    best, library = compared["c"], compared["torch"]
    assert best["counts"] == {"ok": 6}
    assert 0 < best["low_us"] <= best["median_us"] <= best["high_us"]
    assert best["ratio_low"] <= best["ratio"] <= best["ratio_high"]
    assert library["ratio"] == 1.0
    assert best["ratio"] == pytest.approx(library["median_us"] / best["median_us"], rel=0.5)  # medians of ratios and of times
    assert best["verified"]
    assert best["error_relative"] < 1e-5

    again = tune(*SOFTMAX)
    assert "measured 0" in again.stderr
    assert "nothing was measured again" in again.stderr
    assert trials(tmp_path / "results.db") == kept

    more = tune(*SOFTMAX[:4], "trials=8", "seed=1")
    assert "measured 2" in more.stderr
    assert dict(list(trials(tmp_path / "results.db").items())[:6]) == kept

    tune(*SOFTMAX, "fresh=true")
    assert len(trials(tmp_path / "results.db")) == 14


def test_a_seed_gives_the_same_configurations(tune: Tune, tmp_path: Path) -> None:
    for name in ("a.db", "b.db", "c.db"):
        tune(*SOFTMAX[:5], "sampler=random", f"seed={2 if name == 'c.db' else 1}", f"db={name}")
    first, second, other = (list(trials(tmp_path / name).values()) for name in ("a.db", "b.db", "c.db"))
    assert first == second
    assert first != other


def test_every_fault_is_a_trial_and_the_search_goes_on(tune: Tune, tmp_path: Path) -> None:
    faults = "none segfault endless wrong out_of_bounds flaky syntax build_dies launch_error out_of_resources"
    tune(*VECTOR_ADD, "trials=20", "run_timeout=4", more={"PLANTED": faults})
    found: dict[str, set[str]] = {}
    for config, status in trials(tmp_path / "results.db").values():
        found.setdefault(json.loads(config)["fault"], set()).add(status)
    assert found == {
        "none": {"ok"},
        "segfault": {"worker_died"},
        "endless": {"run_timeout"},
        "wrong": {"wrong_result"},
        "out_of_bounds": {"wrong_result"},
        "flaky": {"nondeterministic"},
        "syntax": {"build_error"},
        "build_dies": {"worker_died"},
        "launch_error": {"launch_error"},
        "out_of_resources": {"out_of_resources"},
    }


def test_a_kernel_that_dies_in_the_race_costs_the_others_nothing(tune: Tune) -> None:
    # its trial makes 68 launches and passes; the race makes up to 300
    done = tune(*VECTOR_ADD, "trials=4", more={"PLANTED": "none dies_in_the_race"})
    compared = rows(tune("compare", "problem=vector_add", "format=json", f"plugin={PLANTED}"))
    assert compared["planted"]["counts"] == {"ok": 4}
    assert compared["planted"]["median_us"] > 0
    assert "no comparison" in done.stderr or compared["planted"]["ratio"] > 0


def test_nothing_passed(tune: Tune) -> None:
    done = tune(*VECTOR_ADD, "trials=2", more={"PLANTED": "wrong"}, expect=3)
    assert "wrong_result" in done.stderr + done.stdout


def test_the_budget_stops_it(tune: Tune, tmp_path: Path) -> None:
    # 0.4 s of sampling each: all 448 would take three minutes and more
    tune("problem=softmax", "backend=c", "shape.m=64", "shape.n=256", "budget=8")
    first = trials(tmp_path / "results.db")
    assert 0 < len(first) < 200
    # the seconds of the first run count: the same command has none left
    again = tune("problem=softmax", "backend=c", "shape.m=64", "shape.n=256", "budget=8")
    assert "measured 0" in again.stderr
    assert trials(tmp_path / "results.db") == first


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


@pytest.mark.parametrize("how", ["script", "stdin", "-c"])
def test_a_script_without_a_main_guard(tmp_path: Path, environ: dict[str, str], command: list[str], how: str) -> None:
    words = [*SOFTMAX[:4], "trials=2", "seed=1"]
    code = f"from kerneldyno.cli import main\ncode = main({words!r})\nraise SystemExit(code)\n"
    (tmp_path / "script.py").write_text(code)
    arguments = {"script": ["script.py"], "stdin": ["-"], "-c": ["-c", code]}[how]
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

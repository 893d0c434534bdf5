"""The whole path on a CPU, as a user runs it: search, failures, repeats, budgets."""

import json
from pathlib import Path

import pytest

from tests.tuner.conftest import PLANTED
from tests.tuner.conftest import SOFTMAX
from tests.tuner.conftest import VECTOR_ADD
from tests.tuner.conftest import Tune
from tests.tuner.conftest import rows
from tests.tuner.conftest import trials


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
    faults = {"PLANTED": "wrong syntax launch_error out_of_resources"}  # none of which takes the time of a comparison
    for name in ("a.db", "b.db", "c.db"):
        tune(*VECTOR_ADD, "trials=6", f"seed={2 if name == 'c.db' else 1}", f"db={name}", more=faults, expect=3)
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


def test_a_race_is_not_lost_for_want_of_memory_after_it(tune: Tune) -> None:
    done = tune(*VECTOR_ADD, "trials=2", more={"PLANTED": "no_memory_later"})
    assert "not checked again" in done.stdout
    compared = rows(tune("compare", "problem=vector_add", "format=json", f"plugin={PLANTED}"))
    assert compared["planted"]["ratio"] > 0
    assert (compared["planted"]["status"], compared["planted"]["verified"]) == ("ok", False)
    assert "OUT_OF_MEMORY" in compared["planted"]["message"]


def test_the_time_of_the_layout_stands_beside_the_kernels(tune: Tune) -> None:
    done = tune(*VECTOR_ADD, "trials=1", more={"PLANTED": "none"})
    assert "Layout: what the kernel prepares" in done.stdout
    compared = rows(tune("compare", "problem=vector_add", "format=json", f"plugin={PLANTED}"))
    assert 2000 < compared["planted"]["layout_us"] < 50_000
    assert compared["planted"]["median_us"] < 2000
    assert compared["torch"]["layout_us"] is None


def test_a_refusal_says_why_and_who_can(tune: Tune) -> None:
    words = [word for word in VECTOR_ADD if not word.startswith("shape.")]
    done = tune(*words, "shape.n=13", expect=2)
    assert "13 is unlucky. Backends here that can: c." in done.stderr


def test_a_workload_beyond_the_memory_is_refused_before_anything_is_built(tune: Tune) -> None:
    done = tune("problem=softmax", "backend=c", "shape.m=65536", "shape.n=131072", expect=4)
    assert "GiB of memory. Choose a smaller shape" in done.stderr


def test_nothing_passed(tune: Tune) -> None:
    done = tune(*VECTOR_ADD, "trials=2", more={"PLANTED": "wrong"}, expect=3)
    assert "wrong_result" in done.stderr + done.stdout


def test_the_budget_stops_it(tune: Tune, tmp_path: Path) -> None:
    # 0.4 s of sampling each: all 64 would take half a minute and more, after some five seconds in which processes start
    tune("problem=softmax", "backend=c", "shape.m=64", "shape.n=256", "budget=15")
    first = trials(tmp_path / "results.db")
    assert 0 < len(first) < 64
    # the seconds of the first run count: its first trial alone took more than this budget, since processes had to start
    again = tune("problem=softmax", "backend=c", "shape.m=64", "shape.n=256", "budget=1")
    assert "measured 0" in again.stderr
    assert trials(tmp_path / "results.db") == first

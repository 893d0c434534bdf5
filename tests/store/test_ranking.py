"""The one ranking, against a plain reading of the same data, and its pages and lists."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from sqlalchemy.engine import Engine

from kerneldyno.core import Device
from kerneldyno.core import Environment
from kerneldyno.core import Outcome
from kerneldyno.core import Status
from kerneldyno.core import Workload
from kerneldyno.store import query
from kerneldyno.store.records import Filters
from kerneldyno.store.records import PlayoffEntry
from kerneldyno.store.write import Writer


Study = Callable[..., int]
Ok = Callable[[float], Outcome]
Playoff = Callable[..., int]

FAILURES = [status for status in Status if status is not Status.OK]


def _kernel(backend: str, median_us: float | None, trial_id: int | None = None, **more: object) -> PlayoffEntry:
    given: dict = {"backend": backend, "trial_id": trial_id, "config": {"a": 1}, "median_us": median_us, "verified": True} | more
    return PlayoffEntry(backend, "kernel", **given)


def test_ranking_of_generated_data(writer: Writer, engine: Engine, study: Study, ok: Ok) -> None:
    rng = random.Random(5)
    environments = [Environment({"driver": "1"}), Environment({"driver": "2"})]
    newest: dict[tuple, tuple] = {}
    trials: dict[tuple, list[Outcome]] = {}
    for _ in range(40):
        workload = Workload("gemm", {"m": rng.choice((1, 16)), "n": 8}, "bf16")
        device = Device("cuda", rng.choice(("NVIDIA H200", "NVIDIA B200")), "sm_90a")
        backend, kernel_digest, environment = rng.choice(("triton", "cuda")), rng.choice("xy"), rng.choice(environments)
        record = writer.study(
            workload,
            device,
            environment,
            backend,
            kernel_digest,
            rng.choice(("tpe", "random")),
            rng.randrange(99),
            "tune",
            rng.random() < 0.2,
        )
        group = (workload.key, device.name, backend, environment.digest, kernel_digest, record.generation)
        newest[group[:3]] = group
        for number in range(rng.randrange(1, 6)):
            outcome = ok(rng.uniform(10, 20)) if rng.random() < 0.6 else Outcome(rng.choice(FAILURES), build_s=0.5)
            writer.record(record.id, 1000 * record.id + number, {"a": rng.random()}, outcome, 0.0)
            trials.setdefault(group, []).append(outcome)
    rows = query.ranking(engine)
    assert len(rows) == len(newest)
    for row in rows:
        outcomes = trials[newest[row.workload.key, row.device.name, row.name]]
        passed = [outcome.median_us for outcome in outcomes if outcome.median_us is not None]
        assert row.median_us == min(passed, default=None)
        assert row.counts == Counter(outcome.status.value for outcome in outcomes)
        assert row.trials == len(outcomes)
        assert row.tuning_s == pytest.approx(sum(outcome.build_s + outcome.measure_s for outcome in outcomes))
        assert (row.ratio, row.playoff, row.source) == (None, None, "database")
    places = [(row.workload.shape["m"], row.device.name, row.median_us is None, row.median_us or 0) for row in rows]
    assert places == sorted(places)


def test_row_before_a_playoff_is_the_best_trial(
    writer: Writer, engine: Engine, study: Study, ok: Ok, gemm: Workload, device: Device, environment: Environment
) -> None:
    own = study()
    writer.record(own, 0, {"a": 1}, ok(60.0), 1.0)
    best = writer.record(own, 1, {"a": 2}, ok(50.0), 2.0)
    (row,) = query.ranking(engine)
    assert (row.workload, row.device, row.environment) == (gemm, replace(device, index=0, driver=""), environment)
    assert (row.name, row.role, row.backend, row.status) == ("triton", "kernel", "triton", Status.OK)
    assert (row.median_us, row.low_us, row.high_us, row.config, row.trial_id) == (50.0, 49.0, 52.5, {"a": 2}, best)
    assert (row.error_relative, row.sm_clock_mhz, row.power_w, row.tuning_s) == (0.0011, 1755.0, 512.5, 3.5)
    assert (row.command, row.kernel_digest, row.verified) == ("tune problem=gemm backend=triton", "k1", False)


def test_newest_playoff_stands_for_a_name(writer: Writer, engine: Engine, study: Study, ok: Ok, playoff: Playoff) -> None:
    own = study()
    rows = [writer.record(own, number, {"a": number}, ok(50.0 + number), 1.0) for number in range(3)]
    playoff(_kernel("triton", 40.0, rows[0]), PlayoffEntry("torch", "library", median_us=30.0, ratio=1.0, verified=True))
    playoff(
        _kernel("triton", 45.0, rows[1], ratio=1.2, ratio_low=1.1, ratio_high=1.3, tied_first=True),
        _kernel("triton", 44.0, rows[2], verified=False),
        _kernel("triton", 43.0, rows[0], status=Status.WRONG_RESULT, verified=False, message="recheck"),
        PlayoffEntry("cublas", "library", median_us=54.0, ratio=1.0, verified=True),
        PlayoffEntry("copy", "roof", median_us=20.0, ratio=2.7, verified=True),
    )
    ranked = query.ranking(engine)
    assert [(row.name, row.role, row.median_us) for row in ranked] == [
        ("copy", "roof", 20.0),
        ("torch", "library", 30.0),  # took part in the older one only
        ("triton", "kernel", 45.0),  # the fastest of the newest that was right on fresh inputs
        ("cublas", "library", 54.0),
    ]
    torch, triton = ranked[1], ranked[2]
    assert torch.playoff != triton.playoff
    assert (triton.ratio, triton.ratio_low, triton.ratio_high, triton.tied_first, triton.verified) == (1.2, 1.1, 1.3, True, True)
    assert (triton.trial_id, triton.best_trial_id, triton.best_trial_us) == (rows[1], rows[0], 50.0)
    assert (triton.counts, triton.trials, triton.kernel_digest, triton.rounds, triton.seed) == ({"ok": 3}, 3, "k1", 15, 3)
    assert (torch.counts, torch.trials, torch.config, torch.backend) == ({}, 0, None, None)


def test_failures_are_rows(writer: Writer, engine: Engine, study: Study, ok: Ok, playoff: Playoff) -> None:
    writer.record(study("triton"), 0, {"a": 1}, ok(50.0), 1.0)
    cuda = study("cuda")
    for number, status in enumerate((Status.BUILD_ERROR, Status.LAUNCH_ERROR, Status.BUILD_ERROR)):
        writer.record(cuda, number, {"a": number}, Outcome(status), 1.0)
    playoff(_kernel("tilelang", None, status=Status.WORKER_DIED, verified=False, message="signal 11"))
    study("c")  # no trial yet: nothing to say
    found = [(row.name, row.status, row.median_us, row.message) for row in query.ranking(engine)]
    assert found == [
        ("triton", Status.OK, 50.0, ""),
        ("cuda", Status.BUILD_ERROR, None, ""),
        ("tilelang", Status.WORKER_DIED, None, "signal 11"),
    ]


def test_a_study_without_trials_hides_nothing(writer: Writer, engine: Engine, study: Study, ok: Ok) -> None:
    writer.record(study(), 0, {"a": 1}, ok(50.0), 1.0)
    study(fresh=True)
    assert [row.median_us for row in query.ranking(engine)] == [50.0]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(), 5),
        (Filters(problems=["gemm"]), 4),
        (Filters(problems=["gemm", "softmax"]), 5),
        (Filters(dtypes=["fp32"]), 1),
        (Filters(shapes=[{"m": 16}]), 2),
        (Filters(shapes=[{"m": 16}, {"n": 3}]), 3),
        (Filters(shapes=[{"m": 16, "n": 9}]), 0),
        (Filters(shapes=[{"layout": "nn"}]), 0),
        (Filters(backends=["cuda"]), 2),
        (Filters(backends=["tilelang"]), 0),
        (Filters(devices=["cuda:1"]), 4),
        (Filters(devices=["h200"]), 4),
        (Filters(devices=["cpu"]), 1),
        (Filters(devices=["100%"]), 0),
        (Filters(limit=2), 2),
    ],
)
def test_filters(writer: Writer, engine: Engine, study: Study, ok: Ok, playoff: Playoff, filters: Filters, expected: int) -> None:
    gemms = [Workload("gemm", {"m": m, "n": 8, "layout": "nt"}, "bf16") for m in (1, 16)]
    softmax = Workload("softmax", {"m": 2, "n": 3}, "fp32")
    for backend, workload in (("triton", gemms[0]), ("triton", gemms[1]), ("cuda", gemms[1])):
        writer.record(study(backend, workload=workload), 0, {"a": 1}, ok(9.0), 1.0)
    playoff(PlayoffEntry("torch", "library", median_us=8.0), workload=gemms[0])
    writer.record(study("c", workload=softmax, device=Device("cpu", "Xeon", "x86_64")), 0, {"a": 1}, ok(9.0), 1.0)
    if filters.backends == ["cuda"]:
        playoff(PlayoffEntry("torch", "library", median_us=8.0), workload=gemms[1])
    assert len(query.ranking(engine, filters)) == expected


def test_counting_reads_the_index_alone(writer: Writer, engine: Engine, study: Study, ok: Ok) -> None:
    own = study()
    statement = (
        "EXPLAIN QUERY PLAN SELECT study.id, trial.status, count(*), sum(build_s + measure_s) "
        f"FROM study JOIN trial ON trial.study_id = study.id WHERE study.id = {own} GROUP BY study.id, trial.status"
    )
    with engine.connect() as connection:
        plan = " ".join(row.detail for row in connection.exec_driver_sql(statement))
    assert "COVERING INDEX ix_trial_rank" in plan


def test_trials_page_by_page(writer: Writer, engine: Engine, study: Study, ok: Ok) -> None:
    own = study()
    for number in range(23):
        outcome = ok(10.0) if number % 3 else Outcome(Status.REJECTED)
        writer.record(own, number * 2, {"a": number}, outcome, 1.0)
    seen: list[int] = []
    while page := query.trials(engine, own, after=seen[-1] if seen else None, limit=5):
        seen += [trial.number for trial in page]
    assert seen == list(range(0, 46, 2))
    assert len(query.trials(engine, own, limit=None, statuses=[Status.REJECTED])) == 8


def test_studies(writer: Writer, engine: Engine, study: Study, ok: Ok, gemm: Workload) -> None:
    first, second = study(), study("cuda", seed=4)
    writer.record(first, 0, {"a": 1}, ok(9.0), 1.0)
    writer.record(first, 1, {"a": 2}, ok(8.0), 1.0)
    writer.record(first, 2, {"a": 3}, Outcome(Status.RUN_TIMEOUT), 1.0)
    found = query.studies(engine)
    assert [(row.id, row.backend, row.seed, row.counts, row.best_us) for row in found] == [
        (second, "cuda", 4, {}, None),
        (first, "triton", 0, {"ok": 2, "run_timeout": 1}, 8.0),
    ]
    assert found[0].workload == gemm
    assert [row.id for row in query.studies(engine, Filters(backends=["triton"]))] == [first]
    assert [row.id for row in query.studies(engine, Filters(limit=1))] == [second]

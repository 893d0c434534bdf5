"""What is written comes back, and a study continues where it was."""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC
from datetime import datetime

import pytest
from sqlalchemy.engine import Engine

from kerneldyno.core import Artifact
from kerneldyno.core import Device
from kerneldyno.core import Environment
from kerneldyno.core import Error
from kerneldyno.core import Outcome
from kerneldyno.core import Status
from kerneldyno.core import Workload
from kerneldyno.core import digest
from kerneldyno.store import query
from kerneldyno.store.records import PlayoffEntry
from kerneldyno.store.write import Writer


Study = Callable[..., int]
Ok = Callable[[float], Outcome]


def test_trial_round_trip(writer: Writer, study: Study, ok: Ok) -> None:
    own = study()
    before = datetime.now(UTC)
    row = writer.record(own, 7, {"block_m": 128, "order": "grouped", "fast": True}, ok(55.5), 12.25)
    writer.record(own, 2, {"block_m": 64}, Outcome(Status.BUILD_ERROR, message="out of shared memory"), 3.0)
    first, second = writer.finished(own)
    assert (first.number, first.outcome) == (2, Outcome(Status.BUILD_ERROR, message="out of shared memory"))
    assert (second.id, second.number, second.elapsed_s) == (row, 7, 12.25)
    assert second.outcome == ok(55.5)
    assert second.config == {"block_m": 128, "order": "grouped", "fast": True}
    assert list(second.config) == ["block_m", "order", "fast"]
    assert second.config_key == digest(second.config)
    assert before <= second.finished_at <= datetime.now(UTC)
    assert query.trial(writer.engine, row) == second
    assert query.trial(writer.engine, 99) is None


@pytest.mark.parametrize("status", list(Status))
def test_every_status_is_kept(writer: Writer, study: Study, status: Status) -> None:
    outcome = Outcome(status, message="" if status is Status.OK else "why")
    row = writer.record(study(), 0, {"a": 1}, outcome, 0.0)
    found = query.trial(writer.engine, row)
    assert found is not None
    assert found.outcome == outcome


def test_numbers_that_are_none(writer: Writer, study: Study) -> None:
    own = study()
    writer.record(own, 0, {"a": 1}, Outcome(Status.WRONG_RESULT, error=Error(math.nan, math.inf)), 0.0)
    error = writer.finished(own)[0].outcome.error
    assert error is not None
    assert math.isnan(error.relative)
    assert error.max_abs == math.inf


def test_text_that_no_database_takes(writer: Writer, study: Study) -> None:
    own = study()
    writer.record(own, 0, {"a": 1}, Outcome(Status.WORKER_DIED, message="a\0b\udce9 µs"), 0.0)
    assert writer.finished(own)[0].outcome.message == "a\ufffdb? µs"


def test_record_twice_is_one_trial(writer: Writer, study: Study, ok: Ok) -> None:
    own = study()
    first = writer.record(own, 0, {"a": 1}, ok(5.0), 1.0)
    assert writer.record(own, 0, {"a": 1}, ok(6.0), 2.0) == first
    assert [trial.median_us for trial in writer.finished(own)] == [5.0]


def test_a_taken_number_drops_no_measurement(writer: Writer, study: Study, ok: Ok) -> None:
    own = study()
    writer.record(own, 0, {"a": 1}, ok(5.0), 1.0)
    writer.record(own, 4, {"a": 2}, ok(6.0), 1.0)
    writer.record(own, 0, {"a": 3}, ok(4.0), 1.0)
    assert [(trial.number, trial.median_us) for trial in writer.finished(own)] == [(0, 5.0), (4, 6.0), (5, 4.0)]


def test_study_is_found_again(study: Study, environment: Environment) -> None:
    own = study()
    assert study() == own
    others = [
        study("cuda"),
        study(sampler="random"),
        study(seed=1),
        study(kernel_digest="k2"),
        study(environment=Environment({"triton": "3.9.0"})),
        study(workload=Workload("softmax", {"m": 1}, "fp32")),
        study(device=Device("cuda", "NVIDIA H100", "sm_90a", sm_count=132)),
    ]
    assert len({own, *others}) == 8


def test_device_is_its_kind_not_its_ordinal(study: Study, device: Device) -> None:
    assert study(device=replace(device, index=5, driver="590.1", memory_bytes=device.memory_bytes - 4096)) == study()


def test_workload_ignores_the_order_of_its_shape(study: Study, gemm: Workload) -> None:
    turned = replace(gemm, shape=dict(reversed(gemm.shape.items())))
    assert study(workload=turned) == study()


def test_fresh_begins_a_generation_for_the_whole_group(writer: Writer, gemm: Workload, device: Device, environment: Environment) -> None:
    def begin(sampler: str, fresh: bool) -> int:
        return writer.study(gemm, device, environment, "triton", "k1", sampler, 0, "tune", fresh).generation

    assert [begin("tpe", False), begin("tpe", True), begin("tpe", False), begin("random", False), begin("random", True)] == [0, 1, 1, 1, 2]
    assert begin("tpe", False) == 2


def test_memo_spans_samplers_and_seeds_of_a_group(writer: Writer, study: Study, ok: Ok) -> None:
    own, other = study(), study(sampler="random", seed=9)
    writer.record(own, 0, {"a": 1}, ok(5.0), 1.0)
    writer.record(other, 0, {"a": 2}, Outcome(Status.RUN_TIMEOUT, message="60 s"), 1.0)
    writer.record(other, 1, {"a": 1}, ok(7.0), 1.0)
    writer.record(study("cuda"), 0, {"a": 3}, ok(1.0), 1.0)
    writer.record(study(kernel_digest="k2"), 0, {"a": 4}, ok(1.0), 1.0)
    known = {digest({"a": 1}): ok(5.0), digest({"a": 2}): Outcome(Status.RUN_TIMEOUT, message="60 s")}
    assert writer.memo(own) == writer.memo(other) == known
    assert writer.memo(study(fresh=True)) == {}


def test_best_trials_are_distinct_and_passed(writer: Writer, study: Study, ok: Ok) -> None:
    own, other = study(), study(seed=1)
    for number, median_us in enumerate((9.0, 3.0, 7.0)):
        writer.record(own, number, {"a": number}, ok(median_us), 1.0)
    writer.record(other, 0, {"a": 1}, ok(2.5), 1.0)
    writer.record(other, 1, {"a": 8}, Outcome(Status.LAUNCH_ERROR), 1.0)
    assert [(trial.config["a"], trial.median_us) for trial in writer.best_trials(own, 2)] == [(1, 2.5), (2, 7.0)]
    assert len(writer.best_trials(other, 10)) == 3


def test_artifact_round_trip(writer: Writer, engine: Engine) -> None:
    texts = {"ptx": "ld.global.v4\n" * 5000, "sass": "HGMMA"}
    artifact = Artifact({"a": 1}, "sm_90a", "@triton.jit\0", "kernel", b"\x7fELF", {"grid": 3}, 168, 1024, 8, 256, texts, 2.5)
    writer.record_artifact("key", artifact)
    writer.record_artifact("key", replace(artifact, source="another"))
    found = query.listing(engine, "key")
    assert found is not None
    assert (found.source, found.entry, found.arch, found.texts) == ("@triton.jit\ufffd", "kernel", "sm_90a", texts)
    assert (found.registers, found.smem_bytes, found.spill_bytes, found.threads, found.compile_s) == (168, 1024, 8, 256, 2.5)
    assert query.listing(engine, "none") is None


def test_playoff_trials_are_those_of_the_newest(
    writer: Writer, study: Study, ok: Ok, playoff: Callable[..., int], gemm: Workload, device: Device
) -> None:
    assert writer.playoff_trials(gemm, device) == frozenset()
    rows = [writer.record(study(), number, {"a": number}, ok(5.0), 1.0) for number in range(3)]
    playoff(PlayoffEntry("triton", "kernel", backend="triton", trial_id=rows[0]))
    playoff(*(PlayoffEntry("triton", "kernel", backend="triton", trial_id=row) for row in rows[1:]), PlayoffEntry("torch", "library"))
    assert writer.playoff_trials(gemm, device) == frozenset(rows[1:])
    assert writer.playoff_trials(replace(gemm, seed=1), device) == frozenset()

"""Several processes at once, and processes that are killed: what was recorded is there, and whole."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from sqlalchemy import text

from kerneldyno.store import open_store
from kerneldyno.store import query


COMMON = """
import sys
from kerneldyno.core import Device, Environment, Outcome, Status, Workload
from kerneldyno.store import open_store
from kerneldyno.store.write import Writer

def begin(path, backend="c", fresh=False):
    writer = Writer(open_store(path))
    workload = Workload("gemm", {"m": 16, "n": 8}, "fp32")
    study = writer.study(workload, Device("cpu", "x", "y"), Environment({"cc": "12"}), backend, "k", "tpe", 0, "tune", fresh)
    return writer, study

def outcome(number):
    return Outcome(Status.OK, (float(number), number + 0.5), number + 0.25, float(number), number + 0.5)
"""

RACER = (
    COMMON
    + """
print("ready", flush=True)
for number, line in enumerate(sys.stdin):
    writer, study = begin(line.strip())
    writer.record(study.id, int(sys.argv[1]), {"racer": sys.argv[1]}, outcome(int(sys.argv[1])), 0.0)
    writer.engine.dispose()
    print(study.id, study.generation, flush=True)
"""
)

ENDLESS = (
    COMMON
    + """
writer, study = begin(sys.argv[1])
number = int(sys.argv[2])
while True:
    writer.record(study.id, number, {"a": number, "pad": "x" * 500}, outcome(number), 1.0)
    print(number, flush=True)
    number += 1
"""
)

MANY = (
    COMMON
    + """
writer, study = begin(sys.argv[1])
for number in range(30):
    writer.record(study.id, number, {"of": sys.argv[2], "a": number}, outcome(number), 1.0)
"""
)


def _start(code: str, *words: object, **streams: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, text=True, **streams)


def test_processes_that_make_one_database_at_once(tmp_path: Path) -> None:
    racers = [_start(RACER, number, stdin=subprocess.PIPE) for number in range(3)]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for attempt in range(8):
            path = tmp_path / f"{attempt}.db"
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write(f"{path}\n")
                racer.stdin.flush()
            assert [racer.stdout.readline() for racer in racers if racer.stdout] == ["1 0\n"] * 3
            trials = query.trials(open_store(path, readonly=True), 1)
            assert [(trial.number, trial.config) for trial in trials] == [(number, {"racer": str(number)}) for number in range(3)]
    finally:
        for racer in racers:
            racer.communicate()  # closes its input, which ends it


def test_two_writers_of_one_study(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    writers = [_start(MANY, path, name) for name in "xy"]
    assert [writer.wait() for writer in writers] == [0, 0]
    for writer in writers:
        writer.communicate()
    trials = query.trials(open_store(path, readonly=True), 1, limit=None)
    assert len(trials) == 60
    assert {(trial.config["of"], trial.config["a"]) for trial in trials} == {(name, number) for name in "xy" for number in range(30)}


def test_kill_at_any_instant_loses_no_recorded_trial(tmp_path: Path) -> None:
    rng = random.Random(11)
    path = tmp_path / "a.db"
    told = 0
    for _ in range(6):
        writer = _start(ENDLESS, path, told)
        assert writer.stdout is not None
        first = writer.stdout.readline()  # it has begun; the imports take most of a second
        time.sleep(rng.uniform(0.0, 0.3))
        writer.send_signal(signal.SIGKILL)
        rest, _ = writer.communicate()
        lines = [int(line) for line in (first + rest).splitlines(keepends=True) if line.endswith("\n")]
        assert lines == list(range(told, told + len(lines)))
        told = lines[-1] + 1
        engine = open_store(path, readonly=True)
        trials = query.trials(engine, 1, limit=None)
        # the last one may have been committed and not yet told
        assert len(trials) - told in (0, 1)
        for number, trial in enumerate(trials):
            assert (trial.number, trial.config["a"], trial.outcome.samples_us) == (number, number, (float(number), number + 0.5))
        with engine.connect() as connection:
            assert connection.execute(text("PRAGMA integrity_check")).scalar() == "ok"
        engine.dispose()
        told = len(trials)
    assert told > 6

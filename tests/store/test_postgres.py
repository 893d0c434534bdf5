"""The same store on PostgreSQL, in a private cluster that these tests start."""

import glob
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from kerneldyno.core import Device
from kerneldyno.core import Environment
from kerneldyno.core import Error
from kerneldyno.core import Outcome
from kerneldyno.core import Status
from kerneldyno.core import Workload
from kerneldyno.errors import StoreError
from kerneldyno.store import EmptyStore
from kerneldyno.store import open_store
from kerneldyno.store import query
from kerneldyno.store import state
from kerneldyno.store.engine import VERSION_TABLE
from kerneldyno.store.records import PlayoffEntry
from kerneldyno.store.records import PlayoffRecord
from kerneldyno.store.write import Writer


RACER = """
import sys
from kerneldyno.core import Device, Environment, Outcome, Status, Workload
from kerneldyno.store import open_store
from kerneldyno.store.write import Writer
writer = Writer(open_store(sys.argv[1]))
study = writer.study(Workload("gemm", {"m": 1}, "fp32"), Device("cpu", "x", "y"), Environment({}), "c", "k", "tpe", 0, "tune")
for number in range(20):
    writer.record(study.id, number, {"of": sys.argv[2], "a": number}, Outcome(Status.OK, (1.0,), 1.0), 0.0)
"""


def _binaries() -> Path | None:
    found = shutil.which("initdb")
    places = [found] if found else sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))
    return Path(places[-1]).parent if places else None


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """URL of a private cluster without a database name; its only way in is a socket in its own folder."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'kerneldyno[postgres]'")
    binaries = _binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's initdb is not installed")
    become: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="kd"))  # a socket's path has at most 107 bytes
    if os.getuid() == 0:  # which the server refuses
        if shutil.which("runuser") is None:
            pytest.skip("PostgreSQL does not run as root, and there is no runuser")
        user = "postgres" if subprocess.run(["id", "postgres"], capture_output=True, check=False).returncode == 0 else "nobody"
        become = ["runuser", "-u", user, "--"]
        shutil.chown(folder, user)

    def call(program: str, *words: str) -> None:
        subprocess.run([*become, str(binaries / program), "-D", str(folder / "data"), *words], check=True, capture_output=True, cwd="/")

    try:
        call("initdb", "-A", "trust", "-U", "tester", "--no-sync", "-E", "UTF8", "--locale=C")
        call("pg_ctl", "-w", "-l", str(folder / "log"), "-o", f"-k {folder} -c listen_addresses='' -c fsync=off", "start")
        try:
            yield f"postgresql://tester@/%s?host={folder}"
        finally:
            call("pg_ctl", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def url(server: str, request: pytest.FixtureRequest) -> str:
    name = request.node.name.lower()
    import psycopg

    with psycopg.connect(server % "postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server % name


def test_round_trip_and_ranking(url: str, gemm: Workload, device: Device, environment: Environment, ok: Callable[[float], Outcome]) -> None:
    with pytest.raises(EmptyStore):
        open_store(url, readonly=True)
    assert state(url).text == "none yet; the first search makes its tables"
    writer = Writer(open_store(url))
    study = writer.study(gemm, device, environment, "triton", "k1", "tpe", 2**40, "tune")
    assert writer.study(gemm, device, environment, "triton", "k1", "tpe", 2**40, "tune") == study
    best = writer.record(study.id, 0, {"b": 1, "a": 2}, ok(50.0), 1.0)
    assert writer.record(study.id, 0, {"b": 1, "a": 2}, ok(50.0), 1.0) == best
    failed = Outcome(Status.WRONG_RESULT, error=Error(0.5, float("inf")), message="a\0b\udce9")
    writer.record(study.id, 0, {"b": 2, "a": 2}, failed, 2.0)
    first, second = writer.finished(study.id)
    assert (first.outcome, list(first.config), first.finished_at.utcoffset()) == (ok(50.0), ["b", "a"], second.finished_at.utcoffset())
    assert (second.number, second.outcome.error, second.outcome.message) == (1, Error(0.5, float("inf")), "a\ufffdb?")
    assert len(writer.memo(study.id)) == 2
    assert [trial.id for trial in writer.best_trials(study.id, 5)] == [best]
    entry = PlayoffEntry("triton", "kernel", Status.OK, "triton", best, {"b": 1}, (49.0,), 49.0, ratio=1.2, verified=True)
    entries = (entry, PlayoffEntry("torch", "library", median_us=58.8, ratio=1.0))
    writer.record_playoff(PlayoffRecord(gemm, device, environment, 0, 1, "tune", {"cache": "cold"}, entries))
    assert writer.playoff_trials(gemm, device) == {best}
    reader = open_store(url, readonly=True)
    rows = query.ranking(reader, query.Filters(devices=["h200"], shapes=[{"m": 4096}], backends=["triton"]))
    assert [(row.name, row.median_us, row.ratio, row.trials) for row in rows] == [("triton", 49.0, 1.2, 2), ("torch", 58.8, 1.0, 0)]
    assert rows[0].counts == {"ok": 1, "wrong_result": 1}
    assert query.studies(reader)[0].seed == 2**40
    assert state(url).text == "1 studies, 2 trials"
    with pytest.raises(StoreError, match="may not be written"):
        Writer(reader).record(study.id, 9, {"a": 1}, ok(1.0), 0.0)


def test_processes_at_once(url: str) -> None:
    racers = [subprocess.Popen([sys.executable, "-c", RACER, url, name]) for name in "xy"]
    assert [racer.wait() for racer in racers] == [0, 0]
    trials = query.trials(open_store(url, readonly=True), 1, limit=None)
    assert len({(trial.config["of"], trial.config["a"]) for trial in trials}) == 40


def test_wrong_databases(url: str, server: str) -> None:
    with pytest.raises(StoreError, match="cannot be reached"):
        open_store(server % "no_such_database")
    with pytest.raises(StoreError, match="cannot be reached"):
        open_store("postgresql://tester:secret@/x?host=/no/such/folder")
    import psycopg

    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE trial (x int)")
    with pytest.raises(StoreError, match="another program under our names"):
        open_store(url)
    with psycopg.connect(url) as connection:
        connection.execute("DROP TABLE trial")
    engine = open_store(url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(StoreError, match="newer Kerneldyno"):
        open_store(url)

"""Opening: settings, every way in which it cannot be done, and that nothing is overwritten then."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import IntegrityError

from kerneldyno.core import Device
from kerneldyno.core import Environment
from kerneldyno.core import Outcome
from kerneldyno.core import Status
from kerneldyno.core import Workload
from kerneldyno.errors import StoreError
from kerneldyno.store import EmptyStore
from kerneldyno.store import engine as engine_module
from kerneldyno.store import open_store
from kerneldyno.store import query
from kerneldyno.store import state
from kerneldyno.store.engine import VERSION_TABLE
from kerneldyno.store.engine import revisions
from kerneldyno.store.models import Base
from kerneldyno.store.write import Writer


NOBODY = 65534


def _pragma(engine: Engine, name: str) -> object:
    with engine.connect() as connection:
        return connection.execute(text(f"PRAGMA {name}")).scalar()


def _filled(path: Path, ok: Callable[[float], Outcome]) -> int:
    """Make a database with one trial in it; its study."""
    engine = open_store(path)
    writer = Writer(engine)
    study = writer.study(Workload("gemm", {"m": 1}, "fp32"), Device("cpu", "x", "y"), Environment({}), "c", "k", "tpe", 0, "tune")
    writer.record(study.id, 0, {"a": 1}, ok(5.0), 1.0)
    engine.dispose()
    return study.id


def _as_nobody(act: Callable[[], object]) -> None:
    """Act as a user without rights, where these tests run as root, who may write everything."""
    if os.getuid() != 0:
        act()
        return
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
            code = 0
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may reach, which pytest's own are not."""
    folder = Path(tempfile.gettempdir()) / f"kerneldyno-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_sqlite_settings(engine: Engine) -> None:
    assert [_pragma(engine, name) for name in ("journal_mode", "foreign_keys", "synchronous", "busy_timeout")] == ["wal", 1, 1, 10_000]
    with pytest.raises(IntegrityError):
        Writer(engine).record(99, 0, {}, Outcome(Status.OK), 0.0)


def test_migrations_make_what_the_models_say(engine: Engine) -> None:
    def ours(item: object, name: str | None, kind: str, *_: object) -> bool:
        return not (kind == "table" and name == VERSION_TABLE)

    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_object": ours, "compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_revisions_are_those_of_the_files(engine: Engine) -> None:
    script = ScriptDirectory(str(engine_module.MIGRATIONS))
    assert [revision.revision for revision in script.walk_revisions()][::-1] == revisions()
    with engine.connect() as connection:
        assert connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all() == [script.get_current_head()]


def test_migrations_run_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "50% of a folder"
    shutil.copytree(engine_module.MIGRATIONS, odd)
    monkeypatch.setattr(engine_module, "MIGRATIONS", odd)
    open_store(tmp_path / "new.db").dispose()
    open_store(tmp_path / "new.db", readonly=True).dispose()


def test_opening_is_quiet_and_leaves_logging_alone(tmp_path: Path) -> None:
    code = (
        "import logging, sys; from kerneldyno.store import open_store; open_store(sys.argv[1]);"
        "assert not logging.root.handlers and logging.root.level == logging.WARNING"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, tmp_path / "new.db"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["with space.db", "per%cent.db", "quest?ion.db", "ha#sh.db", "a&mode=memory.db", "µ.db"])
def test_any_file_name(tmp_path: Path, name: str, new_database: Path) -> None:
    shutil.copy(new_database, tmp_path / name)
    open_store(tmp_path / name).dispose()
    open_store(str(tmp_path / name), readonly=True).dispose()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".db"] == [name]


def test_a_url_is_its_path(tmp_path: Path, ok: Callable[[float], Outcome]) -> None:
    study = _filled(tmp_path / "a.db", ok)
    assert len(query.trials(open_store(f"sqlite:///{tmp_path}/a.db", readonly=True), study)) == 1


def test_readonly_cannot_write(tmp_path: Path, ok: Callable[[float], Outcome]) -> None:
    study = _filled(tmp_path / "a.db", ok)
    engine = open_store(tmp_path / "a.db", readonly=True)
    with pytest.raises(StoreError, match="read-only"):
        Writer(engine).record(study, 1, {}, ok(1.0), 0.0)


def test_a_reader_sees_what_a_writer_adds(tmp_path: Path, ok: Callable[[float], Outcome]) -> None:
    study = _filled(tmp_path / "a.db", ok)
    reader, writer = open_store(tmp_path / "a.db", readonly=True), Writer(open_store(tmp_path / "a.db"))
    writer.record(study, 1, {"a": 2}, ok(4.0), 1.0)
    assert [trial.median_us for trial in query.trials(reader, study)] == [5.0, 4.0]


@pytest.mark.parametrize("content", [b"hello", b"x" * 10_000, b"SQLite format 2\0" + b"\0" * 5000])
@pytest.mark.parametrize("readonly", [False, True])
def test_not_sqlite(tmp_path: Path, content: bytes, readonly: bool) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"notes\.txt is not an SQLite database"):
        open_store(path, readonly)
    assert path.read_bytes() == content


def test_sqlite_in_its_first_bytes_only(tmp_path: Path) -> None:
    path = tmp_path / "torn.db"
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    with pytest.raises(StoreError, match=r"torn\.db"):
        open_store(path)
    assert path.read_bytes()[:16] == b"SQLite format 3\0"


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("script", ["CREATE TABLE study (x)", "CREATE TABLE alembic_version (version_num)", "PRAGMA application_id=7"])
def test_a_database_of_another_program(tmp_path: Path, script: str, readonly: bool) -> None:
    path = tmp_path / "theirs.db"
    connection = sqlite3.connect(path)
    connection.execute(script)
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        open_store(path, readonly)
    assert path.read_bytes() == before


def test_newer_than_the_code(tmp_path: Path, ok: Callable[[float], Outcome]) -> None:
    path = tmp_path / "newer.db"
    _filled(path, ok)
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    for readonly in (False, True):
        with pytest.raises(StoreError, match=r"newer Kerneldyno .*Upgrade kerneldyno"):
            open_store(path, readonly)
    assert path.read_bytes() == before


def test_an_older_one_is_read_after_an_upgrade(tmp_path: Path, new_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = tmp_path / "migrations"
    shutil.copytree(engine_module.MIGRATIONS, versions)
    (versions / "versions" / "9999_note.py").write_text(
        f"import sqlalchemy as sa\nfrom alembic import op\nrevision = '9999'\ndown_revision = '{revisions()[-1]}'\n"
        "def upgrade():\n    op.add_column('study', sa.Column('note', sa.Text))\n"
    )
    monkeypatch.setattr(engine_module, "MIGRATIONS", versions)
    path = tmp_path / "old.db"
    shutil.copy(new_database, path)
    with pytest.raises(StoreError, match="older Kerneldyno"):
        open_store(path, readonly=True)
    open_store(path).dispose()
    with open_store(path, readonly=True).connect() as connection:
        assert connection.execute(text("SELECT note FROM study")).all() == []


def test_a_failed_upgrade_changes_nothing(tmp_path: Path, new_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = tmp_path / "migrations"
    shutil.copytree(engine_module.MIGRATIONS, versions)
    (versions / "versions" / "9999_bad.py").write_text(
        f"from alembic import op\nrevision = '9999'\ndown_revision = '{revisions()[-1]}'\n"
        "def upgrade():\n    op.execute('DROP TABLE profile')\n    raise RuntimeError('half way')\n"
    )
    path = tmp_path / "old.db"
    shutil.copy(new_database, path)
    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "MIGRATIONS", versions)
        with pytest.raises(RuntimeError, match="half way"):
            open_store(path)
    with open_store(path, readonly=True).connect() as connection:
        assert connection.execute(text("SELECT * FROM profile")).all() == []


def test_missing_and_empty(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    with pytest.raises(EmptyStore, match="no database at"):
        open_store(path, readonly=True)
    assert not path.exists()
    path.touch()
    with pytest.raises(EmptyStore, match="is empty"):
        open_store(path, readonly=True)
    assert path.stat().st_size == 0
    open_store(path).dispose()
    open_store(path, readonly=True).dispose()


@pytest.mark.parametrize("readonly", [False, True])
def test_no_folder(tmp_path: Path, readonly: bool) -> None:
    with pytest.raises(StoreError, match=r"missing does not exist\. Make it"):
        open_store(tmp_path / "missing" / "results.db", readonly)
    assert not (tmp_path / "missing").exists()


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a file"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "is empty"),
        ("postgresql://user@host:port/name", "is not a database URL"),
        ("://x", "is not a database URL"),
        ("mysql://host/name", "'mysql' is not supported. Choose sqlite or postgresql"),
        ("postgresql+psycopg2://host/name", "is not supported"),
        ("sqlite://", "in memory would be lost"),
        (":memory:", "in memory would be lost"),
        ("~no-such-user/results.db", "no-such-user"),
    ],
)
def test_wrong_words(url: str, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        open_store(url)


def test_a_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    found = engine_module.importlib.util.find_spec
    monkeypatch.setattr(engine_module.importlib.util, "find_spec", lambda name: None if name == "psycopg" else found(name))
    with pytest.raises(StoreError, match=r"pip install 'kerneldyno\[postgres\]'") as raised:
        open_store("postgresql://me:secret@localhost/results")
    assert "secret" not in str(raised.value)


def test_locked(tmp_path: Path, ok: Callable[[float], Outcome]) -> None:
    path = tmp_path / "a.db"
    study = _filled(path, ok)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    engine = open_store(path, busy_s=0.2)  # nothing to change: it opens beside a writer
    with pytest.raises(StoreError, match="locked by another process"):
        Writer(engine).record(study, 1, {"a": 2}, ok(1.0), 0.0)
    assert len(query.trials(engine, study)) == 1
    other.execute("ROLLBACK")
    Writer(engine).record(study, 1, {"a": 2}, ok(1.0), 0.0)
    assert len(query.trials(engine, study)) == 2


def test_locked_while_it_would_be_made(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="locked by another process"):
        open_store(path, busy_s=0.2)
    other.execute("ROLLBACK")


def test_a_file_that_may_only_be_read(open_folder: Path, ok: Callable[[float], Outcome]) -> None:
    path = open_folder / "a.db"
    study = _filled(path, ok)
    assert sorted(file.name for file in open_folder.iterdir()) == ["a.db"]
    path.chmod(0o444)
    open_folder.chmod(0o555)

    def act() -> None:
        assert len(query.trials(open_store(path, readonly=True), study)) == 1
        for wanted in (path, open_folder / "new.db"):
            with pytest.raises(StoreError, match=r"read-only|cannot be opened"):
                open_store(wanted)

    _as_nobody(act)
    assert sorted(file.name for file in open_folder.iterdir()) == ["a.db"]


def test_a_copy_with_a_log_in_a_folder_that_may_only_be_read(open_folder: Path, tmp_path: Path, ok: Callable[[float], Outcome]) -> None:
    study = _filled(tmp_path / "a.db", ok)
    engine = open_store(tmp_path / "a.db")
    Writer(engine).record(study, 1, {"a": 2}, ok(1.0), 0.0)
    for name in ("a.db", "a.db-wal"):
        shutil.copy(tmp_path / name, open_folder / name)
        (open_folder / name).chmod(0o444)
    open_folder.chmod(0o555)

    def act() -> None:
        with pytest.raises(StoreError, match=r"has changes in a\.db-wal"):
            open_store(open_folder / "a.db", readonly=True)

    _as_nobody(act)


def test_an_unreadable_file(open_folder: Path, ok: Callable[[float], Outcome]) -> None:
    _filled(open_folder / "a.db", ok)
    (open_folder / "a.db").chmod(0o000)

    def act() -> None:
        with pytest.raises(StoreError, match="cannot be read"):
            open_store(open_folder / "a.db", readonly=True)

    _as_nobody(act)


def _fill_up(engine: Engine, study: int, ok: Callable[[float], Outcome]) -> int:
    """Record until the database refuses; the trials that were recorded."""
    writer = Writer(engine)
    for number in range(1, 5000):
        try:
            writer.record(study, number, {"a": number, "pad": "x" * 2000}, ok(1.0), 1.0)
        except StoreError as error:
            if "is full" not in str(error):
                raise
            return number
    raise AssertionError("it never filled")


def test_a_full_database(tmp_path: Path, ok: Callable[[float], Outcome]) -> None:
    study = _filled(tmp_path / "a.db", ok)
    engine = open_store(tmp_path / "a.db")
    with engine.connect() as connection:  # the pool hands the same connection out again
        connection.execute(text("PRAGMA max_page_count=80"))
    recorded = _fill_up(engine, study, ok)
    assert len(query.trials(engine, study, limit=None)) == recorded
    assert len(query.trials(open_store(tmp_path / "a.db", readonly=True), study, limit=None)) == recorded


def test_a_full_disk(tmp_path: Path, ok: Callable[[float], Outcome]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a small disk can be mounted by root only, and not in every container")
    try:
        study = _filled(disk / "a.db", ok)
        engine = open_store(disk / "a.db")
        recorded = _fill_up(engine, study, ok)
        reader = open_store(disk / "a.db", readonly=True)
        assert len(query.trials(reader, study, limit=None)) == recorded
        assert _pragma(reader, "integrity_check") == "ok"
        reader.dispose()
        engine.dispose()
    finally:
        subprocess.run(["umount", disk], check=True)


def test_state_for_the_doctor(tmp_path: Path, ok: Callable[[float], Outcome]) -> None:
    none = state(str(tmp_path / "none.db"))
    assert (none.ok, none.text) == (True, f"none yet; the first search makes it in {tmp_path}")
    assert not (tmp_path / "none.db").exists()
    _filled(tmp_path / "a.db", ok)
    assert (state(str(tmp_path / "a.db")).ok, state(str(tmp_path / "a.db")).text) == (True, "1 studies, 1 trials")
    (tmp_path / "notes.txt").write_text("hello")
    wrong = state(str(tmp_path / "notes.txt"))
    assert not wrong.ok
    assert "not an SQLite database" in wrong.text
    assert wrong.remedy

"""Opens the database: SQLite by path, PostgreSQL by URL; makes the tables or brings them up to date.

SQLite runs in WAL mode, so readers never wait for the writer. With `synchronous=NORMAL` a committed transaction survives
`kill -9` of any process at any instant. A power loss may take the last transactions (those since the last checkpoint), never
the database: a few measurements to repeat, against an fsync for each trial (`synchronous=FULL`).
Source: https://www.sqlite.org/pragma.html#pragma_synchronous.
"""

import importlib.util
import json
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection
from sqlalchemy import create_engine
from sqlalchemy import event
from sqlalchemy import inspect
from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.engine import Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import QueuePool
from sqlalchemy.pool import StaticPool

from kerneldyno.errors import StoreError
from kerneldyno.store.faults import explain
from kerneldyno.store.faults import translate
from kerneldyno.store.models import Base


APPLICATION_ID = 0x4B44594E
"""What SQLite's header says of our files: "KDYN". Source: https://www.sqlite.org/pragma.html#pragma_application_id."""

VERSION_TABLE = "kerneldyno_version"
"""Alembic's table, by a name of our own: another program's `alembic_version` in the same PostgreSQL schema is not ours."""

BUSY_S = 10.0
"""Seconds to wait for another process's transaction; ours take milliseconds."""

MIGRATIONS = Path(__file__).parent / "migrations"

_SQLITE_MAGIC = b"SQLite format 3\0"
_ADVISORY_LOCK = APPLICATION_ID
_POSTGRES = ("postgresql", "postgres", "postgresql+psycopg")


class EmptyStore(StoreError):
    """There is no database yet, or nothing in it: a reader may go on with the shipped results."""


def revisions() -> list[str]:
    """The schema's revisions, oldest first, from the names of the migration files."""
    return sorted(path.name.split("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*_*.py"))


def open_store(url_or_path: str | os.PathLike[str], readonly: bool = False, busy_s: float = BUSY_S) -> Engine:
    """Open a database, made or brought up to date where it is opened for writing.

    Args:
        url_or_path: A path, or an SQLAlchemy URL (`sqlite:///path`, `postgresql://user@host/name`).
        readonly: Open it so that nothing can be written; a read-only file or folder will do.
        busy_s: Seconds to wait for another process's transaction.

    Returns:
        An engine whose every use raises StoreError where the database cannot be used.

    Raises:
        EmptyStore: `readonly`, and there is no database, or nothing in it.
        StoreError: It cannot be used; the text says why and what to do. Nothing was overwritten.
    """
    target = parse(url_or_path)
    if isinstance(target, Path):
        return _open_sqlite(target, str(url_or_path), readonly, busy_s)
    return _open_postgres(target, readonly, busy_s)


def parse(url_or_path: str | os.PathLike[str]) -> Path | URL:
    """Tell a path from a URL; an SQLite URL gives its path.

    Raises:
        StoreError: The URL is malformed, or of a database that is not supported.
    """
    word = os.fspath(url_or_path)
    if not word:
        raise StoreError("db= is empty. Give a path (db=results.db) or a URL (db=postgresql://user@host/name).")
    if "://" not in word and not word.startswith("sqlite:"):
        return _path(word)
    try:
        url = make_url(word)
    except (ArgumentError, ValueError) as error:
        raise StoreError(f"db={word} is not a database URL. Examples: sqlite:///results.db, postgresql://user@host/name.") from error
    if url.get_backend_name() == "sqlite":
        if not url.database or url.database == ":memory:":
            raise StoreError("a database in memory would be lost when the command ends. Give a path: db=results.db.")
        return _path(url.database)
    if url.drivername not in _POSTGRES:
        raise StoreError(f"db={url.render_as_string()}: '{url.drivername}' is not supported. Choose sqlite or postgresql.")
    return url.set(drivername="postgresql+psycopg")


def _path(word: str) -> Path:
    if word == ":memory:":
        raise StoreError("a database in memory would be lost when the command ends. Give a path: db=results.db.")
    try:
        return Path(word).expanduser().absolute()
    except RuntimeError as error:  # "~nobody-here/results.db"
        raise StoreError(f"db={word}: {error}") from error


def _open_sqlite(path: Path, name: str, readonly: bool, busy_s: float) -> Engine:
    try:
        size = path.stat().st_size if path.exists() else None
        regular = path.is_file()
        folder = path.parent.is_dir()
        head = b""
        if size and regular:
            with path.open("rb") as file:
                head = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise StoreError(f"{name} cannot be read: {error.strerror}. Choose another file with db=FILE.") from error
    if size is None:
        if not folder:
            raise StoreError(f"the folder {path.parent} does not exist. Make it, or choose another file with db=FILE.")
        if readonly:
            raise EmptyStore(f"there is no database at {name} yet.")
    elif not regular:
        raise StoreError(f"{name} is not a file. Choose a file with db=FILE.")
    elif size and head != _SQLITE_MAGIC:
        # checked here, as SQLite takes a file of a few bytes for an empty database and would overwrite it
        raise StoreError(f"{name} is not an SQLite database. It was left as it is; choose another file with db=FILE.")
    mode = "mode=ro" if readonly else "mode=rwc"
    if readonly and _needs_immutable(path, name):
        mode = "mode=ro&immutable=1"
    engine = sqlite_engine(path, name, mode, busy_s)
    try:
        with engine.connect() as connection:
            if readonly:
                _check_readable(connection, name)
            else:
                _make_current(connection, name, busy_s)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _needs_immutable(path: Path, name: str) -> bool:
    """Whether a WAL database lies where SQLite cannot make its -shm file, and may be read as a file that nobody writes."""
    try:
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=0)
        try:
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        if not error.sqlite_errorname.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
            return False  # the open that follows says it
        log = path.with_name(path.name + "-wal")
        if log.exists() and log.stat().st_size:
            text = f"{name} has changes in {log.name} that cannot be read in a read-only folder. Copy both files to a folder of yours."
            raise StoreError(text) from error
        return True
    return False


def sqlite_engine(path: Path | None, name: str, mode: str = "", busy_s: float = BUSY_S) -> Engine:
    """Make an SQLite engine with our settings and transactions.

    Args:
        path: The file; None for a database in memory.
        name: How the user calls it.
        mode: How to open the file, as URI parameters ("mode=ro").
        busy_s: Seconds to wait for another process's transaction.
    """
    uri = ":memory:" if path is None else f"file:{quote(str(path))}?{mode}"

    def connect() -> sqlite3.Connection:
        # no isolation level: Python's module would commit before a CREATE TABLE, and ours hold migrations too
        connection = sqlite3.connect(uri, uri=True, timeout=busy_s, check_same_thread=False, isolation_level=None)
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA synchronous=NORMAL")
        return connection

    engine = create_engine(
        URL.create("sqlite", database=None if path is None else str(path)),
        creator=connect,
        poolclass=StaticPool if path is None else QueuePool,
        json_serializer=compact_json,
    )
    translate(engine, name)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # a writer takes the lock at once: one that reads first and then writes cannot wait for another, only fail
        immediate = connection.get_execution_options().get("immediate", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def compact_json(value: object) -> str:
    """JSON without spaces, keys in their own order (a shape is shown as its problem declares it)."""
    return json.dumps(value, separators=(",", ":"), default=dict)


def _sqlite_state(connection: Connection, name: str) -> str | None:
    """The schema's revision; None for an empty database. Raises StoreError where it is somebody else's."""
    owner = connection.execute(text("PRAGMA application_id")).scalar_one()
    tables = set(connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'")).scalars())
    if not tables and owner in (0, APPLICATION_ID):
        return None
    if owner != APPLICATION_ID or VERSION_TABLE not in tables:
        raise StoreError(f"{name} is a database of another program. It was left as it is; choose another file with db=FILE.")
    return _revision(connection, name)


def _revision(connection: Connection, name: str) -> str:
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one_or_none()
    if found not in revisions():
        raise StoreError(
            f"{name} was written by a newer Kerneldyno (schema {found}; this one knows up to {revisions()[-1]}). Upgrade kerneldyno."
        )
    return found


def _check_readable(connection: Connection, name: str) -> None:
    state = _sqlite_state if connection.dialect.name == "sqlite" else _postgres_state
    found = state(connection, name)
    if found is None:
        raise EmptyStore(f"{name} is empty: nothing has been tuned into it yet.")
    if found != revisions()[-1]:
        raise StoreError(
            f"{name} was written by an older Kerneldyno (schema {found}; this one reads {revisions()[-1]}). "
            "Run any search with it once: that brings it up to date."
        )


def _make_current(connection: Connection, name: str, busy_s: float) -> None:
    with connection.begin():
        found = _sqlite_state(connection, name)
    _use_wal(connection, name, busy_s)
    if found == revisions()[-1]:
        return
    with connection.execution_options(immediate=True).begin():
        # again, under the lock: of two processes that both found nothing, the first makes the tables
        found = _sqlite_state(connection, name)
        if found != revisions()[-1]:
            connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
            _migrate(connection)


def _use_wal(connection: Connection, name: str, busy_s: float) -> None:
    raw = connection.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)
    deadline = time.monotonic() + busy_s
    while True:
        try:
            # outside a transaction; a file system without shared memory keeps its journal, which works too
            raw.execute("PRAGMA journal_mode=WAL").fetchone()
            return
        except sqlite3.OperationalError as error:
            # SQLite does not wait by itself here: two connections that wait for each other's lock would never end
            if not error.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                raise StoreError(explain(name, error) or str(error)) from error
            time.sleep(0.02)


def _migrate(connection: Connection) -> None:
    # imported here: it takes a third of a second, and most commands find the tables up to date
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _open_postgres(url: URL, readonly: bool, busy_s: float) -> Engine:
    name = url.render_as_string(hide_password=True)
    remedy = "install the driver: pip install 'kerneldyno[postgres]'"
    if importlib.util.find_spec("psycopg") is None:
        raise StoreError(f"{name} needs psycopg: {remedy}.")
    try:
        engine = create_engine(url, json_serializer=compact_json, pool_pre_ping=True, connect_args={"connect_timeout": max(int(busy_s), 2)})
    except ImportError as error:  # psycopg without libpq
        raise StoreError(f"{name}: psycopg cannot be used ({str(error).splitlines()[0]}); {remedy}.") from error
    translate(engine, name)

    @event.listens_for(engine, "connect")
    def settle(connection: object, record: object) -> None:
        execute: Callable[[str], object] = connection.execute  # type: ignore[attr-defined]
        execute(f"SET lock_timeout = {int(busy_s * 1000)}")
        execute("SET timezone = 'UTC'")
        if readonly:
            execute("SET default_transaction_read_only = on")
        connection.commit()  # type: ignore[attr-defined]

    try:
        if readonly:
            with engine.connect() as connection:
                _check_readable(connection, name)
        else:
            with engine.begin() as connection:
                take_lock(connection)
                if _postgres_state(connection, name) != revisions()[-1]:
                    _migrate(connection)
    except BaseException:
        engine.dispose()
        raise
    return engine


def take_lock(connection: Connection) -> None:
    """Let one writer at a time through until the transaction ends (PostgreSQL; SQLite's IMMEDIATE does it by itself)."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})


def _postgres_state(connection: Connection, name: str) -> str | None:
    tables = set(inspect(connection).get_table_names())
    if VERSION_TABLE in tables:
        return _revision(connection, name)
    taken = sorted(tables & set(Base.metadata.tables))
    if taken:
        raise StoreError(
            f"{name} has tables of another program under our names ({', '.join(taken)}). "
            "They were left as they are; choose another database or schema."
        )
    return None

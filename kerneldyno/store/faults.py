"""What a database driver complains about, in words that say what to do."""

import sqlite3

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.engine import ExceptionContext

from kerneldyno.errors import StoreError


def explain(name: str, error: BaseException) -> str | None:
    """Put a driver's error into words; None where it is not about the state of the database (then it is a fault of ours).

    Args:
        name: How the user calls the database.
        error: What the driver raised.
    """
    if isinstance(error, sqlite3.Error):
        return _sqlite(name, error)
    # psycopg's classes are named after PEP 249; OperationalError covers the connection, the disk and the locks
    kinds = {kind.__name__ for kind in type(error).__mro__}
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    if "LockNotAvailable" in kinds:
        return f"{name} is locked by another session: {reason}. Try again when it is done."
    if "DiskFull" in kinds:
        return f"the disk of {name} is full: {reason}. What was finished before stays readable; free some space and repeat the command."
    if "ReadOnlySqlTransaction" in kinds or "InsufficientPrivilege" in kinds:
        return f"{name} may not be written: {reason}."
    if "OperationalError" in kinds or "InterfaceError" in kinds:
        return f"{name} cannot be reached: {reason}."
    return None


def _sqlite(name: str, error: sqlite3.Error) -> str | None:
    code = getattr(error, "sqlite_errorname", None) or ""  # absent on errors that Python's module raises itself
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")):
        return f"{name} is locked by another process. Try again when it is done, or choose another file with db=FILE."
    if code.startswith("SQLITE_FULL"):
        return f"the disk of {name} is full. What was finished before stays readable; free some space and repeat the command."
    if code.startswith(("SQLITE_READONLY", "SQLITE_PERM")):
        return f"{name} is read-only (the file or its folder). Make both writable, or choose another file with db=FILE."
    if code.startswith("SQLITE_CANTOPEN"):
        return f"{name} cannot be opened: the file or its folder may not be read or written. Choose another file with db=FILE."
    if code.startswith("SQLITE_NOTADB"):
        return f"{name} is not an SQLite database. It was left as it is; choose another file with db=FILE."
    if code.startswith("SQLITE_CORRUPT"):
        return f"{name} is damaged ({error}). Keep a copy, then try: sqlite3 FILE .recover | sqlite3 NEW"
    if code.startswith("SQLITE_IOERR"):
        return f"{name} cannot be read or written ({error}, {code}): the disk is full or faulty."
    return None


def translate(engine: Engine, name: str) -> None:
    """Make every use of an engine raise StoreError where the database cannot be used, on connecting too.

    Args:
        engine: The engine.
        name: How the user calls the database.
    """

    @event.listens_for(engine, "handle_error")
    def handle(context: ExceptionContext) -> None:
        text = explain(name, context.original_exception)
        if text is not None:
            raise StoreError(text) from context.original_exception

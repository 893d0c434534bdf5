"""Results that ship with the package: one JSON line for each verified best, library and roof, in `results/<gpu>/<problem>.jsonl`.

A line is a standing in one interleaved run; the lines of one run share `playoff`, so their ratios may be compared. Fields
(schema_version 1): problem, shape, dtype, seed (of the inputs), device {kind, name, arch, sm_count, ...}, environment {package: version},
name, role, backend (null for a baseline), config, median_us, low_us, high_us, ratio, ratio_low, ratio_high (time of the library
over this time), tied_first, verified, error_relative, sm_clock_mhz, power_w, layout_us, rounds, conditions, playoff, work {flops, bytes},
kernel_digest, counts (trials by status), trials, tuning_s, search_seed, command, created_at (UTC, ISO 8601).
"""

import json
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import replace
from datetime import datetime
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection
from sqlalchemy import select
from sqlalchemy.engine import Engine

from kerneldyno.core import SOLVING_ROLES
from kerneldyno.core import Device
from kerneldyno.core import Environment
from kerneldyno.core import Status
from kerneldyno.core import Work
from kerneldyno.core import Workload
from kerneldyno.errors import StoreError
from kerneldyno.registry import Registry
from kerneldyno.store.engine import compact_json
from kerneldyno.store.engine import sqlite_engine
from kerneldyno.store.models import Base
from kerneldyno.store.models import EntryRow
from kerneldyno.store.models import PlayoffRow
from kerneldyno.store.ranking import ranking
from kerneldyno.store.records import Filters
from kerneldyno.store.records import PlayoffEntry
from kerneldyno.store.records import RankRow
from kerneldyno.store.rows import add
from kerneldyno.store.rows import device_id
from kerneldyno.store.rows import entry_values
from kerneldyno.store.rows import environment_id
from kerneldyno.store.rows import workload_id


SCHEMA_VERSION = 1

_SAME = ("name", "role", "backend", "config", "median_us", "low_us", "high_us", "ratio", "ratio_low", "ratio_high", "tied_first")
_SAME += ("verified", "error_relative", "sm_clock_mhz", "power_w", "layout_us")
"""Fields that a line, a ranking row and a playoff entry call by the same name."""


def to_lines(engine: Engine, problem: str, work: Callable[[Workload], Work] | None = None) -> list[str]:
    """Write the standings of the newest playoffs as lines: what passed, and was right on fresh inputs after timing.

    A playoff of which no kernel is left then is not written at all.

    Args:
        engine: A database, or `load_shipped`.
        problem: Name of the problem.
        work: Its `core.Problem.work`; None to look it up.

    Returns:
        One line a standing, without line ends, in the ranking's order.
    """
    work = work or Registry().load_problem(problem).work
    passed = [
        row
        for row in ranking(engine, Filters(problems=(problem,)))
        if row.playoff is not None and row.status is Status.OK and (row.verified or row.role not in SOLVING_ROLES)
    ]
    kept = {row.playoff for row in passed if row.role == "kernel"}
    return [compact_json(_line(row, work(row.workload))) for row in passed if row.playoff in kept]


def _line(row: RankRow, work: Work) -> dict[str, Any]:
    device = {name: value for name, value in asdict(row.device).items() if name not in ("index", "driver")}
    return {
        "schema_version": SCHEMA_VERSION,
        "problem": row.workload.problem,
        "shape": dict(row.workload.shape),
        "dtype": row.workload.dtype,
        "seed": row.workload.seed,
        "device": device,
        "environment": dict(row.environment.versions),
        **{name: getattr(row, name) for name in _SAME},
        "rounds": row.rounds,
        "conditions": dict(row.conditions),
        "playoff": row.playoff,
        "work": asdict(work),
        "kernel_digest": row.kernel_digest,
        "counts": dict(row.counts),
        "trials": row.trials,
        "tuning_s": row.tuning_s,
        "search_seed": row.seed,
        "command": row.command,
        "created_at": row.created_at.isoformat(),
    }


def load_shipped(root: Path | Traversable | None = None) -> Engine:
    """Fill a database in memory from the shipped lines, so that the same queries read them; rows say `source="shipped"`.

    Args:
        root: Folder of `<gpu>/<problem>.jsonl`; None for the package's own.

    Raises:
        StoreError: A line cannot be read; it says which.
    """
    root = root if root is not None else resources.files("kerneldyno") / "results"
    engine = sqlite_engine(None, "the shipped results").execution_options(source="shipped")
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        for where, text in _lines(root):
            try:
                _add(connection, json.loads(text))
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(f"{where} is not a result of this version: {type(error).__name__}: {error}") from error
    return engine


def _lines(root: Path | Traversable) -> Iterator[tuple[str, str]]:
    if not root.is_dir():
        return
    for folder in _sorted(root.iterdir()):
        if folder.is_dir():
            for file in _sorted(folder.iterdir()):
                if file.name.endswith(".jsonl"):
                    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
                        if text.strip():
                            yield f"{folder.name}/{file.name}, line {number},", text


def _sorted(entries: Iterable[Path | Traversable]) -> list[Path | Traversable]:
    return sorted(entries, key=lambda entry: entry.name)


def _add(connection: Connection, line: Mapping[str, Any]) -> None:
    if line["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema_version is {line['schema_version']}, not {SCHEMA_VERSION}; upgrade kerneldyno")
    entry = replace(PlayoffEntry(line["name"], line["role"]), **{name: line[name] for name in _SAME if name in line})
    search = {name: line[name] for name in ("counts", "trials", "tuning_s", "kernel_digest")}
    add(connection, EntryRow, {"playoff_id": _playoff(connection, line), **entry_values(entry, search)})


def _playoff(connection: Connection, line: Mapping[str, Any]) -> int:
    found = connection.execute(select(PlayoffRow.id).where(PlayoffRow.key == line["playoff"])).scalar_one_or_none()
    if found is not None:
        return found
    values = {
        "key": line["playoff"],
        "workload_id": workload_id(connection, Workload(line["problem"], line["shape"], line["dtype"], line["seed"])),
        "device_id": device_id(connection, Device(**line["device"])),
        "environment_id": environment_id(connection, Environment(line["environment"])),
        "created_at": datetime.fromisoformat(line["created_at"]),
        "seed": line["search_seed"],
        "rounds": line["rounds"],
        "command": line["command"],
        "conditions": line["conditions"],
    }
    return add(connection, PlayoffRow, values)

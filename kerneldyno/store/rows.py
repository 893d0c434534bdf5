"""Between records and rows: what is found or added, and how a row becomes a record again."""

import math
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection
from sqlalchemy import Row
from sqlalchemy import insert
from sqlalchemy import select
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects import sqlite

from kerneldyno.core import Device
from kerneldyno.core import Environment
from kerneldyno.core import Error
from kerneldyno.core import Outcome
from kerneldyno.core import Status
from kerneldyno.core import Workload
from kerneldyno.core import digest
from kerneldyno.store.models import Base
from kerneldyno.store.models import DeviceRow
from kerneldyno.store.models import EnvironmentRow
from kerneldyno.store.models import TrialRow
from kerneldyno.store.models import WorkloadRow
from kerneldyno.store.records import PlayoffEntry
from kerneldyno.store.records import TrialRecord


_FACTS = ("memory_bytes", "smem_per_block_bytes", "smem_per_sm_bytes", "registers_per_sm", "max_threads_per_block", "l2_bytes")


def add_once(connection: Connection, table: type[Base], values: Mapping[str, Any]) -> None:
    """Insert a row unless one with the same unique columns is there, whoever put it there."""
    if connection.dialect.name == "postgresql":
        connection.execute(postgresql.insert(table).values(**values).on_conflict_do_nothing())
    else:
        connection.execute(sqlite.insert(table).values(**values).on_conflict_do_nothing())


def _keyed(connection: Connection, table: type[DeviceRow | EnvironmentRow | WorkloadRow], key: str, values: Mapping[str, Any]) -> int:
    found = connection.execute(select(table.id).where(table.key == key)).scalar_one_or_none()
    if found is not None:
        return found
    add_once(connection, table, {"key": key, **values})
    return connection.execute(select(table.id).where(table.key == key)).scalar_one()


def workload_id(connection: Connection, workload: Workload) -> int:
    """Find or add a workload."""
    values = {"problem": workload.problem, "shape": dict(workload.shape), "dtype": workload.dtype, "seed": workload.seed}
    return _keyed(connection, WorkloadRow, workload.key, values)


def _identity(device: Device) -> dict[str, Any]:
    return {"kind": device.kind, "name": device.name, "arch": device.arch, "sm_count": device.sm_count}


def device_key(device: Device) -> str:
    """The identity of a device: kind, name, target and number of processors."""
    return digest(_identity(device))


def device_id(connection: Connection, device: Device) -> int:
    """Find or add a device, by `device_key`.

    Its other facts are those of the first sight: a new driver or kernel reports a few more or fewer bytes of the same memory.
    """
    facts = {name: getattr(device, name) for name in _FACTS}
    return _keyed(connection, DeviceRow, device_key(device), {**_identity(device), "facts": facts})


def environment_id(connection: Connection, environment: Environment) -> int:
    """Find or add a set of versions."""
    return _keyed(connection, EnvironmentRow, environment.digest, {"versions": dict(environment.versions)})


WORKLOAD = (WorkloadRow.problem, WorkloadRow.shape, WorkloadRow.dtype, WorkloadRow.seed.label("workload_seed"))
"""Columns that `workload_of` reads."""

DEVICE = (DeviceRow.kind, DeviceRow.name.label("device_name"), DeviceRow.arch, DeviceRow.sm_count, DeviceRow.facts)
"""Columns that `device_of` reads."""


def workload_of(row: Row[Any]) -> Workload:
    """Make the workload of a row that has the columns WORKLOAD."""
    return Workload(row.problem, row.shape, row.dtype, row.workload_seed)


def device_of(row: Row[Any]) -> Device:
    """Make the device of a row that has the columns DEVICE."""
    return Device(kind=row.kind, name=row.device_name, arch=row.arch, sm_count=row.sm_count, **row.facts)


def outcome_of(row: Row[Any]) -> Outcome:
    """Make the outcome of a row of all columns of trial."""
    error = None
    if row.error_max_abs is not None or row.error_relative is not None:
        # SQLite keeps no NaN: it comes back as NULL
        error = Error(*(math.nan if value is None else value for value in (row.error_relative, row.error_max_abs)))
    return Outcome(
        status=Status(row.status),
        samples_us=tuple(row.samples_us),
        median_us=row.median_us,
        low_us=row.low_us,
        high_us=row.high_us,
        error=error,
        sm_clock_mhz=row.sm_clock_mhz,
        power_w=row.power_w,
        artifact=row.artifact,
        message=row.message,
        build_s=row.build_s,
        measure_s=row.measure_s,
        registers=row.registers,
        smem_bytes=row.smem_bytes,
        spill_bytes=row.spill_bytes,
    )


def trial_of(row: Row[Any]) -> TrialRecord:
    """Make the record of a row of all columns of trial."""
    return TrialRecord(row.id, row.study_id, row.number, row.config, row.config_key, outcome_of(row), row.elapsed_s, row.finished_at)


def trial_values(outcome: Outcome) -> dict[str, Any]:
    """The columns of trial that an outcome fills."""
    return {
        "status": outcome.status.value,
        "median_us": outcome.median_us,
        "low_us": outcome.low_us,
        "high_us": outcome.high_us,
        "sample_count": len(outcome.samples_us),
        "samples_us": list(outcome.samples_us),
        "error_relative": outcome.error.relative if outcome.error else None,
        "error_max_abs": outcome.error.max_abs if outcome.error else None,
        "sm_clock_mhz": outcome.sm_clock_mhz,
        "power_w": outcome.power_w,
        "registers": outcome.registers,
        "smem_bytes": outcome.smem_bytes,
        "spill_bytes": outcome.spill_bytes,
        "artifact": outcome.artifact,
        "message": outcome.message,
        "build_s": outcome.build_s,
        "measure_s": outcome.measure_s,
    }


def add(connection: Connection, table: type[Base], values: Mapping[str, Any]) -> int:
    """Insert a row and return its id."""
    key = connection.execute(insert(table).values(**values)).inserted_primary_key
    assert key is not None
    return key[0]


TRIAL = tuple(TrialRow.__table__.columns)
"""Every column of trial."""


def entry_values(entry: PlayoffEntry, search: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The columns of playoff_entry that an entry fills, but its playoff."""
    return {
        "name": entry.name,
        "role": entry.role,
        "backend": entry.backend,
        "trial_id": entry.trial_id,
        "config": None if entry.config is None else dict(entry.config),
        "round_medians_us": list(entry.round_medians_us),
        "median_us": entry.median_us,
        "low_us": entry.low_us,
        "high_us": entry.high_us,
        "ratio": entry.ratio,
        "ratio_low": entry.ratio_low,
        "ratio_high": entry.ratio_high,
        "tied_first": entry.tied_first,
        "verified": entry.verified,
        "error_relative": entry.error_relative,
        "layout_us": entry.layout_us,
        "sm_clock_mhz": entry.sm_clock_mhz,
        "power_w": entry.power_w,
        "status": entry.status.value,
        "message": entry.message,
        "search": search,
    }

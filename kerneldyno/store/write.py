"""Writes to the database; the tuner alone uses it. One transaction a trial, so that a kill at any instant loses no finished one."""

import uuid
from collections.abc import Mapping
from datetime import UTC
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement
from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy.engine import Engine

from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Environment
from kerneldyno.core import Outcome
from kerneldyno.core import Workload
from kerneldyno.core import digest
from kerneldyno.store import query
from kerneldyno.store.engine import take_lock
from kerneldyno.store.models import ArtifactRow
from kerneldyno.store.models import Base
from kerneldyno.store.models import DeviceRow
from kerneldyno.store.models import EntryRow
from kerneldyno.store.models import PlayoffRow
from kerneldyno.store.models import StudyTable
from kerneldyno.store.models import TrialRow
from kerneldyno.store.models import WorkloadRow
from kerneldyno.store.records import PlayoffRecord
from kerneldyno.store.records import StudyRecord
from kerneldyno.store.records import TrialRecord
from kerneldyno.store.rows import TRIAL
from kerneldyno.store.rows import add
from kerneldyno.store.rows import add_once
from kerneldyno.store.rows import device_id
from kerneldyno.store.rows import device_key
from kerneldyno.store.rows import entry_values
from kerneldyno.store.rows import environment_id
from kerneldyno.store.rows import outcome_of
from kerneldyno.store.rows import trial_values
from kerneldyno.store.rows import workload_id


def _equal(table: type[Base], values: Mapping[str, Any]) -> list[ColumnElement[bool]]:
    return [getattr(table, name) == value for name, value in values.items()]


class Writer:
    """Keeps what the tuner finds, and gives it back where a study continues.

    Args:
        engine: From `open_store`, not read-only. Every method raises StoreError where it cannot be used.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writes = engine.execution_options(immediate=True)

    def study(
        self,
        workload: Workload,
        device: Device,
        environment: Environment,
        backend: str,
        kernel_digest: str,
        sampler: str,
        seed: int,
        command: str,
        fresh: bool = False,
    ) -> StudyRecord:
        """Find the study to continue, or begin it.

        Generations are counted over all samplers and seeds of the same (workload, device, environment, backend, kernel source):
        they share what was measured (`memo`), so `fresh` begins anew for all of them.

        Args:
            workload: What is computed.
            device: Where.
            environment: Versions that could change a result.
            backend: The backend.
            kernel_digest: Identity of the kernel's source.
            sampler: The sampler's name.
            seed: Its seed.
            command: The command that repeats the study.
            fresh: Begin a new generation instead of continuing the newest.
        """
        with self._writes.begin() as connection:
            take_lock(connection)
            group = {
                "workload_id": workload_id(connection, workload),
                "device_id": device_id(connection, device),
                "environment_id": environment_id(connection, environment),
                "backend": backend,
                "kernel_digest": kernel_digest,
            }
            newest = connection.execute(select(func.max(StudyTable.generation)).where(*_equal(StudyTable, group))).scalar()
            generation = 0 if newest is None else newest + int(fresh)
            identity = {**group, "sampler": sampler, "seed": seed, "generation": generation}
            found = connection.execute(select(StudyTable.id).where(*_equal(StudyTable, identity))).scalar_one_or_none()
            if found is None:
                found = add(connection, StudyTable, {**identity, "command": command, "created_at": datetime.now(UTC)})
            return StudyRecord(found, generation)

    def finished(self, study_id: int) -> list[TrialRecord]:
        """Return every trial of a study, by number."""
        return query.trials(self.engine, study_id, limit=None)

    def memo(self, study_id: int) -> Mapping[str, Outcome]:
        """Return what is known of each configuration of a study's group, by `core.digest` of the configuration.

        The group is every study with the same (workload, device, environment, backend, kernel source, generation), whatever its
        sampler and seed. Where a configuration was measured twice, the first counts, now and later.
        """
        statement = select(*TRIAL).where(TrialRow.study_id.in_(query.group_of(study_id))).order_by(TrialRow.id)
        known: dict[str, Outcome] = {}
        with self.engine.connect() as connection:
            for row in connection.execute(statement):
                if row.config_key not in known:
                    known[row.config_key] = outcome_of(row)
        return known

    def record(self, study_id: int, number: int, config: Config, outcome: Outcome, elapsed_s: float) -> int:
        """Keep a finished trial, in one transaction.

        A second call with the same number and configuration changes nothing. Where another process of the same study took the
        number for another configuration, the next free one is used: no measurement is dropped.

        Args:
            study_id: Its study.
            number: Its number within the study.
            config: The configuration.
            outcome: What became of it.
            elapsed_s: Seconds of search when it finished.

        Returns:
            The trial's row.
        """
        key = digest(config)
        with self._writes.begin() as connection:
            take_lock(connection)
            taken = connection.execute(
                select(TrialRow.id, TrialRow.config_key).where(TrialRow.study_id == study_id, TrialRow.number == number)
            ).one_or_none()
            if taken is not None:
                if taken.config_key == key:
                    return taken.id
                number = connection.execute(select(func.max(TrialRow.number) + 1).where(TrialRow.study_id == study_id)).scalar_one()
            values = {
                "study_id": study_id,
                "number": number,
                "config": dict(config),
                "config_key": key,
                **trial_values(outcome),
                "elapsed_s": elapsed_s,
                "finished_at": datetime.now(UTC),
            }
            return add(connection, TrialRow, values)

    def record_artifact(self, key: str, artifact: Artifact) -> None:
        """Keep the listings of an artifact, once; its machine code stays in the cache.

        Args:
            key: Its key in the cache.
            artifact: The artifact.
        """
        values = {
            "key": key,
            "arch": artifact.arch,
            "entry": artifact.entry,
            "source": artifact.source,
            "texts": dict(artifact.texts),
            "registers": artifact.registers,
            "smem_bytes": artifact.smem_bytes,
            "spill_bytes": artifact.spill_bytes,
            "threads": artifact.threads,
            "compile_s": artifact.compile_s,
        }
        with self._writes.begin() as connection:
            add_once(connection, ArtifactRow, values)

    def record_playoff(self, playoff: PlayoffRecord) -> int:
        """Keep an interleaved run with all its entries, in one transaction.

        Returns:
            The playoff's row.
        """
        with self._writes.begin() as connection:
            take_lock(connection)
            values = {
                "key": uuid.uuid4().hex,
                "workload_id": workload_id(connection, playoff.workload),
                "device_id": device_id(connection, playoff.device),
                "environment_id": environment_id(connection, playoff.environment),
                "created_at": datetime.now(UTC),
                "seed": playoff.seed,
                "rounds": playoff.rounds,
                "command": playoff.command,
                "conditions": dict(playoff.conditions),
            }
            row = add(connection, PlayoffRow, values)
            for entry in playoff.entries:
                add(connection, EntryRow, {"playoff_id": row, **entry_values(entry)})
            return row

    def best_trials(self, study_id: int, count: int) -> list[TrialRecord]:
        """Return the fastest trials of a study's group (see `memo`) that passed, each configuration once."""
        return query.best_trials(self.engine, study_id, count)

    def playoff_trials(self, workload: Workload, device: Device) -> frozenset[int]:
        """Return the trials that took part in the newest playoff of a workload on a device; empty where there was none."""
        newest = (
            select(func.max(PlayoffRow.id))
            .join(WorkloadRow, WorkloadRow.id == PlayoffRow.workload_id)
            .join(DeviceRow, DeviceRow.id == PlayoffRow.device_id)
            .where(WorkloadRow.key == workload.key, DeviceRow.key == device_key(device))
        )
        found = select(EntryRow.trial_id).where(EntryRow.playoff_id == newest.scalar_subquery(), EntryRow.trial_id.is_not(None))
        with self.engine.connect() as connection:
            return frozenset(trial for trial in connection.execute(found).scalars() if trial is not None)

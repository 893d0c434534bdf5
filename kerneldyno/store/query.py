"""Reads the database, for everyone. `ranking` is the one ranking: the command, the dashboard, the exports and the API show its rows."""

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import Select
from sqlalchemy import and_
from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy.engine import Engine
from sqlalchemy.orm import aliased

from kerneldyno.core import Environment
from kerneldyno.core import Status
from kerneldyno.store.models import ArtifactRow
from kerneldyno.store.models import DeviceRow
from kerneldyno.store.models import EnvironmentRow
from kerneldyno.store.models import StudyTable
from kerneldyno.store.models import TrialRow
from kerneldyno.store.models import WorkloadRow
from kerneldyno.store.ranking import ranking
from kerneldyno.store.records import Filters
from kerneldyno.store.records import ListingRecord
from kerneldyno.store.records import RankRow
from kerneldyno.store.records import StudyRow
from kerneldyno.store.records import TrialRecord
from kerneldyno.store.rows import DEVICE
from kerneldyno.store.rows import TRIAL
from kerneldyno.store.rows import WORKLOAD
from kerneldyno.store.rows import device_of
from kerneldyno.store.rows import trial_of
from kerneldyno.store.rows import workload_of
from kerneldyno.store.scope import GROUP
from kerneldyno.store.scope import conditions


__all__ = ["Filters", "RankRow", "best_trials", "group_of", "listing", "ranking", "studies", "trial", "trials"]


def studies(engine: Engine, filters: Filters | None = None) -> list[StudyRow]:
    """List the studies, newest first, with their trials by status and their best median."""
    filters = filters or Filters()
    with engine.connect() as connection:
        where = conditions(connection, filters)
        if filters.backends:
            where.append(StudyTable.backend.in_(filters.backends))
        statement = (
            select(*StudyTable.__table__.columns, *WORKLOAD, *DEVICE, EnvironmentRow.versions)
            .join(WorkloadRow, WorkloadRow.id == StudyTable.workload_id)
            .join(DeviceRow, DeviceRow.id == StudyTable.device_id)
            .join(EnvironmentRow, EnvironmentRow.id == StudyTable.environment_id)
            .where(*where)
            .order_by(StudyTable.id.desc())
            .limit(filters.limit)
        )
        rows = connection.execute(statement).all()
        shown = select(statement.with_only_columns(StudyTable.id).subquery().c.id)
        tally = (
            select(TrialRow.study_id, TrialRow.status, func.count().label("trials"), func.min(TrialRow.median_us).label("best_us"))
            .where(TrialRow.study_id.in_(shown))
            .group_by(TrialRow.study_id, TrialRow.status)
        )
        counts: dict[int, dict[str, int]] = defaultdict(dict)
        best: dict[int, float] = {}
        for row in connection.execute(tally):
            counts[row.study_id][row.status] = row.trials
            if row.status == Status.OK.value:
                best[row.study_id] = row.best_us
    return [
        StudyRow(
            id=row.id,
            workload=workload_of(row),
            device=device_of(row),
            environment=Environment(row.versions),
            backend=row.backend,
            kernel_digest=row.kernel_digest,
            sampler=row.sampler,
            seed=row.seed,
            generation=row.generation,
            command=row.command,
            created_at=row.created_at,
            counts=dict(sorted(counts[row.id].items())),
            best_us=best.get(row.id),
        )
        for row in rows
    ]


def trials(
    engine: Engine, study_id: int, after: int | None = None, limit: int | None = 100, statuses: Sequence[Status] = ()
) -> list[TrialRecord]:
    """Return a page of a study's trials, by number.

    Args:
        engine: The database.
        study_id: The study.
        after: Number of the last trial of the page before; None for the first page.
        limit: Most trials; None for all.
        statuses: Only these; empty for every status.
    """
    statement = select(*TRIAL).where(TrialRow.study_id == study_id).order_by(TrialRow.number).limit(limit)
    if after is not None:
        statement = statement.where(TrialRow.number > after)
    if statuses:
        statement = statement.where(TrialRow.status.in_([status.value for status in statuses]))
    with engine.connect() as connection:
        return [trial_of(row) for row in connection.execute(statement)]


def trial(engine: Engine, trial_id: int) -> TrialRecord | None:
    """Return a trial by its row; None where there is none."""
    with engine.connect() as connection:
        row = connection.execute(select(*TRIAL).where(TrialRow.id == trial_id)).one_or_none()
    return None if row is None else trial_of(row)


def group_of(study_id: int) -> Select:
    """The studies that share what was measured with a study: same workload, device, backend, versions, source and generation."""
    own = aliased(StudyTable)
    same = and_(*(getattr(own, column.key) == column for column in GROUP))
    return select(StudyTable.id).join(own, same).where(own.id == study_id)


def best_trials(engine: Engine, study_id: int, count: int) -> list[TrialRecord]:
    """Return the fastest trials of a study's group that passed, each configuration once.

    Args:
        engine: The database.
        study_id: Any study of the group.
        count: Most trials.
    """
    place = func.row_number().over(partition_by=TrialRow.config_key, order_by=(TrialRow.median_us, TrialRow.id)).label("place")
    placed = (
        select(TrialRow.id, place)
        .where(TrialRow.study_id.in_(group_of(study_id)), TrialRow.status == Status.OK.value, TrialRow.median_us.is_not(None))
        .subquery()
    )
    statement = select(*TRIAL).join(placed, placed.c.id == TrialRow.id).where(placed.c.place == 1).order_by(TrialRow.median_us, TrialRow.id)
    with engine.connect() as connection:
        return [trial_of(row) for row in connection.execute(statement.limit(count))]


def listing(engine: Engine, key: str) -> ListingRecord | None:
    """Return the listings of an artifact; None where none were kept."""
    with engine.connect() as connection:
        row = connection.execute(select(*ArtifactRow.__table__.columns).where(ArtifactRow.key == key)).one_or_none()
    if row is None:
        return None
    return ListingRecord(
        key=row.key,
        arch=row.arch,
        entry=row.entry,
        source=row.source,
        texts=row.texts,
        registers=row.registers,
        smem_bytes=row.smem_bytes,
        spill_bytes=row.spill_bytes,
        threads=row.threads,
        compile_s=row.compile_s,
    )

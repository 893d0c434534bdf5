"""The one ranking: newest playoff entries, best trials and counts, put together for each (device, workload, name)."""

from collections import Counter
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement
from sqlalchemy import Connection
from sqlalchemy import Row
from sqlalchemy import Select
from sqlalchemy import Subquery
from sqlalchemy import and_
from sqlalchemy import case
from sqlalchemy import exists
from sqlalchemy import func
from sqlalchemy import select
from sqlalchemy.engine import Engine
from sqlalchemy.orm import aliased

from kerneldyno.core import Environment
from kerneldyno.core import Status
from kerneldyno.store.models import DeviceRow
from kerneldyno.store.models import EntryRow
from kerneldyno.store.models import EnvironmentRow
from kerneldyno.store.models import PlayoffRow
from kerneldyno.store.models import StudyTable
from kerneldyno.store.models import TrialRow
from kerneldyno.store.models import WorkloadRow
from kerneldyno.store.records import Filters
from kerneldyno.store.records import RankRow
from kerneldyno.store.rows import DEVICE
from kerneldyno.store.rows import WORKLOAD
from kerneldyno.store.rows import device_of
from kerneldyno.store.rows import workload_of
from kerneldyno.store.scope import GROUP
from kerneldyno.store.scope import conditions


_Key = tuple[int, int, str]
"""(workload, device, name) of a ranking row."""


def ranking(engine: Engine, filters: Filters | None = None) -> list[RankRow]:
    """Rank everything that competed: for each (device, workload, name) one row, the fastest of a workload first.

    The times of a row are those of the newest playoff that it took part in; before any, those of the best trial in the newest
    (environment, kernel source, generation) group of the backend. A backend's best entry that is right stands for it. What failed
    comes last. Baselines are shown beside kernels, and alone only where no backend is filtered for.

    Args:
        engine: From `open_store` or `load_shipped`.
        filters: What to show.

    Returns:
        Rows by problem, dtype, shape, device, then time.
    """
    filters = filters or Filters()
    source = engine.get_execution_options().get("source", "database")
    with engine.connect() as connection:
        where = conditions(connection, filters)
        of_backend = [StudyTable.backend.in_(filters.backends)] if filters.backends else []
        groups = _newest_groups([*where, *of_backend])
        found: dict[_Key, RankRow] = {}
        searches = _searches(connection, groups)
        for row in connection.execute(_best_trials(groups)):
            _better(found, (row.workload_id, row.device_id, row.backend), _from_trial(row, searches, source))
        entered = [EntryRow.backend.is_(None) | EntryRow.backend.in_(filters.backends)] if filters.backends else []
        for row in connection.execute(_newest_entries([*where, *entered])):
            key = (row.workload_id, row.device_id, row.name)
            found[key] = _from_entry(row, searches, found.get(key), source)
        for row in connection.execute(_heads(groups)):
            key = (row.workload_id, row.device_id, row.backend)
            if key not in found and searches[key].counts:
                found[key] = _from_failures(row, searches, source)
    contested = {key[:2] for key, row in found.items() if row.backend is not None}
    rows = [row for key, row in found.items() if not filters.backends or key[:2] in contested]
    rows.sort(key=_order)
    return rows if filters.limit is None else rows[: filters.limit]


def _order(row: RankRow) -> tuple[Any, ...]:
    shape = tuple((name, isinstance(value, str), value) for name, value in row.workload.shape.items())
    passed = row.status is Status.OK and row.median_us is not None
    return (row.workload.problem, row.workload.dtype, shape, row.workload.seed, row.device.name, not passed, row.median_us or 0.0, row.name)


def _better(found: dict[_Key, RankRow], key: _Key, row: RankRow) -> None:
    other = found.get(key)
    if other is None or (row.median_us or 0.0) < (other.median_us or 0.0):
        found[key] = row


class _Search:
    """What a group of studies did."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.tuning_s = 0.0

    @property
    def columns(self) -> dict[str, Any]:
        counts = dict(sorted(self.counts.items()))
        return {"counts": counts, "trials": sum(counts.values()), "tuning_s": self.tuning_s}


def _newest_groups(where: Sequence[ColumnElement[bool]]) -> Subquery:
    """The studies of the newest group of each (workload, device, backend), `place` 1 for the newest of them.

    A study without a trial yet makes no group: a search that was stopped at once does not hide what was known.
    """
    place = func.row_number().over(partition_by=GROUP[:3], order_by=StudyTable.id.desc()).label("place")
    placed = (
        select(*GROUP, place)
        .join(WorkloadRow, WorkloadRow.id == StudyTable.workload_id)
        .join(DeviceRow, DeviceRow.id == StudyTable.device_id)
        .where(*where, exists().where(TrialRow.study_id == StudyTable.id))
        .subquery()
    )
    same = and_(*(placed.c[column.key] == column for column in GROUP))
    place = func.row_number().over(partition_by=GROUP[:3], order_by=StudyTable.id.desc()).label("place")
    return select(StudyTable.id.label("study_id"), *GROUP, place).join(placed, same).where(placed.c.place == 1).subquery()


def _searches(connection: Connection, groups: Subquery) -> dict[_Key, _Search]:
    """Trials by status and seconds of each group; read from the index alone."""
    statement = (
        select(
            groups.c.workload_id,
            groups.c.device_id,
            groups.c.backend,
            TrialRow.status,
            func.count().label("trials"),
            func.sum(TrialRow.build_s + TrialRow.measure_s).label("seconds"),
        )
        .join(groups, groups.c.study_id == TrialRow.study_id)
        .group_by(groups.c.workload_id, groups.c.device_id, groups.c.backend, TrialRow.status)
    )
    found: dict[_Key, _Search] = defaultdict(_Search)
    for row in connection.execute(statement):
        search = found[row.workload_id, row.device_id, row.backend]
        search.counts[row.status] += row.trials
        search.tuning_s += row.seconds
    return found


def _described(statement: Select, groups: Subquery) -> Select:
    """Add study, workload, device and environment to a statement on groups."""
    return (
        statement.add_columns(*WORKLOAD, *DEVICE, EnvironmentRow.versions, StudyTable.command, StudyTable.kernel_digest)
        .add_columns(StudyTable.workload_id, StudyTable.device_id, StudyTable.backend, StudyTable.seed, StudyTable.created_at)
        .join(StudyTable, StudyTable.id == groups.c.study_id)
        .join(WorkloadRow, WorkloadRow.id == groups.c.workload_id)
        .join(DeviceRow, DeviceRow.id == groups.c.device_id)
        .join(EnvironmentRow, EnvironmentRow.id == groups.c.environment_id)
    )


def _heads(groups: Subquery) -> Select:
    """The newest study of each group."""
    return _described(select(groups.c.study_id).select_from(groups), groups).where(groups.c.place == 1)


def _best_trials(groups: Subquery) -> Select:
    """The best trial of each study of the groups: one step into the index a study."""
    candidate = aliased(TrialRow)
    best = (
        select(candidate.id)
        .where(candidate.study_id == groups.c.study_id, candidate.status == Status.OK.value, candidate.median_us.is_not(None))
        .order_by(candidate.median_us, candidate.id)
        .limit(1)
        .correlate(groups)
        .scalar_subquery()
    )
    columns = (
        TrialRow.id.label("trial_id"),
        TrialRow.config,
        TrialRow.median_us,
        TrialRow.low_us,
        TrialRow.high_us,
        TrialRow.error_relative,
        TrialRow.sm_clock_mhz,
        TrialRow.power_w,
        TrialRow.finished_at,
    )
    return _described(select(*columns).select_from(groups).join(TrialRow, TrialRow.id == best), groups)


def _newest_entries(where: Sequence[ColumnElement[bool]]) -> Select:
    """The newest playoff entry of each (workload, device, name); of several in one playoff the fastest that is right."""
    right = and_(EntryRow.status == Status.OK.value, EntryRow.median_us.is_not(None))
    rank = case((and_(right, EntryRow.verified), 0), (right, 1), else_=2)
    place = func.row_number().over(
        partition_by=(PlayoffRow.workload_id, PlayoffRow.device_id, EntryRow.name),
        order_by=(PlayoffRow.created_at.desc(), PlayoffRow.id.desc(), rank, EntryRow.median_us, EntryRow.id),
    )
    placed = (
        select(EntryRow.id, place.label("place"))
        .join(PlayoffRow, PlayoffRow.id == EntryRow.playoff_id)
        .join(WorkloadRow, WorkloadRow.id == PlayoffRow.workload_id)
        .join(DeviceRow, DeviceRow.id == PlayoffRow.device_id)
        .where(*where)
        .subquery()
    )
    return (
        select(*EntryRow.__table__.columns, PlayoffRow.key.label("playoff"), PlayoffRow.rounds, PlayoffRow.seed, PlayoffRow.command)
        .add_columns(PlayoffRow.conditions, PlayoffRow.created_at, PlayoffRow.workload_id, PlayoffRow.device_id)
        .add_columns(*WORKLOAD, *DEVICE, EnvironmentRow.versions, StudyTable.kernel_digest)
        .join(placed, placed.c.id == EntryRow.id)
        .join(PlayoffRow, PlayoffRow.id == EntryRow.playoff_id)
        .join(WorkloadRow, WorkloadRow.id == PlayoffRow.workload_id)
        .join(DeviceRow, DeviceRow.id == PlayoffRow.device_id)
        .join(EnvironmentRow, EnvironmentRow.id == PlayoffRow.environment_id)
        .join(TrialRow, TrialRow.id == EntryRow.trial_id, isouter=True)
        .join(StudyTable, StudyTable.id == TrialRow.study_id, isouter=True)
        .where(placed.c.place == 1)
    )


def _from_trial(row: Row[Any], searches: dict[_Key, _Search], source: str) -> RankRow:
    return RankRow(
        workload=workload_of(row),
        device=device_of(row),
        environment=Environment(row.versions),
        name=row.backend,
        role="kernel",
        backend=row.backend,
        status=Status.OK,
        command=row.command,
        created_at=row.finished_at,
        source=source,
        median_us=row.median_us,
        low_us=row.low_us,
        high_us=row.high_us,
        config=row.config,
        error_relative=row.error_relative,
        sm_clock_mhz=row.sm_clock_mhz,
        power_w=row.power_w,
        trial_id=row.trial_id,
        best_trial_id=row.trial_id,
        best_trial_us=row.median_us,
        seed=row.seed,
        kernel_digest=row.kernel_digest,
        **searches[row.workload_id, row.device_id, row.backend].columns,
    )


def _from_failures(row: Row[Any], searches: dict[_Key, _Search], source: str) -> RankRow:
    search = searches[row.workload_id, row.device_id, row.backend]
    return RankRow(
        workload=workload_of(row),
        device=device_of(row),
        environment=Environment(row.versions),
        name=row.backend,
        role="kernel",
        backend=row.backend,
        status=Status(search.counts.most_common(1)[0][0]),
        command=row.command,
        created_at=row.created_at,
        source=source,
        seed=row.seed,
        kernel_digest=row.kernel_digest,
        **search.columns,
    )


def _from_entry(row: Row[Any], searches: dict[_Key, _Search], best: RankRow | None, source: str) -> RankRow:
    key = (row.workload_id, row.device_id, row.name)
    # the trials of a shipped entry are elsewhere; what they came to was carried along
    carried = dict(row.search or {})
    kernel_digest = carried.pop("kernel_digest", row.kernel_digest)
    search = searches[key].columns if row.backend is not None and key in searches else carried
    return RankRow(
        workload=workload_of(row),
        device=device_of(row),
        environment=Environment(row.versions),
        name=row.name,
        role=row.role,
        backend=row.backend,
        status=Status(row.status),
        command=row.command,
        created_at=row.created_at,
        source=source,
        median_us=row.median_us,
        low_us=row.low_us,
        high_us=row.high_us,
        ratio=row.ratio,
        ratio_low=row.ratio_low,
        ratio_high=row.ratio_high,
        tied_first=row.tied_first,
        verified=row.verified,
        config=row.config,
        error_relative=row.error_relative,
        layout_us=row.layout_us,
        sm_clock_mhz=row.sm_clock_mhz,
        power_w=row.power_w,
        message=row.message,
        trial_id=row.trial_id,
        best_trial_id=best.trial_id if best else None,
        best_trial_us=best.median_us if best else None,
        playoff_id=row.playoff_id,
        playoff=row.playoff,
        rounds=row.rounds,
        seed=row.seed,
        kernel_digest=kernel_digest,
        conditions=row.conditions,
        **search,
    )

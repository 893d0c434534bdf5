"""What a reader asks for, as conditions in SQL."""

from sqlalchemy import ColumnElement
from sqlalchemy import Connection
from sqlalchemy import func
from sqlalchemy import or_
from sqlalchemy import select

from kerneldyno.store.models import DeviceRow
from kerneldyno.store.models import StudyTable
from kerneldyno.store.models import WorkloadRow
from kerneldyno.store.records import Filters


GROUP = (
    StudyTable.workload_id,
    StudyTable.device_id,
    StudyTable.backend,
    StudyTable.environment_id,
    StudyTable.kernel_digest,
    StudyTable.generation,
)
"""Studies that agree in these share what was measured; the first three say who competes on what."""


def conditions(connection: Connection, filters: Filters) -> list[ColumnElement[bool]]:
    """Conditions on workload and device."""
    found: list[ColumnElement[bool]] = []
    if filters.problems:
        found.append(WorkloadRow.problem.in_(filters.problems))
    if filters.dtypes:
        found.append(WorkloadRow.dtype.in_(filters.dtypes))
    if filters.devices:
        words = [word.partition(":")[0].lower() for word in filters.devices]
        named = [func.lower(DeviceRow.name).contains(word, autoescape=True) for word in words]
        found.append(or_(DeviceRow.kind.in_(words), *named))
    if filters.shapes:
        # here rather than in SQL: workloads are few, and the databases compare JSON values each in their own way
        rows = connection.execute(select(WorkloadRow.id, WorkloadRow.shape)).all()
        fitting = [row.id for row in rows if any(shape.items() <= row.shape.items() for shape in filters.shapes)]
        found.append(WorkloadRow.id.in_(fitting))
    return found

"""The tables. Migrations in `migrations/versions` make them; a test holds the two against each other.

A migration is written by hand: `NNNN_words.py` with `revision = "NNNN"`, the number one above the last.
"""

import json
import zlib
from datetime import UTC
from datetime import datetime
from typing import Any

from sqlalchemy import JSON
from sqlalchemy import BigInteger
from sqlalchemy import DateTime
from sqlalchemy import Double
from sqlalchemy import ForeignKey
from sqlalchemy import Index
from sqlalchemy import LargeBinary
from sqlalchemy import String
from sqlalchemy import Text
from sqlalchemy import UniqueConstraint
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.orm import Mapped
from sqlalchemy.orm import mapped_column
from sqlalchemy.types import TypeDecorator


def clean(text: str) -> str:
    """Replace what a database refuses in text: NUL (PostgreSQL) and lone surrogates (both), as crashes print them."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


class Utc(TypeDecorator[datetime]):
    """A moment in UTC; SQLite forgets the zone, which is put back here."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Turn an aware moment into UTC."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return an aware moment in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Words(TypeDecorator[str]):
    """Text of any origin (compilers, crashed processes), kept free of what a database refuses."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Clean the text."""
        return None if value is None else clean(value)


class Packed(TypeDecorator[dict[str, str]]):
    """Texts by name as deflated JSON: PTX and SASS listings shrink about tenfold, and there is one a trial."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: dict[str, str] | None, dialect: Dialect) -> bytes | None:
        """Pack."""
        return None if value is None else zlib.compress(json.dumps(value).encode())

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> dict[str, str] | None:
        """Unpack."""
        return None if value is None else json.loads(zlib.decompress(value))


class Base(DeclarativeBase):
    """Base of the tables."""

    # JSON, not PostgreSQL's JSONB: the order of a shape's and a configuration's keys is kept for display
    type_annotation_map = {  # noqa: RUF012 - read by SQLAlchemy as declared
        dict[str, Any]: JSON,
        list[float]: JSON,
        dict[str, str]: Packed,
        datetime: Utc,
        float: Double,
        str: Words,
    }


class DeviceRow(Base):
    """A kind of device. The index and the driver are no part of it: two H200 are one device, a driver is an environment."""

    __tablename__ = "device"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(20), unique=True)
    kind: Mapped[str]
    name: Mapped[str]
    arch: Mapped[str]
    sm_count: Mapped[int]
    facts: Mapped[dict[str, Any]]


class EnvironmentRow(Base):
    """Versions that could change a result."""

    __tablename__ = "environment"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(20), unique=True)
    versions: Mapped[dict[str, Any]]


class WorkloadRow(Base):
    """What kernels compete on."""

    __tablename__ = "workload"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)
    problem: Mapped[str] = mapped_column(String(200), index=True)
    shape: Mapped[dict[str, Any]]
    dtype: Mapped[str]
    seed: Mapped[int] = mapped_column(BigInteger)


class StudyTable(Base):
    """One search: a backend on a workload and device, with a sampler and a seed."""

    __tablename__ = "study"
    __table_args__ = (
        UniqueConstraint(
            "workload_id",
            "device_id",
            "environment_id",
            "backend",
            "kernel_digest",
            "sampler",
            "seed",
            "generation",
            name="uq_study",
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    workload_id: Mapped[int] = mapped_column(ForeignKey("workload.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    backend: Mapped[str] = mapped_column(String(200))
    kernel_digest: Mapped[str] = mapped_column(String(64))
    sampler: Mapped[str] = mapped_column(String(200))
    seed: Mapped[int] = mapped_column(BigInteger)
    generation: Mapped[int]
    command: Mapped[str]
    created_at: Mapped[datetime]


class TrialRow(Base):
    """One configuration that ended. The artifact's row is written before it, yet is not required: a listing may be dropped."""

    __tablename__ = "trial"
    __table_args__ = (
        UniqueConstraint("study_id", "number", name="uq_trial"),
        # the two times at the end let a ranking count and sum without reading the rows and their samples
        Index("ix_trial_rank", "study_id", "status", "median_us", "build_s", "measure_s"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("study.id"))
    number: Mapped[int]
    config: Mapped[dict[str, Any]]
    config_key: Mapped[str] = mapped_column(String(20), index=True)
    status: Mapped[str] = mapped_column(String(40))
    median_us: Mapped[float | None]
    low_us: Mapped[float | None]
    high_us: Mapped[float | None]
    sample_count: Mapped[int]
    samples_us: Mapped[list[float]]
    error_relative: Mapped[float | None]
    error_max_abs: Mapped[float | None]
    sm_clock_mhz: Mapped[float | None]
    power_w: Mapped[float | None]
    registers: Mapped[int | None]
    smem_bytes: Mapped[int | None]
    spill_bytes: Mapped[int | None]
    artifact: Mapped[str | None] = mapped_column(String(64))
    message: Mapped[str]
    build_s: Mapped[float]
    measure_s: Mapped[float]
    elapsed_s: Mapped[float]
    finished_at: Mapped[datetime]


class ArtifactRow(Base):
    """Listings of what a configuration compiled to; the machine code stays in the artifact cache."""

    __tablename__ = "artifact"

    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    arch: Mapped[str]
    entry: Mapped[str]
    source: Mapped[str]
    texts: Mapped[dict[str, str]]
    registers: Mapped[int | None]
    smem_bytes: Mapped[int | None]
    spill_bytes: Mapped[int | None]
    threads: Mapped[int | None]
    compile_s: Mapped[float]


class PlayoffRow(Base):
    """One interleaved run. `key` names it in every database that it is carried to."""

    __tablename__ = "playoff"
    __table_args__ = (Index("ix_playoff_workload", "workload_id", "device_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(32), unique=True)
    workload_id: Mapped[int] = mapped_column(ForeignKey("workload.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    created_at: Mapped[datetime]
    seed: Mapped[int] = mapped_column(BigInteger)
    rounds: Mapped[int]
    command: Mapped[str]
    conditions: Mapped[dict[str, Any]]


class EntryRow(Base):
    """One contender of a playoff. `search` tells what search stood behind it where its trials are not in this database."""

    __tablename__ = "playoff_entry"

    id: Mapped[int] = mapped_column(primary_key=True)
    playoff_id: Mapped[int] = mapped_column(ForeignKey("playoff.id"), index=True)
    name: Mapped[str] = mapped_column(String(200))
    role: Mapped[str] = mapped_column(String(20))
    backend: Mapped[str | None] = mapped_column(String(200))
    trial_id: Mapped[int | None] = mapped_column(ForeignKey("trial.id"), index=True)
    config: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    round_medians_us: Mapped[list[float]]
    median_us: Mapped[float | None]
    low_us: Mapped[float | None]
    high_us: Mapped[float | None]
    ratio: Mapped[float | None]
    ratio_low: Mapped[float | None]
    ratio_high: Mapped[float | None]
    tied_first: Mapped[bool]
    verified: Mapped[bool]
    error_relative: Mapped[float | None]
    layout_us: Mapped[float | None]
    sm_clock_mhz: Mapped[float | None]
    power_w: Mapped[float | None]
    status: Mapped[str] = mapped_column(String(40))
    message: Mapped[str]
    search: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class CeilingRow(Base):
    """A measured bound of a device (copy bandwidth, tensor throughput), with its conditions."""

    __tablename__ = "ceiling"
    __table_args__ = (Index("ix_ceiling_device", "device_id", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    name: Mapped[str] = mapped_column(String(200))
    value: Mapped[float]
    unit: Mapped[str]
    conditions: Mapped[dict[str, Any]]
    measured_at: Mapped[datetime]


class ProfileRow(Base):
    """What a profiler said about a trial."""

    __tablename__ = "profile"

    id: Mapped[int] = mapped_column(primary_key=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("trial.id"), index=True)
    tool: Mapped[str]
    data: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]

"""Frozen records that go into the database and come out of it; no ORM object leaves the store."""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from datetime import datetime
from typing import Any

from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Environment
from kerneldyno.core import Outcome
from kerneldyno.core import Shape
from kerneldyno.core import Status
from kerneldyno.core import Value
from kerneldyno.core import Workload


@dataclass(frozen=True, slots=True)
class StudyRecord:
    """A study as the tuner continues it.

    Attributes:
        id: Its row.
        generation: 0, and one more each time that `fresh=true` began again.
    """

    id: int
    generation: int


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """One configuration that ended, one way or another.

    Attributes:
        id: Its row.
        study_id: The study it belongs to.
        number: Its number within the study, counted from 0.
        config: The configuration.
        config_key: `core.digest` of the configuration.
        outcome: What became of it.
        elapsed_s: Seconds of search when it finished.
        finished_at: When, UTC.
    """

    id: int
    study_id: int
    number: int
    config: Config
    config_key: str
    outcome: Outcome
    elapsed_s: float
    finished_at: datetime

    @property
    def status(self) -> Status:
        """How it ended."""
        return self.outcome.status

    @property
    def median_us(self) -> float | None:
        """Median of its samples, in microseconds; None unless it is ok."""
        return self.outcome.median_us

    @property
    def artifact(self) -> str | None:
        """Key of its artifact; None where nothing was built."""
        return self.outcome.artifact


@dataclass(frozen=True, slots=True)
class PlayoffEntry:
    """One contender of a playoff.

    Attributes:
        name: Backend or baseline; a backend may have several entries, one a configuration.
        role: "kernel", "library", "peer", "roof" or "step".
        status: How it ended.
        backend: The backend; None for a baseline.
        trial_id: The trial that sent it; None for a baseline.
        config: Its configuration; None for a baseline.
        round_medians_us: Median of each round, in microseconds; the same position is the same round for all.
        median_us: Median of the rounds' medians.
        low_us: Lower end of its 95% interval.
        high_us: Upper end of it.
        ratio: Time of the library over time of this entry: above 1 it is faster. None where no library ran.
        ratio_low: Lower end of the ratio's 95% interval.
        ratio_high: Upper end of it.
        tied_first: True where the interval does not tell it from the fastest.
        verified: True where it was right on fresh inputs after timing.
        error_relative: `core.Error.relative` before timing.
        layout_us: Median time of the kernel's `layout`, which is not in `median_us`; None where it has none.
        sm_clock_mhz: Mean SM clock over the rounds; None where unknown.
        power_w: Mean board power over the rounds; None where unknown.
        message: The error text; empty where ok.
    """

    name: str
    role: str
    status: Status = Status.OK
    backend: str | None = None
    trial_id: int | None = None
    config: Config | None = None
    round_medians_us: Sequence[float] = ()
    median_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    tied_first: bool = False
    verified: bool = False
    error_relative: float | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    message: str = ""
    layout_us: float | None = None


@dataclass(frozen=True, slots=True)
class PlayoffRecord:
    """One interleaved run on one workload and device.

    Attributes:
        workload: What was computed.
        device: Where.
        environment: Every version that took part.
        seed: Seed of the search that led to it.
        rounds: Number of rounds.
        command: The command that repeats it.
        conditions: Regime and cache state ({"cache": "cold", ...}); JSON values.
        entries: The contenders.
    """

    workload: Workload
    device: Device
    environment: Environment
    seed: int
    rounds: int
    command: str
    conditions: Mapping[str, Any]
    entries: Sequence[PlayoffEntry]


@dataclass(frozen=True, slots=True)
class Filters:
    """What a reader wants to see; an empty field lets everything through.

    Attributes:
        problems: Names of problems.
        backends: Names of backends; the baselines of a workload stay beside the kernels that are shown.
        dtypes: fp32, fp16, bf16.
        shapes: Partial shapes; a workload is shown where it agrees with any of them.
        devices: A kind ("cuda", "cpu"; an index as in "cuda:0" is ignored) or part of a name ("h200"), in any case.
        limit: Most rows; None for all.
    """

    problems: Sequence[str] = ()
    backends: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    shapes: Sequence[Mapping[str, Value] | Shape] = ()
    devices: Sequence[str] = ()
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class RankRow:
    """The standing of one backend or baseline on one workload and device.

    The times come from the newest playoff that it took part in; before any playoff, from its best trial, and then there is no ratio.

    Attributes:
        workload: What was computed.
        device: Where; index 0 and no driver (the driver is in `environment`).
        environment: Versions behind the times.
        name: Backend or baseline.
        role: "kernel", "library", "peer", "roof" or "step".
        backend: The backend; None for a baseline.
        status: ok, or how the playoff entry failed, or the commonest status of a search in which nothing passed.
        median_us: Median time in microseconds; None where nothing passed.
        low_us: Lower end of its 95% interval.
        high_us: Upper end of it.
        ratio: Time of the library over this time in the same playoff: above 1 it is faster. None where there was none.
        ratio_low: Lower end of the ratio's 95% interval.
        ratio_high: Upper end of it.
        tied_first: True where it was not told from the fastest of its playoff.
        verified: True where it was right on fresh inputs after timing; trials are verified before timing only.
        config: The configuration; None for a baseline.
        error_relative: Distance from the reference.
        layout_us: Median time of the kernel's `layout`, which is not in `median_us`; None where it has none or raced in no playoff.
        sm_clock_mhz: SM clock; None where unknown.
        power_w: Board power; None where unknown.
        message: The error text of a failed entry.
        counts: Trials by status in the newest group (environment, kernel source, generation) of this backend; empty for a baseline.
        trials: Their sum.
        tuning_s: Seconds of building and measuring in that group.
        trial_id: The trial whose configuration is shown; None for baselines and shipped results.
        best_trial_id: The best trial of the newest group, which may be newer than the playoff.
        best_trial_us: Its median, in microseconds.
        playoff_id: Row of the playoff; None where the times are a trial's.
        playoff: Name of the playoff, the same for all its entries and in every database; None likewise.
        rounds: Rounds of the playoff; 0 where there was none.
        seed: Seed of the search.
        kernel_digest: Identity of the kernel's source; None for a baseline.
        conditions: Of the playoff; empty where there was none.
        command: The command that repeats it.
        created_at: When it was measured, UTC.
        source: "database" or "shipped".
    """

    workload: Workload
    device: Device
    environment: Environment
    name: str
    role: str
    backend: str | None
    status: Status
    command: str
    created_at: datetime
    source: str
    median_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    tied_first: bool = False
    verified: bool = False
    config: Config | None = None
    error_relative: float | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    message: str = ""
    layout_us: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    trials: int = 0
    tuning_s: float = 0.0
    trial_id: int | None = None
    best_trial_id: int | None = None
    best_trial_us: float | None = None
    playoff_id: int | None = None
    playoff: str | None = None
    rounds: int = 0
    seed: int = 0
    kernel_digest: str | None = None
    conditions: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StudyRow:
    """A study with what is in it.

    Attributes:
        id: Its row.
        workload: What was computed.
        device: Where.
        environment: Versions that could change a result.
        backend: The backend.
        kernel_digest: Identity of the kernel's source.
        sampler: The sampler's name.
        seed: Its seed.
        generation: How often `fresh=true` began again.
        command: The command that repeats it.
        created_at: When it began, UTC.
        counts: Trials by status.
        best_us: The least median, in microseconds; None where nothing passed.
    """

    id: int
    workload: Workload
    device: Device
    environment: Environment
    backend: str
    kernel_digest: str
    sampler: str
    seed: int
    generation: int
    command: str
    created_at: datetime
    counts: Mapping[str, int]
    best_us: float | None


@dataclass(frozen=True, slots=True)
class ListingRecord:
    """The listings kept of an artifact; its machine code stays in the cache.

    Attributes:
        key: The artifact's key.
        arch: The target.
        entry: Name of the kernel's entry point.
        source: The source text.
        texts: Other listings by name ("ptx", "ttgir").
        registers: Registers a thread; None where unknown.
        smem_bytes: Shared memory a block; None where unknown.
        spill_bytes: Spill stores plus loads a thread; None where unknown.
        threads: Threads a block; None where unknown.
        compile_s: Seconds the compiler took.
    """

    key: str
    arch: str
    entry: str
    source: str
    texts: Mapping[str, str]
    registers: int | None
    smem_bytes: int | None
    spill_bytes: int | None
    threads: int | None
    compile_s: float

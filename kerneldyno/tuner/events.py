"""What a search tells whoever listens, as it happens."""

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass

from kerneldyno.core import Config
from kerneldyno.core import Outcome
from kerneldyno.core import Workload
from kerneldyno.store.records import PlayoffEntry


@dataclass(frozen=True, slots=True)
class StudyStarted:
    """A backend's search begins.

    Attributes:
        backend: Its name.
        workload: What it competes on.
        space_size: Valid configurations.
        trials: Configurations wanted; never more than `space_size`.
        already: How many of them the database holds.
        budget_s: Seconds it may take; None: no limit.
    """

    backend: str
    workload: Workload
    space_size: int
    trials: int
    already: int
    budget_s: float | None


@dataclass(frozen=True, slots=True)
class TrialFinished:
    """A configuration ended, one way or another, and is in the database."""

    backend: str
    number: int
    config: Config
    outcome: Outcome
    best_us: float | None


@dataclass(frozen=True, slots=True)
class Queue:
    """How much is under way: builds queued or running, built and waiting for the device, being measured."""

    building: int
    built: int
    measuring: int


@dataclass(frozen=True, slots=True)
class StudyFinished:
    """A backend's search ended.

    Attributes:
        backend: Its name.
        workload: What it competed on.
        ran: Configurations measured now.
        reused: Configurations that the database held before.
        best_us: Median of the best; None where none passed.
        counts: Trials by status, the reused ones too.
    """

    backend: str
    workload: Workload
    ran: int
    reused: int
    best_us: float | None
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PlayoffRound:
    """A round of the interleaved comparison ended."""

    round: int
    rounds: int


@dataclass(frozen=True, slots=True)
class PlayoffFinished:
    """The comparison of a workload ended; the entries are in the database."""

    workload: Workload
    entries: tuple[PlayoffEntry, ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a user should know, in one line."""

    text: str


Event = StudyStarted | TrialFinished | Queue | StudyFinished | PlayoffRound | PlayoffFinished | Notice
Listener = Callable[[Event], None]

"""Shows a search as it goes: a live line on a terminal, plain lines elsewhere; always on standard error."""

import sys
import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Self
from typing import TextIO

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from kerneldyno.console.show import console
from kerneldyno.console.show import span_text
from kerneldyno.console.show import time_text
from kerneldyno.core import Status
from kerneldyno.tuner.events import Event
from kerneldyno.tuner.events import Notice
from kerneldyno.tuner.events import PlayoffFinished
from kerneldyno.tuner.events import PlayoffRound
from kerneldyno.tuner.events import Queue
from kerneldyno.tuner.events import StudyFinished
from kerneldyno.tuner.events import StudyStarted
from kerneldyno.tuner.events import TrialFinished


# a log file gets a line at most this often, unless the best improves
_PLAIN_EVERY_S = 5.0


class Progress:
    """A listener for `tuner.run`, and a context manager that leaves the terminal clean.

    Args:
        stream: Where to write; standard error by default.
        live: True for one line that is redrawn; None: where the stream is a terminal.
    """

    def __init__(self, stream: TextIO | None = None, live: bool | None = None) -> None:
        self._console = console(stream or sys.stderr)
        self._study: StudyStarted | None = None
        self._queue = Queue(0, 0, 0)
        self._round: PlayoffRound | None = None
        self._counts: Counter[str] = Counter()
        self._best_us: float | None = None
        self._started_s = self._printed_s = time.monotonic()
        self._ran = 0
        self._live: Live | None = None
        if self._console.is_terminal if live is None else live:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take one event in."""
        match event:
            case StudyStarted():
                self._start(event)
            case TrialFinished():
                self._trial(event)
            case Queue():
                self._queue = event
            case StudyFinished():
                self._finish(event)
            case PlayoffRound():
                self._round = event
            case PlayoffFinished():
                self._round = None
            case Notice():
                self._print(event.text)

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _start(self, event: StudyStarted) -> None:
        self._study, self._ran, self._best_us = event, 0, None
        self._counts.clear()
        self._started_s = self._printed_s = time.monotonic()
        held = f", {event.already} of them in the database" if event.already else ""
        limit = f", at most {span_text(event.budget_s)}" if event.budget_s is not None else ""
        load = f"{event.workload.problem} {event.workload.shape_text} {event.workload.dtype}"
        self._print(f"{load}: {event.backend} tries {event.trials} of {event.space_size} configurations{held}{limit}")

    def _trial(self, event: TrialFinished) -> None:
        self._ran += 1
        self._counts[event.outcome.status] += 1
        improved = event.best_us is not None and (self._best_us is None or event.best_us < self._best_us)
        self._best_us = event.best_us if event.best_us is not None else self._best_us
        now = time.monotonic()
        if self._live is None and (improved or now - self._printed_s >= _PLAIN_EVERY_S):
            self._printed_s = now
            self._print("  " + "  ".join(filter(None, self._facts())))

    def _finish(self, event: StudyFinished) -> None:
        self._study, self._queue = None, Queue(0, 0, 0)
        best = f"best {time_text(event.best_us)}" if event.best_us is not None else "no configuration passed"
        done = f"measured {event.ran}, took {event.reused} from the database" if event.reused else f"measured {event.ran}"
        nothing = " (nothing was measured again)" if event.reused and not event.ran else ""
        self._print("  " + "  ".join(filter(None, [f"{event.backend}: {best}", done + nothing, _failures(event.counts)])))

    def _facts(self) -> list[str]:
        study = self._study
        if study is None:
            return []
        done = study.already + self._ran
        best = f"best {time_text(self._best_us)}" if self._best_us is not None else ""
        waiting = self._queue.building or self._queue.built
        queue = f"building {self._queue.building}, built {self._queue.built}" if waiting else ""
        left_s = self._left_s(study)
        left = f"{span_text(left_s)} left" if left_s is not None else ""
        return [f"{study.backend} {done}/{study.trials}", best, _failures(self._counts), queue, left]

    def _left_s(self, study: StudyStarted) -> float | None:
        spent = time.monotonic() - self._started_s
        left = [study.budget_s - spent] if study.budget_s is not None else []
        if self._ran:
            left.append(spent / self._ran * (study.trials - study.already - self._ran))
        return min(left, default=None)

    def _render(self) -> Table | str:
        row = Table.grid(padding=(0, 2))
        if self._round is not None:
            done, rounds = self._round.round, self._round.rounds
            row.add_row("comparing", ProgressBar(total=rounds, completed=done, width=24), f"round {done}/{rounds}")
        elif self._study is not None:
            bar = ProgressBar(total=max(self._study.trials, 1), completed=self._study.already + self._ran, width=24)
            name, *facts = self._facts()
            row.add_row(name, bar, *filter(None, facts))
        else:
            return ""
        return row


def _failures(counts: Mapping[str, int]) -> str:
    found = [f"{count} {status}" for status, count in sorted(counts.items()) if status != Status.OK and count]
    return ", ".join(found)

"""The playoff: the best few configurations and the baselines, interleaved in one fresh process.

Medians of single trials were taken minutes apart, at other clocks and temperatures. Here every contender runs in every
round, in an order that rotates, so that a ratio is taken between neighbours in time.
Source of the practice: order effects of 1-8% where arms are not rotated (TileOPs, H200); ../measure/stats.py for the intervals.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from statistics import fmean
from statistics import median

from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Environment
from kerneldyno.core import Error
from kerneldyno.core import Status
from kerneldyno.core import Workload
from kerneldyno.measure.bench import Contender
from kerneldyno.measure.bench import Round
from kerneldyno.measure.process import Failure
from kerneldyno.measure.session import Session
from kerneldyno.measure.stats import median_interval
from kerneldyno.measure.stats import ratio_interval
from kerneldyno.measure.status import status_of
from kerneldyno.registry import Ref
from kerneldyno.store.records import PlayoffEntry
from kerneldyno.tuner.events import Listener
from kerneldyno.tuner.events import PlayoffRound
from kerneldyno.tuner.interrupt import Interrupt


ROUNDS = 15
"""Rounds of a playoff: with 15 pairs the 95% interval of a median ratio spans about the middle half of them."""

ENTER_TIMEOUT_S = 300.0
"""A baseline may compile when it enters (torch.compile with max-autotune took about a minute for a GEMM)."""


@dataclass(frozen=True, slots=True)
class Finalist:
    """A configuration that won its place by its trial.

    Attributes:
        backend: Its backend.
        config: The configuration.
        artifact: Key of its artifact.
        kernel: Where its kernel is.
        median_us: The trial's median.
        trial_id: The trial's row.
    """

    backend: str
    config: Config
    artifact: str
    kernel: Ref
    median_us: float
    trial_id: int


@dataclass
class _Runner:
    contender: Contender
    role: str
    finalist: Finalist | None
    error: Error | None = None
    failure: Failure | None = None
    verified: bool = False
    rounds: list[Round] = field(default_factory=list)

    @property
    def round_medians_us(self) -> list[float]:
        return [median(found.samples_us) for found in self.rounds]


class Playoff:
    """One interleaved comparison on one workload.

    Args:
        session: Measures; a fresh process is started.
        problem: Where the problem is.
        workload: The workload.
        finalists: Configurations that take part, in any order.
        listener: Hears of each round.
        interrupt: Says when to stop.
        rounds: Number of rounds.
    """

    def __init__(
        self,
        session: Session,
        problem: Ref,
        workload: Workload,
        finalists: Sequence[Finalist],
        listener: Listener,
        interrupt: Interrupt,
        rounds: int = ROUNDS,
    ) -> None:
        self.session = session
        self.problem = problem
        self.workload = workload
        self.finalists = finalists
        self.listener = listener
        self.interrupt = interrupt
        self.rounds = rounds
        self._in: list[_Runner] = []
        self._out: list[_Runner] = []

    def run(self) -> tuple[PlayoffEntry, ...]:
        """Hold it; the entries come fastest first, those that failed last. Empty where it was interrupted."""
        self.session.prepare(self.problem, self.workload, again=True)
        reply = self.session.call("baselines", timeout_s=ENTER_TIMEOUT_S)
        roles: Mapping[str, str] = reply.value or {}
        runners = [_Runner(Contender(name), role, None) for name, role in roles.items()]
        for finalist in self.finalists:
            name = f"{finalist.backend}#{finalist.trial_id}"
            runners.append(_Runner(Contender(name, finalist.kernel, finalist.artifact), "kernel", finalist))
        for runner in runners:
            self._enter(runner)
        for round_number in range(self.rounds):
            if self.interrupt.asked:
                return ()
            self._round(round_number)
            self.listener(PlayoffRound(round_number + 1, self.rounds))
        for runner in list(self._in):
            self._recheck(runner)
        return self._entries()

    def _enter(self, runner: _Runner) -> bool:
        reply = self.session.call("enter", runner.contender, timeout_s=ENTER_TIMEOUT_S)
        if reply.failure is None:
            runner.error = reply.value
            self._in.append(runner)
            return True
        self._drop(runner, reply.failure)
        return False

    def _drop(self, runner: _Runner, failure: Failure) -> None:
        """Take a contender out; where its failure cost the process, the others enter a new one."""
        runner.failure = failure
        self._out.append(runner)
        others = [other for other in self._in if other is not runner]
        self._in = others
        if not self.session.worker.alive:
            self._in = []
            self.session.prepare(self.problem, self.workload)
            for other in others:
                self._enter(other)

    def _round(self, number: int) -> None:
        count = len(self._in)
        order = [self._in[(position + number) % count] for position in range(count)]
        for runner in order:
            if runner not in self._in:
                continue
            reply = self.session.call("sample", runner.contender.name)
            if reply.failure is None:
                runner.rounds.append(reply.value)
            else:
                self._drop(runner, reply.failure)

    def _recheck(self, runner: _Runner) -> None:
        if runner not in self._in or runner.role == "roof":
            return
        reply = self.session.call("recheck", runner.contender.name, self.workload.seed + 1)
        if reply.failure is None:
            runner.verified = True
        else:
            self._drop(runner, reply.failure)

    def _entries(self) -> tuple[PlayoffEntry, ...]:
        # the pairs of a ratio are rounds that both ran: a contender that lost a round to a restart would shift them
        ran = [runner for runner in self._in if len(runner.rounds) == self.rounds]
        library = next((runner for runner in ran if runner.role == "library"), None)
        racing = [runner for runner in ran if runner.role != "roof"]
        first = min(racing, key=lambda runner: median(runner.round_medians_us), default=None)
        entries = [self._entry(runner, library, first) for runner in ran]
        entries.sort(key=lambda entry: entry.median_us or 0.0)
        return (*entries, *(self._failed(runner) for runner in self._out))

    def _entry(self, runner: _Runner, library: _Runner | None, first: _Runner | None) -> PlayoffEntry:
        medians = runner.round_medians_us
        middle, low, high = median_interval(medians)
        clocks = [found.conditions.sm_clock_mhz for found in runner.rounds if found.conditions.sm_clock_mhz is not None]
        powers = [found.conditions.power_w for found in runner.rounds if found.conditions.power_w is not None]
        ratio = ratio_interval(library.round_medians_us, medians) if library is not None else (None, None, None)
        tied = runner.role != "roof" and first is not None and ratio_interval(first.round_medians_us, medians)[2] >= 1.0
        return replace(
            self._bare(runner),
            round_medians_us=tuple(round(value, 3) for value in medians),
            median_us=middle,
            low_us=low,
            high_us=high,
            ratio=ratio[0],
            ratio_low=ratio[1],
            ratio_high=ratio[2],
            tied_first=tied,
            verified=runner.verified,
            sm_clock_mhz=fmean(clocks) if clocks else None,
            power_w=fmean(powers) if powers else None,
        )

    def _failed(self, runner: _Runner) -> PlayoffEntry:
        assert runner.failure is not None
        wrong = runner.failure.text.startswith("ValueError")  # how `enter` and `recheck` say that an output was wrong
        status = Status.WRONG_RESULT if wrong else status_of(runner.failure, running=True)
        return replace(self._bare(runner), status=status, message=runner.failure.text)

    @staticmethod
    def _bare(runner: _Runner) -> PlayoffEntry:
        finalist = runner.finalist
        return PlayoffEntry(
            name=finalist.backend if finalist else runner.contender.name,
            role=runner.role,
            backend=finalist.backend if finalist else None,
            trial_id=finalist.trial_id if finalist else None,
            config=finalist.config if finalist else None,
            error_relative=runner.error.relative if runner.error else None,
            status=Status.OK,
        )


def environment_of(device: Device, studies: Sequence[Environment]) -> Environment:
    """The union of the environments whose configurations meet: each backend's compiler beside the common ones."""
    versions: dict[str, str] = {"driver": device.driver}
    for environment in studies:
        versions |= environment.versions
    return Environment(versions)

"""The playoff: the best few configurations and the baselines, interleaved in one fresh process.

Medians of single trials were taken minutes apart, at other clocks and temperatures. Here every contender launches once a turn,
in an order drawn anew for each turn, so that all run at the same clock and none always behind the same neighbour
(`measure.bench.BenchServer.race` says what bursts in rotating order did to the ratios); `measure.stats` gives the intervals.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from statistics import fmean
from statistics import median

from kerneldyno.core import SOLVING_ROLES
from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Environment
from kerneldyno.core import Error
from kerneldyno.core import Status
from kerneldyno.core import Workload
from kerneldyno.measure.bench import Contender
from kerneldyno.measure.bench import Entered
from kerneldyno.measure.bench import Round
from kerneldyno.measure.process import Failure
from kerneldyno.measure.session import Session
from kerneldyno.measure.stats import median_interval
from kerneldyno.measure.stats import ratio_interval
from kerneldyno.measure.status import status_of
from kerneldyno.measure.timing import Conditions
from kerneldyno.registry import Ref
from kerneldyno.store.records import PlayoffEntry
from kerneldyno.tuner.events import Listener
from kerneldyno.tuner.events import Notice
from kerneldyno.tuner.events import PlayoffRound
from kerneldyno.tuner.interrupt import Interrupt


ROUNDS = 15
"""Rounds of a playoff: with 15 pairs the 95% interval of a median ratio spans about the middle half of them."""

ENTER_TIMEOUT_S = 300.0
"""A baseline may compile when it enters (torch.compile with max-autotune took about a minute for a GEMM)."""

RACE_TIMEOUT_S = 120.0
RACE_ATTEMPTS = 3


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
    layout_us: float | None = None
    failure: Failure | None = None
    message: str = ""
    verified: bool = False
    round_medians_us: list[float] = field(default_factory=list)


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
        self._conditions: list[Conditions] = []

    def run(self) -> tuple[PlayoffEntry, ...]:
        """Hold it; the entries come fastest first, those that failed last. Empty where it was interrupted or nobody could race."""
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
            if not self._in or not self._round(round_number):
                self.listener(Notice(f"{self.workload.key}: no comparison; the contenders failed when they raced"))
                return ()
            self.listener(PlayoffRound(round_number + 1, self.rounds))
        for runner in list(self._in):
            self._recheck(runner)
        return self._entries()

    def _enter(self, runner: _Runner) -> bool:
        reply = self.session.call("enter", runner.contender, timeout_s=ENTER_TIMEOUT_S)
        if reply.failure is None:
            entered: Entered = reply.value
            runner.error = entered.error
            runner.layout_us = entered.layout_us
            self._in.append(runner)
            return True
        self._drop(runner, reply.failure)
        return False

    def _drop(self, runner: _Runner, failure: Failure) -> None:
        """Take a contender out; where its failure cost the process, the others enter a new one."""
        runner.failure = failure
        self._out.append(runner)
        self._in = [other for other in self._in if other is not runner]
        if not self.session.worker.alive:
            self._restart()

    def _restart(self) -> None:
        others = self._in
        self._in = []
        self.session.prepare(self.problem, self.workload)
        for other in others:
            self._enter(other)

    def _round(self, number: int) -> bool:
        """Race once. Where that fails, each races alone, the one that fails then is out, and all race again."""
        for _ in range(RACE_ATTEMPTS):
            reply = self.session.call("race", [runner.contender.name for runner in self._in], number, timeout_s=RACE_TIMEOUT_S)
            if reply.failure is None:
                found: Round = reply.value
                self._conditions.append(found.conditions)
                for runner in self._in:
                    runner.round_medians_us.append(median(found.samples_us[runner.contender.name]))
                return True
            self._restart()
            for runner in list(self._in):
                alone = self.session.call("race", [runner.contender.name], number, timeout_s=RACE_TIMEOUT_S)
                if alone.failure is not None:
                    self._drop(runner, alone.failure)
            if not self._in:
                break
        return False

    def _recheck(self, runner: _Runner) -> None:
        if runner not in self._in or runner.role not in SOLVING_ROLES:
            return
        reply = self.session.call("recheck", runner.contender.name, self.workload.seed + 1)
        if reply.failure is None:
            runner.verified = True
        elif status_of(reply.failure, running=True) is Status.OUT_OF_RESOURCES:
            # no memory for fresh inputs: it raced, and its times stand, marked as not checked again
            runner.message = reply.failure.text
        else:
            self._drop(runner, reply.failure)

    def _entries(self) -> tuple[PlayoffEntry, ...]:
        # the pairs of a ratio are rounds that both ran: a contender that lost a round to a restart would shift them
        ran = [runner for runner in self._in if len(runner.round_medians_us) == self.rounds]
        library = next((runner for runner in ran if runner.role == "library"), None)
        racing = [runner for runner in ran if runner.role in SOLVING_ROLES]
        first = min(racing, key=lambda runner: median(runner.round_medians_us), default=None)
        entries = [self._entry(runner, library, first) for runner in ran]
        entries.sort(key=lambda entry: entry.median_us or 0.0)
        return (*entries, *(self._failed(runner) for runner in self._out))

    def _entry(self, runner: _Runner, library: _Runner | None, first: _Runner | None) -> PlayoffEntry:
        medians = runner.round_medians_us
        middle, low, high = median_interval(medians)
        clocks = [found.sm_clock_mhz for found in self._conditions if found.sm_clock_mhz is not None]
        powers = [found.power_w for found in self._conditions if found.power_w is not None]
        against = library if runner.role != "step" else None
        ratio = ratio_interval(against.round_medians_us, medians) if against is not None else (None, None, None)
        tied = runner.role in SOLVING_ROLES and first is not None and ratio_interval(first.round_medians_us, medians)[2] >= 1.0
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
            layout_us=runner.layout_us,
            message=runner.message,
            status=Status.OK,
        )


def environment_of(device: Device, studies: Sequence[Environment]) -> Environment:
    """The union of the environments whose configurations meet: each backend's compiler beside the common ones."""
    versions: dict[str, str] = {"driver": device.driver}
    for environment in studies:
        versions |= environment.versions
    return Environment(versions)

"""One study: a backend's kernel searched on one workload and device, compilation overlapping measurement."""

import time
from collections import Counter
from collections import deque
from dataclasses import dataclass
from dataclasses import replace
from multiprocessing.connection import wait

from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Environment
from kerneldyno.core import Outcome
from kerneldyno.core import Space
from kerneldyno.core import Status
from kerneldyno.core import Workload
from kerneldyno.core import digest
from kerneldyno.measure.bench import Contender
from kerneldyno.measure.cache import artifact_key
from kerneldyno.measure.compile import BuildRequest
from kerneldyno.measure.compile import Built
from kerneldyno.measure.compile import CompilePool
from kerneldyno.measure.session import Session
from kerneldyno.registry import Ref
from kerneldyno.store.write import Writer
from kerneldyno.tuner.events import Listener
from kerneldyno.tuner.events import Queue
from kerneldyno.tuner.events import StudyFinished
from kerneldyno.tuner.events import StudyStarted
from kerneldyno.tuner.events import TrialFinished
from kerneldyno.tuner.interrupt import Interrupt
from kerneldyno.tuner.sampler import Asker


LOOKAHEAD = {"cuda": 16, "cpu": 8}
"""Configurations under way at once. A constant, not the number of cores, so that a seed gives the same sequence on every
machine: configuration i is asked for when exactly the first i - LOOKAHEAD results are known, in order. 16 keeps 16 compile
processes busy; on a CPU, which compiles and measures in turn, less keeps the sampler better informed."""

_WAIT_S = 0.25
"""Longest sleep between looks at the clock and at Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Study:
    """What is searched, and the identity under which its results are kept.

    Attributes:
        backend: The backend's name.
        workload: The workload.
        problem: Where the problem is.
        kernel: Where the kernel is.
        kernel_digest: Identity of the kernel's source.
        environment: Versions that could change a result.
        space: The kernel's space for this workload and device.
        study_id: Its row in the database.
    """

    backend: str
    workload: Workload
    problem: Ref
    kernel: Ref
    kernel_digest: str
    environment: Environment
    space: Space
    study_id: int


class Search:
    """Runs one study until its trials or its budget are used up.

    The search is a function of the seed, the sampler, the space and the outcomes; the database only remembers outcomes.
    So a command that was killed and is repeated asks for the same configurations in the same order, and measures those
    that it finds no outcome of.

    Args:
        study: What to search.
        sampler: The sampler's name.
        seed: Its seed.
        trials: Configurations wanted; None for all.
        budget_s: Seconds of search, those of earlier runs counted; None for no limit.
        pool: Compiles.
        session: Measures.
        writer: Keeps.
        listener: Hears.
        interrupt: Says when to stop.
    """

    def __init__(
        self,
        study: Study,
        sampler: str,
        seed: int,
        trials: int | None,
        budget_s: float | None,
        pool: CompilePool,
        session: Session,
        writer: Writer,
        listener: Listener,
        interrupt: Interrupt,
    ) -> None:
        self.study = study
        self.trials = min(trials or study.space.size, study.space.size)
        self.budget_s = budget_s
        self.pool = pool
        self.session = session
        self.writer = writer
        self.listener = listener
        self.interrupt = interrupt
        self._asker = Asker(study.space, sampler, seed)
        finished = writer.finished(study.study_id)
        self._memo = dict(writer.memo(study.study_id))
        self._spent_s = max((trial.elapsed_s for trial in finished), default=0.0)
        self._began = time.monotonic()
        self._asked: list[Config] = []
        self._told = 0
        self._outcomes: dict[int, Outcome] = {}
        self._building: dict[str, int] = {}
        self._ready: deque[tuple[int, str, Built]] = deque()
        self._measuring: tuple[int, str, Built] | None = None
        # what the database holds counts from the start, whether or not there is time left to ask for it again
        self._counts = Counter(outcome.status.value for outcome in self._memo.values())
        self._best_us = min((outcome.median_us for outcome in self._memo.values() if outcome.median_us is not None), default=None)
        self._ran = 0
        self._queue = Queue(0, 0, 0)

    @property
    def _elapsed_s(self) -> float:
        return self._spent_s + time.monotonic() - self._began

    @property
    def _over(self) -> bool:
        return self.interrupt.asked or (self.budget_s is not None and self._elapsed_s >= self.budget_s)

    def run(self) -> StudyFinished:
        """Search; every finished configuration is in the database when this returns, however it returns."""
        already = min(len(self._memo), self.trials)
        self.listener(StudyStarted(self.study.backend, self.study.workload, self.study.space.size, self.trials, already, self.budget_s))
        try:
            while True:
                self._ask()
                self._collect_builds()
                self._measure()
                if len(self._outcomes) == self.trials or (self._over and self._measuring is None):
                    break
                self._wait()
        finally:
            self.pool.cancel()
        result = StudyFinished(
            self.study.backend, self.study.workload, self._ran, len(self._memo), self._best_us, dict(sorted(self._counts.items()))
        )
        self.listener(result)
        return result

    @property
    def _more(self) -> bool:
        return len(self._asked) < self.trials

    def _ask(self) -> None:
        """Ask and tell in the one order that a seed stands for, as far as results allow.

        Result t is told when exactly t + lookahead configurations were asked for, also where it was known before: a study
        that continues, whose first results come from the database at once, asks for what it asked for the first time.
        """
        lookahead = LOOKAHEAD[self.session.device.kind]
        while not self._over:
            if self._more and len(self._asked) - self._told < lookahead:
                config = self._asker.ask()
                assert config is not None  # trials is at most the size of the space
                number = len(self._asked)
                self._asked.append(config)
                known = self._memo.get(digest(config))
                if known is not None:
                    self._outcomes[number] = known
                else:
                    self._build(number, config)
            elif self._told in self._outcomes:
                self._asker.tell(self._asked[self._told], self._outcomes[self._told].median_us)
                self._told += 1
            else:
                break

    def _build(self, number: int, config: Config) -> None:
        study = self.study
        arch = self.session.device.arch
        key = artifact_key(study.workload, study.backend, study.kernel_digest, config, arch, study.environment)
        self._building[key] = number
        built = self.pool.submit(BuildRequest(key, study.kernel, study.workload, config, arch))
        if built is not None:
            self._built(key, built)

    def _built(self, key: str, built: Built) -> None:
        number = self._building.pop(key)
        if built.status is Status.OK:
            self._ready.append((number, key, built))
        else:
            self._finish(number, Outcome(built.status, message=built.message, build_s=built.build_s))

    def _collect_builds(self) -> None:
        # on a CPU the compilers would take the cores from the kernel that is being timed: they wait
        free = self.session.device.kind != "cpu" or not (self.session.busy or self._ready)
        for key, built in self.pool.poll(dispatch=free).items():
            self._built(key, built)

    def _measure(self) -> None:
        if self._measuring is not None:
            outcome = self.session.poll()
            if outcome is None:
                return
            number, key, built = self._measuring
            self._measuring = None
            self._finish(number, outcome, key, built)
        quiet = self.session.device.kind != "cpu" or not self.pool.running
        if self._ready and quiet and not self._over:
            self.session.prepare(self.study.problem, self.study.workload)
            self._measuring = self._ready.popleft()
            self.session.submit(Contender(self.study.backend, self.study.kernel, self._measuring[1]))

    def _finish(self, number: int, outcome: Outcome, key: str | None = None, built: Built | None = None) -> None:
        config = self._asked[number]
        if built is not None and built.artifact is not None:
            artifact: Artifact = built.artifact
            assert key is not None
            self.writer.record_artifact(key, artifact)
            outcome = replace(
                outcome,
                artifact=key,
                build_s=built.build_s,
                registers=artifact.registers,
                smem_bytes=artifact.smem_bytes,
                spill_bytes=artifact.spill_bytes,
            )
        # the writer takes another number where a run of this study with fewer results to learn from gave this one away
        self.writer.record(self.study.study_id, number, config, outcome, self._elapsed_s)
        self._ran += 1
        self._outcomes[number] = outcome
        self._counts[outcome.status.value] += 1
        if outcome.median_us is not None:
            self._best_us = min(outcome.median_us, self._best_us or outcome.median_us)
        self.listener(TrialFinished(self.study.backend, number, config, outcome, self._best_us))

    def _wait(self) -> None:
        queue = Queue(self.pool.building, len(self._ready), int(self._measuring is not None))
        if queue != self._queue:
            self._queue = queue
            self.listener(queue)
        connections = [*self.pool.connections]
        if self.session.connection is not None:
            connections.append(self.session.connection)
        wait(connections, timeout=_WAIT_S)

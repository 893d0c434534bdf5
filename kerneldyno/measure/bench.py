"""The server inside the one process that owns a device: loads, verifies and times what others built."""

import random
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from statistics import median

from kerneldyno.core import SOLVING_ROLES
from kerneldyno.core import Baseline
from kerneldyno.core import Device
from kerneldyno.core import Error
from kerneldyno.core import ErrorBudget
from kerneldyno.core import Launch
from kerneldyno.core import Outcome
from kerneldyno.core import Problem
from kerneldyno.core import Status
from kerneldyno.core import Tensors
from kerneldyno.core import Workload
from kerneldyno.measure.cache import ArtifactCache
from kerneldyno.measure.stats import median_interval
from kerneldyno.measure.timing import Conditions
from kerneldyno.measure.timing import Timer
from kerneldyno.measure.timing import timer_for
from kerneldyno.measure.verify import Guarded
from kerneldyno.measure.verify import Verdict
from kerneldyno.measure.verify import fingerprint
from kerneldyno.measure.verify import guard
from kerneldyno.measure.verify import judge
from kerneldyno.registry import Ref
from kerneldyno.registry import resolve


WARMUP_LAUNCHES = 3
ESTIMATE_LAUNCHES = 3
LAYOUT_LAUNCHES = 10
SAMPLING_S = {"cuda": 0.1, "cpu": 0.4}
"""Seconds of sampling that one configuration gets; Triton's `do_bench` gives 100 ms too. A CPU is noisier and slower."""
MIN_SAMPLES = {"cuda": 10, "cpu": 7}
MAX_SAMPLES = {"cuda": 100, "cpu": 60}
ROUND_S = {"cuda": 0.1, "cpu": 0.3}
"""Seconds of one round of the playoff, all contenders and the flushes of the cache (8 ms each on a CPU) together."""
MIN_TURNS = 3
MAX_TURNS = 20


@dataclass(frozen=True)
class Subject:
    """A workload made real on the device: guarded inputs and outputs, the right answer, the error allowed."""

    workload: Workload
    inputs: Guarded
    before: Mapping[str, int]
    outputs: Guarded
    reference: Tensors
    budget: ErrorBudget


@dataclass(frozen=True, slots=True)
class Contender:
    """What enters a playoff.

    Attributes:
        name: The name under which it is sampled.
        kernel: Where its kernel is; None for a baseline of the problem, which `name` then names.
        artifact: Key of its artifact; empty for a baseline.
    """

    name: str
    kernel: Ref | None = None
    artifact: str = ""


@dataclass(frozen=True, slots=True)
class Entered:
    """What was learned of a contender as it entered.

    Attributes:
        error: Its distance from the reference; None where it does not solve the problem (a roof, a step).
        layout_us: Median time of its `layout`, in microseconds; None where it has none.
    """

    error: Error | None
    layout_us: float | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the playoff.

    Attributes:
        samples_us: Every launch by contender.
        conditions: What the device did; the same for all, since they ran in turns.
    """

    samples_us: Mapping[str, tuple[float, ...]]
    conditions: Conditions = field(default_factory=Conditions)


class BenchServer:
    """Serves one device. Every method may raise."""

    def __init__(self) -> None:
        self.cache = ArtifactCache()
        self.device: Device | None = None
        self.timer: Timer | None = None
        self.subject: Subject | None = None
        self.problem: Problem | None = None
        self.entries: dict[str, Launch] = {}
        self.turn_s: dict[str, float] = {}

    def open(self, device: Device) -> None:
        """Take the device: make its context and the timer's buffers."""
        self.device = device
        self.timer = timer_for(device)

    def healthy(self) -> bool:
        """Say whether the device still answers: an illegal access spoils the context for good, a refused launch does not."""
        try:
            if self.timer is not None:
                self.timer.synchronize()
        except Exception:  # torch raises RuntimeError or a subclass; whatever it is, the context is of no use
            return False
        return True

    def prepare(self, problem: Ref, workload: Workload) -> ErrorBudget:
        """Make the workload's inputs, reference and budget; what was there before is freed."""
        self.entries.clear()
        self.turn_s.clear()
        self.subject = None
        self.problem = resolve(problem)
        self.subject = self._make(workload)
        return self.subject.budget

    def _make(self, workload: Workload) -> Subject:
        assert self.problem is not None
        assert self.device is not None
        where = "cpu" if self.device.kind == "cpu" else "cuda:0"
        inputs = guard(self.problem.inputs(workload, where))
        outputs = guard(self.problem.outputs(workload, where))
        reference = self.problem.reference(workload, inputs.tensors)
        budget = self.problem.tolerance(workload, inputs.tensors, reference)
        return Subject(workload, inputs, fingerprint(inputs.tensors), outputs, reference, budget)

    def _check(self, subject: Subject, launch: Launch) -> Verdict:
        """Run a launch that is bound to the subject's tensors, on poisoned outputs, and judge them."""
        assert self.timer is not None
        subject.outputs.poison()
        self.timer.synchronize()
        launch.run()
        self.timer.synchronize()
        collect: Callable[[], None] | None = getattr(launch, "collect", None)
        if collect is not None:  # a baseline that cannot write into the caller's tensors
            collect()
        verdict = judge(subject.inputs, subject.before, subject.outputs, subject.reference, subject.budget)
        if verdict.spoilt:
            self.subject = self._make(subject.workload)
        return verdict

    def _load(self, contender: Contender) -> Launch:
        assert self.problem is not None
        assert self.subject is not None
        if contender.kernel is None:
            return self._baselines()[contender.name].launch
        artifact = self.cache.get(contender.artifact)
        if artifact is None:
            raise FileNotFoundError(f"artifact {contender.artifact} is no longer in the cache")
        return resolve(contender.kernel).load(artifact, self.subject.workload)

    def measure(self, contender: Contender) -> Outcome:
        """Load a contender, verify it twice on poisoned outputs, then time it."""
        began = time.perf_counter()
        outcome = self._measure(contender)
        return replace(outcome, measure_s=time.perf_counter() - began)

    def _measure(self, contender: Contender) -> Outcome:
        assert self.subject is not None
        assert self.device is not None
        assert self.timer is not None
        launch = self._load(contender)
        launch.prepare(self.subject.inputs.tensors, self.subject.outputs.tensors)
        first = self._check(self.subject, launch)
        if not first.right:
            return Outcome(Status.WRONG_RESULT, error=first.error, message=first.message)
        second = self._check(self.subject, launch)
        if not second.right:
            return Outcome(Status.NONDETERMINISTIC, error=second.error, message=f"right at first, then {second.message}")
        self.timer.sample([launch.run] * WARMUP_LAUNCHES)
        kind = self.device.kind
        began = time.perf_counter()
        estimate = self.timer.sample([launch.run] * ESTIMATE_LAUNCHES)
        each_s = (time.perf_counter() - began) / ESTIMATE_LAUNCHES  # with its flush
        count = min(max(int(SAMPLING_S[kind] / each_s), MIN_SAMPLES[kind]), MAX_SAMPLES[kind])
        samples = self.timer.sample([launch.run] * count) if count > ESTIMATE_LAUNCHES else estimate
        conditions = self.timer.conditions()
        middle, low, high = median_interval(samples)
        return Outcome(
            Status.OK,
            tuple(round(sample, 3) for sample in samples),
            median_us=middle,
            low_us=low,
            high_us=high,
            error=first.error,
            sm_clock_mhz=conditions.sm_clock_mhz,
            power_w=conditions.power_w,
        )

    def baselines(self) -> Mapping[str, str]:
        """Name the problem's baselines on this device, each with its role, the library first."""
        return {name: baseline.role for name, baseline in self._baselines().items()}

    def _baselines(self) -> Mapping[str, Baseline]:
        assert self.problem is not None
        assert self.subject is not None
        assert self.device is not None
        return self.problem.baselines(self.subject.workload, self.device)

    def enter(self, contender: Contender) -> Entered:
        """Load and verify a contender of the playoff, time its layout where it has one, and keep it loaded.

        Raises:
            ValueError: Its outputs are wrong.
        """
        assert self.subject is not None
        assert self.device is not None
        assert self.timer is not None
        launch = self._load(contender)
        launch.prepare(self.subject.inputs.tensors, self.subject.outputs.tensors)
        error: Error | None = None
        if contender.kernel is not None or self._baselines()[contender.name].role in SOLVING_ROLES:
            verdict = self._check(self.subject, launch)
            if not verdict.right:
                raise ValueError(verdict.message)
            error = verdict.error
        began = time.perf_counter()
        self.timer.sample([launch.run] * WARMUP_LAUNCHES)
        self.turn_s[contender.name] = (time.perf_counter() - began) / WARMUP_LAUNCHES
        self.entries[contender.name] = launch
        layout: Callable[[], None] | None = getattr(launch, "layout", None)
        return Entered(error, None if layout is None else median(self.timer.sample([layout] * LAYOUT_LAUNCHES)))

    def race(self, names: Sequence[str], seed: int) -> Round:
        """Time one round: every contender launches once a turn, in an order that is drawn anew for each turn.

        Single launches and not bursts take turns: at its power cap a GPU sets its clock over some ten milliseconds by what ran
        before. In bursts of 20 ms in rotating order cuBLAS, always behind a kernel of half its power, ran at 1769 MHz and
        another GEMM, always behind one of its own kind, at 1473 MHz (8192^3, H200): a ratio of 0.89 that was the order's doing.

        Args:
            names: The contenders.
            seed: Seed of the orders.
        """
        assert self.device is not None
        assert self.timer is not None
        turns = min(max(int(ROUND_S[self.device.kind] / sum(self.turn_s[name] for name in names)), MIN_TURNS), MAX_TURNS)
        rng = random.Random(seed)
        order = [name for _ in range(turns) for name in rng.sample(names, len(names))]
        taken: dict[str, list[float]] = {name: [] for name in names}
        for name, sample_us in zip(order, self.timer.sample([self.entries[name].run for name in order]), strict=True):
            taken[name].append(sample_us)
        return Round({name: tuple(samples) for name, samples in taken.items()}, self.timer.conditions())

    def recheck(self, name: str, seed: int) -> Error:
        """Verify a contender once more, on inputs it has not seen. Raises ValueError where it is wrong."""
        assert self.subject is not None
        launch = self.entries[name]
        if self.subject.workload.seed != seed:
            workload = replace(self.subject.workload, seed=seed)
            self.subject = self._make(workload)
        launch.prepare(self.subject.inputs.tensors, self.subject.outputs.tensors)
        verdict = self._check(self.subject, launch)
        if not verdict.right:
            raise ValueError(verdict.message)
        return verdict.error

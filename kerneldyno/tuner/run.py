"""The verb run: every study of a plan, then a playoff for each workload."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from contextlib import closing
from dataclasses import dataclass

from kerneldyno.core import Device
from kerneldyno.core import Environment
from kerneldyno.core import Workload
from kerneldyno.errors import KerneldynoError
from kerneldyno.errors import Unavailable
from kerneldyno.errors import Unsupported
from kerneldyno.measure.compile import BuildRequest
from kerneldyno.measure.compile import CompilePool
from kerneldyno.measure.device import cpu
from kerneldyno.measure.device import detect
from kerneldyno.measure.device import environment
from kerneldyno.measure.session import Session
from kerneldyno.plan import Job
from kerneldyno.plan import Plan
from kerneldyno.registry import Registry
from kerneldyno.store.records import PlayoffRecord
from kerneldyno.store.write import Writer
from kerneldyno.tuner.events import Listener
from kerneldyno.tuner.events import Notice
from kerneldyno.tuner.events import PlayoffFinished
from kerneldyno.tuner.events import StudyFinished
from kerneldyno.tuner.interrupt import Interrupt
from kerneldyno.tuner.playoff import ROUNDS
from kerneldyno.tuner.playoff import Finalist
from kerneldyno.tuner.playoff import Playoff
from kerneldyno.tuner.playoff import environment_of
from kerneldyno.tuner.sampler import check_sampler
from kerneldyno.tuner.search import Search
from kerneldyno.tuner.search import Study


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to.

    Attributes:
        studies: Each study, in the order in which it ran.
        interrupted: True where Ctrl-C ended it early.
    """

    studies: tuple[StudyFinished, ...]
    interrupted: bool

    @property
    def passed(self) -> bool:
        """Whether at least one configuration is right."""
        return any(study.best_us is not None for study in self.studies)

    @property
    def measured(self) -> int:
        """Configurations measured now."""
        return sum(study.ran for study in self.studies)


def run(plan: Plan, registry: Registry, writer: Writer, listener: Listener) -> RunResult:
    """Search every job of a plan and compare what came of it.

    Args:
        plan: Every job has its backends named (`choose.choose`).
        registry: Where problems and kernels are.
        writer: The database.
        listener: Hears of everything as it happens.

    Raises:
        Unsupported: No backend that was asked for has a variant for any of the workloads.
        Unavailable: The device cannot be opened, or a workload does not fit on it.
        StoreError: The database cannot be written.
    """
    return _Run(plan, registry, writer, listener).run()


class _Run:
    def __init__(self, plan: Plan, registry: Registry, writer: Writer, listener: Listener) -> None:
        check_sampler(plan.options.sampler)
        self.plan = plan
        self.registry = registry
        self.writer = writer
        self.listener = listener
        self.began = time.monotonic()
        self.left = sum(len(job.backends) for job in plan.jobs)

    def run(self) -> RunResult:
        options = self.plan.options
        finished: list[StudyFinished] = []
        unsupported: list[Unsupported] = []
        with ExitStack() as stack:
            interrupt = stack.enter_context(Interrupt())
            pool = stack.enter_context(closing(CompilePool(options.workers, options.build_timeout_s)))
            sessions: dict[str, Session] = {}
            for job in self.plan.jobs:
                if job.device not in sessions:
                    sessions[job.device] = stack.enter_context(closing(Session(detect(job.device), options.run_timeout_s)))
                session = sessions[job.device]
                self._must_fit(job.workload, session.device)
                studies: list[Study] = []
                results: list[StudyFinished] = []
                for backend in job.backends:
                    if interrupt.asked:
                        break
                    try:
                        study = self._study(job, backend, session.device)
                    except Unsupported as error:
                        refusal = Unsupported(f"{str(error).rstrip('.')}. {self._able(job.workload, session.device)}")
                        unsupported.append(refusal)
                        self.listener(Notice(f"{backend} is left out for {job.workload.key}: {refusal}"))
                        continue
                    finally:
                        share_s = self._share_s()
                    search = Search(
                        study, options.sampler, options.seed, options.trials, share_s, pool, session, self.writer, self.listener, interrupt
                    )
                    results.append(search.run())
                    studies.append(study)
                finished += results
                if not interrupt.asked and any(result.best_us is not None for result in results):
                    self._playoff(job, studies, results, session, pool, interrupt)
            if unsupported and not finished and not interrupt.asked:
                raise unsupported[0]
            return RunResult(tuple(finished), interrupt.asked)

    def _share_s(self) -> float | None:
        """An even share of the budget that is left, for the study that begins now."""
        budget_s = self.plan.options.budget_s
        share_s = None if budget_s is None else max(budget_s - (time.monotonic() - self.began), 0.0) / self.left
        self.left -= 1
        return share_s

    def _must_fit(self, workload: Workload, device: Device) -> None:
        """Raise Unavailable where a workload's tensors are larger than the device's memory, before anything is compiled for it."""
        need = self.registry.load_problem(workload.problem).work(workload).bytes
        if device.memory_bytes and need > device.memory_bytes:
            raise Unavailable(
                f"{workload.problem} {workload.shape_text} in {workload.dtype} has {need / 2**30:.1f} GiB of inputs and outputs, and "
                f"{device.name} has {device.memory_bytes / 2**30:.1f} GiB of memory. Choose a smaller shape, or a device with more."
            )

    def _able(self, workload: Workload, device: Device) -> str:
        """Say which backends that are usable here have a variant for a workload."""
        able: list[str] = []
        for backend in self.registry.kernels(workload.problem):
            try:
                found = self.registry.load_backend(backend)
                place = device if found.device_kind == device.kind else cpu()
                if place.kind == found.device_kind and found.probe(place).usable:
                    self.registry.load_kernel(workload.problem, backend).space(workload, place)
                    able.append(backend if place.kind == device.kind else f"{backend} (on the CPU)")
            except KerneldynoError:
                continue  # it has no variant either, or cannot be loaded
        return f"Backends here that can: {', '.join(able)}." if able else "No backend here can."

    def _environment(self, backend: str, device: Device) -> Environment:
        return environment(device, dict(self.registry.load_backend(backend).probe(device).versions))

    def _study(self, job: Job, backend: str, device: Device) -> Study:
        workload = job.workload
        options = self.plan.options
        space = self.registry.load_kernel(workload.problem, backend).space(workload, device)
        if not space.size:
            reasons = "; ".join(constraint.reason for constraint in space.constraints)
            raise Unsupported(f"{backend} has no configuration for {workload.key} on {device.name} that keeps all of: {reasons}")
        kernel_digest = self.registry.kernel_digest(workload.problem, backend)
        found = self._environment(backend, device)
        record = self.writer.study(
            workload, device, found, backend, kernel_digest, options.sampler, options.seed, self.plan.command, fresh=options.fresh
        )
        return Study(
            backend,
            workload,
            self.registry.problem_ref(workload.problem),
            self.registry.kernel_ref(workload.problem, backend),
            kernel_digest,
            found,
            space,
            record.id,
        )

    def _finalists(self, study: Study, pool: CompilePool, arch: str) -> list[Finalist]:
        """The best few trials of a study; one whose artifact left the cache is built again."""
        found: list[Finalist] = []
        for trial in self.writer.best_trials(study.study_id, self.plan.options.top):
            if trial.artifact is None or trial.median_us is None:
                continue
            if pool.cache.get(trial.artifact) is None:
                pool.submit(BuildRequest(trial.artifact, study.kernel, study.workload, trial.config, arch))
            found.append(Finalist(study.backend, trial.config, trial.artifact, study.kernel, trial.median_us, trial.id))
        while pool.building:
            pool.poll()
            time.sleep(0.01)
        return found

    def _playoff(
        self,
        job: Job,
        studies: Sequence[Study],
        results: Sequence[StudyFinished],
        session: Session,
        pool: CompilePool,
        interrupt: Interrupt,
    ) -> None:
        finalists = [finalist for study in studies for finalist in self._finalists(study, pool, session.device.arch)]
        held = self.writer.playoff_trials(job.workload, session.device)
        if not any(result.ran for result in results) and {finalist.trial_id for finalist in finalists} <= held:
            self.listener(Notice(f"{job.workload.problem}: nothing was measured again, and the comparison in the database stands"))
            return
        playoff = Playoff(session, studies[0].problem, job.workload, finalists, self.listener, interrupt)
        entries = playoff.run()
        if not entries:
            return
        self.writer.record_playoff(
            PlayoffRecord(
                workload=job.workload,
                device=session.device,
                environment=environment_of(session.device, [study.environment for study in studies]),
                seed=self.plan.options.seed,
                rounds=ROUNDS,
                command=self.plan.command,
                conditions={"cache": "cold", "rounds": ROUNDS, "order": "drawn for each turn of single launches", "process": "fresh"},
                entries=entries,
            )
        )
        self.listener(PlayoffFinished(job.workload, entries))

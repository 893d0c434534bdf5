"""Which backends of a plan are usable on this machine: asked for and missing is an error, merely possible and missing a line."""

from collections.abc import Callable
from dataclasses import replace

from kerneldyno.core import Availability
from kerneldyno.core import Device
from kerneldyno.errors import KerneldynoError
from kerneldyno.errors import Unavailable
from kerneldyno.plan import Job
from kerneldyno.plan import Plan
from kerneldyno.registry import Registry


def availability(backend: str, registry: Registry, device: Device | None) -> Availability:
    """Say whether a backend is usable on a device.

    Args:
        backend: Its name.
        registry: Where to find it.
        device: The device; None: there is none of the backend's kind here.

    Returns:
        Not usable, with the reason, also where the backend cannot be imported or runs on another kind of device.
    """
    try:
        found = registry.load_backend(backend)
        if device is not None and device.kind != found.device_kind:
            choice = "device=cpu" if found.device_kind == "cpu" else "device=cuda:0 on a machine with an NVIDIA GPU"
            return Availability(False, f"it runs on {found.device_kind}, not on {device.kind}", f"choose {choice}, or another backend")
        return found.probe(device)
    except KerneldynoError as error:
        return Availability(False, str(error), "see `tune list`")
    except Exception as error:  # a plugin's probe may raise anything; it is then simply not usable
        return Availability(False, f"its probe failed: {type(error).__name__}: {error}", "report it to the backend's author")


def choose(plan: Plan, registry: Registry, detect: Callable[[str | None], Device]) -> tuple[Plan, tuple[str, ...]]:
    """Fill in each job's backends with those that are usable.

    Args:
        plan: From `grammar.parse`.
        registry: From `grammar.parse`.
        detect: `measure.device.detect`.

    Returns:
        The plan with every job's backends named, and one line for each backend that was left out.

    Raises:
        errors.Unavailable: Where a device or a backend that was asked for, or every backend, is not usable here: why, and what to do.
    """
    jobs: list[Job] = []
    notices: dict[str, None] = {}
    known: dict[tuple[str, str], Availability] = {}
    devices: dict[str, Device] = {}
    for job in plan.jobs:
        if job.device not in devices:
            devices[job.device] = _detect(job, detect)
        usable: list[str] = []
        lines: list[str] = []
        candidates = job.backends or registry.kernels(job.workload.problem)
        for backend in candidates:
            if not job.backends and _runs_elsewhere(backend, registry, devices[job.device]):
                continue  # a CPU's backend beside a GPU is no news
            if (backend, job.device) not in known:
                known[backend, job.device] = availability(backend, registry, devices[job.device])
            found = known[backend, job.device]
            if found.usable:
                usable.append(backend)
            elif job.backends:
                raise Unavailable(f"backend '{backend}' is not usable on {job.device}: {found.reason}. {_sentence(found.remedy)}")
            else:
                lines.append(f"{backend} is left out: {found.reason}. {_sentence(found.remedy)}".strip())
        if not usable:
            have = f"Kernels are in: {', '.join(candidates) or 'none'}."
            raise Unavailable(" ".join((f"no backend for problem '{job.workload.problem}' is usable on {job.device}.", have, *lines)))
        notices |= dict.fromkeys(lines)
        jobs.append(replace(job, backends=tuple(usable)))
    return replace(plan, jobs=tuple(jobs)), tuple(notices)


def _runs_elsewhere(backend: str, registry: Registry, device: Device) -> bool:
    try:
        return registry.load_backend(backend).device_kind != device.kind
    except KerneldynoError:
        return False  # it cannot be imported, which is news


def _detect(job: Job, detect: Callable[[str | None], Device]) -> Device:
    try:
        return detect(job.device)
    except Unavailable as error:
        names = ", ".join(f"'{backend}'" for backend in job.backends)
        raise Unavailable(f"backend {names} cannot run here: {error}" if names else str(error)) from None


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if not text or text.endswith(".") else ".")

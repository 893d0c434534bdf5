"""Builds and runs configurations for tests, in the same worker processes that the tuner uses."""

import atexit
import os
import random
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import wait
from types import ModuleType

from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Error
from kerneldyno.core import Space
from kerneldyno.core import Value
from kerneldyno.core import Workload
from kerneldyno.core import digest
from kerneldyno.measure.bench import Contender
from kerneldyno.measure.compile import BuildRequest
from kerneldyno.measure.compile import Built
from kerneldyno.measure.compile import CompilePool
from kerneldyno.measure.device import cpu
from kerneldyno.measure.device import gpus
from kerneldyno.measure.session import Session
from kerneldyno.registry import Ref


BUILD_TIMEOUT_S = 180.0
RUN_TIMEOUT_S = 60.0
"""A test's kernel that runs longer hangs: it is killed, with its process, and the next case gets a fresh one."""
ENTER_TIMEOUT_S = 300.0
"""A library may compile when it enters."""


def ref_of(thing: ModuleType | Ref) -> Ref:
    """Return where a kernel or a problem is, so that a worker process finds it."""
    return thing if isinstance(thing, Ref) else Ref(module=thing.__name__)


def here(device: Device) -> Device | None:
    """Return the machine's own device that can run what is built for `device`; None where there is none."""
    if device.kind == "cpu":
        return cpu()
    return next((gpu for gpu in gpus() if gpu.arch == device.arch), None)


def draw(space: Space, rng: random.Random, attempts: int = 2000) -> Config:
    """Draw a valid configuration without enumerating the space: knob by knob, until the constraints hold.

    Args:
        space: The space; spaces of 100,000 take a second to enumerate, which a test of many shapes cannot pay each time.
        rng: The source of chance.
        attempts: Tries before the space is enumerated after all.
    """
    for _ in range(attempts):
        wish: dict[str, Value] = {name: rng.choice(param.values) for name, param in space.params.items()}
        config = space.complete(wish)
        if config in space:
            return config
    return space.sample(rng)


class Lab:
    """A compile pool and one process for each device, with an artifact cache of their own that is thrown away.

    Args:
        processes: Compile processes; None for as many as there are cores.
    """

    def __init__(self, processes: int | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kerneldyno-lab-")
        self._sessions: dict[str, Session] = {}
        self._built: dict[str, Built] = {}
        before = os.environ.get("KERNELDYNO_CACHE")
        os.environ["KERNELDYNO_CACHE"] = self._folder.name
        try:
            self._pool = CompilePool(processes, BUILD_TIMEOUT_S)
        finally:
            _restore("KERNELDYNO_CACHE", before)
        for worker in self._pool.workers:
            worker.environ["TRITON_INTERPRET"] = "0"  # a test of the interpreter may have set it for its own process

    def submit(self, kernel: Ref, workload: Workload, config: Config, arch: str) -> str:
        """Queue a build; return its key, for `built`."""
        key = digest([kernel.module, kernel.file, kernel.attribute, kernel.item, workload.key, config, arch])
        if key not in self._built:
            done = self._pool.submit(BuildRequest(key, kernel, workload, config, arch))
            if done is not None:
                self._built[key] = done
            else:
                self._built.update(self._pool.poll())
        return key

    def built(self, key: str) -> Built:
        """Wait for a build and return how it ended."""
        deadline = time.monotonic() + 4 * BUILD_TIMEOUT_S
        while key not in self._built:
            self._built.update(self._pool.poll())
            if key not in self._built:
                wait(list(self._pool.connections), timeout=1.0)
            if time.monotonic() > deadline:
                raise TimeoutError(f"build {key} did not end")
        return self._built[key]

    def artifact(self, key: str) -> Artifact:
        """Return what a build that succeeded made, with its binary."""
        found = self._pool.cache.get(key)
        assert found is not None, f"artifact {key} is not in the cache"
        return found

    def verify(self, problem: Ref, workload: Workload, device: Device, kernel: Ref, key: str) -> str:
        """Load an artifact and run it twice, on poisoned outputs between guard zones; say what is wrong, "" where nothing is."""
        self._built.update(self._pool.poll())  # keep the compilers busy meanwhile
        session = self._session(device)
        session.prepare(problem, workload)
        contender = Contender("case", kernel, key)
        failure, when = session.call("enter", contender).failure, ""
        if failure is None:
            failure, when = session.call("recheck", contender.name, workload.seed).failure, "at the second run: "
        return "" if failure is None else f"{when}{' '.join(failure.text.split())[:600]}"

    def errors(self, problem: Ref, workload: Workload, device: Device, kernel: Ref, key: str) -> tuple[Error, Error]:
        """Run an artifact and the problem's first library that can on the same inputs; return the error of each.

        Raises:
            AssertionError: The artifact, or every library, failed or is wrong.
        """
        session = self._session(device)
        session.prepare(problem, workload)
        roles: Mapping[str, str] = session.call("baselines", timeout_s=ENTER_TIMEOUT_S).value or {}
        libraries = [Contender(name) for name, role in roles.items() if role == "library"]
        found: list[Error] = []
        for contenders in ([Contender("case", kernel, key)], libraries):
            replies = (session.call("enter", contender, timeout_s=ENTER_TIMEOUT_S) for contender in contenders)
            right = next((reply for reply in replies if reply.failure is None), None)
            assert right is not None, f"none of {[contender.name for contender in contenders]} ran and was right"
            found.append(right.value.error)
        return found[0], found[1]

    def _session(self, device: Device) -> Session:
        if device.spec not in self._sessions:
            before = os.environ.get("KERNELDYNO_CACHE")
            os.environ["KERNELDYNO_CACHE"] = self._folder.name
            try:
                self._sessions[device.spec] = Session(device, RUN_TIMEOUT_S)
            finally:
                _restore("KERNELDYNO_CACHE", before)
            self._sessions[device.spec].worker.environ["TRITON_INTERPRET"] = "0"
        return self._sessions[device.spec]

    def close(self) -> None:
        """End every process and remove the cache."""
        self._pool.cancel()
        self._pool.close()
        for session in self._sessions.values():
            session.close()
        self._folder.cleanup()


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@cache
def shared_lab() -> Lab:
    """Return the lab that all contracts of one test process share; its processes take seconds to start."""
    lab = Lab()
    atexit.register(lab.close)
    return lab

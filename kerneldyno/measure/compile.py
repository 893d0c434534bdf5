"""Compilation, apart from any GPU: the server inside a compile process, and the pool of them."""

import os
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
from multiprocessing.connection import Connection

from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Status
from kerneldyno.core import Workload
from kerneldyno.measure.cache import ArtifactCache
from kerneldyno.measure.cache import cache_root
from kerneldyno.measure.cache import compiler_caches
from kerneldyno.measure.process import Reply
from kerneldyno.measure.process import Worker
from kerneldyno.measure.status import status_of
from kerneldyno.registry import Ref
from kerneldyno.registry import resolve


MAX_COMPILE_PROCESSES = 16
"""More gave nothing on the 16-core machine beside the H200: 24.5 Triton configurations a second there."""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """One configuration to compile; `key` names its artifact."""

    key: str
    kernel: Ref
    workload: Workload
    config: Config
    arch: str


@dataclass(frozen=True, slots=True)
class Built:
    """How a build ended.

    Attributes:
        status: ok, build_error, build_timeout, out_of_resources or worker_died.
        artifact: What was built, without its binary (that lies in the cache); None where it failed.
        message: The compiler's text where it failed.
        build_s: Seconds it took; 0 where the cache had it.
    """

    status: Status
    artifact: Artifact | None = None
    message: str = ""
    build_s: float = 0.0


class CompileServer:
    """Builds artifacts, in a process of its own."""

    def __init__(self) -> None:
        self.cache = ArtifactCache()

    def healthy(self) -> bool:
        """A failed build leaves the process as it was."""
        return True

    def build(self, request: BuildRequest) -> tuple[Artifact, float]:
        """Compile one configuration into the cache; return the artifact less its binary, and the seconds it took."""
        kernel = resolve(request.kernel)
        began = time.perf_counter()
        artifact = kernel.build(request.workload, request.config, request.arch)
        spent = time.perf_counter() - began
        artifact = replace(artifact, compile_s=spent)
        self.cache.put(request.key, artifact)
        return replace(artifact, binary=b""), spent


class CompilePool:
    """Compile processes, as many as cores, started when first needed.

    Args:
        size: Number of processes; None for the cores this process may use.
        timeout_s: A build that takes longer is killed, with the compilers it started.
    """

    def __init__(self, size: int | None, timeout_s: float) -> None:
        root = cache_root()
        # no GPU is visible, and a compiler gets one thread: the pool itself is the parallelism
        environ = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "KERNELDYNO_CACHE": str(root), **compiler_caches(root)}
        count = size or min(len(os.sched_getaffinity(0)), MAX_COMPILE_PROCESSES)
        self.workers = [Worker("compile", environ) for _ in range(count)]
        self.timeout_s = timeout_s
        self.cache = ArtifactCache(root)
        self._waiting: deque[BuildRequest] = deque()
        self._running: dict[int, BuildRequest] = {}

    @property
    def building(self) -> int:
        """Builds queued or running."""
        return len(self._waiting) + len(self._running)

    @property
    def running(self) -> int:
        """Builds running now."""
        return len(self._running)

    @property
    def connections(self) -> Iterable[Connection]:
        """To wait on."""
        return [worker.connection for worker in self.workers if worker.busy and worker.connection is not None]

    def submit(self, request: BuildRequest) -> Built | None:
        """Queue a build; where the cache holds the artifact, return it at once instead."""
        if (artifact := self.cache.get(request.key)) is not None:
            return Built(Status.OK, replace(artifact, binary=b""))
        self._waiting.append(request)
        return None

    def poll(self, dispatch: bool = True) -> Mapping[str, Built]:
        """Collect the builds that ended, by key, and give the waiting ones to idle processes.

        Args:
            dispatch: False leaves the queue waiting, for as long as something is being timed on the same cores.
        """
        done: dict[str, Built] = {}
        for position, worker in enumerate(self.workers):
            if (reply := worker.poll()) is not None:
                done[self._running.pop(position).key] = _built(reply)
            if dispatch and not worker.busy and self._waiting:
                request = self._waiting.popleft()
                self._running[position] = request
                worker.submit("build", request, timeout_s=self.timeout_s)
        return done

    def cancel(self) -> None:
        """Forget the waiting builds and kill the running ones."""
        self._waiting.clear()
        for position in list(self._running):
            self.workers[position].kill()
        self._running.clear()

    def close(self) -> None:
        """End every process."""
        for worker in self.workers:
            worker.close()


def _built(reply: Reply) -> Built:
    if reply.failure is None:
        artifact, build_s = reply.value
        return Built(Status.OK, artifact, build_s=build_s)
    return Built(status_of(reply.failure, running=False), message=reply.failure.text)

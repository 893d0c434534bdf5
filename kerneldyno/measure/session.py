"""The tuner's end of the process that owns a device: opened, given a workload, killed and replaced when it fails."""

import os
from multiprocessing.connection import Connection

from kerneldyno.core import Device
from kerneldyno.core import Outcome
from kerneldyno.core import Workload
from kerneldyno.errors import Unavailable
from kerneldyno.measure.bench import Contender
from kerneldyno.measure.cache import cache_root
from kerneldyno.measure.cache import compiler_caches
from kerneldyno.measure.process import Reply
from kerneldyno.measure.process import Worker
from kerneldyno.measure.status import status_of
from kerneldyno.registry import Ref


OPEN_TIMEOUT_S = 120.0
PREPARE_TIMEOUT_S = 600.0
"""Inputs, a float64 reference and the library's own error: minutes on a CPU at large shapes."""


def _visible(device: Device) -> str:
    """The CUDA_VISIBLE_DEVICES under which the process sees this GPU alone, as its number 0."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",")[device.index].strip() if chosen else str(device.index)


class Session:
    """One device, one workload at a time, one call at a time.

    Args:
        device: The device.
        run_timeout_s: A configuration that loads, verifies and runs longer is killed, with the process.
    """

    def __init__(self, device: Device, run_timeout_s: float) -> None:
        self.device = device
        self.run_timeout_s = run_timeout_s
        root = cache_root()
        environ = {"KERNELDYNO_CACHE": str(root), **compiler_caches(root)}
        if device.kind == "cuda":
            environ["CUDA_VISIBLE_DEVICES"] = _visible(device)
        self.worker = Worker("bench", environ)
        self._prepared: tuple[int, str] = (0, "")

    @property
    def connection(self) -> Connection | None:
        """To wait on while a call runs."""
        return self.worker.connection if self.worker.busy else None

    @property
    def busy(self) -> bool:
        """Whether a call runs."""
        return self.worker.busy

    def prepare(self, problem: Ref, workload: Workload, again: bool = False) -> None:
        """Have the process ready for a workload; does nothing where it is, starts it where it died.

        Args:
            problem: Where the problem is.
            workload: The workload.
            again: Start a fresh process in any case.

        Raises:
            Unavailable: The device cannot be opened, or the workload does not fit on it.
        """
        if again:
            self.worker.kill()
        if self.worker.alive and self._prepared == (self.worker.starts, workload.key):
            return
        if not self.worker.alive:
            self._must(self.worker.call("open", self.device, timeout_s=OPEN_TIMEOUT_S), f"{self.device.name} could not be opened")
        reply = self.worker.call("prepare", problem, workload, timeout_s=PREPARE_TIMEOUT_S)
        self._must(reply, f"the inputs and the reference of {workload.key} could not be made")
        self._prepared = (self.worker.starts, workload.key)

    def _must(self, reply: Reply, what: str) -> None:
        if reply.failure is not None:
            self.worker.kill()
            raise Unavailable(f"{what} on {self.device.spec}: {reply.failure.text}")

    def submit(self, contender: Contender) -> None:
        """Begin to measure a contender."""
        self.worker.submit("measure", contender, timeout_s=self.run_timeout_s)

    def poll(self) -> Outcome | None:
        """Return the outcome of the measurement, or None while it runs."""
        reply = self.worker.poll()
        if reply is None:
            return None
        if reply.failure is None:
            outcome: Outcome = reply.value
            return outcome
        return Outcome(status_of(reply.failure, running=True), message=reply.failure.text)

    def call(self, method: str, *arguments: object, timeout_s: float | None = None) -> Reply:
        """Make one call of the playoff (`enter`, `sample`, `recheck`) and wait for it; `run_timeout_s` holds unless another is given."""
        return self.worker.call(method, *arguments, timeout_s=timeout_s or self.run_timeout_s)

    def close(self) -> None:
        """End the process."""
        self.worker.close()

"""From the way a call failed to the status of its trial."""

import re

from kerneldyno.core import Status
from kerneldyno.measure.process import Failure


_RESOURCES = re.compile(
    r"out.?of.?(resources|memory)|uses too much shared|too many resources|"
    r"shared memory.{0,40}(exceed|limit|too)|exceeds? .{0,30}shared memory",
    re.IGNORECASE,
)
"""What CUDA (error 701, 2), ptxas, Triton (OutOfResources) and TileLang say when a kernel does not fit."""


def status_of(failure: Failure, running: bool) -> Status:
    """Name the status of a configuration whose build (or whose run) failed this way.

    Args:
        failure: What the worker answered, or what became of it.
        running: True where it was loading or running, False where it was being built.
    """
    if failure.kind == "timeout":
        return Status.RUN_TIMEOUT if running else Status.BUILD_TIMEOUT
    if failure.kind == "died":
        return Status.WORKER_DIED
    if _RESOURCES.search(failure.text):
        return Status.OUT_OF_RESOURCES
    return Status.LAUNCH_ERROR if running else Status.BUILD_ERROR

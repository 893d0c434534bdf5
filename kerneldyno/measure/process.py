"""Worker processes: started from a fixed entry point, killed with all they started, replaced when they die.

They are started by exec and not by fork, so that none inherits a CUDA context, and not by `multiprocessing`'s spawn, which
runs the user's script again: a script without a `__main__` guard, a notebook and `python -c` all work.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any
from typing import Literal


_LOG_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call to a worker gave no value.

    Attributes:
        kind: "error" (it raised), "timeout" (it was killed) or "died".
        text: The exception's type and text, or how the process ended and the last lines it printed.
        fatal: True where the process is of no more use (a spoilt CUDA context fails every later kernel).
    """

    kind: Literal["error", "timeout", "died"]
    text: str
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What a call to a worker came to: a value, or a failure."""

    value: Any = None
    failure: Failure | None = None


class Worker:
    """One worker process and the call it is busy with. Starts with its first call, and again after it died.

    Args:
        role: What it serves: "compile" or "bench" (`kerneldyno.measure.worker`).
        environ: Environment variables set over this process's own.
    """

    def __init__(self, role: Literal["compile", "bench"], environ: Mapping[str, str]) -> None:
        self.role = role
        self.environ = dict(environ)
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lifeline = -1
        self._log = tempfile.TemporaryFile()
        self._deadline = 0.0
        self._timeout_s = 0.0
        self.busy = False

    @property
    def connection(self) -> Connection | None:
        """To wait on: readable when the call ended or the process died."""
        return self._connection

    @property
    def alive(self) -> bool:
        """Whether a process is there to take a call without being started first."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process where none is alive."""
        if self.alive:
            return
        self.kill()
        ours, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        # the parent's module path, so that a worker finds a plugin wherever the parent found it
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._log.seek(0)
        self._log.truncate()
        try:
            self._process = subprocess.Popen(
                # -P: the working folder must not shadow a module of the standard library
                [sys.executable, "-P", "-m", "kerneldyno.measure.worker", self.role, str(theirs.fileno()), str(lifeline)],
                env={**os.environ, "PYTHONPATH": path, **self.environ},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,  # a group of its own: Ctrl-C is ours to handle, and one signal ends it with its compilers
            )
        finally:
            theirs.close()
            os.close(lifeline)
        self._connection = ours
        self.starts += 1

    def submit(self, method: str, *arguments: Any, timeout_s: float) -> None:
        """Begin a call; `poll` gives its reply. Raises RuntimeError where one is running already."""
        if self.busy:
            raise RuntimeError(f"the {self.role} worker is busy")
        self.start()
        assert self._connection is not None
        self.busy = True
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        with suppress(BrokenPipeError, ConnectionError):  # it died since: poll will see that
            self._connection.send((method, arguments))

    def poll(self, wait_s: float = 0.0) -> Reply | None:
        """Return the reply of the running call, or None while it runs; kills the process where the time is over."""
        if not self.busy or self._connection is None:
            return None
        if self._connection.poll(min(wait_s, max(self._deadline - time.monotonic(), 0.0))):
            try:
                reply: Reply = self._connection.recv()
                if reply.failure is not None and reply.failure.fatal:
                    self.kill()
            except (EOFError, ConnectionError):
                reply = Reply(failure=Failure("died", self._epitaph()))
                self.kill()
        elif time.monotonic() >= self._deadline:
            reply = Reply(failure=Failure("timeout", f"no end after {self._timeout_s:g} s; the process was killed"))
            self.kill()
        else:
            return None
        self.busy = False
        return reply

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Reply:
        """Make a call and wait for its reply."""
        self.submit(method, *arguments, timeout_s=timeout_s)
        while (reply := self.poll(wait_s=1.0)) is None:
            pass
        return reply

    def _epitaph(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = None
        if code is not None and code < 0:
            with suppress(ValueError):
                ended = f"killed by {signal.Signals(-code).name}"
                return f"the process was {ended}{self._last_words()}"
        return f"the process ended with code {code}{self._last_words()}"

    def _last_words(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(size - _LOG_TAIL_BYTES, 0))
        text = self._log.read().decode(errors="replace").strip()
        return f": {text}" if text else ""

    def kill(self) -> None:
        """End the process and all that it started; safe to call at any time."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        self.busy = False

    def close(self) -> None:
        """End the process for good."""
        self.kill()
        self._log.close()

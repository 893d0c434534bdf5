"""The fixed entry point of worker processes: `python -m kerneldyno.measure.worker ROLE CONNECTION_FD LIFELINE_FD`."""

import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from kerneldyno.measure.process import Failure
from kerneldyno.measure.process import Reply


_TEXT_LIMIT = 4000


def _watch(connection_fd: int, lifeline_fd: int) -> None:
    """Fork a watcher that kills this whole process group when the parent is gone, however it went.

    A watcher and not a thread or PR_SET_PDEATHSIG: a thread cannot run while a compiler holds the interpreter lock, and the
    death signal does not reach nvcc, ptxas or cc, which the worker started. Forked before anything heavy is imported.
    """
    if os.fork() == 0:
        os.close(connection_fd)
        os.read(lifeline_fd, 1)  # returns when the parent's end closes
        os.killpg(0, signal.SIGKILL)
    os.close(lifeline_fd)


def _server(role: str) -> Any:
    if role == "compile":
        from kerneldyno.measure.compile import CompileServer

        return CompileServer()
    from kerneldyno.measure.bench import BenchServer

    return BenchServer()


def _error_text(error: BaseException) -> str:
    """The exception as a user reads it; its last own frame helps where the text alone is bare."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" (at {os.path.basename(frame[0].filename)}:{frame[0].lineno})" if frame else ""
    if len(text) > _TEXT_LIMIT:  # compilers say what is wrong first and give their dump last
        text = text[:_TEXT_LIMIT] + " ..."
    return text + where


def main() -> None:
    """Serve calls, one at a time, until the parent closes the connection."""
    role, connection_fd, lifeline_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _watch(connection_fd, lifeline_fd)
    connection = Connection(connection_fd)
    server = _server(role)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            reply = Reply(value=getattr(server, method)(*arguments))
        except Exception as error:
            reply = Reply(failure=Failure("error", _error_text(error), fatal=not server.healthy()))
        connection.send(reply)


if __name__ == "__main__":
    main()

"""Ctrl-C once: stop asking, keep what is finished, end cleanly. Twice: at once."""

import signal
import threading
from types import FrameType
from types import TracebackType
from typing import Self


class Interrupt:
    """While entered, the first SIGINT or SIGTERM only sets `asked`; the next one acts as it always did."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: dict[int, object] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def __enter__(self) -> Self:
        """Take the signals over, where this is the main thread (no other may)."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give the signals back."""
        self._restore()

"""What a search shows as it goes, on a terminal and in a log."""

import io
import re

import pytest

from kerneldyno.console.progress import Progress
from kerneldyno.console.show import bytes_text
from kerneldyno.console.show import span_text
from kerneldyno.console.show import time_text
from kerneldyno.core import Outcome
from kerneldyno.core import Status
from kerneldyno.core import Workload
from kerneldyno.tuner.events import Notice
from kerneldyno.tuner.events import PlayoffFinished
from kerneldyno.tuner.events import PlayoffRound
from kerneldyno.tuner.events import Queue
from kerneldyno.tuner.events import StudyFinished
from kerneldyno.tuner.events import StudyStarted
from kerneldyno.tuner.events import TrialFinished


WORKLOAD = Workload("softmax", {"m": 64, "n": 128}, "fp32")
EVENTS = [
    Notice("triton is left out: [it] is not installed"),
    StudyStarted("c", WORKLOAD, 448, 20, 3, 90.0),
    Queue(5, 2, 1),
    TrialFinished("c", 3, {}, Outcome(Status.OK, median_us=21.5), 21.5),
    TrialFinished("c", 4, {}, Outcome(Status.BUILD_ERROR), 21.5),
    TrialFinished("c", 5, {}, Outcome(Status.BUILD_ERROR), 21.5),
    TrialFinished("c", 6, {}, Outcome(Status.OK, median_us=9.25), 9.25),
    StudyFinished("c", WORKLOAD, 4, 3, 9.25, {"ok": 5, "build_error": 2}),
    PlayoffRound(7, 15),
    PlayoffFinished(WORKLOAD, ()),
]


def test_a_log_gets_plain_lines_when_the_best_improves() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        for event in EVENTS:
            progress(event)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "triton is left out: [it] is not installed"
    assert lines[1] == "softmax m=64 n=128 fp32: c tries 20 of 448 configurations, 3 of them in the database, at most 1m30s"
    assert re.fullmatch(r"  c 4/20  best 21\.50 us  building 5, built 2  \S+ left", lines[2])
    assert re.fullmatch(r"  c 7/20  best 9\.250 us  2 build_error  building 5, built 2  \S+ left", lines[3])
    assert lines[4] == "  c: best 9.250 us  measured 4, took 3 from the database  2 build_error"
    assert len(lines) == 5


def test_nothing_measured_again_is_said() -> None:
    stream = io.StringIO()
    Progress(stream)(StudyFinished("c", WORKLOAD, 0, 3, 9.25, {"ok": 3}))
    assert "took 3 from the database (nothing was measured again)" in stream.getvalue()


def test_nothing_passed_is_said() -> None:
    stream = io.StringIO()
    Progress(stream)(StudyFinished("c", WORKLOAD, 2, 0, None, {"wrong_result": 2}))
    assert "c: no configuration passed  measured 2  2 wrong_result" in stream.getvalue()


def test_a_terminal_gets_a_line_that_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = io.StringIO()
    with Progress(stream) as progress:
        for event in EVENTS[:7]:
            progress(event)
        assert progress._live is not None
        progress._live.refresh()
        progress(EVENTS[7])
        progress(EVENTS[8])
        progress._live.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert re.search(r"c 7/20 .*best 9\.250 us +2 build_error +building 5, built 2 +\S+ left", shown)
    assert re.search(r"comparing .*round 7/15", shown)
    assert "c: best 9.250 us" in shown


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.9124, "0.912 us"), (12.345, "12.35 us"), (999.94, "999.9 us"), (1234.5, "1.234 ms"), (2.5e6, "2.500 s")],
)
def test_times(value: float | None, text: str) -> None:
    assert time_text(value) == text


@pytest.mark.parametrize(("value", "text"), [(-1, "0s"), (7.4, "7s"), (125, "2m05s"), (3720, "1h02m")])
def test_spans(value: float, text: str) -> None:
    assert span_text(value) == text


@pytest.mark.parametrize(("value", "text"), [(12, "12 B"), (232_448, "227.0 KiB"), (150_754_820_096, "140.4 GiB")])
def test_sizes(value: int, text: str) -> None:
    assert bytes_text(value) == text

"""Planted kernels through real processes: each fault gets its own status, and the next kernel is measured as if nothing was."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kerneldyno.core import Environment
from kerneldyno.core import Outcome
from kerneldyno.core import Status
from kerneldyno.core import Workload
from kerneldyno.measure.bench import Contender
from kerneldyno.measure.cache import artifact_key
from kerneldyno.measure.compile import BuildRequest
from kerneldyno.measure.compile import Built
from kerneldyno.measure.compile import CompilePool
from kerneldyno.measure.device import cpu
from kerneldyno.measure.session import Session
from kerneldyno.registry import Registry


PLANTED = Path(__file__).parents[1] / "planted.py"
WORKLOAD = Workload("vector_add", {"n": 1000}, "fp32")
REGISTRY = Registry([PLANTED])
# a team of threads waits for a scheduler tick where tests share the cores
ONE_CORE = replace(cpu(), sm_count=1)


def request(fault: str) -> BuildRequest:
    config = {"fault": fault, "twin": 1}
    key = artifact_key(WORKLOAD, "planted", "digest", config, "x86_64", Environment({}))
    return BuildRequest(key, REGISTRY.kernel_ref("vector_add", "planted"), WORKLOAD, config, "x86_64")


def build(pool: CompilePool, *faults: str) -> dict[str, Built]:
    wanted = {request(fault).key: fault for fault in faults}
    done: dict[str, Built] = {}
    for fault in faults:
        if (built := pool.submit(request(fault))) is not None:
            done[fault] = built
    while len(done) < len(faults):
        done |= {wanted[key]: built for key, built in pool.poll().items()}
        time.sleep(0.01)
    return done


def measure(session: Session, fault: str) -> Outcome:
    session.prepare(REGISTRY.problem_ref("vector_add"), WORKLOAD)
    session.submit(Contender("planted", REGISTRY.kernel_ref("vector_add", "planted"), request(fault).key))
    while (outcome := session.poll()) is None:
        time.sleep(0.01)
    return outcome


@pytest.fixture
def pool() -> Iterator[CompilePool]:
    with closing(CompilePool(2, timeout_s=3.0)) as made:
        yield made


@pytest.fixture
def session() -> Iterator[Session]:
    with closing(Session(ONE_CORE, run_timeout_s=3.0)) as made:
        yield made


def running(pattern: str) -> list[str]:
    listed = subprocess.run(["ps", "-eo", "pid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if pattern in line and not line.split()[1].startswith("Z")]


def test_builds_that_fail(pool: CompilePool) -> None:
    built = build(pool, "none", "syntax", "build_hangs", "build_dies")
    assert built["none"].status is Status.OK
    assert built["none"].artifact is not None
    assert built["none"].artifact.entry == "add"
    assert built["syntax"].status is Status.BUILD_ERROR
    assert "error" in built["syntax"].message
    assert built["build_hangs"].status is Status.BUILD_TIMEOUT
    assert "3 s" in built["build_hangs"].message
    assert built["build_dies"].status is Status.WORKER_DIED
    assert "SIGABRT" in built["build_dies"].message
    assert not running("sleep 1000")  # the compiler that the hung build had started went with it
    assert build(pool, "wrong")["wrong"].status is Status.OK  # and the pool goes on


def test_a_second_build_is_free(pool: CompilePool) -> None:
    first = build(pool, "none")["none"]
    second = build(pool, "none")["none"]
    assert first.build_s > 0
    assert second.build_s == 0
    assert second.artifact == first.artifact


def test_every_fault_has_its_status(pool: CompilePool, session: Session) -> None:
    expected = {
        "none": (Status.OK, ""),
        "segfault": (Status.WORKER_DIED, "SIGSEGV"),
        "endless": (Status.RUN_TIMEOUT, "3 s"),
        "wrong": (Status.WRONG_RESULT, "of the norm"),
        "one_wrong": (Status.WRONG_RESULT, "in one element"),
        "unwritten": (Status.WRONG_RESULT, "inf"),
        "out_of_bounds": (Status.WRONG_RESULT, "out of bounds, beside output out"),
        "changes_input": (Status.WRONG_RESULT, "changed its input x"),
        "flaky": (Status.NONDETERMINISTIC, "right at first"),
        "keeps_output": (Status.NONDETERMINISTIC, "right at first"),
        "launch_error": (Status.LAUNCH_ERROR, "CUDA_ERROR_INVALID_VALUE"),
        "out_of_resources": (Status.OUT_OF_RESOURCES, "OUT_OF_RESOURCES"),
    }
    build(pool, *expected)
    for fault, (status, said) in expected.items():
        outcome = measure(session, fault)
        assert (fault, outcome.status) == (fault, status), outcome.message
        assert said in outcome.message
        # whatever this one did, the next right kernel is found right
        after = measure(session, "none")
        assert after.status is Status.OK, (fault, after.message)
        assert after.error is not None
        assert after.error.relative < 1e-6
        assert after.low_us is not None
        assert after.median_us is not None
        assert after.high_us is not None
        assert 0 < after.low_us <= after.median_us <= after.high_us
        assert len(after.samples_us) >= 7


def test_a_lost_artifact_is_a_launch_error(pool: CompilePool, session: Session) -> None:
    build(pool, "none")
    pool.cache.path(request("none").key).unlink()
    outcome = measure(session, "none")
    assert outcome.status is Status.LAUNCH_ERROR
    assert "no longer in the cache" in outcome.message


def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    # the parent is killed while a build hangs in a child of the worker, and while another process runs a kernel
    script = tmp_path / "parent.py"
    script.write_text(  # without a __main__ guard
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_faults import *\n"
        "pool = CompilePool(1, 100.0); session = Session(ONE_CORE, 100.0)\n"
        "build(pool, 'endless'); pool.submit(request('build_hangs')); pool.poll()\n"
        "session.prepare(REGISTRY.problem_ref('vector_add'), WORKLOAD)\n"
        "session.submit(Contender('planted', REGISTRY.kernel_ref('vector_add', 'planted'), request('endless').key))\n"
        "print(pool.workers[0]._process.pid, session.worker._process.pid, flush=True); time.sleep(100)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while not running("sleep 1000") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running("sleep 1000")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while (left := running("sleep 1000") or [pid for pid in workers if os.path.exists(f"/proc/{pid}/exe")]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left

"""The command on the CPU, for real: search, comparison, repetition, formats, exit codes, Ctrl-C."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest


SOFTMAX = "problem=softmax backend=c shape.m=64 shape.n=128 trials=4 seed=1 top=1".split()

WRONG_KERNEL = """

from kerneldyno.core import Artifact, Param, Space

class Launch:
    def prepare(self, inputs, outputs): self.outputs = outputs
    def run(self): self.outputs["out"].fill_(1.0)

class Ones:
    def space(self, workload, device): return Space([Param("a", (1, 2), "nothing")])
    def build(self, workload, config, arch): return Artifact(config, arch, "", "ones")
    def load(self, artifact, workload): return Launch()

class Python:
    name = "python"
    device_kind = "cpu"
    def probe(self, device):
        from kerneldyno.core import Availability
        return Availability(True)

BACKENDS = {"python": Python()}
KERNELS = {"vector_add.python": Ones()}
"""


def tune(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kerneldyno", *map(str, words)], capture_output=True, text=True, timeout=240, cwd=cwd, check=False
    )


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    db = tmp_path_factory.mktemp("run") / "a.db"
    return db, tune(*SOFTMAX, f"db={db}")


def test_a_search_prints_progress_a_comparison_and_what_to_type_next(searched: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    db, done = searched
    assert done.returncode == 0, done.stderr
    assert "c tries 4 of" in done.stderr
    assert "measured 4" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    for part in (
        "softmax in fp32 on",
        "m=64 n=128",
        "torch (library)",
        "4 ok",
        "Next",
        f"tune compare problem=softmax db={db}",
        "trials=8",
    ):
        assert part in done.stdout


def test_compare_gives_times_intervals_ratios_and_counts(searched: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    db, _ = searched
    done = tune("compare", "problem=softmax", f"db={db}", "format=json")
    assert done.returncode == 0
    assert done.stderr == ""
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    row = rows["c"]
    assert row["low_us"] <= row["median_us"] <= row["high_us"]
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert row["counts"] == {"ok": 4}
    assert (row["shape"], row["dtype"], row["source"], row["verified"]) == ({"m": 64, "n": 128}, "fp32", "database", True)
    assert row["gbps"] == pytest.approx(64 * 128 * 8 / row["median_us"] * 1e-3)
    assert rows["torch"]["role"] == "library"
    table = list(csv.DictReader(io.StringIO(tune("compare", f"db={db}", "format=csv").stdout)))
    assert {line["name"]: float(line["median_us"]) for line in table if line["median_us"]} == {
        name: found["median_us"] for name, found in rows.items() if found["median_us"]
    }


def test_the_selection_narrows_the_table(searched: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    db, _ = searched
    assert json.loads(tune("compare", "problem=softmax", "shape.m=65", f"db={db}", "format=json").stdout) == []
    done = tune("compare", "problem=softmax", "shape.m=65", f"db={db}")
    assert done.returncode == 0
    assert "To measure: tune problem=softmax" in done.stderr
    assert len(json.loads(tune("compare", "backend=c", "limit=1", f"db={db}", "format=json").stdout)) == 1


def test_repeating_measures_nothing_again_and_says_so(searched: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    db, _ = searched
    before = tune("compare", f"db={db}", "format=json").stdout
    done = tune(*SOFTMAX, f"db={db}", "format=json")
    assert done.returncode == 0
    assert "nothing was measured again" in done.stderr
    assert json.loads(done.stdout) == json.loads(before)


def test_doctor_reads_the_database(searched: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    db, _ = searched
    done = tune("doctor", f"db={db}", "format=json")
    assert done.returncode == 0
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks[str(db)]["ok"] is True
    assert "4 trials" in checks[str(db)]["found"]
    assert checks["c"]["ok"] is True


def test_list_as_json_holds_everything() -> None:
    found = json.loads(tune("list", "format=json").stdout)
    gemm = next(problem for problem in found["problems"] if problem["name"] == "gemm")
    assert [dim["name"] for dim in gemm["dims"]] == ["m", "n", "k", "layout"]
    assert gemm["dims"][3]["range"] == ["nt", "nn"]
    backend = next(backend for backend in found["backends"] if backend["name"] == "c")
    assert backend["usable"] is True
    assert backend["versions"]["cc"]


def test_nothing_passed_is_3(tmp_path: Path) -> None:
    plugin = tmp_path / "ones.py"
    plugin.write_text(WRONG_KERNEL)
    done = tune("problem=vector_add", "backend=python", "shape.n=100", "trials=2", f"plugin={plugin}", f"db={tmp_path / 'a.db'}")
    assert done.returncode == 3, done.stderr
    assert "no configuration passed" in done.stderr
    assert "2 wrong_result" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("problem=softmax backend=c device=cuda:77", "device=cuda:77"),
        ("problem=softmax backend=cuda device=cpu", "it runs on cuda"),
        ("problem=softmax device=cpu db=text.txt", "text.txt is not an SQLite database"),
        ("problem=softmax device=cpu db=nowhere/a.db", "does not exist"),
        ("compare db=text.txt", "text.txt is not an SQLite database"),
    ],
)
def test_what_the_machine_lacks_is_4(tmp_path: Path, words: str, said: str) -> None:
    (tmp_path / "text.txt").write_text("this is somebody's letter, and stays one\n")
    done = tune(*words.split(), cwd=tmp_path)
    assert done.returncode == 4
    assert done.stdout == ""
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "text.txt").read_text() == "this is somebody's letter, and stays one\n"


def test_ctrl_c_keeps_what_is_finished_and_leaves_no_process(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    words = ["problem=softmax", "backend=c", "shape.m=64", "shape.n=128", "trials=400", f"db={db}"]
    command = subprocess.Popen(
        [sys.executable, "-m", "kerneldyno", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert command.stderr is not None
    lines = []
    while "best" not in (lines[-1] if lines else ""):
        lines.append(command.stderr.readline())
        assert lines[-1], "".join(lines)
    children = psutil.Process(command.pid).children(recursive=True)
    assert children
    os.kill(command.pid, signal.SIGINT)
    out, err = command.communicate(timeout=120)
    assert command.returncode == 130, err
    assert "every finished trial is in the database" in err
    assert "softmax in fp32" in out
    deadline = time.monotonic() + 10
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    (row,) = [row for row in json.loads(tune("compare", f"db={db}", "format=json").stdout) if row["name"] == "c"]
    assert 1 <= row["trials"] < 400

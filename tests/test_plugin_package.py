"""A separate package, built and installed as a user would, brings a problem, a kernel for it, and a backend with a kernel for gemm."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin installed in it, and beside it a package that fails to import and one that takes names."""
    work = tmp_path_factory.mktemp("plugin")
    shutil.copytree(Path(__file__).parent / "plugin_package", work / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    wheels, folder = work / "wheels", work / "site"
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(wheels), str(work / "source")]
    subprocess.run(build, check=True, timeout=180)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)], check=True, timeout=180)
    _distribution(folder, "broken", "import nothing_of_this_name", "[kerneldyno.kernels]\nsoftmax.plainc = broken\n")
    _distribution(folder, "zealous", "", "[kerneldyno.problems]\ngemm = zealous\n[kerneldyno.backends]\nplainc = zealous\n")
    return folder


def _distribution(site: Path, name: str, module: str, entry_points: str) -> None:
    (site / f"{name}.py").write_text(module + "\n")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def _tune(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))}
    return subprocess.run([sys.executable, "-m", "kerneldyno", *words], env=env, capture_output=True, text=True, timeout=240, check=False)


def test_list_shows_what_it_brings_and_a_line_for_each_that_fails(site: Path) -> None:
    done = _tune(site, "list", "format=json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    problems = {problem["name"]: problem for problem in found["problems"]}
    assert problems["scale"]["origin"] == "kerneldyno-scale"
    assert problems["scale"]["backends"] == ["c"]
    assert "plainc" in problems["gemm"]["backends"]
    assert next(backend for backend in found["backends"] if backend["name"] == "plainc")["usable"] is True
    lines = {failure["name"]: (failure["origin"], failure["reason"]) for failure in found["failures"]}
    assert len(lines) == len(found["failures"]) == 3
    assert lines["backend plainc"] == ("zealous", "the name is taken by kerneldyno-scale, which is used")
    assert lines["problem gemm"] == ("zealous", "the name is taken by kerneldyno, which is used")
    assert lines["kernel softmax.plainc"] == ("broken", "ModuleNotFoundError: No module named 'nothing_of_this_name'")


def test_its_problem_and_its_kernels_are_tuned(site: Path, tmp_path: Path) -> None:
    db = f"db={tmp_path / 'a.db'}"
    scale = _tune(site, "problem=scale", "shape.n=5000", "trials=3", "top=1", db, "format=json")
    assert scale.returncode == 0, scale.stderr
    rows = {row["name"]: row for row in json.loads(scale.stdout)}
    assert rows["c"]["counts"] == {"ok": 3}
    assert rows["torch"]["role"] == "library"
    assert rows["c"]["ratio"] > 0
    gemm = _tune(site, *"problem=gemm backend=plainc shape.m=17 shape.n=33 shape.k=65 trials=2 top=1".split(), db, "format=json")
    assert gemm.returncode == 0, gemm.stderr
    assert {row["name"]: row["counts"] for row in json.loads(gemm.stdout)}["plainc"] == {"ok": 2}
    half = _tune(site, *"problem=gemm backend=plainc dtype=bf16 shape.m=17 shape.n=33 shape.k=65 trials=2".split(), db)
    assert half.returncode == 2
    assert "computes fp32 with layout=nt only" in half.stderr

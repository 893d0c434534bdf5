"""The wheel holds what an installed Kerneldyno needs, and nothing of the tests."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    work = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "kerneldyno", work / "kerneldyno", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, work)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(work / "wheels"), str(work)], check=True, timeout=180)
    (file,) = (work / "wheels").glob("*.whl")
    return zipfile.ZipFile(file)


def test_every_file_of_the_package_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    packed = set(wheel.namelist())
    source = {
        str(path.relative_to(ROOT)) for path in (ROOT / "kerneldyno").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert source - packed == set()
    assert {name.split("/")[0] for name in packed - source} == {next(name for name in packed if name.endswith("/METADATA")).split("/")[0]}


def test_both_commands_and_all_extras_are_declared(wheel: zipfile.ZipFile) -> None:
    info = next(name for name in wheel.namelist() if name.endswith("/METADATA")).rsplit("/", 1)[0]
    assert (
        wheel.read(f"{info}/entry_points.txt").decode().split()
        == "[console_scripts] kerneldyno = kerneldyno.cli:run tune = kerneldyno.cli:run".split()
    )
    metadata = wheel.read(f"{info}/METADATA").decode()
    for extra in ("triton", "tilelang", "cuda", "dashboard", "postgres", "dev", "all"):
        assert f"Provides-Extra: {extra}" in metadata
    core = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert not any(word in line for line in core for word in ("triton", "tilelang", "cuda"))

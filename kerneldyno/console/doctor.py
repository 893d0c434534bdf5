"""`tune doctor`: what this machine has, what it lacks and how to get it."""

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from dataclasses import dataclass
from importlib import metadata
from importlib import util
from pathlib import Path

from kerneldyno import __version__
from kerneldyno.console.listing import backend_rows
from kerneldyno.console.show import bytes_text
from kerneldyno.console.show import console
from kerneldyno.console.show import print_json
from kerneldyno.console.show import table
from kerneldyno.measure import device as machine
from kerneldyno.plan import Plan
from kerneldyno.registry import Registry


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Attributes:
        area: What it is about.
        name: What was looked at.
        ok: True where it is there; False where it is missing or wrong; None where it does not matter here.
        found: What was found, or what is wrong.
        remedy: How to get it; empty where nothing is to be done.
    """

    area: str
    name: str
    ok: bool | None
    found: str
    remedy: str = ""


def show(plan: Plan, registry: Registry) -> int:
    """Print the report.

    Args:
        plan: Its options name the database and the format.
        registry: Which backends to probe.

    Returns:
        0, or 4 where no backend is usable or torch is missing: nothing can be tuned then.
    """
    registry.check_plugins()
    checks = [
        *_python(),
        *_torch(),
        *_devices(),
        *_compilers(),
        *_backends(registry, plan),
        *_plugins(registry),
        *_database(plan.options.db),
    ]
    able = any(check.ok for check in checks if check.area == "backend") and all(check.ok for check in checks if check.name == "torch")
    if plan.options.format == "json":
        print_json({"usable": able, "checks": [asdict(check) for check in checks]})
        return 0 if able else 4
    out = console()
    made = table("", "", "", "found", "what to do")
    area = ""
    for check in checks:
        mark = {True: "ok", False: "missing", None: "-"}[check.ok]
        made.add_row(check.area if check.area != area else "", check.name, mark, check.found, check.remedy)
        area = check.area
    out.print(made)
    out.print("\nReady: tune problem=softmax" if able else "\nNothing can be tuned here yet: see the lines marked missing.")
    return 0 if able else 4


def _python() -> Iterator[Check]:
    ok = (3, 11) <= tuple(map(int, platform.python_version_tuple()[:2])) <= (3, 13)
    yield Check("system", "python", ok, platform.python_version(), "" if ok else "use Python 3.11, 3.12 or 3.13")
    yield Check("system", "platform", True, f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Check("system", "kerneldyno", True, __version__)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _torch() -> Iterator[Check]:
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        yield Check("torch", "torch", False, "not installed", "pip install torch (scripts/setup.sh picks the build for this machine)")
        return
    # version.py says which CUDA the build is for; reading it spares the seconds that importing torch takes
    path = Path(spec.origin).with_name("version.py")
    text = path.read_text() if path.is_file() else ""
    cuda = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
    build = f"built for CUDA {cuda.group(1)}" if cuda else "built without CUDA"
    yield Check("torch", "torch", True, f"{_version('torch')}, {build}")
    if machine.gpus() and not cuda:
        yield Check(
            "torch",
            "torch with CUDA",
            False,
            "there is a GPU, but this build of torch cannot use it",
            "pip install --force-reinstall torch",
        )


def _devices() -> Iterator[Check]:
    gpus = machine.gpus()
    for gpu in gpus:
        facts = f"{gpu.name}, {gpu.arch}, {gpu.sm_count} SMs, {bytes_text(gpu.memory_bytes)}, driver {gpu.driver}"
        yield Check("device", gpu.spec, True, facts)
    if not gpus:
        yield Check("device", "cuda", None, "no NVIDIA GPU, or no driver (libcuda.so.1)", "on a machine with one: install NVIDIA's driver")
    cpu = machine.cpu()
    yield Check("device", "cpu", True, f"{cpu.name}, {cpu.sm_count} cores, {bytes_text(cpu.memory_bytes)}")


def _compilers() -> Iterator[Check]:
    for name, purpose, remedy in (
        ("cc", "the backend c", "apt-get install gcc"),
        ("nvcc", "TileLang, where it does not use NVRTC", "the CUDA toolkit, or pip install 'kerneldyno[tilelang]'"),
    ):
        path = shutil.which(name)
        if path is None:
            # nvcc may also come as a wheel, which the backend's own probe knows about
            yield Check("compiler", name, False if name == "cc" else None, f"not on the path; used by {purpose}", remedy)
            continue
        try:
            lines = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout.splitlines()
            release = next((line for line in lines if "release" in line), lines[0] if lines else "version unknown")
        except (OSError, subprocess.TimeoutExpired) as error:
            yield Check("compiler", name, False, f"{path} does not run: {error}", remedy)
            continue
        yield Check("compiler", name, True, f"{release.strip()} ({path})")


def _backends(registry: Registry, plan: Plan) -> Iterator[Check]:
    for row in backend_rows(registry, registry.backends(), plan.selection.devices):
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        # a GPU's backend on a machine without one is no fault of the installation
        ok = True if row["usable"] else None if row["device_kind"] == "cuda" and row["device"] is None else False
        found = f"usable on {row['device']}" + (f": {versions}" if versions else "") if row["usable"] else row["reason"]
        yield Check("backend", row["name"], ok, found, row["remedy"])


def _plugins(registry: Registry) -> Iterator[Check]:
    for failure in registry.failures:
        yield Check("plugin", failure.name, False, failure.reason, f"see {failure.origin}")


def _database(db: str) -> Iterator[Check]:
    lacking = [name for name in ("sqlalchemy", "alembic", "optuna") if util.find_spec(name) is None]
    for name in lacking:
        yield Check("database", name, False, "not installed", f"pip install {name}")
    if lacking:
        return
    from kerneldyno.store import state

    found = state(db)
    yield Check("database", db, found.ok, found.text, found.remedy)

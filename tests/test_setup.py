"""scripts/setup.sh: which interpreter, which build of torch, what it does where Python comes without ensurepip. Nothing is installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
TORCH_CPU = "torch==2.13.0+cpu"

# stands for an interpreter; `-m venv` works once apt-get has brought the package, and what pip is asked for is noted
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then
    case "$2" in
        *-venv*) echo python3.11-venv ;;
        *version_info*) exit $OLD_PYTHON ;;
        *"import torch"*) exit 1 ;;
    esac
elif [ "$2" = venv ]; then
    [ -e "$STATE/ensurepip" ] || exit 1
    mkdir -p .venv/bin && cp "$0" .venv/bin/python
elif [ "$2" = pip ]; then
    echo "$@" >> "$STATE/pip"
    case "$*" in *"$REFUSED"*) exit 1 ;; esac
fi
"""
APT = '#!/bin/sh\necho "$@" >> "$STATE/apt"; touch "$STATE/ensurepip"\n'


class Machine:
    """A machine of stand-ins: only what it names can be run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.bin = folder / "bin"
        for place in (self.state, self.bin, folder / "project"):
            place.mkdir()
        shutil.copytree(ROOT / "scripts", folder / "project" / "scripts")
        for name in ("sh", "dirname", "mkdir", "cp", "rm", "touch", "grep"):
            (self.bin / name).symlink_to(str(shutil.which(name)))
        self.add("python3", PYTHON)
        self.add("cc", "#!/bin/sh\n")
        self.add("g++", "#!/bin/sh\n")
        self.add("id", "#!/bin/sh\necho 0\n")
        (folder / "project" / "scripts" / "has_gpu.sh").write_text("exit 1\n")

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def setup(self, *words: str, refused: str = "nothing", old_python: str = "0") -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.bin), "STATE": str(self.state), "REFUSED": refused, "OLD_PYTHON": old_python}
        command = ["/bin/sh", "scripts/setup.sh", *words]
        return subprocess.run(command, cwd=self.folder / "project", env=env, capture_output=True, text=True, timeout=60, check=False)

    def asked(self, tool: str) -> list[str]:
        noted = self.state / tool
        return noted.read_text().splitlines() if noted.exists() else []

    def installed(self) -> list[str]:
        return [line for line in self.asked("pip") if " install " in line]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    (made.state / "ensurepip").touch()
    return made


def test_a_cpu_machine_gets_a_build_without_cuda_and_the_core(machine: Machine) -> None:
    done = machine.setup("tune")
    assert done.returncode == 0, done.stderr
    torch, package = machine.installed()
    assert torch.endswith(TORCH_CPU)
    assert package.endswith("-e .")


def test_the_tests_need_everything(machine: Machine) -> None:
    assert machine.setup("test").returncode == 0
    assert machine.installed()[-1].endswith("-e .[all,dev]")


def test_the_index_of_cpu_builds_comes_second_and_the_default_build_last(machine: Machine) -> None:
    done = machine.setup("tune", refused="+cpu")
    assert done.returncode == 0, done.stderr
    first, second, third, _ = machine.installed()
    assert "index-url" not in first
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in second
    assert "--timeout 10" in second
    assert third.endswith("torch>=2.8")
    assert "gigabytes" in done.stderr


def test_a_gpu_machine_gets_the_default_build_and_the_dsls(machine: Machine) -> None:
    (machine.folder / "project" / "scripts" / "has_gpu.sh").write_text("exit 0\n")
    assert machine.setup("tune").returncode == 0
    torch, package = machine.installed()
    assert torch.endswith("torch>=2.8")
    assert package.endswith("-e .[triton,tilelang,cuda]")


def test_a_missing_ensurepip_is_installed_by_root(machine: Machine) -> None:
    (machine.state / "ensurepip").unlink()
    machine.add("apt-get", APT)
    done = machine.setup("tune")
    assert done.returncode == 0, done.stderr
    assert machine.asked("apt") == ["install -y -q python3.11-venv"]


def test_a_missing_ensurepip_is_named_to_others(machine: Machine) -> None:
    (machine.state / "ensurepip").unlink()
    machine.add("apt-get", APT)
    machine.add("id", "#!/bin/sh\necho 1000\n")
    done = machine.setup("tune")
    assert done.returncode == 4
    assert "apt-get install python3.11-venv" in done.stderr
    assert machine.asked("apt") == []


def test_an_old_python_is_refused_with_what_to_do(machine: Machine) -> None:
    done = machine.setup("tune", old_python="1")
    assert done.returncode == 4
    assert "Python 3.11, 3.12 or 3.13 is needed" in done.stderr
    assert "PYTHON=" in done.stderr


def test_a_failed_install_fails(machine: Machine) -> None:
    assert machine.setup("tune", refused="-e .").returncode != 0


def test_has_gpu_is_quiet_and_says_it_by_its_code() -> None:
    done = subprocess.run(["/bin/sh", str(ROOT / "scripts" / "has_gpu.sh")], capture_output=True, env=os.environ, timeout=60, check=False)
    assert done.returncode in (0, 1)
    assert done.stdout == done.stderr == b""

"""The registry: found by place, by entry point and in a file; what cannot be used is a line, never a crash."""

import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from importlib import util
from pathlib import Path

import pytest

from kerneldyno import registry as registry_module
from kerneldyno.choose import availability
from kerneldyno.choose import choose
from kerneldyno.errors import PluginError
from kerneldyno.errors import RequestError
from kerneldyno.errors import Unavailable
from kerneldyno.grammar import parse
from kerneldyno.measure.device import cpu
from kerneldyno.measure.device import detect
from kerneldyno.registry import Registry
from kerneldyno.registry import resolve


ROOT = Path(registry_module.__file__).parent

KERNEL = """
class Copy:
    def space(self, workload, device): return None
    def build(self, workload, config, arch): return None
    def load(self, artifact, workload): return None
"""


def _plugin(tmp_path: Path, text: str, name: str = "mine.py") -> Path:
    file = tmp_path / name
    file.write_text(KERNEL + textwrap.dedent(text))
    return file


def test_ours_are_found_by_their_place() -> None:
    registry = Registry()
    assert {"gemm", "softmax", "vector_add"} <= set(registry.problems())
    assert "c" in registry.backends()
    assert {f"{problem}.c" for problem in registry.problems() if "c" in registry.kernels(problem)} == {
        f"{file.stem}.c" for file in (ROOT / "backends" / "c").glob("[!_]*.py")
    }
    assert not any(name.startswith("_") for name in (*registry.problems(), *registry.backends()))


def test_looking_up_imports_neither_torch_nor_a_dsl() -> None:
    script = """
        import sys
        from kerneldyno.registry import Registry
        registry = Registry()
        for problem in registry.problems():
            for backend in registry.kernels(problem):
                registry.kernel_ref(problem, backend), registry.kernel_digest(problem, backend)
        for backend in registry.backends():
            registry.load_backend(backend).probe(None)
        assert not {"torch", "triton", "tilelang", "cuda.core", "optuna"} & set(sys.modules), sorted(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


@pytest.fixture(scope="module")
def bare_path(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment for `python -S` in which only what the grammar and the tables need can be imported."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("omegaconf", "yaml", "rich", "markdown_it", "mdurl", "pygments"):
        spec = util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        (folder / name).symlink_to(Path(spec.origin).parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT.parent)))}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("list", 0, ["softmax", "gemm", "named shapes", "pip install"]),
        ("list problem=gemm", 0, ["shape.layout", "llama3-70b-gate-up-4k"]),
        ("list format=json", 0, ['"usable": false', '"failures": []']),
        ("doctor", 4, ["not installed", "pip install", "missing"]),
        ("help", 0, ["problem="]),
    ],
)
def test_list_and_doctor_work_with_no_dsl_and_no_torch(bare_path: dict[str, str], words: str, code: int, said: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "kerneldyno", *words.split()], env=bare_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == code, done.stderr
    for part in said:
        assert part in done.stdout


def test_unknown_names_come_with_the_nearest() -> None:
    registry = Registry()
    with pytest.raises(RequestError, match="Did you mean 'softmax'"):
        registry.problem_ref("sofmax")
    with pytest.raises(RequestError, match="unknown backend"):
        registry.kernel_ref("softmax", "nothing")


def test_a_file_adds_a_kernel_and_another_process_finds_the_same(tmp_path: Path) -> None:
    file = _plugin(tmp_path, "import types\nBACKENDS = {'mine': types.SimpleNamespace(name='mine', device_kind='cpu', probe=print)}\n")
    other = _plugin(tmp_path, "KERNELS = {'gemm.mine': Copy()}", "other.py")
    registry = Registry([file, other])
    assert registry.failures == []
    assert "mine" in registry.kernels("gemm")
    ref = pickle.loads(pickle.dumps(registry.kernel_ref("gemm", "mine")))
    assert resolve(ref) is registry.load_kernel("gemm", "mine")
    script = "import pickle, sys; from kerneldyno.registry import resolve; print(type(resolve(pickle.load(sys.stdin.buffer))).__name__)"
    done = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(ref), capture_output=True, check=True, timeout=60)
    assert done.stdout.decode().strip() == "Copy"


def test_the_digest_follows_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _plugin(tmp_path, "KERNELS = {'vector_add.mine': Copy()}\nBACKENDS = {'mine': 1}")
    before = Registry([file]).kernel_digest("vector_add", "mine")
    assert before == Registry([file]).kernel_digest("vector_add", "mine")
    file.write_text(file.read_text() + "# changed\n")
    assert before != Registry([file]).kernel_digest("vector_add", "mine")


def test_the_digest_covers_what_the_folder_shares_and_nothing_else(tmp_path: Path) -> None:
    # a copy of the tree, so that its files can be changed
    shutil.copytree(ROOT, tmp_path / "kerneldyno", ignore=shutil.ignore_patterns("__pycache__", "results"))
    folder = tmp_path / "kerneldyno" / "backends" / "c"

    def digest() -> str:
        script = "from kerneldyno.registry import Registry; print(Registry().kernel_digest('softmax', 'c'))"
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    seen = [digest()]
    for name in ("softmax.py", "_compile.py", "shared.h"):
        (folder / name).open("a").write("\n")
        seen.append(digest())
    assert len(set(seen)) == 4
    for name in ("gemm.py", "__init__.py"):
        (folder / name).open("a").write("\n")
        assert digest() == seen[-1]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import nothing_of_this_name", ("plugin mine.py", "ModuleNotFoundError: No module named 'nothing_of_this_name'")),
        ("1 +", ("plugin mine.py", "SyntaxError")),
        ("raise SystemError('a\\nb')", ("plugin mine.py", "SystemError: a b")),
        ("x = 1", ("plugin mine.py", "no PROBLEMS, BACKENDS or KERNELS")),
        ("KERNELS = [Copy()]", ("plugin mine.py", "KERNELS is not a mapping")),
        ("KERNELS = {'gemm': Copy()}", ("kernel gemm", "PROBLEM.BACKEND")),
        ("KERNELS = {'nothing.c': Copy()}", ("kernel nothing.c", "no problem 'nothing'")),
        ("KERNELS = {'gemm.nothing': Copy()}", ("kernel gemm.nothing", "no backend 'nothing'")),
        ("KERNELS = {'gemm.c': Copy()}", ("kernel gemm.c", "taken by kerneldyno")),
        ("PROBLEMS = {'gemm': Copy()}", ("problem gemm", "taken by kerneldyno")),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path: Path, text: str, line: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    file = _plugin(tmp_path, text)
    (failure,) = Registry([file]).failures
    assert failure.name == line[0]
    assert failure.origin == "mine.py"
    assert line[1] in failure.reason
    assert "\n" not in failure.reason


def test_ours_wins_a_collision(tmp_path: Path) -> None:
    registry = Registry([_plugin(tmp_path, "KERNELS = {'gemm.c': Copy()}")])
    assert registry.kernel_ref("gemm", "c").module == "kerneldyno.backends.c.gemm"


def test_what_lacks_an_attribute_is_named_when_loaded(tmp_path: Path) -> None:
    registry = Registry([_plugin(tmp_path, "BACKENDS = {'mine': Copy()}\nPROBLEMS = {'nil': Copy()}")])
    registry.check_plugins()
    assert [failure.name for failure in registry.failures] == ["problem nil", "backend mine"]
    with pytest.raises(PluginError, match="lacks name, dims"):
        registry.load_problem("nil")
    assert len(registry.failures) == 2
    assert availability("mine", registry, cpu()).usable is False


def test_a_probe_that_raises_is_not_usable(tmp_path: Path) -> None:
    text = "import types\nBACKENDS = {'mine': types.SimpleNamespace(name='mine', device_kind='cpu', probe=lambda device: 1 / 0)}"
    found = availability("mine", Registry([_plugin(tmp_path, text)]), cpu())
    assert not found.usable
    assert "ZeroDivisionError" in found.reason


def test_a_broken_plugin_is_refused_by_a_search_and_listed_by_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kerneldyno.cli import main

    file = _plugin(tmp_path, "import nothing_of_this_name")
    assert main(["problem=softmax", "backend=c", f"plugin={file}"]) == 2
    assert "mine.py cannot be used: ModuleNotFoundError" in capsys.readouterr().err
    assert main(["list", f"plugin={file}"]) == 0
    assert "plugin mine.py (from mine.py): ModuleNotFoundError" in capsys.readouterr().out


def test_choosing_fills_in_the_usable_and_says_why_not_the_others() -> None:
    plan, registry = parse(["problem=softmax", "device=cpu"])
    chosen, notices = choose(plan, registry, detect)
    assert chosen.jobs[0].backends == ("c",)
    assert notices == ()  # a GPU's backend on a CPU is no news


@pytest.mark.parametrize(
    ("words", "said"),
    [("backend=cuda device=cpu", "runs on cuda, not on cpu"), ("backend=cuda device=cuda:99", "device=cuda:99")],
)
def test_asked_for_and_not_usable_says_what_to_do(words: str, said: str) -> None:
    plan, registry = parse(["problem=softmax", *words.split()])
    with pytest.raises(Unavailable, match=said) as error:
        choose(plan, registry, detect)
    assert "hoose" in str(error.value)
    assert error.value.exit_code == 4

"""Look-up of problems, backends and kernels by name, without importing any before it is needed.

Ours are found by their place in the tree, those of other packages by entry points, those of a local file by its
`PROBLEMS`, `BACKENDS` and `KERNELS`. The registry imports neither torch nor a DSL; the modules that it loads may.
"""

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from typing import cast

from kerneldyno.core import Backend
from kerneldyno.core import Kernel
from kerneldyno.core import Problem
from kerneldyno.core import digest
from kerneldyno.errors import KerneldynoError
from kerneldyno.errors import PluginError
from kerneldyno.errors import RequestError
from kerneldyno.errors import Unavailable
from kerneldyno.errors import unknown


_PACKAGE = "kerneldyno"
_TREE = "kerneldyno"
# what a plugin must offer, checked on loading so that a gap is named before the search starts
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "problem": ("name", "dims", "dtypes", "shapes", "check", "inputs", "outputs", "reference", "tolerance", "work", "baselines"),
    "backend": ("name", "device_kind", "probe"),
    "kernel": ("space", "build", "load"),
}


@dataclass(frozen=True, slots=True)
class Ref:
    """Where an object is, so that another process finds the same one; picklable.

    Attributes:
        module: Dotted name of the module; empty where it is a file.
        file: Absolute path of a plugin file; empty where it is a module.
        attribute: Dotted attribute within; empty: the module itself.
        item: Key within a mapping attribute (`KERNELS["gemm.mydsl"]`); empty: none.
        origin: What a person would call the place: "kerneldyno", a distribution's name, a file's name.
    """

    module: str = ""
    file: str = ""
    attribute: str = ""
    item: str = ""
    origin: str = _TREE


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """One line of `tune list`.

    Attributes:
        name: What failed, as `kind name`: "kernel gemm.mydsl".
        origin: The package or file it is from.
        reason: Why, in one line.
    """

    name: str
    origin: str
    reason: str


def _load_file(path: str) -> ModuleType:
    # the name depends on the path alone, so that what a worker unpickles names the same module
    name = f"kerneldyno_plugin_{hashlib.sha256(path.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def resolve(ref: Ref) -> Any:
    """Import what a reference names; the worker processes call this too.

    Args:
        ref: From `Registry.problem_ref`, `backend_ref` or `kernel_ref`.

    Raises:
        Exception: Whatever the import raises.
    """
    found: Any = _load_file(ref.file) if ref.file else importlib.import_module(ref.module)
    for part in filter(None, ref.attribute.split(".")):
        found = getattr(found, part)
    return found[ref.item] if ref.item else found


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, KerneldynoError) else f"{type(error).__name__}: {text}"


def _modules(folder: Iterable[str], packages: bool) -> Iterator[str]:
    for found in pkgutil.iter_modules(folder):
        if found.ispkg == packages and not found.name.startswith("_"):
            yield found.name


class Registry:
    """Everything that can be named in a request.

    Args:
        plugins: Local plugin files.

    Attributes:
        failures: What could not be used, one entry for each; more may join as things are loaded.

    Raises:
        errors.RequestError: Where a plugin file does not exist.
    """

    def __init__(self, plugins: Iterable[str | Path] = ()) -> None:
        self.failures: list[PluginFailure] = []
        self._refs: dict[str, dict[str, Ref]] = {"problem": {}, "backend": {}, "kernel": {}}
        self._loaded: dict[tuple[str, str], Any] = {}
        root = Path(__file__).parent
        for name in _modules([str(root / "problems")], packages=False):
            self._refs["problem"][name] = Ref(module=f"{_PACKAGE}.problems.{name}")
        for backend in _modules([str(root / "backends")], packages=True):
            self._refs["backend"][backend] = Ref(module=f"{_PACKAGE}.backends.{backend}")
            for problem in _modules([str(root / "backends" / backend)], packages=False):
                self._refs["kernel"][f"{problem}.{backend}"] = Ref(module=f"{_PACKAGE}.backends.{backend}.{problem}")
        self._add_entry_points()
        for path in plugins:
            self._add_file(Path(path))
        self._check_kernel_names()

    def _add(self, kind: str, name: str, ref: Ref) -> None:
        taken = self._refs[kind].get(name)
        if taken is not None:
            self.failures.append(PluginFailure(f"{kind} {name}", ref.origin, f"the name is taken by {taken.origin}, which is used"))
        else:
            self._refs[kind][name] = ref

    def _add_entry_points(self) -> None:
        for kind in self._refs:
            # a distribution found twice on the path (an editable install beside a wheel) counts once
            points = {
                (point.dist.name if point.dist else "", point.name, point.value): point
                for point in importlib.metadata.entry_points(group=f"kerneldyno.{kind}s")
            }
            for (dist, name, _), point in sorted(points.items()):
                self._add(kind, name, Ref(module=point.module, attribute=point.attr or "", origin=dist or point.module))

    def _add_file(self, path: Path) -> None:
        path = path.expanduser().resolve()
        if not path.is_file():
            raise RequestError(f"plugin={path}: there is no such file")
        origin = path.name
        try:
            module = _load_file(str(path))
        except Exception as error:  # a user's file may raise anything; it becomes a line, not a crash
            self.failures.append(PluginFailure(f"plugin {origin}", origin, _one_line(error)))
            return
        tables = {kind: getattr(module, f"{kind}s".upper()) for kind in self._refs if hasattr(module, f"{kind}s".upper())}
        if not tables:
            self.failures.append(PluginFailure(f"plugin {origin}", origin, "it has no PROBLEMS, BACKENDS or KERNELS"))
        for kind, table in tables.items():
            attribute = f"{kind}s".upper()
            if not isinstance(table, Mapping):
                self.failures.append(PluginFailure(f"plugin {origin}", origin, f"{attribute} is not a mapping from names to objects"))
                continue
            for name in table:
                self._add(kind, str(name), Ref(file=str(path), attribute=attribute, item=str(name), origin=origin))

    def _check_kernel_names(self) -> None:
        for name, ref in list(self._refs["kernel"].items()):
            problem, dot, backend = name.partition(".")
            if not dot or not problem or not backend:
                reason = "a kernel's name is PROBLEM.BACKEND"
            elif problem not in self._refs["problem"]:
                reason = f"there is no problem '{problem}'"
            elif backend not in self._refs["backend"]:
                reason = f"there is no backend '{backend}'"
            else:
                continue
            del self._refs["kernel"][name]
            self.failures.append(PluginFailure(f"kernel {name}", ref.origin, reason))

    def problems(self) -> tuple[str, ...]:
        """Names of the problems, sorted."""
        return tuple(sorted(self._refs["problem"]))

    def backends(self) -> tuple[str, ...]:
        """Names of the backends, sorted."""
        return tuple(sorted(self._refs["backend"]))

    def kernels(self, problem: str) -> tuple[str, ...]:
        """Names of the backends that have a kernel for a problem, sorted."""
        names = (name.partition(".") for name in self._refs["kernel"])
        return tuple(sorted(backend for found, _, backend in names if found == problem))

    def _ref(self, kind: str, name: str) -> Ref:
        ref = self._refs[kind].get(name)
        if ref is None:
            raise unknown(kind, name, self._refs[kind])
        return ref

    def problem_ref(self, problem: str) -> Ref:
        """Where a problem is. Raises `errors.RequestError` for an unknown name."""
        return self._ref("problem", problem)

    def backend_ref(self, backend: str) -> Ref:
        """Where a backend is. Raises `errors.RequestError` for an unknown name."""
        return self._ref("backend", backend)

    def kernel_ref(self, problem: str, backend: str) -> Ref:
        """Where a kernel is.

        Raises:
            errors.RequestError: Where the problem or the backend is unknown, or the backend has no kernel for the problem.
        """
        self._ref("problem", problem)
        self._ref("backend", backend)
        ref = self._refs["kernel"].get(f"{problem}.{backend}")
        if ref is None:
            have = ", ".join(self.kernels(problem)) or "no backend"
            raise RequestError(f"backend '{backend}' has no kernel for problem '{problem}'. These have: {have}.")
        return ref

    def _load(self, kind: str, name: str, ref: Ref) -> Any:
        if (kind, name) in self._loaded:
            return self._loaded[kind, name]
        label = f"{kind} {name}"
        try:
            found = resolve(ref)
            lacking = [attribute for attribute in _NEEDED[kind] if not hasattr(found, attribute)]
            if lacking:
                raise PluginError(f"it lacks {', '.join(lacking)}")
            if kind != "kernel" and found.name != name:
                raise PluginError(f"it is registered as '{name}' but calls itself '{found.name}'")
        except Exception as error:  # whatever an import raises becomes one line
            reason = _one_line(error)
            if all(failure.name != label for failure in self.failures):
                self.failures.append(PluginFailure(label, ref.origin, reason))
            if isinstance(error, ImportError) and ref.origin == _TREE:
                raise Unavailable(f"{label} cannot be used here: {reason}. `tune doctor` says what is missing.") from error
            raise PluginError(f"{label} (from {ref.origin}) cannot be used: {reason}") from error
        self._loaded[kind, name] = found
        return found

    def load_problem(self, problem: str) -> Problem:
        """Import a problem.

        Raises:
            errors.RequestError: Where the name is unknown.
            errors.Unavailable: Where one of ours needs a package that is not installed.
            errors.PluginError: Where a plugin cannot be used.
        """
        return cast(Problem, self._load("problem", problem, self.problem_ref(problem)))

    def load_backend(self, backend: str) -> Backend:
        """Import a backend (not its DSL). Raises as `load_problem`."""
        return cast(Backend, self._load("backend", backend, self.backend_ref(backend)))

    def load_kernel(self, problem: str, backend: str) -> Kernel:
        """Import a kernel, and with it its DSL. Raises as `load_problem`."""
        return cast(Kernel, self._load("kernel", f"{problem}.{backend}", self.kernel_ref(problem, backend)))

    def check_plugins(self) -> None:
        """Import everything that is not ours, so that what cannot be used is among the failures."""
        loaders = {"problem": self.load_problem, "backend": self.load_backend}
        for kind, refs in self._refs.items():
            for name, ref in refs.items():
                if ref.origin == _TREE:
                    continue
                with contextlib.suppress(KerneldynoError):  # noted among the failures
                    if kind == "kernel":
                        problem, _, backend = name.partition(".")
                        self.load_kernel(problem, backend)
                    else:
                        loaders[kind](name)

    def kernel_digest(self, problem: str, backend: str) -> str:
        """Identity of a kernel's source: a changed kernel is measured again, an unchanged one is not.

        It covers the kernel's own module and what the modules of its folder share: private modules (`_*.py`) and
        files that are not Python (`.cuh`). For a plugin it covers the file alone.
        """
        ref = self.kernel_ref(problem, backend)
        if ref.file:
            return digest([Path(ref.file).read_text(errors="replace")])
        spec = importlib.util.find_spec(ref.module)
        if spec is None or spec.origin is None:
            raise PluginError(f"kernel {problem}.{backend} (from {ref.origin}) cannot be used: there is no module {ref.module}")
        file = Path(spec.origin)
        files = [file]
        if ref.origin == _TREE:
            for other in sorted(file.parent.rglob("*")):
                shared = other.name.startswith("_") and other.name != "__init__.py" if other.suffix == ".py" else other.suffix != ".pyc"
                if other.is_file() and shared and "__pycache__" not in other.parts:
                    files.append(other)
        return digest([[path.name, path.read_text(errors="replace")] for path in files])

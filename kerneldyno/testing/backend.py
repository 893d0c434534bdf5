"""What every backend keeps: inherit `BackendContract` in your tests, name your backend, and run pytest."""

import importlib
import subprocess
import sys
from types import ModuleType
from typing import ClassVar

from kerneldyno.core import Availability
from kerneldyno.core import Device
from kerneldyno.measure.device import cpu
from kerneldyno.testing.devices import H200


HEAVY = ("torch", "triton", "tilelang", "tvm", "cuda.core", "cuda.bindings")
"""Packages that take a second or more to import, or load a GPU library: a probe must do without."""


class BackendContract:
    """Checks that a backend says whether it is usable, quickly and in words.

    Attributes:
        backend: The backend, a module.
        heavy: Modules that a probe must not import.
    """

    backend: ClassVar[ModuleType]
    heavy: ClassVar[tuple[str, ...]] = HEAVY

    def device(self) -> Device:
        """Return a device of the backend's kind."""
        return cpu() if self.backend.device_kind == "cpu" else H200

    def test_it_says_what_it_is(self) -> None:
        """Its name is the last part of its module, its kind of device is one we have."""
        assert self.backend.name
        assert self.backend.name == self.backend.name.lower()
        assert self.backend.device_kind in {"cuda", "cpu"}

    def test_probe_gives_versions_or_a_remedy(self) -> None:
        """Usable with the versions that could change a result, or not, with the reason and what to do."""
        _assert_clear(self.backend.probe(self.device()))

    def test_probe_without_a_device(self) -> None:
        """Without a device of its kind, a CUDA backend is not usable, and says so."""
        found = self.backend.probe(None)
        _assert_clear(found)
        if self.backend.device_kind == "cuda":
            assert not found.usable

    def test_probe_imports_no_compiler(self) -> None:
        """`tune list` probes every backend: it stays quick and works with no DSL installed."""
        code = "\n".join(
            (
                "import importlib, sys",
                "from kerneldyno.testing.devices import H200",
                f"backend = importlib.import_module({self.backend.__name__!r})",
                "backend.probe(H200 if backend.device_kind == 'cuda' else None)",
                f"print(*(name for name in {self.heavy!r} if name in sys.modules))",
            )
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
        assert ran.returncode == 0, ran.stderr
        assert not ran.stdout.split(), f"probing imports {ran.stdout.strip()}"

    def test_it_imports_twice(self) -> None:
        """Importing the module again gives the same one: it registers nothing on the way."""
        assert importlib.import_module(self.backend.__name__) is self.backend


def _assert_clear(found: Availability) -> None:
    if found.usable:
        assert found.versions
        assert not found.reason
        assert not found.remedy
    else:
        assert found.reason.strip()
        assert found.remedy.strip()
        assert "\n" not in found.reason

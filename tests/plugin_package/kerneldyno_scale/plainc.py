"""A backend of its own: plain C, compiled with cc, one thread."""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kerneldyno.core import Artifact
from kerneldyno.core import Availability
from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Tensors


name = "plainc"
device_kind = "cpu"


def probe(device: Device | None) -> Availability:
    """Usable where cc is on the path."""
    if shutil.which("cc") is None:
        return Availability(False, "there is no C compiler (cc)", "apt-get install gcc")
    return Availability(True)


def build(source: str, entry: str, config: Config, arch: str) -> Artifact:
    """Compile C source to a shared library; raises CalledProcessError where cc refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.c")
        file.write_text(source)
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", str(file), "-o", f"{file}.so"], check=True, capture_output=True, text=True)
        return Artifact(config, arch, source, entry, Path(f"{file}.so").read_bytes())


class Launch:
    """A C function whose arguments are the tensors' addresses, then whole numbers."""

    def __init__(self, artifact: Artifact, arguments: Callable[[Tensors, Tensors], tuple[Any, ...]]) -> None:
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(artifact.binary)
            file.flush()
            self._function = getattr(ctypes.CDLL(file.name), artifact.entry)
        self._arguments = arguments

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind the addresses."""
        self._held = self._arguments(inputs, outputs)
        self._call = partial(
            self._function, *(ctypes.c_int64(item) if isinstance(item, int) else ctypes.c_void_p(item.data_ptr()) for item in self._held)
        )

    def run(self) -> None:
        """Run the kernel."""
        self._call()

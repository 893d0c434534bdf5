"""From C source to a function that runs: finding the compiler, building a shared library, loading it."""

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from collections.abc import Mapping
from functools import cache
from functools import partial
from pathlib import Path
from typing import Any

from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Param
from kerneldyno.core import Tensors
from kerneldyno.errors import KerneldynoError
from kerneldyno.errors import Unavailable


FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
"""Contraction makes `c += a * b` one FMA; without errno the compiler need not keep calls that could set it."""

NATIVE = "-march=native"

MESSAGE_LIMIT = 2000
"""Most characters of the compiler's text in an error: the first errors, as later ones follow from them."""

_VERSION_TIMEOUT_S = 20


class BuildError(KerneldynoError):
    """The C compiler refused the source, or lacks OpenMP."""


def find_compiler() -> list[str]:
    """Return the command of the C compiler: `CC` where it is set (it may hold options), else cc, gcc or clang on `PATH`.

    Raises:
        Unavailable: There is none.
    """
    words = shlex.split(os.environ.get("CC", ""))
    if words:
        if shutil.which(words[0]) is None:
            raise Unavailable(f"CC names '{words[0]}', which is not on PATH")
        return words
    for word in ("cc", "gcc", "clang"):
        if shutil.which(word):
            return [word]
    raise Unavailable("no C compiler: neither cc, gcc nor clang is on PATH")


@cache
def compiler_version(command: tuple[str, ...]) -> str:
    """Return the compiler's kind and version, "gcc 12.2.0" or "clang 14.0.6".

    Args:
        command: The compiler's words, as `find_compiler` gives them.

    Raises:
        Unavailable: It does not run.
    """
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"the C compiler does not run: {error}") from error
    kind = "clang" if "clang" in done.stdout else "gcc" if "Free Software Foundation" in done.stdout else command[0]
    # a packager's note such as "(Debian 12.2.0-14)" comes before gcc's own number, "(tags/...)" after clang's
    first = re.sub(r"\([^)]*\)", "", done.stdout.partition("\n")[0])
    number = re.search(r"\d+(\.\d+)+", first)
    return f"{kind} {number.group() if number else 'of unknown version'}"


def build_library(source: str, entry: str, config: Config, arch: str, threads: int, payload: Mapping[str, Any] | None = None) -> Artifact:
    """Compile C source to a shared library for this machine's own CPU.

    Args:
        source: The C source.
        entry: The function to call.
        config: The configuration, kept in the artifact.
        arch: The target, kept in the artifact.
        threads: Threads of the OpenMP team.
        payload: What `load` needs besides.

    Raises:
        BuildError: The compiler refused it; the text holds what it said.
        Unavailable: There is no compiler.
    """
    command = find_compiler()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kerneldyno-") as folder:
        Path(folder, f"{entry}.c").write_text(source)
        words = [*command, *FLAGS, NATIVE, f"{entry}.c", "-o", f"{entry}.so", "-lm"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        if done.returncode and re.search("march|native", done.stderr):
            # clang before 16 knows no native on aarch64; a compiler without it still makes a right kernel
            done = subprocess.run([word for word in words if word != NATIVE], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(_explain(command, done.stderr))
        binary = Path(folder, f"{entry}.so").read_bytes()
    return Artifact(config, arch, source, entry, binary, payload or {}, threads=threads, compile_s=time.perf_counter() - started)


def _explain(command: list[str], stderr: str) -> str:
    text = stderr.strip()
    if len(text) > MESSAGE_LIMIT:
        text = f"{text[:MESSAGE_LIMIT]}\n({len(text) - MESSAGE_LIMIT} more characters)"
    missing = re.search(r"omp\.h|l[gi]?omp\b|-fopenmp|libgomp\.spec", stderr)
    remedy = "\nOpenMP is missing: apt-get install gcc libgomp1 (for clang: libomp-dev)." if missing else ""
    return f"{' '.join(command)} failed:\n{text}{remedy}"


def load_function(artifact: Artifact) -> Callable[..., None]:
    """Load the library and return its entry point.

    Where torch is loaded the OpenMP calls bind to the libgomp that torch brings, since that is in the process's global
    scope already: one team of threads serves both, and two teams never spin against each other.

    Args:
        artifact: What `build_library` made.
    """
    # a fresh name each time: the dynamic loader takes a library of a name it knows for the same one
    with tempfile.NamedTemporaryFile(prefix=f"kerneldyno-{artifact.entry}-", suffix=".so") as file:
        file.write(artifact.binary)
        file.flush()
        function = getattr(ctypes.CDLL(file.name), artifact.entry)
    function.restype = None
    return function


class CLaunch:
    """A C function with its arguments.

    Args:
        artifact: What `build_library` made.
        arguments: Gives the function's arguments for inputs and outputs: a tensor becomes its address, a number an int64_t.
    """

    def __init__(self, artifact: Artifact, arguments: Callable[[Tensors, Tensors], tuple[Any, ...]]) -> None:
        self._function = load_function(artifact)
        self._arguments = arguments
        self._held: tuple[Any, ...] = ()
        self._call: Callable[[], None] | None = None

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind the tensors' addresses, and hold the tensors."""
        self._held = self._arguments(inputs, outputs)
        words = [ctypes.c_int64(item) if isinstance(item, int) else ctypes.c_void_p(item.data_ptr()) for item in self._held]
        self._call = partial(self._function, *words)

    def run(self) -> None:
        """Run the kernel to its end.

        Raises:
            RuntimeError: `prepare` was not called.
        """
        if self._call is None:
            raise RuntimeError("prepare() comes before run()")
        self._call()


def threads_knob(device: Device) -> Param:
    """Return the knob for the size of the OpenMP team: powers of two up to the cores, and the cores.

    Args:
        device: The CPU; `sm_count` is the cores that this process may use.
    """
    counts = {1 << power for power in range(device.sm_count.bit_length())} | {device.sm_count}
    return Param("threads", tuple(sorted(counts)), "threads of the OpenMP team")


def vector_knob(arch: str) -> Param:
    """Return the knob for the vectors' width: up to that of a register, since wider ones go through memory (gcc 12: 3 times slower).

    Args:
        arch: "x86_64" or "aarch64".
    """
    widest = vector_registers(arch)[1]
    return Param("vector_bytes", tuple(width for width in (16, 32, 64) if width <= widest), "bytes of a vector of fp32")


def vector_registers(arch: str) -> tuple[int, int]:
    """Return the number of this machine's vector registers and the bytes of each.

    Args:
        arch: "x86_64" or "aarch64".

    Source: Intel SDM vol. 1, 3.7.2 (16 XMM or YMM, 32 ZMM registers); Arm ARM, B1.2.1 (32 registers of 128 bits).
    """
    if arch != "x86_64":
        return 32, 16
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        flags = []
    if "avx512f" in flags:
        return 32, 64
    return (16, 32) if "avx2" in flags else (16, 16)

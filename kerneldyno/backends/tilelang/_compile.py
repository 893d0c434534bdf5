"""From a TileLang function to an artifact, and from an artifact to a launch; shared by the kernels of this folder.

The artifact's binary is the shared library that TileLang links: the host function, which checks the tensors and builds tensor maps,
with the machine code (a cubin) inside. So the process that runs it needs no compiler, and TileLang's own cache is left out: an
interrupted write there would fail later runs (tilelang issue 1813), and two processes that build never meet.
"""

import contextlib
import logging
import os
import re
import struct
import tempfile
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import tilelang

from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Launch
from kerneldyno.core import Tensors


DTYPES: Mapping[str, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""TileLang's names of our dtypes."""

STATIC_SMEM_BYTES = 1024
"""Shared memory of a block beside what is dynamic: at most this, since barriers come first and tiles are aligned to 1024 bytes."""

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_STATIC_SMEM = re.compile(r"(\d+) bytes smem")
_ELF = b"\x7fELF"
_ELF_CUDA = 190
_MOST_ERROR_LINES = 8


@dataclass(frozen=True, slots=True)
class Program:
    """What TileLang compiles.

    Attributes:
        function: A `T.prim_func`.
        passes: Settings of TileLang's passes, by key.
    """

    function: Any
    passes: Mapping[str, Any] = field(default_factory=dict)


def build(program: Program, config: Config, arch: str) -> Artifact:
    """Compile a program and describe what came out; needs no GPU.

    Args:
        program: What to compile.
        config: The configuration it was made from.
        arch: Target such as "sm_90a".

    Raises:
        RuntimeError: nvcc refused the generated source; the text holds its errors.
    """
    with _settings() as log:
        try:
            kernel = tilelang.compile(
                program.function,
                target={"kind": "cuda", "arch": arch},
                execution_backend="tvm_ffi",
                verbose=False,
                pass_configs=dict(program.passes),
            )
        except RuntimeError as error:
            raise RuntimeError(_nvcc_errors(str(error))) from None
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "kernel.so")
            kernel.adapter.get_exportable_executable().export_library(str(library))
            binary = library.read_bytes()
    # where a second kernel combines what the first computed, the first is the one with tiles in shared memory
    attributes = max(
        (function.attrs for function in kernel.artifact.device_mod.functions.values()),
        key=lambda attributes: int(attributes.get("dyn_shared_memory_buf", 0)),
    )
    extents = attributes["thread_extent"]
    ptxas = "\n".join(log)
    spills = [int(stores) + int(loads) for stores, loads in _SPILLS.findall(ptxas)]
    static = [int(size) for size in _STATIC_SMEM.findall(ptxas)]
    return Artifact(
        config=config,
        arch=arch,
        source=kernel.get_kernel_source(),
        entry=str(attributes["global_symbol"]),
        binary=binary,
        payload={"host_function": str(program.function.attrs["global_symbol"]), "cubin_span": list(_cubin_span(binary))},
        registers=max((int(count) for count in _USED.findall(ptxas)), default=None),
        smem_bytes=int(attributes.get("dyn_shared_memory_buf", 0)) + max(static, default=0),
        spill_bytes=sum(spills) if spills else None,
        # the compiler adds a warpgroup of producers where it specialises warps
        threads=int(extents["threadIdx.x"]) * int(extents["threadIdx.y"]) * int(extents["threadIdx.z"]),
        texts={"ptxas": "\n".join(line for line in ptxas.splitlines() if line.startswith(("ptxas", "    ")))},
    )


def load(artifact: Artifact, arguments: tuple[str, ...]) -> Launch:
    """Load what `build` made.

    Args:
        artifact: It.
        arguments: Names of the tensors in the order of the function's parameters.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "kernel.so")
        library.write_bytes(artifact.binary)
        module = tilelang.tvm.runtime.load_module(str(library))
    return _Launch(module, artifact.payload["host_function"], arguments)


class _Launch:
    """A loaded library with its tensors bound."""

    def __init__(self, module: Any, function: str, arguments: tuple[str, ...]) -> None:
        # the module owns the library and must outlive the function
        self._module = module
        self._call = module[function]
        self._arguments = arguments

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind tensors. TileLang's host function makes its tensor maps at each launch, on the CPU: there is nothing to prepare."""
        tensors = {**inputs, **outputs}
        self._tensors = tuple(tensors[argument] for argument in self._arguments)

    def run(self) -> None:
        """Launch once; tvm-ffi takes torch's current stream from the tensors' device."""
        self._call(*self._tensors)


@contextlib.contextmanager
def _settings() -> Iterator[list[str]]:
    """Within it TileLang caches nothing and shows nothing, and asks ptxas what the code needs: the log gathers in the list."""
    wanted = {"TILELANG_DISABLE_CACHE": "1", "TILELANG_PRINT_ON_COMPILATION": "0", "TILELANG_VERBOSE": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    logger = logging.getLogger("tilelang")
    handlers = logger.handlers
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.handlers = [handler]
    os.environ.update(wanted)
    try:
        yield lines
    finally:
        logger.handlers = handlers
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _nvcc_errors(text: str) -> str:
    """Keep the lines that say what is wrong: nvcc's errors, where there are some, come after the whole source and its warnings."""
    errors = [line.strip() for line in text.splitlines() if re.search(r"\berror\b", line)]
    return "\n".join(errors[:_MOST_ERROR_LINES]) if errors else text[-2000:]


def _cubin_span(library: bytes) -> tuple[int, int]:
    """Offset and length of the machine code in the library: an ELF file of its own, for a disassembler.

    Source: the ELF-64 header (System V ABI): the machine at byte 18, the offsets of both header tables at 32, their sizes at 54.
    """
    start = library.find(_ELF, len(_ELF))
    while start >= 0 and struct.unpack_from("<H", library, start + 18)[0] != _ELF_CUDA:
        start = library.find(_ELF, start + len(_ELF))
    if start < 0:
        raise RuntimeError("the library that TileLang linked holds no machine code for a GPU")
    program_at, section_at = struct.unpack_from("<QQ", library, start + 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", library, start + 54)
    # the tables stand at the end of a cubin
    return start, max(program_at + program_size * programs, section_at + section_size * sections)

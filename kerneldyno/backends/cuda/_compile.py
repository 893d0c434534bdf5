"""Puts a kernel's source text together and compiles it with NVRTC, with no GPU and no header files."""

import re
import time
from collections.abc import Mapping
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from cuda.bindings import nvrtc

from kerneldyno.core import Artifact
from kerneldyno.core import Config


REGISTERS_PER_THREAD = 255
"""Most registers a thread can have. Source: CUDA C++ Programming Guide, table of technical specifications (9.0)."""

_USED = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_SMEM = re.compile(r"(\d+) bytes smem")


def source_text(kernel: str, dtype: str, constants: Mapping[str, int], macros: Mapping[str, str], pieces: Sequence[str] = ()) -> str:
    """Return the whole text of one configuration: its constants, the common vocabulary, what it shares with others, the kernel.

    Args:
        kernel: Name of the kernel's file beside this one, without the ending.
        dtype: fp32, fp16 or bf16.
        constants: Whole numbers below 2^31, or switches.
        macros: What must be a macro: names of enumerators, attributes.
        pieces: Names, without the ending, of the files that the kernel builds on, in order.
    """
    lines = [f"#define DTYPE_{dtype.upper()} 1"]
    lines += [f"#define {name} {value}".rstrip() for name, value in macros.items()]
    for name, value in constants.items():
        kind = "bool" if isinstance(value, bool) else "int"
        lines.append(f"constexpr {kind} {name} = {str(value).lower()};")
    return "\n".join([*lines, "", *(piece(f"{name}.cuh") for name in ("ptx", *pieces, kernel))])


def piece(name: str) -> str:
    """Return the text of a file of device code in this folder."""
    return (files(__package__) / name).read_text(encoding="utf-8")


def compile_kernel(
    text: str,
    entry: str,
    config: Config,
    arch: str,
    *,
    blocks: int,
    threads: int,
    smem_bytes: int,
    tensors: Sequence[str],
    then: Sequence[Mapping[str, Any]] = (),
    maps: Mapping[str, Mapping[str, Any]] | None = None,
) -> Artifact:
    """Compile one source text to machine code.

    Args:
        text: From `source_text`.
        entry: Name of the kernel in it, which takes one pointer for each tensor.
        config: The configuration.
        arch: The target, such as "sm_90a".
        blocks: Thread blocks of the launch.
        threads: Threads a block.
        smem_bytes: Dynamic shared memory a block, in bytes.
        tensors: Names of the tensors in the order of the kernel's parameters.
        then: Kernels of the same text that each run launches after it: their entry, blocks, threads, smem_bytes and tensors.
        maps: For tensors that the kernel takes as tensor maps, not pointers: what `_tensor_map.tensor_map` gave.

    Raises:
        RuntimeError: Where NVRTC refuses the text; its log is in the message.
    """
    started = time.perf_counter()
    program = _value(nvrtc.nvrtcCreateProgram(text.encode(), f"{entry}.cu".encode(), 0, [], []))
    try:
        options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"-default-device", b"--ptxas-options=-v"]
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        log = bytes(_value(nvrtc.nvrtcGetProgramLogSize(program)))
        _value(nvrtc.nvrtcGetProgramLog(program, log))
        listing = log.rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC: {status.name}\n{listing}")
        cubin = bytes(_value(nvrtc.nvrtcGetCUBINSize(program)))
        _value(nvrtc.nvrtcGetCUBIN(program, cubin))
        ptx = bytes(_value(nvrtc.nvrtcGetPTXSize(program)))
        _value(nvrtc.nvrtcGetPTX(program, ptx))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    registers = [int(used) for used in _USED.findall(listing)]
    spills = [int(stores) + int(loads) for stores, loads in _SPILLS.findall(listing)]
    static = [int(smem) for smem in _SMEM.findall(listing)]
    payload: dict[str, Any] = {"blocks": blocks, "threads": threads, "smem_bytes": smem_bytes, "tensors": list(tensors)}
    if then:
        payload["then"] = [dict(kernel) for kernel in then]
    if maps:
        payload["maps"] = dict(maps)
    return Artifact(
        config=dict(config),
        arch=arch,
        source=text,
        entry=entry,
        binary=cubin,
        payload=payload,
        registers=max(registers, default=None),
        smem_bytes=smem_bytes + max(static, default=0),
        spill_bytes=sum(spills) if spills else None,
        threads=threads,
        texts={"ptx": ptx.rstrip(b"\0").decode(), "ptxas": listing},
        compile_s=time.perf_counter() - started,
    )


def _value(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC: {status.name}")
    return values[0] if values else None

"""Runs what TileLang generates on a CPU, in float32 and in bfloat16 with wgmma and tensor maps: numbers without a GPU."""

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tilelang
import torch

from kerneldyno.backends.tilelang._compile import Program


HEADER = Path(__file__).with_name("emulated.h")
TENSOR_HEADER = Path(__file__).with_name("emulated_tensor.h")
SIGNATURE = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(\d+, \d+\) )?(\w+)\(([^)]*)\) \{')
TENSOR_MAP = re.compile(r'T\.call_packed\("__tvm_tensormap_create_tiled", (\w+), ([^)]*)\)')


def _lower(program: Program) -> tuple[Any, dict[str, int]]:
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with tilelang.tvm.transform.PassContext(opt_level=3, config=dict(program.passes)), target:
        artifact = tilelang.lower(program.function, target=target)
    (function,) = artifact.device_mod.functions.values()
    return artifact, {str(name): int(value) for name, value in function.attrs["thread_extent"].items()}


def lower(program: Program) -> tuple[str, tuple[int, int], int]:
    """Return the generated source, the grid and the threads of a block; nvcc is not needed."""
    artifact, extent = _lower(program)
    return artifact.kernel_source, (extent["blockIdx.x"], extent.get("blockIdx.y", 1)), extent["threadIdx.x"]


def _compile(source: str, headers: Sequence[Path], grid: tuple[int, int], threads: int, arguments: Sequence[str], folder: Path) -> Any:
    """Compile the kernel with a driver that runs its blocks in turn; the arguments are C++ over `void **tensors`."""
    body = "\n".join(line for line in source.splitlines() if not line.startswith("#") and "extern __shared__" not in line)
    entry, _ = SIGNATURE.search(body).groups()
    columns, rows = grid
    driver = f"""
        extern "C" void run(void **tensors) {{
          gridDim = {{{columns}, {rows}, 1}};
          for (int y = 0; y < {rows}; ++y) for (int x = 0; x < {columns}; ++x) {{
            blockIdx = {{x, y, 0}};
            block_barrier = std::make_unique<std::barrier<>>({threads});
            std::vector<std::thread> team;
            for (int thread = 0; thread < {threads}; ++thread)
              team.emplace_back([=] {{
                threadIdx = {{thread, 0, 0}};
                {entry}({", ".join(arguments)});
              }});
            for (auto &thread : team) thread.join();
          }}
        }}"""
    (folder / "kernel.cpp").write_text("".join(header.read_text() for header in headers) + body + driver)
    library = folder / "kernel.so"
    command = ["g++", "-std=c++20", "-O1", "-w", "-pthread", "-shared", "-fPIC", folder / "kernel.cpp", "-o", library]
    subprocess.run([str(word) for word in command], check=True)
    return ctypes.CDLL(str(library)).run


def _parameters(source: str) -> list[str]:
    _, parameters = SIGNATURE.search(source).groups()
    return [parameter.split()[-1] for parameter in parameters.split(",")]


def run(program: Program, folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Compile the generated source with g++ and run it; it writes into the tensors.

    Args:
        program: A program in float32 without tensor cores.
        folder: An empty folder to compile in.
        tensors: C-contiguous arrays by the names of the function's parameters.
    """
    source, grid, threads = lower(program)
    names = _parameters(source)
    call = _compile(source, [HEADER], grid, threads, [f"(float *)tensors[{i}]" for i in range(len(names))], folder)
    call((ctypes.c_void_p * len(names))(*(tensors[name].ctypes.data for name in names)))


def run_tensor_cores(program: Program, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Do the same for a program with wgmma and tensor maps on 2-byte elements.

    Args:
        program: A program in bfloat16.
        folder: An empty folder to compile in.
        tensors: Contiguous tensors by the names of the function's parameters, bfloat16, int32 and float32.
    """
    artifact, extent = _lower(program)
    source = artifact.kernel_source
    names = list(tensors)
    maps = {name: _tensor_map(values, names) for name, values in TENSOR_MAP.findall(str(artifact.host_mod))}
    kinds = {torch.bfloat16: "bfloat16_t", torch.int32: "int", torch.float32: "float"}
    arguments = [maps.get(name) or f"({kinds[tensors[name].dtype]} *)tensors[{names.index(name)}]" for name in _parameters(source)]
    grid = extent["blockIdx.x"], extent.get("blockIdx.y", 1)
    call = _compile(source, [HEADER, TENSOR_HEADER], grid, extent["threadIdx.x"], arguments, folder)
    call((ctypes.c_void_p * len(names))(*(tensors[name].data_ptr() for name in names)))


def _tensor_map(text: str, names: list[str]) -> str:
    """A tensor map in C++ from the host's call: type, rank, tensor, sizes, strides in bytes, box, steps, interleave, swizzle, ..."""
    _, rank, tensor, *rest = text.split(", ")
    rank = int(rank)
    dims, strides, box = (rest[i * rank : (i + 1) * rank] for i in range(3))
    swizzle = (0, 32, 64, 128)[int(rest[4 * rank + 1])]
    return (
        f"CUtensorMap{{(char *)tensors[{names.index(tensor)}], {rank}, "
        + ", ".join(f"{{{', '.join(values)}}}" for values in (dims, strides, box))
        + f", {swizzle}}}"
    )

"""Runs what TileLang generates for float32 on a CPU: numbers without a GPU."""

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import tilelang

from kerneldyno.backends.tilelang._compile import Program


HEADER = Path(__file__).with_name("emulated.h")
SIGNATURE = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(\d+, \d+\) )?(\w+)\(([^)]*)\) \{')


def lower(program: Program) -> tuple[str, tuple[int, int], int]:
    """Return the generated source, the grid and the threads of a block; nvcc is not needed."""
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with tilelang.tvm.transform.PassContext(opt_level=3, config=dict(program.passes)), target:
        artifact = tilelang.lower(program.function, target=target)
    (function,) = artifact.device_mod.functions.values()
    extent = {str(name): int(value) for name, value in function.attrs["thread_extent"].items()}
    return artifact.kernel_source, (extent["blockIdx.x"], extent.get("blockIdx.y", 1)), extent["threadIdx.x"]


def run(program: Program, folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Compile the generated source with g++ and run it; it writes into the tensors.

    Args:
        program: A program in float32 without tensor cores.
        folder: An empty folder to compile in.
        tensors: C-contiguous arrays by the names of the function's parameters.
    """
    source, (columns, rows), threads = lower(program)
    body = "\n".join(line for line in source.splitlines() if not line.startswith("#"))
    entry, parameters = SIGNATURE.search(body).groups()
    names = [parameter.split()[-1] for parameter in parameters.split(",")]
    driver = f"""
        extern "C" void run(float **tensors) {{
          gridDim = {{{columns}, {rows}, 1}};
          for (int y = 0; y < {rows}; ++y) for (int x = 0; x < {columns}; ++x) {{
            blockIdx = {{x, y, 0}};
            block_barrier = std::make_unique<std::barrier<>>({threads});
            std::vector<std::thread> team;
            for (int thread = 0; thread < {threads}; ++thread)
              team.emplace_back([=] {{
                threadIdx = {{thread, 0, 0}};
                {entry}({", ".join(f"tensors[{i}]" for i in range(len(names)))});
              }});
            for (auto &thread : team) thread.join();
          }}
        }}"""
    (folder / "kernel.cpp").write_text(HEADER.read_text() + body + driver)
    library = folder / "kernel.so"
    command = ["g++", "-std=c++20", "-O1", "-w", "-pthread", "-shared", "-fPIC", folder / "kernel.cpp", "-o", library]
    subprocess.run([str(word) for word in command], check=True)
    pointers = (ctypes.POINTER(ctypes.c_float) * len(names))(
        *(tensors[name].ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for name in names)
    )
    ctypes.CDLL(str(library)).run(pointers)

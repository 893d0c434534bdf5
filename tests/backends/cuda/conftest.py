"""Runs the text of a CUDA kernel on the host, and disassembles its machine code."""

import os
import shutil
import subprocess
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch


@dataclass(frozen=True)
class Emulated:
    """What an emulated launch gave: its tensors, the last argument among them, and the bank conflicts of its ldmatrix instructions."""

    tensors: Mapping[str, torch.Tensor]
    output: torch.Tensor
    bank_conflicts: int


Emulate = Callable[..., Emulated]

_EMULATED = {"ptx.cuh": "emulated_ptx.h", "tma.cuh": "emulated_hopper.h", "wgmma.cuh": ""}
"""What stands in for the pieces that only a GPU can do; one file for both of Hopper's."""


@pytest.fixture
def emulate(tmp_path: Path) -> Emulate:
    """Return a function that runs an artifact's source in an emulator, twice: copies late and threads in order, then the opposite."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the emulated kernel with")

    def run(artifact: object, tensors: Mapping[str, torch.Tensor], cluster: int = 1) -> Emulated:
        from kerneldyno.backends.cuda._compile import piece

        assert piece("ptx.cuh") in artifact.source
        source = artifact.source
        for vocabulary, emulated in _EMULATED.items():
            source = source.replace(piece(vocabulary), Path(__file__).with_name(emulated).read_text() if emulated else "")
        kernels = [{"entry": artifact.entry, **artifact.payload}, *artifact.payload.get("then", ())]
        names = list(dict.fromkeys(name for kernel in kernels for name in kernel["tensors"]))
        launches = []
        for kernel in kernels:
            maps = kernel.get("maps", {})
            arguments = ", ".join(_argument(names.index(name), maps.get(name)) for name in kernel["tensors"])
            sizes = ", ".join(str(kernel[size]) for size in ("blocks", "threads"))
            launches.append(f"{{{sizes}, {cluster}, {kernel['smem_bytes']}, [] {{ {kernel['entry']}({arguments}); }}}}")
        main = f"int main(int count, char** words) {{ return emulate(count, words, {{{', '.join(launches)}}}); }}\n"
        (tmp_path / "kernel.cpp").write_text(source + main)
        subprocess.run([compiler, "-std=c++17", "-O1", "-w", "-o", tmp_path / "kernel", tmp_path / "kernel.cpp"], check=True, timeout=300)
        results = []
        for lazy, reverse in (("1", "0"), ("0", "1")):
            files = []
            for name in names:
                path = tmp_path / f"{name}.bin"
                path.write_bytes(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
                files += [str(path), str(tensors[name].nbytes)]
            ran = subprocess.run([tmp_path / "kernel", lazy, reverse, *files], capture_output=True, text=True, timeout=300)
            assert ran.returncode == 0, ran.stderr or f"the kernel died with {ran.returncode} (a touched guard page is -11)"
            results.append({name: _read(tmp_path / f"{name}.bin", tensors[name]) for name in names})
        for name in names:
            first, second = (result[name].view(torch.uint8) for result in results)
            assert torch.equal(first, second), f"the order of threads or copies changes {name}"
        return Emulated(results[0], results[0][kernels[0]["tensors"][-1]], int(ran.stdout))

    return run


def _argument(index: int, tensor_map: Mapping[str, list[int]] | None) -> str:
    """Return the text of an argument: the tensor's address, or the map that is encoded where there is a driver."""
    if tensor_map is None:
        return f"tensor({index})"
    sizes, strides, box = (", ".join(map(str, tensor_map[part])) for part in ("sizes", "strides", "box"))
    return f"TensorMap{{tensor({index}).bytes, {{{sizes}}}, {{2, {strides}}}, {{{box}}}}}"


def _read(path: Path, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=like.dtype).reshape(like.shape)


@pytest.fixture(scope="session")
def disassemble(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], str]:
    """Return a function that gives the SASS text of a cubin."""
    tool = _nvdisasm()
    if tool is None:
        pytest.skip("no nvdisasm: neither Triton's wheel nor a CUDA toolkit is installed")

    def run(cubin: bytes) -> str:
        path = tmp_path_factory.mktemp("cubin") / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([tool, path], check=True, capture_output=True, text=True, timeout=300).stdout

    return run


def _nvdisasm() -> str | None:
    try:
        import triton
    except ImportError:
        triton = None
    if triton is not None:
        bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    return shutil.which("nvdisasm")

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
    """What an emulated launch gave: the output tensor and the bank conflicts of its ldmatrix instructions."""

    output: torch.Tensor
    bank_conflicts: int


Emulate = Callable[..., Emulated]


@pytest.fixture
def emulate(tmp_path: Path) -> Emulate:
    """Return a function that runs an artifact's source in an emulator, twice: copies late and threads in order, then the opposite."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the emulated kernel with")

    def run(artifact: object, tensors: Mapping[str, torch.Tensor], cluster: int = 1) -> Emulated:
        from kerneldyno.backends.cuda._compile import piece

        vocabulary = piece("ptx.cuh")
        assert vocabulary in artifact.source
        emulated = Path(__file__).with_name("emulated_ptx.h").read_text()
        names = artifact.payload["tensors"]
        arguments = ", ".join(f"(element*)tensors[{index}]" for index in range(len(names)))
        main = f"int main(int count, char** words) {{ return emulate(count, words, [] {{ {artifact.entry}({arguments}); }}); }}\n"
        (tmp_path / "kernel.cpp").write_text(artifact.source.replace(vocabulary, emulated) + main)
        subprocess.run([compiler, "-std=c++17", "-O1", "-w", "-o", tmp_path / "kernel", tmp_path / "kernel.cpp"], check=True, timeout=60)
        launch = [str(artifact.payload["blocks"]), str(artifact.threads), str(cluster), str(artifact.smem_bytes)]
        outputs = []
        for lazy, reverse in (("1", "0"), ("0", "1")):
            files = []
            for name in names:
                path = tmp_path / f"{name}.bin"
                path.write_bytes(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
                files += [str(path), str(tensors[name].nbytes)]
            ran = subprocess.run([tmp_path / "kernel", *launch, lazy, reverse, *files], capture_output=True, text=True, timeout=120)
            assert ran.returncode == 0, ran.stderr or f"the kernel died with {ran.returncode} (a touched guard page is -11)"
            like = tensors[names[-1]]
            outputs.append(torch.frombuffer(bytearray((tmp_path / f"{names[-1]}.bin").read_bytes()), dtype=like.dtype).reshape(like.shape))
        assert torch.equal(outputs[0].view(torch.uint8), outputs[1].view(torch.uint8)), "the order of threads or copies changes the result"
        return Emulated(outputs[0], int(ran.stdout))

    return run


@pytest.fixture(scope="session")
def disassemble(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], str]:
    """Return a function that gives the SASS text of a cubin."""
    tool = _nvdisasm()
    if tool is None:
        pytest.skip("no nvdisasm: neither Triton's wheel nor a CUDA toolkit is installed")

    def run(cubin: bytes) -> str:
        path = tmp_path_factory.mktemp("cubin") / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([tool, path], check=True, capture_output=True, text=True, timeout=60).stdout

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

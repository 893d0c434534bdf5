"""TileLang: kernels as tiles in Python, lowered to CUDA C++ and compiled by nvcc; the machine code travels in a shared library."""

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path

from kerneldyno.core import Availability
from kerneldyno.core import Device


name = "tilelang"
device_kind = "cuda"

_INSTALL = "pip install 'kerneldyno[tilelang]'"
_NVCC_WHEEL = "nvidia-cuda-nvcc"
# what else nvcc needs to compile one file to machine code, where it comes as a wheel rather than with a toolkit
_NVCC_PARTS = ("nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
_TOOLKIT_NVCC = Path("/usr/local/cuda/bin/nvcc")


def probe(device: Device | None) -> Availability:
    """Say whether TileLang can compile here and run on the device.

    Reads package metadata and looks for compilers; TileLang itself is not loaded.

    Args:
        device: The NVIDIA GPU, or None where there is none.
    """
    version = _version("tilelang")
    if version is None:
        return Availability(False, "tilelang is not installed", _INSTALL)
    versions = {"tilelang": version}
    if importlib.util.find_spec("torch") is None:
        return Availability(False, "torch, which owns the tensors and the stream, is not installed", _INSTALL, versions)
    nvcc = find_nvcc()
    if nvcc is None:
        return Availability(False, "nvcc, which TileLang compiles with, was not found", _nvcc_remedy(), versions)
    wheel = _version(_NVCC_WHEEL) if nvcc == _nvcc_of_wheel() else None
    versions["nvcc"] = wheel or str(nvcc)
    missing = [part for part in _NVCC_PARTS if _version(part) is None] if wheel else []
    if missing:
        return Availability(False, f"nvcc lacks the packages {', '.join(missing)}", _INSTALL, versions)
    if not _has_host_compiler():
        return Availability(False, "a C++ compiler, for TileLang's host code, was not found", "apt-get install g++", versions)
    if device is None or device.kind != "cuda":
        return Availability(False, "there is no NVIDIA GPU here", "device=cpu backend=c", versions)
    return Availability(True, versions=versions)


def find_nvcc() -> Path | None:
    """Return the nvcc that TileLang will call, or None where it will find none.

    In the order of `tilelang.env`: CUDA_HOME or CUDA_PATH where one is set, the search path, the wheel nvidia-cuda-nvcc (from
    version 13 on it holds a whole nvcc), and the place where toolkits are installed.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is not None:
        found = Path(home, "bin", "nvcc")
    elif on_path := shutil.which("nvcc"):
        found = Path(on_path)
    else:
        found = _nvcc_of_wheel() or _TOOLKIT_NVCC
    return found if os.access(found, os.X_OK) else None


def _nvcc_of_wheel() -> Path | None:
    try:
        files = importlib.metadata.files(_NVCC_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files or () if file.name == "nvcc"), None)


def _nvcc_remedy() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is not None:
        return f"CUDA_HOME or CUDA_PATH is {home or 'empty'}, which holds no bin/nvcc: unset it or let it name a CUDA toolkit"
    return f"install the CUDA toolkit, or {_INSTALL}, which brings nvcc as a package"


def _has_host_compiler() -> bool:
    chosen = os.environ.get("CXX") or os.environ.get("CC")
    return any(shutil.which(compiler) for compiler in ((chosen,) if chosen else ("g++", "clang++", "c++")))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

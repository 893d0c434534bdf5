"""Raw CUDA C++: one readable source text per configuration, compiled by NVRTC and launched through the driver."""

import ctypes.util
import importlib.metadata
import importlib.util
import os
from pathlib import Path

from kerneldyno.core import Availability
from kerneldyno.core import Device


name = "cuda"
device_kind = "cuda"

_INSTALL = "pip install 'kerneldyno[cuda]'"
# NVRTC's wheel has had three names: one for CUDA 13 and later, one for each of the toolkits before.
_NVRTC_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")


def probe(device: Device | None) -> Availability:
    """Say whether CUDA C++ can be compiled here and run on the device.

    Reads package metadata only: neither the bindings nor NVRTC are loaded.

    Args:
        device: The NVIDIA GPU, or None where there is none.
    """
    versions: dict[str, str] = {}
    for package in ("cuda-bindings", "cuda-core"):
        version = _version(package)
        if version is None:
            return Availability(False, f"{package} is not installed", _INSTALL)
        versions[package] = version
    nvrtc = _nvrtc_version()
    if nvrtc is None:
        return Availability(False, "NVRTC (libnvrtc.so), the run-time compiler of CUDA C++, was not found", _INSTALL, versions)
    versions["nvrtc"] = nvrtc
    if importlib.util.find_spec("torch") is None:
        return Availability(False, "torch, which owns the tensors and the stream, is not installed", _INSTALL, versions)
    if device is None or device.kind != "cuda":
        return Availability(False, "there is no NVIDIA GPU here", "device=cpu backend=c", versions)
    return Availability(True, versions=versions)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvrtc_version() -> str | None:
    """Return the version of NVRTC's wheel, else the file name of a toolkit's library; None where there is neither."""
    for wheel in _NVRTC_WHEELS:
        version = _version(wheel)
        if version is not None:
            return version
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        root = os.environ.get(variable)
        found = sorted(Path(root).glob("lib*/libnvrtc.so.*")) if root else []
        if found:
            return found[-1].resolve().name
    return ctypes.util.find_library("nvrtc")

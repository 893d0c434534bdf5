"""Kernels in Triton, compiled ahead for the device and launched without its just-in-time path."""

import importlib.metadata
import importlib.util

from kerneldyno.core import Availability
from kerneldyno.core import Device


name = "triton"
device_kind = "cuda"

# what the kernels here use: ASTSource with attributes by argument path, and tensor descriptors made on the device
_VERSION_MIN = (3, 4)


def probe(device: Device | None) -> Availability:
    """Say whether Triton can be used on the device; reads package metadata only, and imports neither Triton nor torch.

    Args:
        device: The device, or None where there is no NVIDIA GPU.
    """
    if importlib.util.find_spec("triton") is None:
        return Availability(False, "triton is not installed", "pip install 'kerneldyno[triton]'")
    version = _version()
    versions = {"triton": version}
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers and numbers < _VERSION_MIN:
        return Availability(False, f"triton {version} is older than 3.4", "pip install --upgrade 'kerneldyno[triton]'", versions)
    if device is None or device.kind != "cuda":
        return Availability(False, "there is no NVIDIA GPU to run it on", "choose device=cpu backend=c", versions)
    return Availability(True, versions=versions)


def _version() -> str:
    """The installed version; builds for other needs carry the module under another package name, as torch's nightlies do."""
    for package in ("triton", "pytorch-triton"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"

"""Facts of the devices here, read without torch and without creating a CUDA context."""

import ctypes
import os
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

from kerneldyno.core import Device
from kerneldyno.core import Environment
from kerneldyno.core import digest
from kerneldyno.errors import RequestError
from kerneldyno.errors import Unavailable


# CUdevice_attribute. Source: cuda.h of CUDA 13.0, enum CUdevice_attribute_enum.
_MAX_THREADS_PER_BLOCK = 1
_SM_COUNT = 16
_L2_BYTES = 38
_CC_MAJOR = 75
_CC_MINOR = 76
_SMEM_PER_SM = 81
_REGISTERS_PER_SM = 82
_SMEM_PER_BLOCK_OPTIN = 97

# Targets with an architecture-specific variant, which wgmma and setmaxnreg need (9.0) or whose tensor cores do (10.x, 12.x).
# Source: PTX ISA 8.0, "Target architecture": sm_90a; PTX ISA 8.6: sm_100a, sm_120a.
_SPECIFIC = {9, 10, 12}


def cpu() -> Device:
    """Describe the CPU of this machine and the cores that this process may use."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        name = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    except OSError:
        name = ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Device(
        kind="cpu",
        name=name or platform.processor() or platform.machine(),
        arch=platform.machine(),
        sm_count=cores,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        max_threads_per_block=cores,
        l2_bytes=_last_level_cache_bytes(),
        driver=platform.release(),
    )


def _last_level_cache_bytes() -> int:
    caches = Path("/sys/devices/system/cpu/cpu0/cache")
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    try:
        texts = [path.read_text().strip() for path in sorted(caches.glob("index*/size"))]
        return max((int(text[:-1]) * units[text[-1]] for text in texts), default=0)
    except (OSError, ValueError, KeyError):
        return 0


@cache
def _driver() -> ctypes.CDLL | None:
    """The CUDA driver library, initialised (which makes no context); None where there is none or no GPU."""
    for name in ("libcuda.so.1", "libcuda.so"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return library if library.cuInit(0) == 0 else None
    return None


def _gpu(library: ctypes.CDLL, index: int) -> Device:
    handle = ctypes.c_int()
    library.cuDeviceGet(ctypes.byref(handle), index)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        return value.value

    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetName(name, 256, handle)
    memory = ctypes.c_size_t()
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    major, minor = attribute(_CC_MAJOR), attribute(_CC_MINOR)
    return Device(
        kind="cuda",
        name=name.value.decode(),
        arch=f"sm_{major}{minor}{'a' if major in _SPECIFIC else ''}",
        index=index,
        sm_count=attribute(_SM_COUNT),
        memory_bytes=memory.value,
        smem_per_block_bytes=attribute(_SMEM_PER_BLOCK_OPTIN),
        smem_per_sm_bytes=attribute(_SMEM_PER_SM),
        registers_per_sm=attribute(_REGISTERS_PER_SM),
        max_threads_per_block=attribute(_MAX_THREADS_PER_BLOCK),
        l2_bytes=attribute(_L2_BYTES),
        driver=_driver_version(library),
    )


def _driver_version(library: ctypes.CDLL) -> str:
    """The kernel driver's version ("580.159.04") where NVML gives it, else the CUDA version that it supports."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # NVML may be missing or not permitted; the CUDA version still tells drivers apart coarsely
        version = ctypes.c_int()
        library.cuDriverGetVersion(ctypes.byref(version))
        return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def gpus() -> list[Device]:
    """Describe the NVIDIA GPUs that this process may use (CUDA_VISIBLE_DEVICES counts); empty where there is none."""
    library = _driver()
    if library is None:
        return []
    count = ctypes.c_int()
    if library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_gpu(library, index) for index in range(count.value)]


def devices() -> list[Device]:
    """Describe every device here, GPUs first."""
    return [*gpus(), cpu()]


def detect(spec: str | None) -> Device:
    """Find the device that a user asked for.

    Args:
        spec: `cuda`, `cuda:N` or `cpu`; None for the first GPU, else the CPU.

    Raises:
        RequestError: The word is none of these.
        Unavailable: There is no such device here.
    """
    if spec is None:
        return devices()[0]
    if spec == "cpu":
        return cpu()
    kind, _, number = spec.partition(":")
    if kind != "cuda" or not (number.isdecimal() or spec == "cuda"):
        raise RequestError(f"unknown device '{spec}'. Valid: cpu, cuda, cuda:N (N counts from 0).")
    found = gpus()
    if not found:
        raise Unavailable(
            f"device={spec}: this machine has no usable NVIDIA GPU (no driver, or no device). Choose device=cpu with backend=c."
        )
    index = int(number or 0)
    if index >= len(found):
        raise Unavailable(f"device={spec}: this machine has {len(found)} GPU(s); choose cuda:0 to cuda:{len(found) - 1}.")
    return found[index]


def version_of(distribution: str) -> str:
    """The installed version of a Python distribution, "" where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def environment(device: Device, versions: dict[str, str]) -> Environment:
    """Gather the versions that could change a result: the driver, Python, torch, and what a backend's probe names.

    On a CPU its features belong to them: code built for one CPU (`-march=native`) dies on another that lacks an instruction.
    """
    common = {"driver": device.driver, "python": platform.python_version(), "torch": version_of("torch")}
    if device.kind == "cpu":
        common["cpu"] = digest([device.name, _cpu_features()])
    return Environment({**common, **versions})


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.lower().startswith(("flags", "features"))), "")

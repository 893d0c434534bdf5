"""Timing one launch after another with a cold cache: CUDA events on a GPU, a monotonic clock on a CPU."""

import time
from collections.abc import Callable
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kerneldyno.core import Device


CUDA_FLUSH_BYTES = 256 * 2**20
"""Written before each launch to empty the L2 (60 MB on an H200). Source: Triton's `do_bench` writes as much; on another
vendor's GPU a 4 MB flush ranked the worst configuration first (pytorch PR 192159)."""

CPU_FLUSH_BYTES = 2 * 32 * 2**20
"""Least amount written before each run on a CPU; twice the last-level cache where that is larger."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the device did while it was timed; None where it does not say."""

    sm_clock_mhz: float | None = None
    power_w: float | None = None


class Timer(Protocol):
    """Times launches on one device."""

    def sample(self, runs: Sequence[Callable[[], None]]) -> list[float]:
        """Return the microseconds of each launch, in the order given, each after a flush of the cache."""
        ...

    def synchronize(self) -> None:
        """Wait for the device; raises what a launch did wrong."""
        ...

    def conditions(self) -> Conditions:
        """Read clock and power now: call it right after `sample`."""
        ...


class CpuTimer:
    """A monotonic clock around each run. Args: device: The CPU."""

    def __init__(self, device: Device) -> None:
        import torch

        torch.set_num_threads(device.sm_count)
        self._flush = torch.empty(max(CPU_FLUSH_BYTES, 2 * device.l2_bytes), dtype=torch.uint8)

    def sample(self, runs: Sequence[Callable[[], None]]) -> list[float]:
        """Return the microseconds of each run, in the order given, each after a flush of the cache."""
        samples: list[float] = []
        for run in runs:
            self._flush.zero_()
            began = time.perf_counter_ns()
            run()
            samples.append((time.perf_counter_ns() - began) / 1e3)
        return samples

    def synchronize(self) -> None:
        """Do nothing: a run on a CPU has ended when it returns."""

    def conditions(self) -> Conditions:
        """Know nothing: a CPU's clock and power are not read."""
        return Conditions()


class CudaTimer:
    """CUDA events around each launch; the flush before it also hides the time that Python takes to launch.

    Reference for events: CUDA Runtime API, cudaEventElapsedTime (resolution about 0.5 us).
    """

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._flush = torch.empty(CUDA_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._nvml = _nvml_handle(str(torch.cuda.get_device_properties(0).uuid))

    def sample(self, runs: Sequence[Callable[[], None]]) -> list[float]:
        """Return the microseconds of each launch, in the order given, each after a flush of the L2."""
        starts = [self._cuda.Event(enable_timing=True) for _ in runs]
        ends = [self._cuda.Event(enable_timing=True) for _ in runs]
        for start, end, run in zip(starts, ends, runs, strict=True):
            self._flush.zero_()
            start.record()
            run()
            end.record()
        self._cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in zip(starts, ends, strict=True)]

    def synchronize(self) -> None:
        """Wait for the device; raises what a launch did wrong."""
        self._cuda.synchronize()

    def conditions(self) -> Conditions:
        """Read the SM clock and the board's power through NVML."""
        if self._nvml is None:
            return Conditions()
        import pynvml

        with suppress(pynvml.NVMLError):
            clock = pynvml.nvmlDeviceGetClockInfo(self._nvml, pynvml.NVML_CLOCK_SM)
            return Conditions(float(clock), pynvml.nvmlDeviceGetPowerUsage(self._nvml) / 1e3)
        return Conditions()


def _nvml_handle(uuid: str) -> object | None:
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return None


def timer_for(device: Device) -> Timer:
    """Return the timer of a device, in the process that owns it."""
    return CpuTimer(device) if device.kind == "cpu" else CudaTimer()

"""Device records to build search spaces and cross-compile with, where the device itself is not there."""

from kerneldyno.core import Device


H200 = Device(
    kind="cuda",
    name="NVIDIA H200",
    arch="sm_90a",
    sm_count=132,
    memory_bytes=150_754_820_096,
    smem_per_block_bytes=232_448,
    smem_per_sm_bytes=233_472,
    registers_per_sm=65_536,
    max_threads_per_block=1024,
    l2_bytes=62_914_560,
    driver="580.159.04",
)
"""An H200 SXM. Source: cuDeviceGetAttribute on one; CUDA C++ Programming Guide, table of compute capabilities (9.0)."""

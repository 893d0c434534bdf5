"""The CUDA softmax: numbers in the emulator, resources and instructions of its machine code for sm_90a."""

import random
from collections.abc import Callable

import pytest
import torch

from kerneldyno.backends.cuda import softmax
from kerneldyno.core import Config
from kerneldyno.core import Workload
from kerneldyno.testing.devices import H200


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _workload(m: int, n: int, dtype: str = "bf16") -> Workload:
    return Workload("softmax", {"m": m, "n": n}, dtype)


def _held(threads: int, row_threads: int, hold: str = "raw", cluster: int = 1, resident: int = 0) -> Config:
    knobs = {"method": "registers", "threads": threads, "row_threads": row_threads, "cluster": cluster, "hold": hold}
    return {**knobs, "resident": resident, "load": "stream", "store": "stream"}


def _online(threads: int, row_threads: int, unroll: int) -> Config:
    return {"method": "online", "threads": threads, "row_threads": row_threads, "unroll": unroll, "load": "cached", "store": "cached"}


@pytest.mark.parametrize(
    ("workload", "config"),
    [
        pytest.param(_workload(6, 512), _held(64, 64), id="even"),
        pytest.param(_workload(7, 200), _held(64, 16, "exp"), id="part-of-a-warp"),
        pytest.param(_workload(5, 1003), _held(128, 64), id="odd-rows-of-two-warps"),
        pytest.param(_workload(9, 67, "fp16"), _held(32, 8, "exp"), id="odd-fp16"),
        pytest.param(_workload(3, 4096, "fp16"), _held(128, 128, "exp", 4), id="cluster"),
        pytest.param(_workload(3, 1501), _held(64, 64, "raw", 2), id="odd-cluster"),
        pytest.param(_workload(5, 515, "fp32"), _held(64, 32, "exp"), id="odd-fp32"),
        pytest.param(_workload(5, 1000), _online(128, 64, 1), id="online"),
        pytest.param(_workload(5, 1003), _online(64, 32, 2), id="odd-online"),
        pytest.param(_workload(3, 1, "fp16"), _held(32, 8), id="one-column"),
    ],
)
def test_numbers(emulate: Callable, workload: Workload, config: Config) -> None:
    assert not softmax.space(workload, H200).problems(config)
    dtype = DTYPES[workload.dtype]
    shape = (int(workload.shape["m"]), int(workload.shape["n"]))
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 4).to(dtype)
    if shape[1] > 40:
        x[0, :40] = -torch.inf  # whole packets without a finite number
        x[1, :] -= 300.0
        x[2, 5] = torch.nan

    tensors = {"x": x, "y": torch.full(shape, float("nan"), dtype=dtype)}
    found = emulate(softmax.build(workload, config, "sm_90a"), tensors, int(config.get("cluster", 1)))

    # one rounding to the output's dtype on an error of 2e-6 in exp and sum; fp16 results below 2^-14 are denormal
    rtol = {"fp32": 2e-6, "fp16": 2.0**-11 + 4e-6, "bf16": 2.0**-8 + 4e-6}[workload.dtype]
    atol = 2.0**-25 if workload.dtype == "fp16" else 1e-30
    torch.testing.assert_close(found.output.double(), torch.softmax(x.double(), -1), rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize(
    ("workload", "config", "registers"),
    [
        (_workload(4096, 4096), _held(128, 128), 64),
        (_workload(16384, 8192), _held(256, 256, resident=1536), 40),
        (_workload(16384, 8192), _held(256, 256, "exp"), 64),
        (_workload(8192, 131072), _held(512, 512, "raw", 8), 64),
    ],
)
def test_whole_packets_without_spills(disassemble: Callable, workload: Workload, config: Config, registers: int) -> None:
    assert not softmax.space(workload, H200).problems(config)
    artifact = softmax.build(workload, config, "sm_90a")
    assert artifact.spill_bytes == 0
    assert artifact.registers <= registers  # 64: 1024 resident threads on a multiprocessor; 40: 1536
    sass = disassemble(artifact.binary)
    assert "LDG.E.NA.128" in sass  # 16 bytes, without a place in L1
    assert "STG.E.EF.128" in sass


@pytest.mark.parametrize("workload", [_workload(1000, 8191), _workload(64, 131072, "fp32")])
def test_a_sample_of_the_space_compiles(workload: Workload) -> None:
    space = softmax.space(workload, H200)
    rng = random.Random(5)
    for _ in range(4):
        artifact = softmax.build(workload, space.sample(rng), "sm_90a")
        assert artifact.registers * artifact.threads <= H200.registers_per_sm
        assert artifact.spill_bytes == 0
        assert artifact.smem_bytes <= H200.smem_per_block_bytes


def test_constraints_say_why() -> None:
    space = softmax.space(_workload(16, 131072), H200)
    assert "at most 128 registers" in space.problems(_held(256, 256))[0]
    assert "to one row" in space.problems(_held(512, 256, "raw", 8))[0]
    assert "would idle" in softmax.space(_workload(16, 64), H200).problems(_held(64, 64))[0]


@pytest.mark.parametrize(("m", "n"), [(1, 1), (4, 7), (2, 300_000), (100_000, 33)])
def test_every_shape_has_a_configuration(m: int, n: int) -> None:
    for dtype in DTYPES:
        assert softmax.space(_workload(m, n, dtype), H200).size > 0

"""The CUDA gemm: numbers in the emulator, resources and instructions of its machine code for sm_90a."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kerneldyno.backends.cuda import gemm
from kerneldyno.core import Config
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported
from kerneldyno.testing.devices import H200


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _workload(m: int, n: int, k: int, layout: str = "nt", dtype: str = "bf16") -> Workload:
    return Workload("gemm", {"m": m, "n": n, "k": k, "layout": layout}, dtype)


def _mma(
    block: tuple[int, int, int],
    warps: tuple[int, int],
    stages: int,
    epilogue: str = "shared",
    sets: int = 2,
    blocks_per_sm: int = 1,
) -> Config:
    return {
        "mma": "mma.sync",
        "block_m": block[0],
        "block_n": block[1],
        "block_k": block[2],
        "warps_m": warps[0],
        "warps_n": warps[1],
        "stages": stages,
        "group_m": 8,
        "fragment_sets": sets,
        "blocks_per_sm": blocks_per_sm,
        "epilogue": epilogue,
    }


def _ffma(block: tuple[int, int, int], thread: tuple[int, int]) -> Config:
    names = ("block_m", "block_n", "block_k", "thread_m", "thread_n")
    return {"mma": "ffma", **dict(zip(names, (*block, *thread), strict=True)), "group_m": 8}


@pytest.mark.parametrize(
    ("workload", "config"),
    [
        pytest.param(_workload(128, 128, 256), _mma((64, 64, 64), (2, 1), 3), id="even-nt"),
        pytest.param(_workload(128, 128, 160, "nn"), _mma((64, 128, 32), (1, 2), 4, sets=1), id="even-nn"),
        pytest.param(_workload(100, 72, 200, "nn", "fp16"), _mma((32, 64, 64), (2, 2), 2, "direct", 1), id="ragged-nn-16-byte-rows"),
        pytest.param(_workload(70, 202, 130, "nt", "fp16"), _mma((32, 192, 32), (1, 4), 3), id="ragged-nt-4-byte-rows"),
        pytest.param(_workload(67, 68, 36, "nn"), _mma((64, 32, 32), (2, 1), 6), id="8-byte-rows-fewer-tiles-than-stages"),
        pytest.param(_workload(67, 101, 83), _mma((32, 64, 32), (1, 2), 3), id="odd-nt"),
        pytest.param(_workload(67, 101, 83, "nn"), _mma((64, 64, 128), (4, 1), 2, "direct"), id="odd-nn"),
        pytest.param(_workload(1, 1, 1), _mma((16, 32, 32), (1, 2), 2), id="one"),
        pytest.param(_workload(132, 128, 64, "nt", "fp32"), _ffma((64, 64, 16), (8, 4)), id="fp32-nt"),
        pytest.param(_workload(67, 101, 83, "nt", "fp32"), _ffma((32, 64, 8), (4, 8)), id="fp32-odd-nt"),
        pytest.param(_workload(67, 102, 83, "nn", "fp32"), _ffma((64, 32, 32), (4, 4)), id="fp32-nn"),
    ],
)
def test_numbers(emulate: Callable, workload: Workload, config: Config) -> None:
    assert not gemm.space(workload, H200).problems(config)
    m, n, k = (int(workload.shape[dim]) for dim in "mnk")
    dtype = DTYPES[workload.dtype]
    generator = torch.Generator().manual_seed(7)
    a = torch.randn(m, k, generator=generator).to(dtype)
    b = torch.randn(*((n, k) if workload.shape["layout"] == "nt" else (k, n)), generator=generator).to(dtype)
    c = torch.full((m, n), float("nan"), dtype=dtype)

    found = emulate(gemm.build(workload, config, "sm_90a"), {"a": a, "b": b, "c": c})

    right = a.double() @ (b.double().T if workload.shape["layout"] == "nt" else b.double())
    # fp32 sums of k products are within 1e-5 here; what is left is one rounding to the output's dtype
    rtol = {"fp32": 1e-5, "fp16": 2.0**-11, "bf16": 2.0**-8}[workload.dtype]
    torch.testing.assert_close(found.output.double(), right, rtol=rtol, atol=1e-5)
    assert found.bank_conflicts == 0


@pytest.mark.parametrize(
    ("workload", "config"),
    [
        (_workload(8192, 8192, 8192), _mma((128, 256, 64), (2, 4), 4)),
        (_workload(8192, 8192, 8192, "nn"), _mma((128, 128, 64), (2, 4), 3, sets=1, blocks_per_sm=2)),
        (_workload(1000, 1003, 517, "nt", "fp16"), _mma((128, 64, 32), (2, 2), 4, blocks_per_sm=2)),
    ],
)
def test_tensor_cores_without_spills(disassemble: Callable, workload: Workload, config: Config) -> None:
    assert not gemm.space(workload, H200).problems(config)
    artifact = gemm.build(workload, config, "sm_90a")
    assert artifact.spill_bytes == 0
    assert artifact.registers <= 255
    sass = disassemble(artifact.binary)
    assert "HMMA.16816.F32" in sass
    assert "LDSM.16.M88.4" in sass
    assert ("LDGSTS" in sass) == (int(workload.shape["k"]) % 2 == 0)  # odd rows are aligned to 2 bytes, cp.async needs 4


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_sample_of_the_space_compiles(dtype: str) -> None:
    workload = _workload(4096, 4096, 4096, "nn", dtype)
    space = gemm.space(workload, H200)
    rng = random.Random(11)
    for _ in range(3):
        artifact = gemm.build(workload, space.sample(rng), "sm_90a")
        assert artifact.registers * artifact.threads <= H200.registers_per_sm
        assert artifact.smem_bytes <= H200.smem_per_block_bytes
        assert artifact.threads <= H200.max_threads_per_block


def test_constraints_say_why() -> None:
    space = gemm.space(_workload(4096, 4096, 4095), H200)
    assert "16 of one mma.sync" in space.problems(_mma((32, 128, 64), (4, 1), 3))[0]
    assert "232448 bytes a block" in space.problems(_mma((128, 256, 64), (2, 4), 5))[0]
    assert "255 registers" in space.problems(_mma((256, 256, 64), (2, 4), 2))[0]


def test_an_old_gpu_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"compute capability 8\.0"):
        gemm.space(_workload(64, 64, 64), replace(H200, arch="sm_75"))

"""gemm and moe_gemm on CUDA with wgmma: numbers in the emulator, resources and instructions of the machine code for sm_90a."""

import random
import re
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from kerneldyno.backends.cuda import gemm
from kerneldyno.backends.cuda import moe_gemm
from kerneldyno.core import Config
from kerneldyno.core import Workload
from kerneldyno.core.ragged import RaggedTiles
from kerneldyno.testing.devices import H200


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FEW_BLOCKS = replace(H200, sm_count=2)
"""So that a block of a small product takes several tiles in turn."""


def _gemm(m: int, n: int, k: int, layout: str = "nt", dtype: str = "bf16") -> Workload:
    return Workload("gemm", {"m": m, "n": n, "k": k, "layout": layout}, dtype)


def _moe(tokens: int, experts: int, top_k: int, n: int, k: int, gather: bool = False, dtype: str = "bf16") -> Workload:
    shape = {"tokens": tokens, "experts": experts, "top_k": top_k, "n": n, "k": k, "routing": "uniform", "gather": gather}
    return Workload("moe_gemm", shape, dtype)


def _config(block: tuple[int, int, int], consumers: int, stages: int, blocks: int = 2, group_m: int = 8, blocks_per_sm: int = 1) -> Config:
    return {
        "mma": "wgmma",
        **dict(zip(("block_m", "block_n", "block_k"), block, strict=True)),
        "consumers": consumers,
        "stages": stages,
        "group_m": group_m,
        "blocks_per_sm": blocks_per_sm,
        "blocks": blocks,
    }


def _check(found: torch.Tensor, right: torch.Tensor, dtype: str) -> None:
    # fp32 sums are within 1e-5 here; what is left is one rounding to the output's dtype
    torch.testing.assert_close(found.double(), right, rtol={"fp16": 2.0**-11, "bf16": 2.0**-8}[dtype], atol=1e-5)


@pytest.mark.parametrize(
    ("workload", "config"),
    [
        pytest.param(_gemm(128, 576, 256), _config((128, 192, 64), 2, 4, group_m=1), id="even-in-turn"),
        pytest.param(_gemm(150, 328, 200), _config((128, 256, 64), 2, 3), id="ragged"),
        pytest.param(_gemm(300, 136, 72, "nn", "fp16"), _config((256, 192, 64), 2, 3, 0), id="nn-high-tiles-fewer-steps-than-slots"),
        pytest.param(_gemm(200, 200, 264, "nn"), _config((128, 192, 128), 2, 2, group_m=1), id="nn-deep-steps"),
        pytest.param(_gemm(193, 130, 136), _config((192, 128, 64), 3, 2), id="n-without-map"),
        pytest.param(_gemm(65, 67, 8, "nt", "fp16"), _config((64, 64, 128), 1, 2, 4, blocks_per_sm=2), id="odd-n-short-k"),
    ],
)
def test_numbers_of_gemm(emulate: Callable, workload: Workload, config: Config) -> None:
    assert not gemm.space(workload, FEW_BLOCKS).problems(config)
    m, n, k = (int(workload.shape[dim]) for dim in "mnk")
    dtype, nt = DTYPES[workload.dtype], workload.shape["layout"] == "nt"
    generator = torch.Generator().manual_seed(7)
    a = torch.randn(m, k, generator=generator).to(dtype)
    b = torch.randn(*((n, k) if nt else (k, n)), generator=generator).to(dtype)
    c = torch.full((m, n), float("nan"), dtype=dtype)

    found = emulate(gemm.build(workload, config, "sm_90a"), {"a": a, "b": b, "c": c})

    _check(found.tensors["c"], a.double() @ (b.double().T if nt else b.double()), workload.dtype)


@pytest.mark.parametrize(
    ("workload", "counts", "config"),
    [
        pytest.param(_moe(105, 4, 2, 136, 96), (0, 129, 16, 65), _config((128, 64, 64), 2, 3), id="empty-expert-first"),
        pytest.param(_moe(75, 3, 2, 328, 72, dtype="fp16"), (150, 0, 0), _config((128, 256, 64), 2, 2), id="one-hot"),
        pytest.param(_moe(1, 5, 1, 64, 64), (0, 0, 0, 1, 0), _config((64, 64, 64), 1, 5, 0, 1), id="one-row"),
        pytest.param(_moe(100, 3, 2, 67, 136), (1, 133, 66), _config((192, 64, 64), 3, 2), id="n-without-map"),
        pytest.param(_moe(80, 2, 2, 200, 200), (130, 30), _config((256, 128, 64), 2, 2, 2, 1), id="warpgroups-without-rows"),
    ],
)
def test_numbers_of_moe_gemm(emulate: Callable, workload: Workload, counts: tuple[int, ...], config: Config) -> None:
    assert not moe_gemm.space(workload, FEW_BLOCKS).problems(config)
    tokens, experts, top_k, n, k = (int(workload.shape[dim]) for dim in ("tokens", "experts", "top_k", "n", "k"))
    rows, dtype = tokens * top_k, DTYPES[workload.dtype]
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(rows, k, generator=generator).to(dtype)
    w = torch.randn(experts, n, k, generator=generator).to(dtype)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    tiles = RaggedTiles(rows, experts, int(config["block_m"]), "cpu")
    tiles.fill(offsets)
    tensors = {"a": a, "w": w, "offsets": offsets, "tile_experts": tiles.groups, "tile_starts": tiles.starts}
    empty = torch.full((rows, n), float("nan"), dtype=dtype)

    found = emulate(moe_gemm.build(workload, config, "sm_90a"), {**tensors, "c": empty, "c_rows": empty}).tensors

    # on the GPU both are one tensor: what is not written by map is written row by row, and nothing by both
    by_row, by_map = found["c_rows"], found.get("c", empty)
    assert not (~by_row.isnan() & ~by_map.isnan()).any()
    expert_of_row = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    right = torch.einsum("rk,rnk->rn", a.double(), w.double()[expert_of_row])
    _check(torch.where(by_row.isnan(), by_map, by_row), right, workload.dtype)


@pytest.mark.parametrize(
    ("module", "workload"),
    [
        pytest.param(gemm, _gemm(8192, 8192, 8192), id="nt"),
        pytest.param(gemm, _gemm(8192, 8192, 8192, "nn"), id="nn"),
        pytest.param(moe_gemm, _moe(4096, 128, 8, 3072, 4096), id="moe"),
    ],
)
def test_starts_keep_the_tensor_cores_busy(disassemble: Callable, module: ModuleType, workload: Workload) -> None:
    for config in module.space(workload, H200).starts[:2]:
        assert config["mma"] == "wgmma"
        artifact = module.build(workload, config, "sm_90a")
        assert artifact.spill_bytes == 0
        assert artifact.registers * artifact.threads <= H200.registers_per_sm
        assert "serialized" not in artifact.texts["ptxas"]
        sass = disassemble(artifact.binary)
        # the first slot's products, the loop's, and a wait that leaves the newest of them running
        assert len(re.findall("HGMMA", sass)) == 2 * int(config["block_m"]) // (64 * int(config["consumers"])) * 4
        assert "WARPGROUP.DEPBAR.LE gsb0, 0x1" in sass
        assert "UTMALDG" in sass
        assert "UTMASTG" in sass


@pytest.mark.parametrize(("module", "workload"), [(gemm, _gemm(4096, 4096, 4096, "nn")), (moe_gemm, _moe(4096, 8, 2, 28672, 4096))])
def test_a_sample_of_the_space_compiles(module: ModuleType, workload: Workload) -> None:
    configs = [config for config in module.space(workload, H200).configs if config["mma"] == "wgmma"]
    for config in random.Random(3).sample(configs, 2):
        artifact = module.build(workload, config, "sm_90a")
        assert artifact.registers * artifact.threads * int(config["blocks_per_sm"]) <= H200.registers_per_sm
        assert artifact.smem_bytes <= H200.smem_per_block_bytes
        assert artifact.spill_bytes == 0
        assert "serialized" not in artifact.texts["ptxas"]


def _instructions(module: ModuleType, workload: Workload, **device: object) -> Mapping[str, int]:
    """Return how many configurations there are of each instruction."""
    found: dict[str, int] = {}
    for config in module.space(workload, replace(H200, **device)).configs:
        found[str(config["mma"])] = found.get(str(config["mma"]), 0) + 1
    return found


def test_only_what_tensor_maps_can_copy_has_wgmma() -> None:
    assert set(_instructions(gemm, _gemm(64, 67, 72))) == {"wgmma", "mma.sync"}
    for workload in (_gemm(64, 64, 67), _gemm(64, 67, 64, "nn"), _gemm(64, 64, 68, "nn")):
        assert set(_instructions(gemm, workload)) == {"mma.sync"}
    assert set(_instructions(gemm, _gemm(64, 64, 64), arch="sm_100a")) == {"mma.sync"}
    assert set(_instructions(moe_gemm, _moe(64, 4, 2, 64, 64, gather=True))) == {"mma.sync"}
    assert set(_instructions(moe_gemm, _moe(64, 4, 2, 64, 66))) == {"mma.sync"}


def test_few_rows_begin_with_mma_sync() -> None:
    assert gemm.space(_gemm(16, 8192, 8192), H200).starts[0]["mma"] == "mma.sync"
    assert moe_gemm.space(_moe(16, 256, 8, 4096, 7168), H200).starts[0]["mma"] == "mma.sync"

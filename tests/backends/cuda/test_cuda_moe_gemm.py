"""The CUDA grouped product: numbers in the emulator for awkward routings, resources and instructions for sm_90a."""

import random
from collections.abc import Callable

import pytest
import torch

from kerneldyno.backends.cuda import moe_gemm
from kerneldyno.core import Config
from kerneldyno.core import Workload
from kerneldyno.core.ragged import RaggedTiles
from kerneldyno.errors import Unsupported
from kerneldyno.testing.devices import H200


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _workload(tokens: int, experts: int, top_k: int, n: int, k: int, gather: bool = False, dtype: str = "bf16") -> Workload:
    shape = {"tokens": tokens, "experts": experts, "top_k": top_k, "n": n, "k": k, "routing": "uniform", "gather": gather}
    return Workload("moe_gemm", shape, dtype)


def _config(
    block: tuple[int, int, int], warps: tuple[int, int], stages: int, epilogue: str = "shared", group_m: int = 8, sets: int = 2
) -> Config:
    names = ("block_m", "block_n", "block_k", "warps_m", "warps_n")
    knobs = dict(zip(names, (*block, *warps), strict=True))
    return {
        "mma": "mma.sync",
        **knobs,
        "stages": stages,
        "group_m": group_m,
        "fragment_sets": sets,
        "blocks_per_sm": 1,
        "epilogue": epilogue,
    }


@pytest.mark.parametrize(
    ("workload", "counts", "config"),
    [
        pytest.param(_workload(48, 4, 2, 128, 96), (0, 33, 16, 47), _config((16, 64, 32), (1, 2), 3), id="empty-expert-first"),
        pytest.param(
            _workload(75, 3, 2, 136, 72, True, "fp16"), (150, 0, 0), _config((64, 64, 64), (2, 1), 3, "direct"), id="one-hot-gather"
        ),
        pytest.param(_workload(1, 5, 1, 64, 64), (0, 0, 0, 1, 0), _config((16, 32, 64), (1, 2), 5, group_m=1), id="one-row"),
        pytest.param(
            _workload(40, 7, 2, 67, 83, True), (1, 2, 0, 30, 15, 31, 1), _config((16, 64, 32), (1, 2), 2, group_m=1, sets=1), id="odd"
        ),
        pytest.param(_workload(30, 3, 4, 70, 130), (49, 48, 23), _config((48, 64, 128), (1, 2), 2, "direct"), id="4-byte-rows"),
        pytest.param(_workload(80, 2, 2, 192, 64, True), (97, 63), _config((96, 192, 32), (2, 2), 4, sets=1), id="wide"),
    ],
)
def test_numbers(emulate: Callable, workload: Workload, counts: tuple[int, ...], config: Config) -> None:
    assert not moe_gemm.space(workload, H200).problems(config)
    tokens, experts, top_k, n, k = (int(workload.shape[dim]) for dim in ("tokens", "experts", "top_k", "n", "k"))
    rows, dtype = tokens * top_k, DTYPES[workload.dtype]
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(tokens if workload.shape["gather"] else rows, k, generator=generator).to(dtype)
    w = torch.randn(experts, n, k, generator=generator).to(dtype)
    index = torch.randperm(rows, generator=generator).to(torch.int32) // top_k
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    tiles = RaggedTiles(rows, experts, int(config["block_m"]), "cpu")
    tiles.fill(offsets)
    tensors = {"a": a, "x": a, "index": index, "w": w, "offsets": offsets, "tile_experts": tiles.groups, "tile_starts": tiles.starts}
    tensors["c"] = torch.full((rows, n), float("nan"), dtype=dtype)

    found = emulate(moe_gemm.build(workload, config, "sm_90a"), tensors)

    expert_of_row = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    sources = a[index.long()] if workload.shape["gather"] else a
    right = torch.einsum("rk,rnk->rn", sources.double(), w.double()[expert_of_row])
    # fp32 sums are within 1e-5 here; what is left is one rounding to the output's dtype
    torch.testing.assert_close(found.output.double(), right, rtol={"fp16": 2.0**-11, "bf16": 2.0**-8}[workload.dtype], atol=1e-5)
    assert found.bank_conflicts == 0


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("tokens", [4096, 16])
def test_starts_do_not_spill(disassemble: Callable, tokens: int, gather: bool) -> None:
    workload = _workload(tokens, 256, 8, 4096, 7168, gather)
    starts = [config for config in moe_gemm.space(workload, H200).starts if config["mma"] == "mma.sync"]
    assert starts[0]["block_m"] == (128 if tokens == 4096 else 16)
    for config in starts[:2]:
        artifact = moe_gemm.build(workload, config, "sm_90a")
        assert artifact.spill_bytes == 0
        assert artifact.registers * artifact.threads * int(config["blocks_per_sm"]) <= H200.registers_per_sm
    sass = disassemble(artifact.binary)
    assert "HMMA.16816.F32" in sass
    assert "LDGSTS.E.BYPASS.LTC128B.128" in sass


def test_small_batches_keep_64_kb_of_weights_in_flight() -> None:
    for config in moe_gemm.space(_workload(16, 256, 8, 4096, 7168), H200).starts[:4]:
        stage = int(config["block_n"]) * int(config["block_k"]) * 2
        assert (int(config["stages"]) - 1) * stage * int(config["blocks_per_sm"]) >= 64 * 1024


def test_a_sample_of_the_space_compiles() -> None:
    workload = _workload(64, 32, 4, 5760, 2880, True)
    space = moe_gemm.space(workload, H200)
    rng = random.Random(3)
    for _ in range(3):
        artifact = moe_gemm.build(workload, space.sample(rng), "sm_90a")
        assert artifact.registers * artifact.threads <= H200.registers_per_sm
        assert artifact.smem_bytes <= H200.smem_per_block_bytes


def test_fp32_is_refused() -> None:
    with pytest.raises(Unsupported, match="no fp32 variant"):
        moe_gemm.space(_workload(64, 4, 2, 64, 64, dtype="fp32"), H200)

"""The grouped product in TileLang: its numbers on a CPU, what it compiles to, and its space."""

import dataclasses
import shutil

import pytest
import torch

from kerneldyno.backends import tilelang as backend
from kerneldyno.core import Workload
from kerneldyno.core.ragged import RaggedTiles
from kerneldyno.errors import Unsupported
from kerneldyno.testing.devices import H200


pytest.importorskip("tilelang")

from kerneldyno.backends.tilelang import moe_gemm
from tests.backends.tilelang import emulate


OVERLAPPED = {
    "schedule": "overlapped",
    "swap": False,
    "block_m": 128,
    "block_n": 128,
    "block_k": 64,
    "stages": 2,
    "warpgroups": 2,
    "panel": 2,
    "blocks": 132,
    "pieces": 2,
}
SWAPPED = {key: value for key, value in OVERLAPPED.items() if key != "pieces"} | {
    "swap": True,
    "block_m": 8,
    "block_n": 64,
    "stages": 8,
    "warpgroups": 1,
}
PIPELINED = {key: value for key, value in OVERLAPPED.items() if key not in ("pieces", "blocks")} | {"schedule": "pipelined"}


def experts(tokens=4096, experts=128, top_k=8, n=3072, k=4096, gather=False, dtype="bf16", routing="uniform"):
    shape = {"tokens": tokens, "experts": experts, "top_k": top_k, "n": n, "k": k, "routing": routing, "gather": gather}
    return Workload("moe_gemm", shape, dtype)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ runs the generated source")
@pytest.mark.parametrize(
    ("config", "offsets", "n", "k", "gather"),
    [
        # an empty group; tiles whose second warpgroup has 6 rows, 64 and none; a last column and a last step that are partial
        (OVERLAPPED, (0, 70, 70, 198, 200), 200, 136, False),
        ({**OVERLAPPED, "pieces": 1, "block_n": 64, "stages": 3}, (65, 65, 100), 64, 128, True),
        (SWAPPED, (0, 7, 7, 20), 72, 136, True),
        ({**PIPELINED, "swap": True, "block_m": 8, "block_n": 64, "warpgroups": 1, "stages": 8}, (0, 7, 7, 20), 77, 131, True),
        ({**PIPELINED, "block_n": 64, "warpgroups": 1, "block_m": 64, "specialise": False}, (65, 65, 100), 77, 136, False),
    ],
)
def test_numbers(config, offsets, n, k, gather, tmp_path):
    rows = offsets[-1]
    workload = experts(tokens=rows, experts=len(offsets), top_k=1, n=n, k=k, gather=gather)
    assert not moe_gemm.space(workload, H200).problems(config)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, k, generator=draw).bfloat16()
    w = torch.randn(len(offsets), n, k, generator=draw).bfloat16()
    index = torch.randint(rows, (rows,), generator=draw, dtype=torch.int32)
    ends = torch.tensor(offsets, dtype=torch.int32)
    tiles = RaggedTiles(rows, len(offsets), config["block_m"], "cpu")
    tiles.fill(ends)
    assert (tiles.groups < 0).any()
    c = torch.full((rows, n), float("nan"), dtype=torch.bfloat16)
    tensors = {"a": x, "w": w, "offsets": ends, "groups": tiles.groups, "starts": tiles.starts, "index": index, "c": c}
    emulate.run_tensor_cores(moe_gemm.program(workload, config), tmp_path, tensors)
    a = x[index] if gather else x
    begins = (0, *offsets[:-1])
    exact = torch.cat([a[i:j].double() @ w[e].double().T for e, (i, j) in enumerate(zip(begins, offsets, strict=True))])
    # rounded once, to 8 bits
    torch.testing.assert_close(c.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.skipif(backend.find_nvcc() is None, reason="nvcc is missing")
@pytest.mark.parametrize(
    ("workload", "config"),
    [
        (experts(gather=True), {**OVERLAPPED, "block_n": 256, "stages": 4}),
        (
            experts(tokens=16, experts=256, n=4096, k=7168),
            {**SWAPPED, "block_m": 16, "block_n": 128, "block_k": 128, "warpgroups": 2, "stages": 5},
        ),
    ],
)
def test_best_configurations_keep_registers_and_wgmma_in_flight(workload, config):
    assert not moe_gemm.space(workload, H200).problems(config)
    artifact = moe_gemm.build(workload, config, "sm_90a")
    assert artifact.spill_bytes == 0
    assert artifact.smem_bytes <= H200.smem_per_block_bytes
    assert artifact.registers * artifact.threads <= H200.registers_per_sm
    assert "serialized" not in artifact.texts["ptxas"]
    # whole rows are written 16 bytes at a time where a tile is not all the group's
    assert "*(uint4*)(c + " in artifact.source
    moe_gemm.load(artifact, workload)


def test_offsets_beyond_two_to_the_31_have_64_bits():
    config = {**PIPELINED, "block_m": 64, "specialise": False, "warpgroups": 1}
    source, grid, _ = emulate.lower(moe_gemm.program(experts(experts=256, n=4096, k=7168), config))
    assert "((int64_t)group) * (int64_t)29360128" in source
    assert grid == (32, 764)


def test_layout_follows_the_offsets():
    class Inner:
        def prepare(self, inputs, outputs):
            self.inputs = inputs

        def run(self):
            pass

    inner = Inner()
    launch = moe_gemm._Launch(inner, 16)
    offsets = torch.tensor([3, 3, 20], dtype=torch.int32)
    launch.prepare({"offsets": offsets}, {"c": torch.empty(20, 8)})
    groups, starts = inner.inputs["groups"], inner.inputs["starts"]
    assert groups.tolist() == [0, 2, 2, -1]
    assert starts.tolist() == [0, 3, 19, 0]
    offsets.copy_(torch.tensor([0, 20, 20], dtype=torch.int32))
    launch.layout()
    assert groups.tolist() == [1, 1, -1, -1]
    assert starts.tolist() == [0, 16, 0, 0]


@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "n", "k"),
    [
        (4096, 128, 8, 3072, 4096),
        (16, 256, 8, 4096, 7168),
        (1024, 32, 4, 5760, 2880),
        (37, 5, 2, 77, 131),
        (1, 1, 1, 1, 1),
        (2**20, 64, 8, 64, 64),
    ],
)
@pytest.mark.parametrize("gather", [False, True])
def test_space_has_starts_and_is_not_large(tokens, count, top_k, n, k, gather):
    space = moe_gemm.space(experts(tokens, count, top_k, n, k, gather), H200)
    assert 1 <= space.size < 10_000
    assert space.starts or k < 32


def test_refuses_what_it_has_no_variant_for():
    with pytest.raises(Unsupported, match="sm_90a"):
        moe_gemm.space(experts(), dataclasses.replace(H200, arch="sm_80"))
    with pytest.raises(Unsupported, match="float32"):
        moe_gemm.space(experts(dtype="fp32"), H200)

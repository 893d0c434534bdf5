"""Triton's moe_gemm: its space, numbers from the interpreter on ragged routings, and cross-compilation for an H200."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kerneldyno.backends.triton import moe_gemm
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported
from kerneldyno.testing.devices import H200


ROOT = Path(__file__).parents[3]
# few multiprocessors, so that persistent grids loop on shapes small enough to interpret
DEVICE = replace(H200, sm_count=3)


def routed(tokens, experts, top_k, n, k, gather=False, dtype="bf16"):
    shape = {"tokens": tokens, "experts": experts, "top_k": top_k, "n": n, "k": k, "routing": "uniform", "gather": gather}
    return Workload("moe_gemm", shape, dtype)


MIXTRAL = routed(4096, 8, 2, 28672, 4096)
QWEN = routed(4096, 128, 8, 3072, 4096, gather=True)
DEEPSEEK_FEW = routed(16, 256, 8, 4096, 7168)
GPT_OSS = routed(1024, 128, 4, 5760, 2880)
ODD = routed(100, 5, 2, 71, 37)


@pytest.mark.parametrize(
    "workload",
    [MIXTRAL, QWEN, DEEPSEEK_FEW, GPT_OSS, ODD, routed(1, 1, 1, 1, 1), routed(8192, 4, 1, 100, 102, True), routed(1, 256, 8, 7168, 2048)],
)
def test_every_routing_has_configurations(workload):
    space = moe_gemm.space(workload, H200)
    assert 2 <= space.size <= 20_000
    assert all(config["BLOCK_SIZE_M"] <= max(16, 2 * workload.shape["tokens"] - 1) for config in space.configs)
    assert all(config["access"] == "pointers" or workload.shape["k"] % 8 == 0 for config in space.configs)


def test_knobs_are_named_as_in_vllm():
    names = set(moe_gemm.space(MIXTRAL, H200).params)
    assert names >= {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"}


def test_what_has_no_variant_is_refused_with_the_reason():
    with pytest.raises(Unsupported, match="moe_gemm on triton in fp32"):
        moe_gemm.space(routed(16, 8, 2, 64, 64, dtype="fp32"), H200)
    with pytest.raises(Unsupported, match="32 bits"):
        moe_gemm.space(routed(2**30, 8, 2, 1, 1), H200)


def test_starts_suit_the_routing():
    assert moe_gemm.space(DEEPSEEK_FEW, H200).starts[0]["swap_ab"]
    assert [config["BLOCK_SIZE_M"] for config in moe_gemm.space(MIXTRAL, H200).starts] == [128] * 4 + [64] * 2
    assert len(moe_gemm.space(DEEPSEEK_FEW, H200).starts) == 5


def test_reasons_name_what_cannot_work():
    tile = {"access": "descriptors", "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "programs_per_sm": 1}
    space = moe_gemm.space(MIXTRAL, H200)
    plain = {**tile, "num_warps": 8, "num_stages": 4, "flatten": False, "store": "descriptors", "short": 32}
    assert any("232,448 B" in reason for reason in space.problems(plain))
    assert {**plain, "num_stages": 3} in space
    assert any("fused" in reason for reason in space.problems({**plain, "num_stages": 3, "flatten": True}))
    assert any("accumulators" in reason for reason in space.problems({**plain, "num_stages": 3, "num_warps": 4}))


def ragged(draw, workload):
    """Rows of each expert: none has more than the tokens, every third is empty."""
    shape = workload.shape
    counts = [0] * shape["experts"]
    for _ in range(shape["tokens"] * shape["top_k"]):
        counts[draw.choice([expert for expert, rows in enumerate(counts) if rows < shape["tokens"] and expert % 3 != 1])] += 1
    return counts


def cases():
    # the interpreter holds bf16 as integers and multiplies these; the bf16 product runs on GPUs only
    draw = random.Random(3)

    def pick(workload, count=1, **fixed):
        configs = moe_gemm.space(workload, DEVICE).configs
        fitting = [config for config in configs if all(config.get(key) == value for key, value in fixed.items())]
        for config in draw.sample(fitting, count):
            yield [workload.shape, workload.dtype, config, ragged(draw, workload), DEVICE.sm_count]

    for gather in (False, True):
        small = routed(48, 7, 2, 72, 136, gather, "fp16")
        large = routed(140, 4, 2, 136, 200, gather, "fp16")
        yield from pick(routed(1, 1, 1, 1, 1, gather, "fp16"))
        yield from pick(routed(37, 5, 3, 71, 37, gather, "fp16"), 2)
        yield from pick(routed(9, 100, 1, 40, 64, gather, "fp16"), 1, access="descriptors")
        yield from pick(small, 2, access="pointers")
        yield from pick(small, 1, access="descriptors", programs_per_sm=0, swap_ab=True)
        yield from pick(small, 1, access="descriptors", programs_per_sm=1, swap_ab=True, flatten=True)
        yield from pick(small, 2, store="descriptors")
        yield from pick(large, 1, BLOCK_SIZE_M=128, short=32)
        yield from pick(large, 1, BLOCK_SIZE_M=128, short=64, store="descriptors")
        yield from pick(large, 1, BLOCK_SIZE_M=64, programs_per_sm=1, store="descriptors", flatten=True)


CASES = list(cases())


@pytest.fixture(scope="module")
def results():
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.backends.triton.interpret_moe_gemm"]
    done = subprocess.run(command, input=json.dumps(CASES), capture_output=True, text=True, env=environ, cwd=ROOT, check=False)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("the interpreter of this Triton (3.6 and before) does not run with this NumPy (2.4 and later)")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_matches_float64_and_writes_every_row_once(results, index):
    error, intact = results[index]
    assert error <= 1.0, CASES[index]  # in units of fp16's epsilon: a row left out is NaN, one of another expert far off
    assert intact, f"wrote outside of the output: {CASES[index]}"


@pytest.fixture(scope="module")
def _triton_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def drawn():
    for workload, starts, samples in ((MIXTRAL, 5, 1), (QWEN, 2, 1), (DEEPSEEK_FEW, 3, 1), (GPT_OSS, 0, 1), (ODD, 0, 1)):
        space = moe_gemm.space(workload, H200)
        yield from ((workload, config) for config in space.starts[:starts])
        yield from ((workload, config) for config in random.Random(1).sample(space.configs, samples))


@pytest.mark.usefixtures("_triton_cache")
@pytest.mark.parametrize(
    ("workload", "config"), list(drawn()), ids=lambda case: "-".join(map(str, case.values())) if isinstance(case, dict) else ""
)
def test_fits_the_device_without_spills(workload, config):
    artifact = moe_gemm.build(workload, config, H200.arch)
    assert artifact.spill_bytes == 0
    assert 0 < artifact.registers <= 255
    assert artifact.registers * artifact.threads <= H200.registers_per_sm
    assert artifact.smem_bytes <= H200.smem_per_block_bytes
    ptx = artifact.texts["ptx"]
    assert ("cp.async.bulk.tensor.2d.shared" in ptx) == (config["access"] == "descriptors")
    assert ("cp.async.bulk.tensor.2d.global.shared" in ptx) == (config.get("store") == "descriptors")
    tensor_cores = config["BLOCK_SIZE_M"] >= 64 or config.get("swap_ab", False)
    assert ("wgmma.mma_async" if tensor_cores else "mma.sync") in ptx

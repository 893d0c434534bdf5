"""Cross-compilation for an H200 on a machine without one: registers, shared memory, spills, warp specialisation, Triton's cache."""

import json
import os
import random
import re
import subprocess
import sys

import pytest

from kerneldyno.backends.triton import gemm
from kerneldyno.backends.triton import softmax
from kerneldyno.backends.triton import vector_add
from kerneldyno.core import Workload
from kerneldyno.testing.devices import H200


SQUARE = Workload("gemm", {"m": 8192, "n": 8192, "k": 8192, "layout": "nt"}, "bf16")
SQUARE_NN = Workload("gemm", {"m": 8192, "n": 8192, "k": 8192, "layout": "nn"}, "fp16")
SQUARE_FP32 = Workload("gemm", {"m": 4096, "n": 4096, "k": 4096, "layout": "nt"}, "fp32")
ODD = Workload("gemm", {"m": 1000, "n": 1003, "k": 517, "layout": "nn"}, "bf16")
FEW_ROWS = Workload("gemm", {"m": 16, "n": 28672, "k": 4096, "layout": "nt"}, "bf16")
LONG = Workload("softmax", {"m": 8192, "n": 131072}, "bf16")
SHORT = Workload("softmax", {"m": 16384, "n": 8192}, "bf16")
LONG_FP32 = Workload("softmax", {"m": 4096, "n": 151936}, "fp32")

TILE = {"load": "descriptor", "block_m": 128, "block_n": 256, "block_k": 64, "group_m": 8}
PERSISTENT = {**TILE, "num_warps": 8, "persistent": True, "warp_specialize": False}
SPECIALIZED = {**TILE, "num_warps": 4, "num_stages": 3, "persistent": True, "warp_specialize": True}
ROW = {"method": "row", "num_warps": 8, "rows": 1, "hints": True}
ONLINE = {"method": "online", "prefetch": 1, "hints": True}
GOOD = [
    (gemm, SQUARE, {**PERSISTENT, "num_stages": 3, "flatten": True, "epilogue_subtile": 1}),
    (gemm, SQUARE, {**PERSISTENT, "num_stages": 4, "flatten": False, "epilogue_subtile": 2}),
    (gemm, SQUARE_NN, {**PERSISTENT, "num_stages": 3, "flatten": True, "epilogue_subtile": 2}),
    (gemm, SQUARE, SPECIALIZED),
    (gemm, SQUARE, {**TILE, "load": "pointer", "num_warps": 8, "num_stages": 4}),
    (softmax, SHORT, {**ROW, "programs_per_sm": 0}),
    (softmax, SHORT, {**ROW, "programs_per_sm": 4, "row_prefetch": 2}),
    (softmax, LONG, {**ONLINE, "num_warps": 32, "block_n": 32768, "resident": 0}),
    (softmax, LONG, {**ONLINE, "num_warps": 16, "block_n": 16384, "resident": 65536}),
]


@pytest.fixture(scope="module", autouse=True)
def triton_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def drawn(kernel, workload, count):
    configs = kernel.space(workload, H200).configs
    return [(kernel, workload, config) for config in random.Random(1).sample(configs, count)]


SAMPLE = [
    *drawn(gemm, SQUARE, 4),
    *drawn(gemm, SQUARE_NN, 1),
    *drawn(gemm, SQUARE_FP32, 2),
    *drawn(gemm, ODD, 1),
    *drawn(gemm, FEW_ROWS, 2),
    *drawn(softmax, SHORT, 2),
    *drawn(softmax, LONG, 2),
    *drawn(softmax, LONG_FP32, 1),
    *drawn(vector_add, Workload("vector_add", {"n": 2**26}, "bf16"), 1),
]


def named(case):
    kernel, workload, config = case
    return f"{kernel.__name__.rsplit('.', 1)[1]}-{workload.dtype}-" + "-".join(map(str, config.values()))


@pytest.mark.parametrize("case", SAMPLE, ids=named)
def test_fits_the_device(case):
    kernel, workload, config = case
    artifact = kernel.build(workload, config, H200.arch)
    assert 0 < artifact.registers <= 255
    assert artifact.registers * artifact.threads <= H200.registers_per_sm
    assert artifact.smem_bytes <= H200.smem_per_block_bytes
    assert artifact.threads in (32 * config["num_warps"], 384)
    assert artifact.binary.startswith(b"\x7fELF")
    assert f".visible .entry {artifact.entry}(" in artifact.texts["ptx"]


@pytest.mark.parametrize("case", GOOD, ids=named)
def test_good_configurations_are_in_the_space_and_do_not_spill(case):
    kernel, workload, config = case
    assert kernel.space(workload, H200).problems(config) == []
    artifact = kernel.build(workload, config, H200.arch)
    assert artifact.spill_bytes == 0
    assert artifact.registers <= 65536 // artifact.threads
    assert artifact.smem_bytes <= H200.smem_per_block_bytes


def test_warp_specialisation_takes_place():
    artifact = gemm.build(SQUARE, SPECIALIZED, H200.arch)
    assert "ttg.warp_specialize" in artifact.texts["ttgir"]
    assert artifact.threads == 384  # 4 warps that load, 8 that multiply
    plain = gemm.build(
        SQUARE, {**SPECIALIZED, "warp_specialize": False, "block_n": 128, "flatten": False, "epilogue_subtile": 1}, H200.arch
    )
    assert "ttg.warp_specialize" not in plain.texts["ttgir"]
    assert plain.threads == 128


def test_tiles_go_through_tensor_maps_and_tensor_cores():
    artifact = gemm.build(SQUARE, GOOD[0][2], H200.arch)
    ptx = artifact.texts["ptx"]
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared::(cta|cluster)\.global", ptx)
    assert "cp.async.bulk.tensor.2d.global.shared" in ptx
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in ptx


def test_rows_of_16_bytes_are_loaded_whole_whatever_divides_their_length():
    # 4104 is a multiple of 8 and not of 16: one load of 8 elements is still aligned
    artifact = softmax.build(Workload("softmax", {"m": 64, "n": 4104}, "bf16"), {**ROW, "programs_per_sm": 0}, H200.arch)
    loads = [line for line in artifact.texts["ptx"].splitlines() if "ld.global" in line]
    assert loads
    assert all(".v4.b32" in line for line in loads)


_SECOND_PROCESS = """
import json, sys
import triton
from kerneldyno.backends.triton import gemm
from kerneldyno.core import Workload
workload, config = json.load(sys.stdin)
seen = []
triton.knobs.compilation.listener = lambda **facts: seen.append(facts["cache_hit"])
compiled = gemm.program(Workload(**workload), config).compile("sm_90a")
json.dump([seen, compiled.hash], sys.stdout)
"""


def test_another_process_finds_the_build_in_the_cache():
    workload = {"problem": "gemm", "shape": {"m": 512, "n": 512, "k": 512, "layout": "nt"}, "dtype": "bf16"}
    config = {**TILE, "load": "pointer", "block_n": 64, "num_warps": 4, "num_stages": 3}
    artifact = gemm.build(Workload(**workload), config, H200.arch)
    done = subprocess.run(
        [sys.executable, "-c", _SECOND_PROCESS],
        input=json.dumps([workload, config]),
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[True], artifact.payload["triton_hash"]]

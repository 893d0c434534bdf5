"""Cross-compiled for sm_90a without a GPU: what the kernels need, and what TileLang generated for sizes that divide nothing."""

import dataclasses
import re
import shutil
import subprocess

import pytest

from kerneldyno.backends import tilelang as backend
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported
from kerneldyno.testing.devices import H200


pytest.importorskip("tilelang")

from kerneldyno.backends.tilelang import gemm
from kerneldyno.backends.tilelang import softmax
from kerneldyno.backends.tilelang import vector_add
from tests.backends.tilelang import emulate


ARCH = "sm_90a"
needs_nvcc = pytest.mark.skipif(backend.find_nvcc() is None, reason="nvcc is missing")
TILE = {"block_m": 128, "block_n": 256, "block_k": 64, "stages": 3, "warpgroups": 2, "panel": 8}
OVERLAPPED = {"schedule": "overlapped", **TILE, "blocks": 132, "pieces": 1}
PIPELINED = {"schedule": "pipelined", **TILE, "policy": "columns", "c_shared": True}


def product(m, n, k, layout="nt", dtype="bf16"):
    return Workload("gemm", {"m": m, "n": n, "k": k, "layout": layout}, dtype)


def build(kernel, workload, config):
    assert not kernel.space(workload, H200).problems(config)
    artifact = kernel.build(workload, config, ARCH)
    assert artifact.registers <= 255
    assert artifact.spill_bytes == 0
    assert artifact.smem_bytes <= H200.smem_per_block_bytes
    assert artifact.threads <= 1024
    return artifact


def disassemble(artifact, folder):
    tool = shutil.which("cuobjdump")
    if tool is None:
        tool = pytest.importorskip("triton").knobs.nvidia.cuobjdump.path
    start, length = artifact.payload["cubin_span"]
    (folder / "kernel.cubin").write_bytes(artifact.binary[start : start + length])
    return subprocess.run([tool, "-sass", str(folder / "kernel.cubin")], check=True, capture_output=True, text=True).stdout


@needs_nvcc
@pytest.mark.parametrize(
    ("workload", "config", "threads"),
    [(product(8192, 8192, 8192), OVERLAPPED, 384), (product(1000, 1000, 520, "nn", "fp16"), {**PIPELINED, "specialise": True}, 384)],
)
def test_gemm_uses_the_tensor_cores_and_tensor_maps(workload, config, threads, tmp_path, monkeypatch):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    artifact = build(gemm, workload, config)
    # the producer warpgroup is on top of the two that compute
    assert artifact.threads == threads
    assert "serialized" not in artifact.texts["ptxas"]
    listing = disassemble(artifact, tmp_path)
    assert "HGMMA" in listing
    assert "UTMALDG" in listing
    assert "UTMASTG" in listing
    # nothing goes through TileLang's cache, where builders could meet
    assert not list((tmp_path / "cache").rglob("*.so"))
    assert not list((tmp_path / "cache").rglob("*.cubin"))
    gemm.load(artifact, workload)


@pytest.mark.parametrize(("layout", "policy"), [("nt", "rows"), ("nn", "columns")])
def test_gemm_of_odd_sizes_checks_its_bounds(layout, policy):
    workload = product(1000, 1003, 517, layout)
    config = {**PIPELINED, "block_n": 128, "policy": policy}
    assert not gemm.space(workload, H200).problems(config)
    source, grid, threads = emulate.lower(gemm.program(workload, config))
    assert grid == (8, 8)
    assert threads == 256
    assert "wgmma" in source
    # pitches of 1034 and 2006 bytes are no multiples of 16: neither tensor maps nor vectors
    assert "tma_load" not in source
    assert "tma_store" not in source
    assert not re.search(r"\*\(uint[124]\*\)\([abc] \+", source)
    assert not re.search(r"cp_async_gs(_conditional)?<(8|16)>", source)
    assert "< 1003" in source
    # 125 = 1000 / 8, as the compiler writes the last row
    assert "< 125" in source or "< 1000" in source
    # what is left of k behind the two steps that are loaded ahead: 517 - 128
    assert "< 389" in source


def test_gemm_refuses_overlap_where_no_tensor_map_fits():
    space = gemm.space(product(1000, 1003, 520), H200)
    assert space.problems(OVERLAPPED)
    assert space.size > 0
    assert "overlapped" not in space.params["schedule"].values


def test_gemm_space_holds_known_good_configurations_and_keeps_out_what_cannot_fit():
    space = gemm.space(product(8192, 8192, 8192), H200)
    assert OVERLAPPED in space
    assert {**PIPELINED, "specialise": True} in space
    assert {**OVERLAPPED, "stages": 4} not in space
    assert {**OVERLAPPED, "stages": 4, "pieces": 2} in space
    assert {**OVERLAPPED, "block_m": 192, "warpgroups": 3} not in space
    assert 500 < space.size < 10_000


def test_gemm_needs_wgmma():
    with pytest.raises(Unsupported, match="sm_90a"):
        gemm.space(product(64, 64, 64), dataclasses.replace(H200, arch="sm_80"))


@needs_nvcc
def test_softmax_reads_and_writes_16_bytes():
    workload = Workload("softmax", {"m": 16384, "n": 8192}, "bf16")
    artifact = build(softmax, workload, {"algorithm": "held", "row_threads": 256, "rows": 1, "vector_bytes": 16})
    assert "*(uint4*)(x + " in artifact.source
    assert "*(uint4*)(y + " in artifact.source


def test_softmax_of_many_elements_has_64_bit_offsets():
    workload = Workload("softmax", {"m": 32768, "n": 131072}, "bf16")
    config = {"algorithm": "streamed", "row_threads": 1024, "vector_bytes": 16, "unroll": 2, "kept_kb": 216}
    assert config in softmax.space(workload, H200)
    source, _, _ = emulate.lower(softmax.program(workload, config))
    assert "((int64_t)((int)blockIdx.x)) * (int64_t)131072" in source


@pytest.mark.parametrize("n", [1, 128, 1003, 4096, 8192, 131072, 262144])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_softmax_space_is_neither_empty_nor_large(n, dtype):
    space = softmax.space(Workload("softmax", {"m": 64, "n": n}, dtype), H200)
    assert 1 <= space.size < 500


@needs_nvcc
def test_vector_add_loads_everything_before_it_stores():
    workload = Workload("vector_add", {"n": 2**31 - 1}, "bf16")
    artifact = build(vector_add, workload, {"threads": 1024, "vector_bytes": 16, "unroll": 4})
    assert artifact.source.count("*(uint4*)(x + ") == 1
    assert artifact.smem_bytes == 0

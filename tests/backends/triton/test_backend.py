"""What the Triton backend says of itself, and its search spaces."""

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

from kerneldyno.backends import triton as backend
from kerneldyno.backends.triton import gemm
from kerneldyno.backends.triton import softmax
from kerneldyno.backends.triton import vector_add
from kerneldyno.core import Workload
from kerneldyno.testing.devices import H200


def product(m, n, k, layout="nt", dtype="bf16"):
    return Workload("gemm", {"m": m, "n": n, "k": k, "layout": layout}, dtype)


def test_usable_on_an_nvidia_gpu_with_its_version():
    found = backend.probe(H200)
    assert found.usable
    assert found.versions == {"triton": importlib.metadata.version("triton")}


def test_without_a_gpu_it_names_the_cpu_backend():
    found = backend.probe(None)
    assert not found.usable
    assert found.remedy == "choose device=cpu backend=c"


def test_where_it_is_absent_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = backend.probe(H200)
    assert not found.usable
    assert found.reason == "triton is not installed"
    assert "kerneldyno[triton]" in found.remedy


def test_an_old_version_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "3.1.0")
    found = backend.probe(H200)
    assert not found.usable
    assert "3.1.0" in found.reason


def test_looking_does_not_import_triton_or_torch():
    code = "import sys, kerneldyno.backends.triton as b; b.probe(None); print('triton' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("extents", [(1, 1, 1), (1, 28672, 4096), (16, 512, 128), (1000, 1003, 517), (2048, 2048, 2048), (2**31 - 1, 1, 8)])
def test_every_product_has_configurations(extents, layout, dtype):
    space = gemm.space(product(*extents, layout, dtype), H200)
    assert 8 <= space.size <= 4096
    assert all(config["load"] == "pointer" for config in space.configs) or extents[2] % 8 == 0


def test_only_rows_of_16_bytes_are_read_through_tensor_maps():
    assert gemm.space(product(4096, 4096, 4096), H200).params["load"].values == ("descriptor", "pointer")
    assert gemm.space(product(4096, 4096, 4100), H200).params["load"].values == ("pointer",)
    assert gemm.space(product(4096, 4100, 4096), H200).params["load"].values == ("descriptor", "pointer")  # rows of C alone
    assert gemm.space(product(4096, 4100, 4096, "nn"), H200).params["load"].values == ("pointer",)


def test_reasons_name_what_cannot_work():
    tile = {"load": "descriptor", "block_k": 64, "group_m": 8, "num_warps": 4, "num_stages": 3, "persistent": True}
    space = gemm.space(product(8192, 8192, 8192), H200)
    specialized = {**tile, "block_m": 64, "block_n": 256, "warp_specialize": True}
    assert any("assertion" in reason for reason in space.problems(specialized))
    assert any("ignores it" in reason for reason in space.problems({**specialized, "block_m": 128, "num_warps": 8}))
    plain = {**tile, "block_m": 128, "block_n": 256, "warp_specialize": False, "flatten": True, "epilogue_subtile": 1}
    assert any("accumulators" in reason for reason in space.problems(plain))
    assert any("232,448 B" in reason for reason in space.problems({**plain, "num_warps": 8, "num_stages": 4}))
    assert {**plain, "num_warps": 8, "num_stages": 4, "epilogue_subtile": 2} in space


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("extents", [(1, 1), (7, 1003), (4096, 4096), (16384, 8192), (16384, 32768), (8192, 131072), (1, 2**31 - 1)])
def test_every_softmax_has_configurations(extents, dtype):
    space = softmax.space(Workload("softmax", {"m": extents[0], "n": extents[1]}, dtype), H200)
    assert 2 <= space.size <= 1000
    methods = {config["method"] for config in space.configs}
    assert methods == ({"row", "online"} if extents[1] == 32768 else {"row"} if extents[1] <= 8192 else {"online"})


def test_a_long_row_does_not_fit_registers():
    space = softmax.space(Workload("softmax", {"m": 8192, "n": 131072}, "bf16"), H200)
    row = {"method": "row", "num_warps": 32, "rows": 1, "programs_per_sm": 0, "hints": True}
    assert any("32,768 elements" in reason and "n=131072" in reason for reason in space.problems(row))


def test_vector_add_has_configurations_of_every_width():
    space = vector_add.space(Workload("vector_add", {"n": 1}, "fp32"), H200)
    assert {config["block"] for config in space.configs} == {256, 512, 1024, 2048, 4096, 8192}

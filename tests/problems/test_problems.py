"""What the problems say of themselves: shapes, work, inputs, baselines, with figures worked out by hand."""

import subprocess
import sys

import pytest
import torch

from kerneldyno.core import Device
from kerneldyno.core import Workload
from kerneldyno.errors import RequestError
from kerneldyno.measure.device import cpu
from kerneldyno.problems import gemm
from kerneldyno.problems import softmax
from kerneldyno.problems import vector_add
from kerneldyno.problems._common import Compiled
from kerneldyno.testing.devices import H200


def test_defaults() -> None:
    assert {key: dim.default for key, dim in gemm.dims.items()} == {"m": 4096, "n": 4096, "k": 4096, "layout": "nt"}
    assert {key: dim.default for key, dim in softmax.dims.items()} == {"m": 4096, "n": 4096}
    assert {key: dim.default for key, dim in vector_add.dims.items()} == {"n": 2**24}
    assert gemm.dtypes[0] == softmax.dtypes[0] == vector_add.dtypes[0] == "bf16"


@pytest.mark.parametrize(
    ("name", "m", "n", "k"),
    [
        ("llama3-70b-gate-up-4k", 4096, 57344, 8192),
        ("llama3-70b-qkv-16", 16, 10240, 8192),
        ("llama3-8b-down-1", 1, 4096, 14336),
        ("qwen3-32b-o-64", 64, 5120, 8192),
        ("deepseek-v3-qkv-a-4k", 4096, 2112, 7168),
        ("deepseek-v3-q-b-512", 512, 24576, 1536),
        ("deepseek-v3-kv-b-512", 512, 32768, 512),
        ("deepseek-v3-shared-gate-up-4k", 4096, 4096, 7168),
        ("gpt-oss-120b-qkv-1", 1, 5120, 2880),
        ("square-8k", 8192, 8192, 8192),
        ("skinny-k-256", 8192, 8192, 256),
    ],
)
def test_gemm_shapes_of_real_models(name: str, m: int, n: int, k: int) -> None:
    assert gemm.shapes()[name] == {"m": m, "n": n, "k": k, "layout": "nt"}


def test_softmax_and_vector_add_shapes() -> None:
    assert softmax.shapes()["16kx32k"] == {"m": 16384, "n": 32768}
    assert softmax.shapes()["8kx128k"] == {"m": 8192, "n": 131072}
    assert softmax.shapes()["qwen3-8b-logits-4k"] == {"m": 4096, "n": 151936}
    assert softmax.shapes()["deepseek-v3-router-4k"] == {"m": 4096, "n": 256}
    assert vector_add.shapes()["16m"] == {"n": 2**24}
    assert vector_add.shapes()["llama3-70b-residual-4k"] == {"n": 4096 * 8192}


def test_work() -> None:
    assert gemm.work(Workload("gemm", {"m": 2, "n": 3, "k": 5, "layout": "nn"}, "bf16")).flops == 60
    assert gemm.work(Workload("gemm", {"m": 2, "n": 3, "k": 5, "layout": "nn"}, "bf16")).bytes == 2 * (10 + 15 + 6)
    assert softmax.work(Workload("softmax", {"m": 4, "n": 10}, "fp32")).bytes == 2 * 40 * 4
    assert vector_add.work(Workload("vector_add", {"n": 7}, "fp16")).bytes == 42


def test_dtypes_see_the_same_numbers() -> None:
    shape = {"m": 8, "n": 8, "k": 8, "layout": "nt"}
    exact = gemm.inputs(Workload("gemm", shape, "fp32", seed=3), "cpu")
    rounded = gemm.inputs(Workload("gemm", shape, "bf16", seed=3), "cpu")
    assert torch.equal(exact["b"].bfloat16(), rounded["b"])
    assert not torch.equal(exact["a"], exact["b"])


def test_layouts() -> None:
    for layout, extent in (("nt", (3, 5)), ("nn", (5, 3))):
        workload = Workload("gemm", {"m": 2, "n": 3, "k": 5, "layout": layout}, "fp32")
        inputs = gemm.inputs(workload, "cpu")
        assert tuple(inputs["b"].shape) == extent
        reference = gemm.reference(workload, inputs)["c"]
        for row in range(2):
            for column in range(3):
                pairs = [(inputs["a"][row, at], inputs["b"][(column, at) if layout == "nt" else (at, column)]) for at in range(5)]
                assert float(reference[row, column]) == pytest.approx(sum(float(left) * float(right) for left, right in pairs), rel=1e-12)


def test_check_refuses_what_no_device_holds() -> None:
    huge = Workload("gemm", {"m": 2**20, "n": 2**20, "k": 64, "layout": "nt"}, "bf16")
    with pytest.raises(RequestError, match="2048 GiB"):
        gemm.check(huge)
    softmax.check(Workload("softmax", {"m": 8192, "n": 262144}, "fp32"))


def test_baselines_by_device() -> None:
    workload = Workload("softmax", {"m": 4, "n": 4}, "fp32")
    assert list(softmax.baselines(workload, cpu())) == ["torch", "copy"]
    assert list(softmax.baselines(workload, H200)) == ["torch", "torch.compile", "copy"]
    assert list(softmax.baselines(workload, Device("replay", "recorded", "sm_90a"))) == []
    product = Workload("gemm", {"m": 4, "n": 4, "k": 4, "layout": "nt"}, "fp32")
    assert list(gemm.baselines(product, cpu())) == ["torch"]
    assert list(gemm.baselines(product, H200)) == ["cublas", "torch.compile"]


@pytest.mark.parametrize("n", [1, 2, 1001])
def test_vector_add_copy_moves_as_many_bytes(n: int) -> None:
    workload = Workload("vector_add", {"n": n}, "bf16")
    inputs, outputs = vector_add.inputs(workload, "cpu"), vector_add.outputs(workload, "cpu")
    call = vector_add._bind_copy(inputs, outputs)
    copied = call()
    assert isinstance(copied, torch.Tensor)
    assert abs(2 * copied.numel() * 2 - vector_add.work(workload).bytes) <= 2
    assert torch.equal(copied[:n], inputs["x"])


def test_torch_compile_leaves_outputs_poisoned_until_collected() -> None:
    workload = Workload("gemm", {"m": 3, "n": 4, "k": 5, "layout": "nt"}, "fp32")
    inputs, outputs = gemm.inputs(workload, "cpu"), gemm.outputs(workload, "cpu")
    outputs["c"].fill_(float("nan"))
    launch = Compiled(gemm._product_nt, ("a", "b"), output="c")
    launch.prepare(inputs, outputs)
    launch.run()
    assert bool(outputs["c"].isnan().all())
    launch.collect()
    torch.testing.assert_close(outputs["c"], inputs["a"] @ inputs["b"].T)


def test_listing_a_problem_needs_no_torch() -> None:
    code = (
        "import sys; from kerneldyno.problems import attention, gemm, moe_gemm, softmax, vector_add;"
        "[problem.shapes() for problem in (attention, gemm, moe_gemm, softmax, vector_add)]; print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"

"""The contract of every problem in the tree, on the real GPU: references, budgets and library baselines."""

import pytest

from kerneldyno.measure.device import gpus
from kerneldyno.testing.problem import ProblemContract
from tests.contract.found import attention
from tests.contract.found import gemm
from tests.contract.found import moe_gemm
from tests.contract.found import problem_modules
from tests.contract.found import softmax
from tests.contract.found import title
from tests.contract.found import vector_add


pytestmark = pytest.mark.gpu

DEVICES = gpus()
if not DEVICES:
    pytest.skip("there is no NVIDIA GPU here", allow_module_level=True)

WORKLOADS = {
    "attention": (
        attention(2, 4, 4, 512, 512, 128, "bf16"),
        attention(2, 4, 4, 512, 512, 64, "fp16", causal=True, lse=True, layout="bhsd"),
        attention(2, 8, 2, 200, 700, 128, "bf16", causal=True),
        attention(2, 8, 2, 300, 300, 64, "bf16", causal=True, window=128),
        attention(1, 4, 4, 100, 40, 64, "bf16", causal=True),
        attention(1, 4, 4, 100, 40, 64, "bf16", causal=True, lse=True),
        attention(1, 4, 2, 256, 256, 64, "bf16", softcap=20.0),
        attention(1, 8, 8, 400, 400, 192, "bf16", head_dim_v=128, causal=True),
        attention(4, 16, 2, 1, 5000, 128, "bf16", causal=True),
        attention(4, 16, 2, 1, 5000, 128, "fp16", lse=True),
        attention(1, 2, 2, 50, 60, 72, "bf16", scale=0.2),
        attention(1, 2, 2, 100, 120, 64, "fp32", causal=True),
    ),
    "gemm": (
        gemm(17, 33, 65, "bf16", "nn"),
        gemm(16, 4096, 14336, "bf16"),
        gemm(64, 2112, 7168, "fp16"),
        gemm(1024, 1024, 4096, "bf16"),
        gemm(500, 300, 2000, "fp32"),
    ),
    "moe_gemm": (
        moe_gemm(1, 8, 2, 256, 512, "bf16"),
        moe_gemm(300, 16, 4, 512, 1024, "bf16", "zipf"),
        moe_gemm(300, 16, 4, 512, 1024, "bf16", "zipf", gather=True),
        moe_gemm(64, 128, 8, 328, 200, "bf16", gather=True),
        moe_gemm(50, 4, 2, 17, 33, "bf16", "one_hot"),
        moe_gemm(200, 8, 2, 256, 512, "fp16"),
    ),
    "softmax": (softmax(3, 5, "fp32"), softmax(64, 4097, "bf16"), softmax(16, 131072, "fp16")),
    "vector_add": (vector_add(1003, "bf16"), vector_add(2**22, "fp32")),
}

for _name, _module in problem_modules().items():
    globals()[title(_name)] = type(
        title(_name),
        (ProblemContract,),
        {
            "problem": _module,
            "workloads": WORKLOADS[_name],
            "torch_device": "cuda:0",
            "device": DEVICES[0],
            "partly_read": _name in ("attention", "moe_gemm"),
            # max-autotune times cuBLAS against its own kernels for each shape: half a minute for five of them
            "unhurried": ("torch.compile",) if _name == "gemm" else (),
        },
    )

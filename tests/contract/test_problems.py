"""The contract of every problem in the tree, on the CPU."""

from kerneldyno.testing.problem import ProblemContract
from tests.contract.found import attention
from tests.contract.found import gemm
from tests.contract.found import moe_gemm
from tests.contract.found import problem_modules
from tests.contract.found import softmax
from tests.contract.found import title
from tests.contract.found import vector_add


WORKLOADS = {
    "attention": (
        attention(1, 2, 2, 5, 7, 16, "bf16"),
        attention(2, 4, 2, 33, 70, 24, "fp16", head_dim_v=16, causal=True, layout="bhsd"),
        attention(1, 4, 1, 1, 300, 64, "bf16", lse=True),
        attention(1, 2, 2, 40, 10, 32, "bf16", causal=True, lse=True),
        attention(1, 2, 1, 50, 60, 16, "fp32", window=9, softcap=5.0, scale=0.5),
        attention(1, 2, 2, 64, 64, 8, "fp16", causal=True, window=16),
        attention(2, 2, 2, 300, 300, 64, "bf16", softcap=20.0, causal=True),
    ),
    "gemm": (
        gemm(1, 1, 1, "bf16"),
        gemm(17, 33, 65, "bf16"),
        gemm(64, 96, 128, "fp16", "nn"),
        gemm(3, 1, 500, "fp32", "nn"),
        gemm(40, 50, 1000, "fp32"),
    ),
    "moe_gemm": (
        moe_gemm(1, 4, 2, 3, 5, "bf16"),
        moe_gemm(13, 8, 3, 17, 33, "bf16", "zipf", gather=True),
        moe_gemm(32, 4, 4, 40, 64, "fp16", "one_hot"),
        moe_gemm(7, 64, 2, 24, 100, "fp32", gather=True),
    ),
    "softmax": (
        softmax(1, 1, "bf16"),
        softmax(3, 5, "fp32"),
        softmax(7, 1000, "bf16"),
        softmax(33, 4097, "fp16"),
        softmax(2, 131072, "fp16"),
    ),
    "vector_add": (vector_add(1, "bf16"), vector_add(1000, "bf16"), vector_add(4097, "fp16"), vector_add(100_003, "fp32")),
}

PARTLY_READ = ("attention", "moe_gemm")

for _name, _module in problem_modules().items():
    globals()[title(_name)] = type(
        title(_name), (ProblemContract,), {"problem": _module, "workloads": WORKLOADS[_name], "partly_read": _name in PARTLY_READ}
    )

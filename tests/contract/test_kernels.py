"""The contract of every kernel in the tree: CPU kernels are built and run, CUDA kernels cross-compiled for sm_90a."""

from kerneldyno.measure.device import cpu
from kerneldyno.testing.devices import H200
from kerneldyno.testing.kernel import KernelContract
from tests.contract.found import attention
from tests.contract.found import backend_modules
from tests.contract.found import gemm
from tests.contract.found import kernel_refs
from tests.contract.found import moe_gemm
from tests.contract.found import problem_modules
from tests.contract.found import softmax
from tests.contract.found import title
from tests.contract.found import vector_add


ON_CPU = {
    "attention": (
        attention(1, 1, 1, 1, 1, 1, "fp32"),
        attention(2, 4, 2, 37, 37, 16, "fp32", causal=True),
        attention(1, 2, 1, 50, 90, 64, "fp32", head_dim_v=40, window=9, softcap=5.0, lse=True),
        attention(2, 6, 2, 1, 130, 64, "fp32", layout="bhsd"),
        attention(1, 2, 2, 40, 11, 32, "bf16", causal=True, lse=True),
        attention(1, 4, 1, 19, 200, 24, "fp16", causal=True, window=30, scale=0.3),
    ),
    "gemm": (
        gemm(1, 1, 1, "fp32"),
        gemm(17, 33, 65, "fp32"),
        gemm(64, 100, 300, "fp32", "nn"),
        gemm(33, 17, 40, "bf16"),
        gemm(8, 65, 129, "fp16", "nn"),
    ),
    "moe_gemm": (
        moe_gemm(1, 1, 1, 1, 1, "fp32"),
        moe_gemm(33, 8, 3, 17, 65, "fp32", "zipf"),
        moe_gemm(20, 6, 2, 100, 40, "fp32", "one_hot", gather=True),
        moe_gemm(9, 64, 4, 33, 70, "bf16", gather=True),
        moe_gemm(70, 4, 2, 24, 129, "fp16"),
    ),
    "softmax": (
        softmax(1, 1, "fp32"),
        softmax(3, 5, "fp32"),
        softmax(7, 1000, "fp32"),
        softmax(5, 4097, "bf16"),
        softmax(9, 129, "fp16"),
    ),
    "vector_add": (vector_add(1, "fp32"), vector_add(100_003, "fp32"), vector_add(4097, "bf16"), vector_add(515, "fp16")),
}
ON_CUDA = {
    "attention": (
        attention(2, 4, 2, 200, 300, 64, "bf16", causal=True, lse=True),
        attention(2, 16, 2, 1, 700, 128, "fp16", layout="bhsd"),
    ),
    "gemm": (gemm(256, 256, 128, "bf16"), gemm(33, 65, 17, "fp16", "nn")),
    "moe_gemm": (moe_gemm(64, 8, 2, 128, 256, "bf16"), moe_gemm(5, 16, 3, 72, 104, "fp16", "zipf", gather=True)),
    "softmax": (softmax(64, 4096, "bf16"), softmax(7, 1003, "fp32")),
    "vector_add": (vector_add(2**20, "bf16"), vector_add(1003, "fp32")),
}
"""Two builds a kernel: TileLang takes 4 s for each."""

for (_problem, _backend), _ref in kernel_refs().items():
    _module = backend_modules()[_backend]
    _cpu = _module.device_kind == "cpu"
    globals()[title(_problem, _backend)] = type(
        title(_problem, _backend),
        (KernelContract,),
        {
            "kernel": _ref,
            "problem": problem_modules()[_problem],
            "backend": _module,
            "device": cpu() if _cpu else H200,
            "workloads": (ON_CPU if _cpu else ON_CUDA)[_problem],
        },
    )

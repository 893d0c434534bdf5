"""The contract of every kernel in the tree: CPU kernels are built and run, CUDA kernels cross-compiled for sm_90a."""

from kerneldyno.measure.device import cpu
from kerneldyno.testing.devices import H200
from kerneldyno.testing.kernel import KernelContract
from tests.contract.found import backend_modules
from tests.contract.found import gemm
from tests.contract.found import kernel_refs
from tests.contract.found import problem_modules
from tests.contract.found import softmax
from tests.contract.found import title
from tests.contract.found import vector_add


ON_CPU = {
    "gemm": (
        gemm(1, 1, 1, "fp32"),
        gemm(17, 33, 65, "fp32"),
        gemm(64, 100, 300, "fp32", "nn"),
        gemm(33, 17, 40, "bf16"),
        gemm(8, 65, 129, "fp16", "nn"),
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
    "gemm": (gemm(256, 256, 128, "bf16"), gemm(33, 65, 17, "fp16", "nn")),
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

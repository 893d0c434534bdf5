"""The contract of every problem in the tree, on the CPU."""

from kerneldyno.testing.problem import ProblemContract
from tests.contract.found import gemm
from tests.contract.found import problem_modules
from tests.contract.found import softmax
from tests.contract.found import title
from tests.contract.found import vector_add


WORKLOADS = {
    "gemm": (
        gemm(1, 1, 1, "bf16"),
        gemm(17, 33, 65, "bf16"),
        gemm(64, 96, 128, "fp16", "nn"),
        gemm(3, 1, 500, "fp32", "nn"),
        gemm(40, 50, 1000, "fp32"),
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

for _name, _module in problem_modules().items():
    globals()[title(_name)] = type(title(_name), (ProblemContract,), {"problem": _module, "workloads": WORKLOADS[_name]})

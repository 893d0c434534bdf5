"""Runs Triton's moe_gemm in Triton's interpreter, on CPU tensors; started as a process of its own by test_moe_gemm.

The interpreter must be chosen (TRITON_INTERPRET=1) before the jit function is imported. Standard input: a JSON list of cases
[shape, dtype, config, rows of each group, sm_count]; standard output: a JSON list of [error in units of the dtype's epsilon,
guards intact].
"""

import json
import math
import sys

import torch

from kerneldyno.backends.triton import moe_gemm
from kerneldyno.core import DTYPE_EPSILON
from kerneldyno.core import Workload
from tests.backends.triton.interpret import DTYPES
from tests.backends.triton.interpret import GUARD


def run(shape, dtype, config, counts, sm_count):
    """Run one configuration on one routing; the output lies between two guards of NaN, and is NaN itself before."""
    workload = Workload("moe_gemm", shape, dtype)
    random = torch.Generator().manual_seed(len(counts))
    rows = sum(counts)
    index = torch.randint(shape["tokens"], (rows,), generator=random, dtype=torch.int32)
    a = torch.randn(shape["tokens"] if shape["gather"] else rows, shape["k"], generator=random).to(DTYPES[dtype])
    w = torch.randn(shape["experts"], shape["n"], shape["k"], generator=random).to(DTYPES[dtype])
    offsets = torch.tensor(counts).cumsum(0).int()
    expert = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    routed = (a[index] if shape["gather"] else a).double()
    expected = torch.stack([w[group].double() @ row for group, row in zip(expert.tolist(), routed, strict=True)])

    memory = torch.full((expected.numel() + 2 * GUARD,), math.nan, dtype=DTYPES[dtype])
    inputs = {"x" if shape["gather"] else "a": a, "index": index, "w": w, "offsets": offsets}
    launch = moe_gemm.RoutedLaunch(_Interpreted(moe_gemm.program(workload, config), sm_count), workload, config)
    output = memory[GUARD:-GUARD].view(expected.shape)
    launch.prepare(inputs, {"c": output})
    launch.run()
    scale = expected.abs() + expected.square().mean().sqrt()
    error = ((output.double() - expected).abs() / scale).max().item() / DTYPE_EPSILON[dtype]
    guards = torch.cat([memory[:GUARD], memory[-GUARD:]])
    return error, bool(guards.isnan().all())


class _Interpreted:
    """A program as the launch sees it, run by the interpreter."""

    def __init__(self, program, sm_count):
        self._program = program
        self._grid = program.grid(sm_count)

    def prepare(self, inputs, outputs):
        self._arguments = self._program.arguments({**inputs, **outputs})

    def run(self):
        self._program.function[self._grid](**self._arguments, num_warps=self._program.num_warps, num_stages=self._program.num_stages)


if __name__ == "__main__":
    json.dump([run(*case) for case in json.load(sys.stdin)], sys.stdout)

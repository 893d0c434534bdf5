"""Runs kernels of the Triton backend in Triton's interpreter, on CPU tensors; started as a process of its own by test_numbers.

The interpreter must be chosen (TRITON_INTERPRET=1) before the jit functions are imported. Standard input: a JSON list of cases
[problem, shape, dtype, config, sm_count]; standard output: a JSON list of [error in units of the dtype's epsilon, guard intact].
"""

import importlib
import json
import math
import sys

import torch

from kerneldyno.core import DTYPE_EPSILON
from kerneldyno.core import Workload


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
GUARD = 4096


def inputs(workload):
    shape, dtype = workload.shape, DTYPES[workload.dtype]
    random = torch.Generator().manual_seed(workload.seed)

    def normal(*extents):
        return torch.randn(extents, generator=random).to(dtype)

    if workload.problem == "vector_add":
        return {"x": normal(shape["n"]), "y": normal(shape["n"])}
    if workload.problem == "softmax":
        return {"x": 3 * normal(shape["m"], shape["n"])}
    b = (shape["n"], shape["k"]) if shape["layout"] == "nt" else (shape["k"], shape["n"])
    return {"a": normal(shape["m"], shape["k"]), "b": normal(*b)}


def reference(workload, tensors):
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    if workload.problem == "vector_add":
        return "out", wide["x"] + wide["y"]
    if workload.problem == "softmax":
        return "y", torch.softmax(wide["x"], dim=-1)
    return "c", wide["a"] @ (wide["b"].T if workload.shape["layout"] == "nt" else wide["b"])


def run(problem, shape, dtype, config, sm_count):
    """Run one configuration; the output lies between two guards of NaN, and is NaN itself before."""
    workload = Workload(problem, shape, dtype)
    program = importlib.import_module(f"kerneldyno.backends.triton.{problem}").program(workload, config)
    tensors = inputs(workload)
    name, expected = reference(workload, tensors)
    memory = torch.full((expected.numel() + 2 * GUARD,), math.nan, dtype=DTYPES[dtype])
    output = memory[GUARD:-GUARD].view(expected.shape)
    arguments = program.arguments({**tensors, name: output})
    program.function[program.grid(sm_count)](**arguments, num_warps=program.num_warps, num_stages=program.num_stages)
    # against the element and the typical size of one: what cancels in a sum of products keeps the error of its terms
    scale = expected.abs() + expected.square().mean().sqrt()
    error = ((output.double() - expected).abs() / scale).max().item() / DTYPE_EPSILON[dtype]
    guards = torch.cat([memory[:GUARD], memory[-GUARD:]])
    return error, bool(guards.isnan().all())


if __name__ == "__main__":
    json.dump([run(*case) for case in json.load(sys.stdin)], sys.stdout)

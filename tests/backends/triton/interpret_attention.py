"""Runs Triton's attention in Triton's interpreter, on CPU tensors; started as a process of its own by test_attention_numbers.

The interpreter must be chosen (TRITON_INTERPRET=1) before the jit functions are imported. Standard input: a JSON list of cases
[shape, config]; standard output: a JSON list of [largest error of o, of the log-sum-exp, guards intact].
"""

import json
import math
import sys

import torch

from kerneldyno.backends.triton import _attention_decode
from kerneldyno.backends.triton import attention
from kerneldyno.core import Workload
from tests.backends.triton.interpret import GUARD


# few multiprocessors, so that persistent grids loop
SM_COUNT = 5


def reference(shape, q, k, v):
    """The formula in float64, [batch, heads, seq, dim]: o, and the natural logarithm of the sum."""
    repeats = shape["heads"] // shape["kv_heads"]
    k, v = k.double().repeat_interleave(repeats, 1), v.double().repeat_interleave(repeats, 1)
    scores = (shape["scale"] or shape["head_dim"] ** -0.5) * q.double() @ k.mT
    if shape["softcap"]:
        scores = shape["softcap"] * torch.tanh(scores / shape["softcap"])
    place = torch.arange(shape["seq_q"])[:, None] + shape["seq_kv"] - shape["seq_q"]
    key = torch.arange(shape["seq_kv"])[None, :]
    hidden = torch.zeros(shape["seq_q"], shape["seq_kv"], dtype=torch.bool)
    if shape["causal"]:
        hidden |= key > place
    if shape["window"]:
        hidden |= key <= place - shape["window"]
        if not shape["causal"]:
            hidden |= key >= place + shape["window"]
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v, torch.logsumexp(scores, -1)


def guarded(expected, dtype):
    """Memory full of NaN for a result, and the view of it between the guards."""
    memory = torch.full((expected.numel() + 2 * GUARD,), math.nan, dtype=dtype)
    return memory, memory[GUARD:-GUARD].view(expected.shape)


def run(shape, config):
    """Run one configuration in fp16."""
    workload = Workload("attention", shape, "fp16")
    random = torch.Generator().manual_seed(0)

    def normal(heads, sequence, dim):
        return torch.randn(shape["batch"], heads, sequence, dim, generator=random).half()

    q = normal(shape["heads"], shape["seq_q"], shape["head_dim"])
    k = normal(shape["kv_heads"], shape["seq_kv"], shape["head_dim"])
    v = normal(shape["kv_heads"], shape["seq_kv"], shape["head_dim_v"])
    expected, expected_lse = reference(shape, q, k, v)
    inner = shape["layout"] == "bshd"
    q, k, v, expected = (tensor.transpose(1, 2).contiguous() if inner else tensor for tensor in (q, k, v, expected))
    memory, o = guarded(expected, torch.float16)
    memory_lse, lse = guarded(expected_lse, torch.float32)
    outputs = {"o": o, "lse": lse} if shape["lse"] else {"o": o}
    workspaces = _attention_decode.workspaces(workload, config) if attention.decodes(workload) else {}
    launch = attention.SplitLaunch([_Interpreted(program) for program in attention.programs(workload, config)], workspaces)
    launch.prepare({"q": q, "k": k, "v": v}, outputs)
    launch.run()
    error = (o.double() - expected).abs().max().item()
    finite = expected_lse.isfinite()
    error_lse = 0.0
    if shape["lse"]:
        error_lse = (lse.double() - expected_lse)[finite].abs().max().item() if finite.any() else 0.0
        error_lse = error_lse if bool((lse[~finite] == -math.inf).all()) else math.inf
    guards = torch.cat([memory[:GUARD], memory[-GUARD:], memory_lse[:GUARD], memory_lse[-GUARD:]])
    return error, error_lse, bool(guards.isnan().all())


class _Interpreted:
    """A program as the launch sees it, run by the interpreter."""

    def __init__(self, program):
        self._program = program

    def prepare(self, inputs, outputs):
        self._arguments = self._program.arguments({**inputs, **outputs})

    def run(self):
        program = self._program
        program.function[program.grid(SM_COUNT)](**self._arguments, num_warps=program.num_warps, num_stages=program.num_stages)


if __name__ == "__main__":
    json.dump([run(*case) for case in json.load(sys.stdin)], sys.stdout)

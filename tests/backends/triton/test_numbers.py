"""The kernels' numbers, from Triton's interpreter: every method, layout and dtype, on shapes that fit tiles and on odd ones."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kerneldyno.backends.triton import gemm
from kerneldyno.backends.triton import softmax
from kerneldyno.backends.triton import vector_add
from kerneldyno.core import Workload
from kerneldyno.testing.devices import H200


# few multiprocessors, so that persistent grids loop on shapes small enough to interpret
DEVICE = replace(H200, sm_count=3)
KERNELS = {"vector_add": vector_add, "softmax": softmax, "gemm": gemm}
# in units of the dtype's epsilon: a 16-bit result is rounded once, an fp32 one carries the error of its sums
BUDGET = {"fp32": 16.0, "fp16": 1.0, "bf16": 1.0}


def pick(problem, shape, dtype, count=1, **fixed):
    """Draw configurations that have the fixed values, as interpreter cases."""
    configs = KERNELS[problem].space(Workload(problem, shape, dtype), DEVICE).configs
    fitting = [config for config in configs if all(config.get(key) == value for key, value in fixed.items())]
    return [(problem, shape, dtype, config, DEVICE.sm_count) for config in random.Random(0).sample(fitting, count)]


def product(m, n, k, layout="nt"):
    return {"m": m, "n": n, "k": k, "layout": layout}


def cases():
    for dtype in BUDGET:
        yield from pick("vector_add", {"n": 1}, dtype)
        yield from pick("vector_add", {"n": 5003}, dtype)
        yield from pick("softmax", {"m": 1, "n": 1}, dtype)
        yield from pick("softmax", {"m": 7, "n": 1003}, dtype, rows=2, programs_per_sm=0)
        yield from pick("softmax", {"m": 13, "n": 256}, dtype, rows=4, programs_per_sm=1)
        yield from pick("softmax", {"m": 2, "n": 16384}, dtype, method="online", resident=0)
        yield from pick("softmax", {"m": 2, "n": 20011}, dtype, method="online", resident=0)
        yield from pick("softmax", {"m": 2, "n": 33001}, dtype, method="online", resident=16384)
    # the interpreter holds bf16 as integers and multiplies these; the bf16 product runs on GPUs only
    for dtype in ("fp32", "fp16"):
        for layout in ("nt", "nn"):
            yield from pick("gemm", product(1, 1, 1, layout), dtype)
            yield from pick("gemm", product(100, 131, 67, layout), dtype, 2)
            yield from pick("gemm", product(200, 136, 72, layout), dtype, load="pointer")
            yield from pick("gemm", product(200, 136, 72, layout), dtype, load="descriptor", persistent=False)
            yield from pick("gemm", product(256, 320, 192, layout), dtype, persistent=True, epilogue_subtile=2, flatten=True)
            yield from pick("gemm", product(200, 264, 136, layout), dtype, persistent=True, group_m=4)
            yield from pick("gemm", product(16, 512, 128, layout), dtype, load="descriptor", block_m=16)
        yield from pick("gemm", product(130, 131, 72), dtype, load="descriptor")  # C's rows fit no tensor map, those of A and B do
    for layout in ("nt", "nn"):
        yield from pick("gemm", product(256, 264, 136, layout), "fp16", warp_specialize=True)
    yield from pick("gemm", product(1000, 1003, 517), "fp16", load="pointer", block_m=128, block_n=128)


CASES = list(cases())


@pytest.fixture(scope="module")
def results():
    command = [sys.executable, str(Path(__file__).with_name("interpret.py"))]
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, input=json.dumps(CASES), capture_output=True, text=True, env=environ, check=False)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("the interpreter of this Triton (3.6 and before) does not run with this NumPy (2.4 and later)")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{case[0]}-{'x'.join(map(str, case[1].values()))}-{case[2]}" for case in CASES])
def test_matches_float64(results, index):
    error, intact = results[index]
    assert error <= BUDGET[CASES[index][2]], CASES[index]
    assert intact, f"wrote outside of the output: {CASES[index]}"

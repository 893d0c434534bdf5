"""The numbers of Triton's attention against the formula in float64, in Triton's interpreter: every mask, variant and edge, in fp16."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kerneldyno.backends.triton import attention
from kerneldyno.core import Workload


ROOT = Path(__file__).parents[3]
SHAPE = {
    "batch": 1,
    "heads": 2,
    "kv_heads": 1,
    "seq_q": 80,
    "seq_kv": 80,
    "head_dim": 64,
    "head_dim_v": 64,
    "causal": False,
    "window": 0,
    "softcap": 0.0,
    "scale": 0.0,
    "layout": "bshd",
    "lse": True,
}
PREFILL = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2, "group_heads": 1}
DECODE = {"block_n": 32, "num_warps": 4, "num_stages": 2}
# half a unit of fp16 at the largest results of normal values, twice: weights and results are rounded
BUDGET = 2e-3
BUDGET_LSE = 1e-4

PREFILLS = {
    "one row over the tile": {"seq_q": 65, "seq_kv": 64, "batch": 2},
    "one key": {"seq_kv": 1, "heads": 1},
    "causal": {"causal": True},
    "causal, more keys": {"causal": True, "seq_kv": 130, "layout": "bhsd", "kv_heads": 2},
    "causal, rows that see nothing": {"causal": True, "seq_q": 130, "seq_kv": 33},
    "window": {"window": 7, "lse": False},
    "window, causal": {"window": 7, "causal": True},
    "long window": {"window": 100, "seq_q": 150, "seq_kv": 230, "heads": 1},
    "long window, causal": {"window": 110, "causal": True, "seq_q": 150, "seq_kv": 300, "heads": 1},
    "window, rows that see nothing": {"window": 30, "seq_q": 200, "seq_kv": 40, "heads": 1},
    "softcap": {"softcap": 20.0, "scale": 0.5},
    "wide softcap": {"softcap": 3000.0, "scale": 2.0, "causal": True},
    "dims of two parts": {"head_dim": 192, "head_dim_v": 128, "causal": True},
    "dims beyond a part": {"head_dim": 104, "head_dim_v": 72, "heads": 1},
    "small dims": {"head_dim": 8, "head_dim_v": 24, "scale": 0.2},
}
DECODES = {
    "one token": {"seq_q": 1, "seq_kv": 131, "batch": 2, "kv_heads": 2},
    "group": {"seq_q": 1, "seq_kv": 128, "heads": 12, "kv_heads": 2, "causal": True},
    "few tokens, causal": {"seq_q": 5, "seq_kv": 131, "causal": True},
    "window, causal": {"seq_q": 5, "seq_kv": 200, "window": 70, "causal": True, "layout": "bhsd"},
    "window, one token": {"seq_q": 1, "seq_kv": 200, "window": 70, "heads": 4, "lse": False},
    "window, few tokens": {"seq_q": 5, "seq_kv": 200, "window": 90},
    "rows that see nothing": {"seq_q": 8, "seq_kv": 3, "causal": True},
    "dims of two parts": {"seq_q": 1, "seq_kv": 100, "head_dim": 192, "head_dim_v": 96, "softcap": 5.0},
    "many rows": {"seq_q": 20, "seq_kv": 100, "heads": 3, "scale": 0.3},
}


def cases():
    for name, change in PREFILLS.items():
        for access in ("descriptor", "pointer"):
            yield f"{name}, {access}", change, {"access": access, **PREFILL}
    for name in ("causal", "long window, causal", "dims of two parts"):
        yield f"{name}, one loop", PREFILLS[name], {"access": "descriptor", **PREFILL, "warp_specialize": True}
    persistent = {"access": "descriptor", **PREFILL, "warp_specialize": True, "persistent": True}
    yield "persistent", {"seq_q": 128, "seq_kv": 96, "heads": 4, "layout": "bhsd"}, persistent
    yield "persistent, causal", {"seq_q": 256, "seq_kv": 256, "heads": 3, "causal": True}, {**persistent, "group_heads": 2}
    yield "persistent, window", {"seq_q": 128, "seq_kv": 160, "heads": 4, "causal": True, "window": 40, "batch": 2}, persistent
    yield "bands of heads", {"heads": 3, "batch": 2, "causal": True}, {"access": "descriptor", **PREFILL, "block_m": 128, "group_heads": 4}
    for name, change in DECODES.items():
        for access, splits in (("descriptor", 1), ("pointer", 3)):
            yield f"decode, {name}, {access}", change, {"access": access, **DECODE, "num_splits": splits}
    yield "decode, empty splits", {"seq_q": 1, "seq_kv": 40}, {"access": "pointer", **DECODE, "num_splits": 6}
    yield "decode, many splits", {"seq_q": 1, "seq_kv": 700}, {"access": "pointer", **DECODE, "num_splits": 21}


CASES = [(name, {**SHAPE, **change}, config) for name, change, config in cases()]


@pytest.fixture(scope="module")
def results():
    command = [sys.executable, "-m", "tests.backends.triton.interpret_attention"]
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    lines = json.dumps([[shape, config] for _, shape, config in CASES])
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env=environ, check=False, cwd=ROOT)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("the interpreter of this Triton (3.6 and before) does not run with this NumPy (2.4 and later)")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case[0] for case in CASES])
def test_matches_the_formula(results, index):
    error, error_lse, intact = results[index]
    assert error <= BUDGET, CASES[index]
    assert error_lse <= BUDGET_LSE, CASES[index]
    assert intact, f"wrote outside of a result: {CASES[index]}"


def test_the_cases_reach_both_kernels():
    kernels = {attention.decodes(Workload("attention", shape, "fp16")) for _, shape, _ in CASES}
    assert kernels == {True, False}

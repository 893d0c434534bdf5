"""Attention: which tiles of keys are visited, what its spaces hold, what is generated for sm_90a, and the numbers on a CPU."""

import dataclasses
import itertools
import shutil

import pytest
import torch

from kerneldyno.backends import tilelang as backend
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported
from kerneldyno.problems import attention as problem
from kerneldyno.testing.devices import H200


pytest.importorskip("tilelang")

from kerneldyno.backends.tilelang import _attention
from kerneldyno.backends.tilelang import attention
from tests.backends.tilelang import emulate


HAND = {"schedule": "specialised", "block_m": 128, "block_n": 128, "stages": 2}


def workload(dtype="bf16", **dims):
    shape = {key: dims.get(dim.like, dim.default) if dim.like else dim.default for key, dim in problem.dims.items()}
    return Workload("attention", {**shape, **dims}, dtype)


def visible(sizes, query, key):
    place = query + sizes.seq_kv - sizes.seq_q
    if key >= sizes.seq_kv or (sizes.causal and key > place):
        return False
    if not sizes.window:
        return True
    return place - sizes.window < key and (sizes.causal or key < place + sizes.window)


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(40, 40), (17, 50), (50, 17), (1, 33)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 3, 20])
def test_span_holds_every_visible_key_and_says_which_tiles_are_whole(seq_q, seq_kv, causal, window):
    sizes = _attention.Attention.of(workload(seq_q=seq_q, seq_kv=seq_kv, causal=causal, window=window))
    rows, block_n = 16, 8
    for first in range(0, seq_q, rows):
        low, end, whole_low, whole_end = (int(place) for place in sizes.span(first, rows, block_n))
        assert end > low
        queries = range(first, min(first + rows, seq_q))
        for tile in range(-(-seq_kv // block_n) + 1):
            seen = [visible(sizes, query, key) for query, key in itertools.product(queries, range(tile * block_n, (tile + 1) * block_n))]
            assert low <= tile < end or not any(seen)
            assert not whole_low <= tile < whole_end or all(seen)


def test_the_default_space_starts_with_the_hand_made_schedule():
    space = attention.space(workload(), H200)
    assert space.starts[0] == {**space.complete(HAND), "schedule": "specialised"}
    assert len(space.starts) >= 5
    assert 200 < space.size < 5000
    # 2 stages of 2 x 176 x 128 and the queries leave no room for results
    wide = space.complete({**HAND, "block_n": 176})
    assert wide not in space
    assert {**wide, "reuse_q": True} in space


@pytest.mark.parametrize(
    "dims", [{"head_dim": 64}, {"head_dim": 192, "head_dim_v": 128}, {"head_dim": 256}, {"head_dim": 16}, {"seq_q": 5}]
)
@pytest.mark.parametrize("decode", [False, True])
def test_every_shape_has_a_start(dims, decode):
    few = {"seq_q": 1, "seq_kv": 8192, "heads": 64, "kv_heads": 8} if decode else {}
    space = attention.space(workload(**{**dims, **few}), H200)
    assert space.starts
    assert space.size < 5000


def test_decode_shares_keys_out_where_there_are_few_heads():
    many = attention.space(workload(batch=16, heads=64, kv_heads=8, seq_q=1, seq_kv=32768), H200)
    few = attention.space(workload(batch=1, heads=64, kv_heads=8, seq_q=1, seq_kv=32768), H200)
    assert many.starts[0]["num_splits"] == 1
    assert few.starts[0]["num_splits"] == 16


@pytest.mark.parametrize(
    ("problem_dims", "dtype", "device", "reason"),
    [
        ({}, "fp32", H200, "bf16 and fp16"),
        ({"head_dim": 72}, "bf16", H200, "head_dim=72"),
        ({}, "bf16", dataclasses.replace(H200, arch="sm_80"), "sm_90a"),
    ],
)
def test_what_has_no_variant_is_refused(problem_dims, dtype, device, reason):
    with pytest.raises(Unsupported, match=reason):
        attention.space(workload(dtype, **problem_dims), device)


@pytest.mark.skipif(backend.find_nvcc() is None, reason="nvcc is missing")
def test_the_hand_made_schedule_neither_spills_nor_serialises():
    shape = workload(causal=True)
    space = attention.space(shape, H200)
    artifact = attention.build(shape, space.complete({**HAND, "turns": True}), "sm_90a")
    assert artifact.spill_bytes == 0
    assert artifact.smem_bytes <= H200.smem_per_block_bytes
    assert artifact.threads == 384
    # ptxas says so where it waits for each wgmma
    assert "serialized" not in artifact.texts["ptxas"]
    attention.load(artifact, shape)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ runs the generated source")
@pytest.mark.parametrize(
    ("dims", "config"),
    [
        # rows that see nothing, a window's end and a ragged one, several tiles a block
        (
            {"seq_q": 300, "seq_kv": 200, "causal": True, "window": 70, "softcap": 5.0},
            {**HAND, "block_n": 64, "blocks": 2, "turns": True, "reuse_q": True, "panel": 1},
        ),
        ({"heads": 6, "kv_heads": 2, "seq_q": 3, "seq_kv": 150, "layout": "bhsd"}, {"block_n": 64, "stages": 2, "num_splits": 1}),
    ],
)
def test_numbers(dims, config, tmp_path):
    shape = workload(**{"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 64, "head_dim_v": 64, "lse": True, **dims})
    inputs, outputs = problem.inputs(shape, "cpu"), problem.outputs(shape, "cpu")
    for tensor in outputs.values():
        tensor.fill_(float("nan"))
    emulate.run_tensor_cores(attention.program(shape, config), tmp_path, {**inputs, **outputs})
    expected = problem.reference(shape, inputs)
    # o is rounded to bf16 and so are the weights: 2^-9 each
    assert float((outputs["o"] - expected["o"]).norm() / expected["o"].norm()) < 3e-3
    torch.testing.assert_close(outputs["lse"], expected["lse"].float(), rtol=0, atol=1e-5)

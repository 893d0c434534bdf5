"""Triton's attention cross-compiled for an H200 on a machine without one: spills, shared memory, warp specialisation; its spaces."""

import random

import pytest

from kerneldyno.backends.triton import attention
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported
from kerneldyno.testing.devices import H200
from tests.backends.triton.test_attention_numbers import SHAPE


SUITE = {"batch": 4, "heads": 16, "kv_heads": 16, "seq_q": 4096, "seq_kv": 4096, "head_dim": 128, "head_dim_v": 128, "lse": False}
TOKEN = {**SUITE, "batch": 16, "heads": 64, "kv_heads": 8, "seq_q": 1, "seq_kv": 32768}


def work(dtype="bf16", **change):
    return Workload("attention", {**SHAPE, **SUITE, **change}, dtype)


FULL = work()
CAUSAL = work(causal=True)
DEEPSEEK = work(causal=True, head_dim=192)
WINDOW = work(causal=True, window=1024, softcap=30.0, lse=True, seq_kv=5000, head_dim=64, head_dim_v=64)
DECODE = work(**TOKEN)
DRAFT = work(**{**TOKEN, "seq_q": 4, "causal": True, "seq_kv": 32001})


@pytest.fixture(scope="module", autouse=True)
def triton_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def starts(workload, count=None):
    return [(workload, config) for config in attention.space(workload, H200).starts[:count]]


def drawn(workload, count):
    return [(workload, config) for config in random.Random(2).sample(attention.space(workload, H200).configs, count)]


BUILT = [
    *starts(FULL, 2),
    *starts(CAUSAL, 4),
    *starts(DEEPSEEK, 2),
    *starts(WINDOW, 1),
    *starts(DECODE, 2),
    *drawn(CAUSAL, 1),
    *drawn(WINDOW, 1),
    *drawn(DECODE, 1),
    *drawn(DRAFT, 1),
]


def named(case):
    workload, config = case
    return f"{workload.shape['seq_q']}-{'causal' if workload.shape['causal'] else 'full'}-" + "-".join(map(str, config.values()))


@pytest.mark.parametrize("case", BUILT, ids=named)
def test_fits_the_device_without_spills(case):
    workload, config = case
    artifact = attention.build(workload, config, H200.arch)
    assert artifact.spill_bytes == 0
    assert artifact.registers * artifact.threads <= H200.registers_per_sm
    assert artifact.smem_bytes <= H200.smem_per_block_bytes
    specialised = config.get("warp_specialize", False)
    assert ("ttg.warp_specialize" in artifact.texts["ttgir"]) == specialised
    assert artifact.threads == (384 if specialised else 32 * config["num_warps"])
    maps = "cp.async.bulk.tensor.2d.shared" in artifact.texts["ptx"]
    assert maps == (config["access"] == "descriptor")


def test_prefill_multiplies_with_wgmma_and_keeps_weights_in_registers():
    ptx = attention.build(FULL, attention.space(FULL, H200).starts[0], H200.arch).texts["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in ptx
    assert ptx.count("ex2.approx") > 64


def test_a_group_shares_one_read_of_the_keys_and_its_splits_are_combined():
    config = attention.space(DECODE, H200).starts[0]
    first, second = attention.programs(DECODE, config)
    assert first.grid(132) == (16 * 8 * config["num_splits"], 1, 1)
    assert second.grid(132) == (16 * 64, 1, 1)
    assert "attention_combine" in attention.build(DECODE, config, H200.arch).payload


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"seq_q": 1, "seq_kv": 1, "heads": 1, "kv_heads": 1, "batch": 1},
        {"seq_q": 100, "seq_kv": 7},
        {"head_dim": 256, "head_dim_v": 256},
        {"head_dim": 16, "head_dim_v": 16, "window": 1},
        {"head_dim": 104, "head_dim_v": 8, "causal": True},
        {"batch": 128, "heads": 64, "kv_heads": 1, "seq_q": 1, "seq_kv": 131072},
        {"batch": 1, "heads": 4, "kv_heads": 4, "seq_q": 64, "seq_kv": 131072, "window": 128},
    ],
)
def test_every_shape_has_configurations(change):
    space = attention.space(work(**change), H200)
    assert 4 <= space.size <= 2000


@pytest.mark.parametrize("change", [{"head_dim": 72 + 4}, {"head_dim": 264}, {"head_dim_v": 512}, {"dtype": "fp32"}])
def test_refuses_what_has_no_variant(change):
    with pytest.raises(Unsupported, match=r"attention on triton has no variant for \w+"):
        attention.space(work(**change), H200)


def test_reasons_name_what_cannot_work():
    space = attention.space(work(seq_q=4100), H200)
    config = {**attention.space(FULL, H200).starts[0]}
    assert any("end where sequences do" in reason for reason in space.problems(config))
    tall = {
        "access": "descriptor",
        "block_m": 256,
        "block_n": 128,
        "num_warps": 4,
        "num_stages": 1,
        "warp_specialize": False,
        "group_heads": 1,
    }
    assert any("spill" in reason for reason in space.problems(tall))

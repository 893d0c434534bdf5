"""Workloads whose shapes are drawn: the same ones each time, with every feature of the problem among them."""

import random

from kerneldyno.core import Value
from kerneldyno.core import Workload
from tests.contract.found import attention
from tests.contract.found import moe_gemm


HEAD_DIMS = ((64, 64), (128, 128), (64, 64), (128, 128), (192, 128), (32, 32), (256, 256), (96, 96))
"""The two that every backend has come up half of the time."""


def drawn_attentions(count: int) -> list[Workload]:
    """Draw attentions: a third decode, all lengths down to one, masks of every kind, both layouts."""
    rng = random.Random("attention")
    return [_attention(rng, decode=number % 3 == 0) for number in range(count)]


def drawn_moe_gemms(count: int) -> list[Workload]:
    """Draw mixtures of experts: every routing, empty experts, one token, odd n and k in a quarter of them."""
    rng = random.Random("moe_gemm")
    return [_moe_gemm(rng) for _ in range(count)]


def _attention(rng: random.Random, decode: bool) -> Workload:
    head_dim, head_dim_v = rng.choice(HEAD_DIMS)
    kv_heads, group = rng.choice((1, 2, 3, 4)), rng.choice((1, 1, 2, 3, 4, 8))
    longest = 5000 if decode else 1200
    seq_q = rng.choice((1, 1, 1, rng.randint(1, 64 // group))) if decode else max(_length(rng, longest), _length(rng, longest))
    seq_kv = _length(rng, longest) if decode or rng.random() < 0.6 else seq_q
    others: dict[str, Value] = {
        "head_dim_v": head_dim_v,
        "causal": rng.random() < 0.5,
        "window": rng.choice((0, 0, rng.choice((1, 5, 64, 128, 200)))),
        "softcap": rng.choice((0.0, 0.0, 0.0, rng.choice((5.0, 20.0, 50.0)))),
        "scale": rng.choice((0.0, 0.0, 0.0, rng.choice((0.05, 0.3)))),
        "layout": rng.choice(("bshd", "bhsd")),
        "lse": rng.random() < 0.3,
    }
    dtype = rng.choice(("bf16", "bf16", "fp16"))
    return attention(rng.randint(1, 3), kv_heads * group, kv_heads, seq_q, seq_kv, head_dim, dtype, seed=rng.randrange(1000), **others)


def _moe_gemm(rng: random.Random) -> Workload:
    experts = rng.choice((1, 2, 3, 4, 8, 16, 33, 64, 128))
    widths = (8, 64, 104, 128, 256, 320, 512, 1000) if rng.random() < 0.75 else (1, 2, 17, 33, 65, 130, 255, 1003)
    return moe_gemm(
        rng.choice((1, _length(rng, 1500), _length(rng, 1500))),
        experts,
        rng.randint(1, min(8, experts)),
        rng.choice(widths),
        rng.choice(widths),
        rng.choice(("bf16", "bf16", "fp16")),
        rng.choice(("uniform", "zipf", "one_hot")),
        gather=rng.random() < 0.5,
        seed=rng.randrange(1000),
    )


def _length(rng: random.Random, most: int) -> int:
    """Draw a length, short ones as likely as long ones."""
    return round(most ** rng.random())

"""Sizes of published models, from which the problems take their named shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of one model that shape its kernels, in elements.

    Attributes:
        hidden: Width of the residual stream.
        vocab: Entries of the vocabulary, the width of the logits.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Length of a query and of a key.
        head_dim_v: Length of a value; 0 for `head_dim`.
        window: Keys that the windowed layers see; 0 where all layers see all.
        experts: Routed experts of a layer, the width of the router's logits; 0 for a dense model.
        top_k: Routed experts of a token.
        expert_ffn: Intermediate features of one routed expert, whose gate and up are one matrix of twice as many.
        linears: Linear layers by name: (output features N, input features K). Q, K and V are one layer, gate and up are one layer.
    """

    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int = 0
    window: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def _dense(hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int) -> Model:
    """Lay out a dense transformer with grouped-query attention and a gated feed-forward."""
    linears = _outside_experts(hidden, heads, kv_heads, head_dim, vocab) | {"gate-up": (2 * ffn, hidden), "down": (hidden, ffn)}
    return Model(hidden, vocab, heads, kv_heads, head_dim, linears=linears)


def _sparse(
    hidden: int, heads: int, kv_heads: int, head_dim: int, vocab: int, experts: int, top_k: int, expert_ffn: int, window: int = 0
) -> Model:
    """Lay out a transformer with grouped-query attention whose feed-forwards are all experts."""
    return Model(
        hidden,
        vocab,
        heads,
        kv_heads,
        head_dim,
        window=window,
        experts=experts,
        top_k=top_k,
        expert_ffn=expert_ffn,
        linears=_outside_experts(hidden, heads, kv_heads, head_dim, vocab),
    )


def _outside_experts(hidden: int, heads: int, kv_heads: int, head_dim: int, vocab: int) -> dict[str, tuple[int, int]]:
    return {
        "qkv": ((heads + 2 * kv_heads) * head_dim, hidden),
        "o": (hidden, heads * head_dim),
        "lm-head": (vocab, hidden),
    }


MODELS: Mapping[str, Model] = {
    "llama3-8b": _dense(hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256),
    "llama3-70b": _dense(hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256),
    "qwen3-8b": _dense(hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288, vocab=151936),
    "qwen3-32b": _dense(hidden=5120, heads=64, kv_heads=8, head_dim=128, ffn=25600, vocab=151936),
    "deepseek-v3": Model(
        hidden=7168,
        vocab=129280,
        heads=128,
        kv_heads=128,
        head_dim=128 + 64,
        head_dim_v=128,
        experts=256,
        top_k=8,
        expert_ffn=2048,
        linears={
            "qkv-a": (1536 + 512 + 64, 7168),
            "q-b": (128 * (128 + 64), 1536),
            "kv-b": (128 * (128 + 128), 512),
            "o": (7168, 128 * 128),
            "dense-gate-up": (2 * 18432, 7168),
            "dense-down": (7168, 18432),
            "shared-gate-up": (2 * 2048, 7168),
            "shared-down": (7168, 2048),
            "lm-head": (129280, 7168),
        },
    ),
    "mixtral-8x7b": _sparse(4096, heads=32, kv_heads=8, head_dim=128, vocab=32000, experts=8, top_k=2, expert_ffn=14336),
    "mixtral-8x22b": _sparse(6144, heads=48, kv_heads=8, head_dim=128, vocab=32768, experts=8, top_k=2, expert_ffn=16384),
    "qwen3-30b-a3b": _sparse(2048, heads=32, kv_heads=4, head_dim=128, vocab=151936, experts=128, top_k=8, expert_ffn=768),
    "qwen3-235b-a22b": _sparse(4096, heads=64, kv_heads=4, head_dim=128, vocab=151936, experts=128, top_k=8, expert_ffn=1536),
    "gpt-oss-20b": _sparse(2880, heads=64, kv_heads=8, head_dim=64, vocab=201088, experts=32, top_k=4, expert_ffn=2880, window=128),
    "gpt-oss-120b": _sparse(2880, heads=64, kv_heads=8, head_dim=64, vocab=201088, experts=128, top_k=4, expert_ffn=2880, window=128),
}
"""Models by the name their shapes begin with.

Source, read on 2026-12-01:

- Llama 3 8B and 70B: oumi, configs/recipes/llama3_1/README.md (Llama 3.1 keeps Llama 3's sizes); the config.json of
  meta-llama/Llama-3.1-8B as quoted in public repositories agrees.
- Qwen3 8B: the config.json of Qwen/Qwen3-8B as quoted in public repositories (hidden 4096, feed-forward 12288, 32 and 8 heads of 128).
- Qwen3 32B: AMD-AGI/Primus, primus/configs/models/megatron/qwen3_32B.yaml; heads of 128 and the vocabulary from its config.json as quoted.
- DeepSeek-V3: AMD-AGI/Primus, primus/configs/models/megatron/deepseek_v3.yaml (7168, 18432, 128 heads, q_lora_rank 1536, kv_lora_rank 512,
  qk 128 + 64 and v 128 a head, 256 experts of 2048, 8 a token); the vocabulary from its config.json as quoted. `qkv-a` is q_a and kv_a in
  one layer. Its attention is given as a prefill computes it, with keys and values expanded for each head.
- Mixtral 8x7B: huggingface/candle, candle-transformers/src/models/mixtral.rs, v0_1_8x7b, which quotes its config.json; 32 heads of 128:
  keras-team/keras-hub, keras_hub/src/models/mixtral/README.md.
- Mixtral 8x22B: AI-Hypercomputer/maxtext, MaxText/configs/models/mixtral-8x22b.yml.
- Qwen3 30B-A3B and 235B-A22B: zyzshishui/slime, scripts/models/qwen3-30B-A3B.sh and qwen3-235B-A22B.sh.
- gpt-oss 120b: openai/gpt-oss, gpt_oss/torch/model.py, ModelConfig (hidden 2880, 64 and 8 heads of 64, 128 experts of 2880, 4 a token,
  window 128 in every other layer).
- gpt-oss 20b: EchoCog/gpt-oss-20b, docs/gpt-oss-20b-architecture.md (the same with 32 experts);
  AMD-AGI/Primus, primus/configs/models/megatron/gpt_oss_20B.yaml agrees.
"""

TOKENS: Mapping[str, int] = {"1": 1, "16": 16, "64": 64, "512": 512, "4k": 4096}
"""Tokens in flight by the suffix of a shape's name: one sequence decoding, small and large decode batches, chunks of a prefill."""

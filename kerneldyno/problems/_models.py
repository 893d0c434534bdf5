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
        experts: Routed experts of a layer, the width of the router's logits; 0 for a dense model.
        linears: Linear layers by name: (output features N, input features K). Q, K and V are one layer, gate and up are one layer.
    """

    hidden: int
    vocab: int
    experts: int = 0
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def _dense(hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int) -> Model:
    """Lay out a dense transformer with grouped-query attention and a gated feed-forward."""
    return Model(
        hidden=hidden,
        vocab=vocab,
        linears={
            "qkv": ((heads + 2 * kv_heads) * head_dim, hidden),
            "o": (hidden, heads * head_dim),
            "gate-up": (2 * ffn, hidden),
            "down": (hidden, ffn),
            "lm-head": (vocab, hidden),
        },
    )


MODELS: Mapping[str, Model] = {
    "llama3-8b": _dense(hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256),
    "llama3-70b": _dense(hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256),
    "qwen3-8b": _dense(hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288, vocab=151936),
    "qwen3-32b": _dense(hidden=5120, heads=64, kv_heads=8, head_dim=128, ffn=25600, vocab=151936),
    "deepseek-v3": Model(
        hidden=7168,
        vocab=129280,
        experts=256,
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
    "gpt-oss-120b": Model(
        hidden=2880,
        vocab=201088,
        experts=128,
        linears={
            "qkv": ((64 + 2 * 8) * 64, 2880),
            "o": (2880, 64 * 64),
            "lm-head": (201088, 2880),
        },
    ),
}
"""Models by the name their shapes begin with.

Source, read on 2026-12-01:

- Llama 3 8B and 70B: oumi, configs/recipes/llama3_1/README.md (Llama 3.1 keeps Llama 3's sizes); the config.json of
  meta-llama/Llama-3.1-8B as quoted in public repositories agrees.
- Qwen3 8B: the config.json of Qwen/Qwen3-8B as quoted in public repositories (hidden 4096, feed-forward 12288, 32 and 8 heads of 128).
- Qwen3 32B: AMD-AGI/Primus, primus/configs/models/megatron/qwen3_32B.yaml; heads of 128 and the vocabulary from its config.json as quoted.
- DeepSeek-V3: AMD-AGI/Primus, primus/configs/models/megatron/deepseek_v3.yaml (7168, 18432, 128 heads, q_lora_rank 1536, kv_lora_rank 512,
  qk 128 + 64 and v 128 a head, 256 experts of 2048); the vocabulary from its config.json as quoted. `qkv-a` is q_a and kv_a in one layer.
- gpt-oss 120b: openai/gpt-oss, gpt_oss/torch/model.py, ModelConfig (hidden 2880, 64 and 8 heads of 64, 128 experts).
"""

TOKENS: Mapping[str, int] = {"1": 1, "16": 16, "64": 64, "512": 512, "4k": 4096}
"""Tokens in flight by the suffix of a shape's name: one sequence decoding, small and large decode batches, chunks of a prefill."""

"""What to compare an attention with: torch's backends called one by one, FlashAttention-4, and a plain composition."""

import functools
from collections.abc import Callable
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any
from typing import Literal

from kerneldyno.core import Baseline
from kerneldyno.core import Device
from kerneldyno.core import Tensors
from kerneldyno.core import Workload
from kerneldyno.problems import _common
from kerneldyno.problems._attention import Sizes


if TYPE_CHECKING:
    import torch

_Bind = Callable[[Sizes, Tensors], Callable[[], object]]

_WIDEST = 256
"""Longest head that cuDNN (on Hopper), FlashAttention-2 and FlashAttention-4 (on sm_90) take, all in multiples of 8 elements.

Source: pytorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_head_dim_size_flash and check_cudnn_tensor_shapes;
flash-attn-4 4.0.0b36, flash_attn/cute/interface.py, _validate_head_dims.
"""

_FROM_BOTTOM_RIGHT = 2
"""The efficient backend's mask for causal, aligned at the last query and key. Source: pytorch, sdp_utils_cpp.h, CustomMaskType."""


def libraries(workload: Workload, device: Device) -> Mapping[str, Baseline]:
    """Return the libraries that have the case, the strongest first.

    The operators behind torch's scaled_dot_product_attention are called themselves: its own mask is aligned at the first query and key,
    and choosing a backend costs a context manager a call.
    """
    sizes = Sizes.of(workload)
    if device.kind == "replay":
        return {}
    if device.kind == "cpu" or workload.dtype == "fp32":
        return {"torch": _torch(sizes)}
    found: dict[str, Baseline] = {}
    vectors = sizes.head_dim % 8 == 0 and sizes.head_dim_v % 8 == 0
    flashes = vectors and max(sizes.head_dim, sizes.head_dim_v) <= _WIDEST
    plain = sizes.softcap == 0 and sizes.window == 0
    if flashes and plain and sizes.seq_kv > 1 and (not _cuts(sizes) or sizes.seq_q == sizes.seq_kv):
        found["cudnn"] = _baseline(sizes, _cudnn, "library", "cuDNN through torch (_scaled_dot_product_cudnn_attention)")
    if flashes and sizes.softcap == 0 and sizes.head_dim == sizes.head_dim_v and not (sizes.lse and sizes.blind):
        found["flash"] = _baseline(sizes, _flash, "library", "FlashAttention-2 in torch (_flash_attention_forward)")
    if vectors and plain and sizes.heads == sizes.kv_heads and not sizes.blind:
        found["efficient"] = _baseline(sizes, _efficient, "library", "torch's memory-efficient attention (_efficient_attention_forward)")
    if "cudnn" not in found and _common.can_compile() and not sizes.lse and min(sizes.head_dim, sizes.head_dim_v) >= 16:
        found["flex"] = _baseline(sizes, _flex, "library", "flex_attention through torch.compile")
    if not found:
        found["torch"] = _torch(sizes)
    if flashes and _common.installed("flash_attn.cute"):
        found["flash-attention-4"] = _baseline(sizes, _flash_4, "peer", "FlashAttention-4 (CuTe DSL), flash_attn.cute.flash_attn_func")
    return found


def _cuts(sizes: Sizes) -> bool:
    """Whether causal hides any key: from a single query it does not."""
    return sizes.causal and sizes.seq_q > 1


def _baseline(sizes: Sizes, bind: _Bind, role: Literal["library", "peer"], meaning: str) -> Baseline:
    names = ("o", "lse") if sizes.lse else ("o",)
    return Baseline(_common.Returning(functools.partial(bind, sizes), names), role, meaning)


def _torch(sizes: Sizes) -> Baseline:
    """Take scaled_dot_product_attention where it has the case, else a composition of torch's operators that holds all the scores."""
    if sizes.softcap or sizes.lse or sizes.blind:
        return _baseline(sizes, _composed, "library", "plain torch: scores in float32, softmax and the product one after the other")
    return _baseline(sizes, _dispatched, "library", "torch.nn.functional.scaled_dot_product_attention")


def _heads_first(sizes: Sizes, inputs: Tensors) -> "list[torch.Tensor]":
    return [sizes.heads_first(inputs[name]) for name in ("q", "k", "v")]


def _sequence_first(sizes: Sizes, inputs: Tensors) -> "list[torch.Tensor]":
    return [sizes.sequence_first(inputs[name]) for name in ("q", "k", "v")]


def _in_layout(sizes: Sizes, call: Callable[[], object], from_heads_first: bool) -> Callable[[], object]:
    """Let a call return o in the workload's layout, and lse without a last axis of one (cuDNN's)."""
    turn = from_heads_first == (sizes.layout == "bshd")

    def turned() -> object:
        result: Any = call()
        o, *rest = result if isinstance(result, list | tuple) else [result]
        if sizes.lse and rest[0].dim() == 4:
            rest[0] = rest[0].squeeze(-1)
        return [o.transpose(1, 2) if turn else o, *rest]

    return turned


def _cudnn(sizes: Sizes, inputs: Tensors) -> Callable[[], object]:
    import torch

    forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    call = functools.partial(forward, *_heads_first(sizes, inputs), None, sizes.lse, 0.0, _cuts(sizes), False, scale=sizes.scale)
    return _in_layout(sizes, call, from_heads_first=True)


def _flash(sizes: Sizes, inputs: Tensors) -> Callable[[], object]:
    import torch

    forward = torch.ops.aten._flash_attention_forward.default
    edges = {}
    if sizes.window:
        edges = {"window_size_left": sizes.window - 1, "window_size_right": 0 if sizes.causal else sizes.window - 1}
    call = functools.partial(
        forward,
        *_sequence_first(sizes, inputs),
        None,
        None,
        sizes.seq_q,
        sizes.seq_kv,
        0.0,
        sizes.causal,
        False,
        scale=sizes.scale,
        **edges,
    )
    return _in_layout(sizes, call, from_heads_first=False)


def _efficient(sizes: Sizes, inputs: Tensors) -> Callable[[], object]:
    import torch

    forward = torch.ops.aten._efficient_attention_forward.default
    mask = _FROM_BOTTOM_RIGHT if _cuts(sizes) else 0
    nothing = (None, None, None, None, None)
    call = functools.partial(forward, *_sequence_first(sizes, inputs), *nothing, 0.0, mask, sizes.lse, scale=sizes.scale)
    return _in_layout(sizes, call, from_heads_first=False)


def _flash_4(sizes: Sizes, inputs: Tensors) -> Callable[[], object]:
    from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

    left = sizes.window - 1 if sizes.window else None
    right = left if not sizes.causal else (0 if sizes.window else None)
    call = functools.partial(
        flash_attn_func,
        *_sequence_first(sizes, inputs),
        softmax_scale=sizes.scale,
        causal=sizes.causal,
        window_size=(left, right),
        softcap=sizes.softcap,
        return_lse=sizes.lse,
    )
    return _in_layout(sizes, call, from_heads_first=False)


def _flex(sizes: Sizes, inputs: Tensors) -> Callable[[], object]:
    """Bind flex_attention; its mask of blocks is made here, outside the timed region."""
    from torch.nn.attention import flex_attention as flex

    def visible(batch, head, query, key):  # noqa: ANN001, ANN202
        place = query + sizes.offset
        seen = key <= place if sizes.causal else key < place + sizes.window
        return seen & (key > place - sizes.window) if sizes.window else seen

    def capped(score, batch, head, query, key):  # noqa: ANN001, ANN202
        return sizes.softcap * (score / sizes.softcap).tanh()

    q, k, v = _heads_first(sizes, inputs)
    mask = None
    if sizes.causal or sizes.window:
        mask = flex.create_block_mask(visible, None, None, sizes.seq_q, sizes.seq_kv, device=q.device)
    call = functools.partial(
        _common.compile_whole(flex.flex_attention),
        q,
        k,
        v,
        score_mod=capped if sizes.softcap else None,
        block_mask=mask,
        scale=sizes.scale,
        enable_gqa=sizes.group > 1,
    )
    return _in_layout(sizes, call, from_heads_first=True)


def _dispatched(sizes: Sizes, inputs: Tensors) -> Callable[[], object]:
    import torch

    q, k, v = _heads_first(sizes, inputs)
    mask = None
    if _cuts(sizes) or sizes.window:
        mask = ~sizes.hidden(0, sizes.seq_q - 1, 0, sizes.seq_kv, q.device)
    attend = torch.nn.functional.scaled_dot_product_attention
    call = functools.partial(attend, q, k, v, attn_mask=mask, scale=sizes.scale, enable_gqa=sizes.group > 1)
    return _in_layout(sizes, call, from_heads_first=True)


def _composed(sizes: Sizes, inputs: Tensors) -> Callable[[], object]:
    q, k, v = _heads_first(sizes, inputs)
    hidden = sizes.hidden(0, sizes.seq_q - 1, 0, sizes.seq_kv, q.device)

    def attend() -> object:
        keys, values = (tensor.repeat_interleave(sizes.group, dim=1).float() for tensor in (k, v))
        scores = q.float() @ keys.transpose(2, 3) * sizes.scale
        if sizes.softcap:
            scores = sizes.softcap * (scores / sizes.softcap).tanh()
        scores = scores.masked_fill(hidden, -float("inf"))
        weights = scores.softmax(dim=-1).masked_fill(hidden, 0.0)  # a row that sees nothing is NaN after softmax
        return (weights @ values).to(q.dtype), scores.logsumexp(dim=-1)

    return _in_layout(sizes, attend, from_heads_first=True)

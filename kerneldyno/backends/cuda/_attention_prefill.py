"""Attention with many queries on Hopper: wgmma on tiles that one warp copies by tensor map, FlashAttention-3's schedule."""

import math

from kerneldyno.backends.cuda._compile import compile_kernel
from kerneldyno.backends.cuda._compile import source_text
from kerneldyno.backends.cuda._launch import CudaLaunch
from kerneldyno.backends.cuda._tensor_map import tensor_map
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported


_ARCH = "sm_90"
_WARPGROUP_ROWS = 64
_SLAB = 64  # elements of one row of the 128-byte swizzle
_MAX_HEAD_DIM = 256  # a warpgroup's results take head_dim_v / 2 registers a thread
_CONSUMER_REGISTERS = {1: 255, 2: 232, 3: 160}
"""Registers of a thread of each of 1 to 3 multiplying warpgroups, what the copying one gave included: with it at most 512."""
_OTHER_REGISTERS = 24  # addresses, loop counts, sums of rows, temporaries: what the compiled kernels have beside sums and operands


def space(workload: Workload, device: Device) -> Space:
    """Return the knobs: tiles, slots of the pipeline, how products and softmax overlap, order of the tiles.

    Raises:
        Unsupported: Off Hopper (wgmma exists nowhere else), for fp32, and for head dims that are not multiples of 16 up to 256.
    """
    shape = workload.shape
    head_dim, head_dim_v = int(shape["head_dim"]), int(shape["head_dim_v"])
    if not device.arch.startswith(_ARCH):
        raise Unsupported(f"attention on cuda with many queries needs wgmma (sm_90a); {device.name} is {device.arch}")
    if workload.dtype == "fp32":
        raise Unsupported("attention on cuda with many queries is for fp16 and bf16: wgmma has no fp32")
    if head_dim % 16 or head_dim_v % 16 or max(head_dim, head_dim_v) > _MAX_HEAD_DIM:
        raise Unsupported(
            f"attention on cuda with many queries needs head_dim and head_dim_v that are multiples of 16 (a step of wgmma) up to "
            f"{_MAX_HEAD_DIM} (the results stay in registers), not {head_dim} and {head_dim_v}"
        )
    smem_block, results = device.smem_per_block_bytes, _slabs(head_dim_v) * _SLAB // 2

    def registers_fit(block_m: int, block_n: int, overlap: bool) -> bool:
        # with overlap the probabilities of the tile before are still operands while the next scores arrive
        needed = block_n // 2 + results + (block_n // 4 if overlap else 0) + _OTHER_REGISTERS
        return needed <= _CONSUMER_REGISTERS[block_m // _WARPGROUP_ROWS]

    return Space(
        [
            Param("block_m", (128, 192, 64), "queries a block computes, 64 a warpgroup"),
            Param("block_n", (128, 64, 80, 96, 112, 144, 160, 176, 192), "keys of a tile"),
            Param("stages", (2, 1, 3, 4), "tiles of keys, and of values, in flight or in use"),
            Param("overlap", (True, False), "multiply the next scores before the values, so that these run beside the softmax"),
            Param("pingpong", (True, False), "warpgroups take turns at the tensor cores", lambda block_m: block_m > _WARPGROUP_ROWS),
            Param("group_heads", _group_heads(workload, device), "heads that blocks running together share, for the L2 cache"),
        ],
        [
            Constraint(
                registers_fit,
                f"scores, results ({results}), the probabilities beside them and {_OTHER_REGISTERS} more need at most the registers of a "
                "multiplying thread: 232, with block_m=192 160",
            ),
            Constraint(
                lambda block_m, block_n, stages: _smem_bytes(block_m, block_n, stages, head_dim, head_dim_v) <= smem_block,
                f"shared memory (Q, stages x (K + V)) is at most {smem_block} bytes a block",
            ),
        ],
        _starts(head_dim, bool(shape["causal"])),
    )


def _starts(head_dim: int, causal: bool) -> tuple[Config, ...]:
    """Return what FlashAttention-3 takes for these head dims, and neighbours (docs/notes/attention.md). Source: hopper/tile_size.h."""
    tiles = {
        64: ((192, 128, 2), (128, 128, 2), (128, 192, 2), (192, 96, 3)),
        128: ((128, 128, 2), (128, 176, 2), (128, 160, 2), (128, 96, 3)),
        192: ((128, 128, 2), (128, 112, 2), (128, 96, 2), (128, 64, 3)),
        256: ((128, 80, 2), (128, 64, 2), (128, 80, 1), (64, 80, 2)),
    }
    chosen = list(tiles[_slabs(head_dim) * _SLAB])
    if not causal:  # longer tiles of keys, as fewer are cut by a mask
        chosen[0], chosen[1] = chosen[1], chosen[0]
    starts = [{"block_m": m, "block_n": n, "stages": stages, "overlap": True, "pingpong": True} for m, n, stages in chosen]
    return (*starts, {**starts[0], "pingpong": False})


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; touches no GPU."""
    shape = workload.shape
    batch, heads, kv_heads, seq_q, seq_kv, head_dim, head_dim_v = (
        int(shape[key]) for key in ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim", "head_dim_v")
    )
    block_m, block_n, stages = int(config["block_m"]), int(config["block_n"]), int(config["stages"])
    window = int(shape["window"])
    scale, softcap = float(shape["scale"]) or head_dim**-0.5, float(shape["softcap"])
    constants = {
        "BATCH": batch,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "SEQ_Q": seq_q,
        "SEQ_KV": seq_kv,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "CAUSAL": bool(shape["causal"]),
        # a window as long as all there is cuts nothing, and would only risk overflow
        "WINDOW": window if window < max(seq_q, seq_kv) else 0,
        "SOFTCAPPED": softcap > 0,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "STAGES": stages,
        "OVERLAP": bool(config["overlap"]),
        "PINGPONG": bool(config.get("pingpong", False)),
        "GROUP_HEADS": int(config["group_heads"]),
    }
    macros = {
        "LSE": str(int(bool(shape["lse"]))),
        "SCALE_LOG2": f"{(softcap or scale) * math.log2(math.e)!r}f",
        "SOFTCAP_SCALE": f"{scale / softcap if softcap else 1.0!r}f",
    }
    text = source_text("attention_prefill", workload.dtype, constants, macros, ("tma", "ring", "descriptor", "wgmma", "softmax_online"))

    def boxes(count: int, seq: int, width: int, rows: int) -> dict[str, list[int]]:
        row, head = (count * width, width) if shape["layout"] == "bshd" else (width, seq * width)
        strides = [2 * stride for stride in (row, head, count * seq * width)]
        return tensor_map((width, seq, count, batch), strides, (_SLAB, rows, 1, 1))

    return compile_kernel(
        text,
        "attention_prefill",
        config,
        arch,
        blocks=-(-seq_q // block_m) * heads * batch,
        threads=128 * (block_m // _WARPGROUP_ROWS + 1),
        smem_bytes=_smem_bytes(block_m, block_n, stages, head_dim, head_dim_v),
        tensors=("q", "k", "v", "o", *(("lse",) if shape["lse"] else ())),
        maps={
            "q": boxes(heads, seq_q, head_dim, block_m),
            "k": boxes(kv_heads, seq_kv, head_dim, block_n),
            "v": boxes(kv_heads, seq_kv, head_dim_v, block_n),
            "o": boxes(heads, seq_q, head_dim_v, _WARPGROUP_ROWS),
        },
    )


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load the machine code, in the process that owns the GPU."""
    return CudaLaunch(artifact)


def _slabs(width: int) -> int:
    return -(-width // _SLAB)


def _smem_bytes(block_m: int, block_n: int, stages: int, head_dim: int, head_dim_v: int) -> int:
    """Return the shared memory of a block: Q, which O takes over, the slots of K and V, the barriers of 8 bytes."""
    k, v = _slabs(head_dim), _slabs(head_dim_v)
    return (block_m * max(k, v) + stages * block_n * (k + v)) * _SLAB * 2 + (1 + 4 * stages) * 8


def _group_heads(workload: Workload, device: Device) -> tuple[int, ...]:
    """Return group sizes, the likeliest first: whose keys and values fill half of the L2 cache, but as many as fill the device."""
    shape = workload.shape
    heads, kv_heads, seq_q = int(shape["heads"]), int(shape["kv_heads"]), int(shape["seq_q"])
    kv_bytes = int(shape["seq_kv"]) * (int(shape["head_dim"]) + int(shape["head_dim_v"])) * 2 * kv_heads / heads
    every = int(shape["batch"]) * heads
    sizes = [size for size in (1 << bits for bits in range(every.bit_length())) if size <= every]
    fitting = [size for size in sizes if size * kv_bytes <= device.l2_bytes / 2]
    filling = [size for size in sizes if size * -(-seq_q // 128) >= device.sm_count]
    first = max(max(fitting, default=1), min(filling, default=sizes[-1])) if bool(shape["causal"]) else min(filling, default=sizes[-1])
    return (first, *(size for size in sizes if size != first and first / 4 <= size <= first * 4))

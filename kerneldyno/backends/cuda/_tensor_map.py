"""Tensor maps: what Hopper's copy unit must know of a tensor to move boxes of it between global and shared memory."""

import ctypes
from collections.abc import Mapping
from collections.abc import Sequence

import torch
from cuda.bindings import driver


_BYTES = 128  # of an encoded map. Source: cuda.h, CU_TENSOR_MAP_NUM_QWORDS
_ALIGNMENT = 64
_DTYPES = {
    torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    torch.float32: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
}


def tensor_map(sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> dict[str, list[int]]:
    """Describe how boxes of a tensor are copied, 128-byte swizzled, zeros for what lies outside; for an artifact's payload.

    Args:
        sizes: Elements along each dimension, the contiguous one first.
        strides: Bytes from one element to the next along each dimension but the first; multiples of 16.
        box: Elements of a box along each dimension: at most 256, along the first at most 128 bytes.
    """
    return {"sizes": list(sizes), "strides": list(strides), "box": list(box)}


def encode(tensor: torch.Tensor, description: Mapping[str, Sequence[int]]) -> "ctypes.Array[ctypes.c_char]":
    """Encode the map of a tensor: the 128 bytes that a kernel takes as a parameter.

    The driver is called by ctypes: cuda-bindings' own CUtensorMap lies on 16 bytes, not on the 64 that the driver wants.
    Source: github.com/NVIDIA/cuda-python, pull request 1692.

    Args:
        tensor: On the GPU; begins on a 16-byte boundary.
        description: From `tensor_map`.

    Raises:
        RuntimeError: Where the driver refuses it; the text names the CUDA error.
    """
    sizes, strides, box = description["sizes"], description["strides"], description["box"]
    room = (ctypes.c_char * (_BYTES + _ALIGNMENT))()
    encoded = (ctypes.c_char * _BYTES).from_buffer(room, -ctypes.addressof(room) % _ALIGNMENT)
    rank = len(sizes)
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.byref(encoded),
        ctypes.c_int(int(_DTYPES[tensor.dtype])),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE)),
        ctypes.c_int(int(driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B)),
        ctypes.c_int(int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B)),
        ctypes.c_int(int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)),
    )
    if status:
        name = driver.CUresult(status).name
        raise RuntimeError(f"cuTensorMapEncodeTiled: {name}: sizes {list(sizes)}, strides {list(strides)}, box {list(box)}")
    return encoded

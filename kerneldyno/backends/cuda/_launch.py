"""Loads machine code into torch's CUDA context and launches it on torch's current stream."""

import ctypes
import weakref
from typing import Any

import torch
from cuda.bindings import driver

from kerneldyno.core import Artifact
from kerneldyno.core import Tensors


_SUCCESS = driver.CUresult.CUDA_SUCCESS
_ALIGNMENT = 16  # bytes; the kernels count their widest accesses from the start of each tensor


class CudaLaunch:
    """One loaded kernel.

    Args:
        artifact: What `_compile.compile_kernel` made.

    Raises:
        RuntimeError: Where the driver refuses the code or its shared memory; the text names the CUDA error.
    """

    def __init__(self, artifact: Artifact) -> None:
        # makes torch create and bind its primary context, where the module must live
        self._device = torch.cuda.current_device()
        torch.cuda.current_stream(self._device).query()
        payload = artifact.payload
        module = _check("cuModuleLoadData", driver.cuModuleLoadData(artifact.binary))
        self._unload = weakref.finalize(self, driver.cuModuleUnload, module)
        self._unload.atexit = False
        self._function = _check("cuModuleGetFunction", driver.cuModuleGetFunction(module, artifact.entry.encode()))
        self._blocks: int = payload["blocks"]
        self._threads: int = payload["threads"]
        self._smem_bytes: int = payload["smem_bytes"]
        self._names: list[str] = payload["tensors"]
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check("cuFuncSetAttribute", driver.cuFuncSetAttribute(self._function, attribute, self._smem_bytes))
        self._stream_of = torch._C._cuda_getCurrentRawStream  # what torch's own compiler calls: 0.1 us, no Stream object
        self._launch = driver.cuLaunchKernel

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind the tensors' addresses.

        Raises:
            ValueError: Where a tensor is not contiguous or does not begin on a 16-byte boundary.
        """
        tensors = {**inputs, **outputs}
        self._tensors = [tensors[name] for name in self._names]  # held, so that their memory is
        for name, tensor in zip(self._names, self._tensors, strict=True):
            if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT:
                raise ValueError(f"tensor {name} must be contiguous and begin on a {_ALIGNMENT}-byte boundary")
        self._device = self._tensors[0].device.index
        self._pointers = (ctypes.c_void_p * len(self._tensors))(*(tensor.data_ptr() for tensor in self._tensors))
        size = ctypes.sizeof(ctypes.c_void_p)
        start = ctypes.addressof(self._pointers)
        # the driver wants an array of the addresses of the arguments
        self._parameters = (ctypes.c_void_p * len(self._tensors))(*(start + index * size for index in range(len(self._tensors))))
        self._parameters_at = ctypes.addressof(self._parameters)

    def run(self) -> None:
        """Enqueue one launch on torch's current stream.

        Raises:
            RuntimeError: Where the driver refuses the launch; the text names the CUDA error.
        """
        stream = self._stream_of(self._device)
        status = self._launch(self._function, self._blocks, 1, 1, self._threads, 1, 1, self._smem_bytes, stream, self._parameters_at, 0)[0]
        if status != _SUCCESS:
            _check("cuLaunchKernel", (status,))


def _check(call: str, answer: tuple[Any, ...]) -> Any:
    """Return what a call of the driver gave, or raise with the error's name and the driver's words for it."""
    status, *values = answer
    if status != _SUCCESS:
        text = driver.cuGetErrorString(status)[1]
        words = text.decode() if isinstance(text, bytes) else ""
        raise RuntimeError(f"{call}: {driver.CUresult(status).name}: {words}")
    return values[0] if values else None

"""Loads machine code into torch's CUDA context and launches it on torch's current stream."""

import ctypes
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from cuda.bindings import driver

from kerneldyno.backends.cuda._tensor_map import encode
from kerneldyno.core import Artifact
from kerneldyno.core import Tensors


_SUCCESS = driver.CUresult.CUDA_SUCCESS
_ALIGNMENT = 16  # bytes; the kernels count their widest accesses from the start of each tensor


class CudaLaunch:
    """One loaded kernel, or a few that run after each other.

    A kernel that needs a workspace adds it to the inputs, in a `prepare` of its own.

    Args:
        artifact: What `_compile.compile_kernel` made.

    Raises:
        RuntimeError: Where the driver refuses the code or its shared memory; the text names the CUDA error.
    """

    def __init__(self, artifact: Artifact) -> None:
        # makes torch create and bind its primary context, where the module must live
        self._device = torch.cuda.current_device()
        torch.cuda.current_stream(self._device).query()
        module = _check("cuModuleLoadData", driver.cuModuleLoadData(artifact.binary))
        self._unload = weakref.finalize(self, driver.cuModuleUnload, module)
        self._unload.atexit = False
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._kernels: list[tuple[driver.CUfunction, Mapping[str, Any]]] = []
        for kernel in ({"entry": artifact.entry, **artifact.payload}, *artifact.payload.get("then", ())):
            function = _check("cuModuleGetFunction", driver.cuModuleGetFunction(module, kernel["entry"].encode()))
            _check("cuFuncSetAttribute", driver.cuFuncSetAttribute(function, attribute, kernel["smem_bytes"]))
            self._kernels.append((function, kernel))
        self._stream_of = torch._C._cuda_getCurrentRawStream  # what torch's own compiler calls: 0.1 us, no Stream object
        self._launch = driver.cuLaunchKernel

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind the tensors' addresses, and encode the maps of those that are copied by map.

        Raises:
            ValueError: Where a tensor is not contiguous or does not begin on a 16-byte boundary.
        """
        tensors = {**inputs, **outputs}
        names = {name for _, kernel in self._kernels for name in kernel["tensors"]}
        self._tensors = {name: tensors[name] for name in sorted(names)}  # held, so that their memory is
        for name, tensor in self._tensors.items():
            if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT:
                raise ValueError(f"tensor {name} must be contiguous and begin on a {_ALIGNMENT}-byte boundary")
        self._device = next(iter(self._tensors.values())).device.index
        self._arguments = [_arguments([self._argument(name, kernel) for name in kernel["tensors"]]) for _, kernel in self._kernels]
        self._calls = [
            ((function, kernel["blocks"], 1, 1, kernel["threads"], 1, 1, kernel["smem_bytes"]), ctypes.addressof(arguments[1]))
            for (function, kernel), arguments in zip(self._kernels, self._arguments, strict=True)
        ]

    def _argument(self, name: str, kernel: Mapping[str, Any]) -> Any:
        tensor = self._tensors[name]
        tensor_map = kernel.get("maps", {}).get(name)
        return encode(tensor, tensor_map) if tensor_map else ctypes.c_void_p(tensor.data_ptr())

    def run(self) -> None:
        """Enqueue the kernels on torch's current stream.

        Raises:
            RuntimeError: Where the driver refuses a launch; the text names the CUDA error.
        """
        stream = self._stream_of(self._device)
        for call, arguments in self._calls:
            status = self._launch(*call, stream, arguments, 0)[0]
            if status != _SUCCESS:
                _check("cuLaunchKernel", (status,))


def _arguments(values: list[Any]) -> tuple[list[Any], ctypes.Array[ctypes.c_void_p]]:
    """Return a kernel's arguments, which must be held, and the array of their places that the driver wants."""
    return values, (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))


def _check(call: str, answer: tuple[Any, ...]) -> Any:
    """Return what a call of the driver gave, or raise with the error's name and the driver's words for it."""
    status, *values = answer
    if status != _SUCCESS:
        text = driver.cuGetErrorString(status)[1]
        words = text.decode() if isinstance(text, bytes) else ""
        raise RuntimeError(f"{call}: {driver.CUresult(status).name}: {words}")
    return values[0] if values else None

"""From a jit function and its arguments to an artifact, and from an artifact to a launch; shared by the kernels of this folder."""

import inspect
import math
import re
import subprocess
import tempfile
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Launch
from kerneldyno.core import Tensors
from kerneldyno.core import Value


if TYPE_CHECKING:
    import torch

_WARP_SIZE = 32
_ALIGNMENT = 16
# sizes from here on are compiled as 64-bit; the margin keeps sums of a size and a tile in range
_INT32_SIZE_MAX = 2**31 - 2**20
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True, slots=True)
class Program:
    """A jit function with all that fixes its machine code and its grid.

    Attributes:
        function: The jit function; its first parameters are the tensors, by the names that the problem gives them.
        dtype: Element type of the tensors: fp32, fp16 or bf16.
        sizes: Its integer arguments, passed at launch; the power of two in each, up to 16, is compiled in.
        constants: Its constexpr arguments.
        grid: Number of programs, from the number of multiprocessors.
        num_warps: Warps a program.
        num_stages: Depth of software pipelines whose loop names none.
        dtypes: Triton's element type ("i32") of the tensors that have another than `dtype`, by name.
    """

    function: Any
    dtype: str
    sizes: Mapping[str, int]
    constants: Mapping[str, Value]
    grid: Callable[[int], tuple[int, int, int]]
    num_warps: int
    num_stages: int = 3
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument in the order of the jit function's parameters, constants too, as a launch takes them."""
        return {name: tensors[name] if name in tensors else self._number(name) for name in self.function.arg_names}

    def _number(self, name: str) -> Value:
        return self.sizes[name] if name in self.sizes else self.constants[name]

    def compile(self, arch: str) -> Any:
        """Compile for an architecture ("sm_90a"), or take it from Triton's cache; needs no GPU. Returns a CompiledKernel."""
        signature = {name: self._type(name) for name in self.function.arg_names}
        # torch aligns memory to 512 bytes; of a size the compiler is told the power of two in it, for the width of vectors
        attributes = {
            (position,): [["tt.divisibility", math.gcd(self.sizes.get(name, _ALIGNMENT), _ALIGNMENT)]]
            for position, (name, kind) in enumerate(signature.items())
            if kind != "constexpr"
        }
        source = ASTSource(self.function, signature, constexprs=dict(self.constants), attrs=attributes)
        target = GPUTarget("cuda", int(re.sub(r"\D", "", arch)), _WARP_SIZE)
        # fused multiply-add is named because Triton 3.9 warns where it is left to the default
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        return triton.compile(source, target=target, options=options)

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        if name in self.sizes:
            return "i32" if self.sizes[name] <= _INT32_SIZE_MAX else "i64"
        return f"*{self.dtypes.get(name, self.dtype)}"


def build(program: Program, config: Config, arch: str) -> Artifact:
    """Compile a program and describe what came out.

    `spill_bytes` is the stack frame of a thread: these kernels keep nothing else there.

    Args:
        program: What to compile.
        config: The configuration it was made from.
        arch: Target such as "sm_90a".
    """
    compiled = program.compile(arch)
    binary = compiled.asm["cubin"]
    registers, stack_bytes = _resources(binary)
    return Artifact(
        config=config,
        arch=arch,
        source=inspect.getsource(inspect.getmodule(program.function.fn)),
        entry=compiled.metadata.name,
        binary=binary,
        payload={"triton_hash": compiled.hash},
        registers=registers,
        smem_bytes=compiled.metadata.shared,
        spill_bytes=stack_bytes,
        # the compiler raises num_warps where it adds producer warps
        threads=compiled.metadata.num_warps * _WARP_SIZE,
        texts={"ttgir": compiled.asm["ttgir"], "ptx": compiled.asm["ptx"]},
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, from the `cuobjdump` that Triton brings along."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = _RESOURCES.search(listing)
    if found is None:
        raise RuntimeError(f"cuobjdump names no registers: {listing.strip()}")
    return int(found[1]), int(found[2])


def load(program: Program, arch: str) -> Launch:
    """Load a program that `build` compiled, out of Triton's cache.

    Args:
        program: The same program.
        arch: The same target.

    Raises:
        triton.runtime.errors.OutOfResources: Where it needs more shared memory or threads than the device has.
    """
    import torch

    compiled = program.compile(arch)
    device = torch.cuda.current_device()
    return _Launch(program, compiled, device, torch.cuda.get_device_properties(device).multi_processor_count)


class _Launch:
    """A loaded program on one device."""

    def __init__(self, program: Program, compiled: Any, device: int, sm_count: int) -> None:
        from torch._C import _cuda_getCurrentRawStream

        self._program = program
        self._compiled = compiled
        self._device = device
        self._grid = program.grid(sm_count)
        self._stream = _cuda_getCurrentRawStream
        self._workspace: torch.Tensor | None = None
        # the first look at `run` loads the module
        self._run = compiled.run

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind tensors, and allocate the memory in which programs build their tensor maps.

        The tensors are kept alive here, since the launch holds bare addresses.
        """
        import torch

        self._tensors = {**inputs, **outputs}
        addresses = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}
        # the calling convention of CompiledKernel.run in Triton 3.6 and 3.9: metadata, then three launch hooks that are unused here
        hooks = (None, None, None)
        size = self._compiled.metadata.global_scratch_size * math.prod(self._grid)
        if size:
            self._workspace = torch.empty(size, dtype=torch.int8, device=f"cuda:{self._device}")
        self._tail = (self._compiled.function, self._compiled.packed_metadata, *hooks, *self._program.arguments(addresses).values())

    def run(self) -> None:
        """Launch once on torch's current stream."""
        if self._workspace is not None:
            triton.set_allocator(self._allocate)
        self._run(*self._grid, self._stream(self._device), *self._tail)

    def _allocate(self, size: int, alignment: int, stream: int | None) -> "torch.Tensor | None":
        # Triton asks at each launch; `alignment` is 128 at most, and torch gives 512
        return self._workspace

"""What the problems share: seeded inputs, error budgets, row blocks and launches of library calls."""

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kerneldyno.core import DTYPE_EPSILON
from kerneldyno.core import Baseline
from kerneldyno.core import Device
from kerneldyno.core import Error
from kerneldyno.core import ErrorBudget
from kerneldyno.core import Tensors
from kerneldyno.core import Work
from kerneldyno.core import Workload
from kerneldyno.errors import RequestError


if TYPE_CHECKING:
    import torch

DTYPES = ("bf16", "fp16", "fp32")
"""Dtypes of every problem so far, the default first (on a CPU the command picks fp32, which compilers vectorise everywhere)."""

BLOCK_ELEMENTS = 2**26
"""Elements of one row block of a float64 reference: 512 MiB, so that a softmax of 8192 x 131072 needs no 8.6 GB tensor."""

DRAWN_ELEMENTS = 2**28
"""Elements of an input drawn at once: 1 GiB in float32."""

LIBRARY_FACTOR = 1.25
"""How many times the library's own error a kernel may have.

A kernel that keeps float32 until it rounds once lands on the library's error to a few percent, since both are that one rounding.
Rounding to the output dtype twice (partial sums in 16 bits, a 16-bit intermediate) costs sqrt(2) = 1.41 times as much, four 16-bit
partial sums 1.9 times. 1.25 parts the two. It also finds one element that is wrong by 1% of the largest: half a unit in the last
place of bf16 is at most 0.39% of the largest, times 1.25 is 0.49%. Both were measured on products of normal matrices.

Source: the idea of a budget from a low-precision reference is attention-gym's `assert_matches_low_precision_reference`, which
allows 2 x (reference error + eps x largest) on the maximum; that would let two roundings pass.
"""

WALK_FACTOR = 4.0
"""How many float32 units in the last place, times the square root of the summed terms, a sum may be off.

Rounding errors of a sum in any order behave like a random walk: about sqrt(k) half units instead of the worst case k.
A plain sequential sum of k = 4096 products of normal numbers measures 0.15 sqrt(k) eps in the norm, blocked sums less, so 4 leaves
a margin of 25 for truncating tensor-core adders and data with unlike magnitudes; TF32 inputs (3e-4) stay 5 times above it at
k = 16384.

Source: N. Higham and T. Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41(5), 2019.
"""

MEMORY_BOUND_FLOPS_PER_BYTE = 100.0
"""Below this a copy is shown beside the kernels: an H200 does 150 to 190 FLOPs for each byte it can copy (650 to 800 TFLOP/s, 4.2 TB/s)."""

_COPIED_BYTES = 2**30
"""Bytes of one copy: far more than any L2 cache, and little beside a KV cache of 30 GB."""

LARGEST_BYTES = 128 * 2**30
"""Inputs and outputs together may take this much: an H200 holds 141 GB, and the inputs are drawn in float32 before they are cast."""


def torch_dtype(dtype: str) -> "torch.dtype":
    """Return torch's dtype for ours ("bf16", "fp16", "fp32")."""
    import torch

    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]


def normal(workload: Workload, device: str, **shapes: tuple[int, ...]) -> Tensors:
    """Draw normal tensors in the workload's dtype, in the order given, from one generator seeded by `workload.seed`.

    They are drawn in float32 and cast, so that all dtypes see the same numbers up to rounding, `DRAWN_ELEMENTS` at a time, so that a
    KV cache of 30 GB in 16 bits does not need 60 GB more. The generators of a CPU and of a GPU differ: the same seed gives other
    numbers there.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(workload.seed)
    tensors = empty(workload, device, **shapes)
    for tensor in tensors.values():
        for part in tensor.view(-1).split(DRAWN_ELEMENTS):
            part.copy_(torch.randn(part.numel(), generator=generator, device=device, dtype=torch.float32))
    return tensors


def empty(workload: Workload, device: str, **shapes: tuple[int, ...]) -> Tensors:
    """Allocate tensors in the workload's dtype without filling them."""
    import torch

    return {name: torch.empty(shape, device=device, dtype=torch_dtype(workload.dtype)) for name, shape in shapes.items()}


def reference_dtype(workload: Workload) -> "torch.dtype":
    """Return what a float64 reference is kept in: float64 beside fp32 outputs, float32 beside 16-bit ones.

    Rounding to float32 adds 3e-8 to the smallest error of a 16-bit output, 2e-4 (fp16), and halves the memory.
    """
    import torch

    return torch.float64 if workload.dtype == "fp32" else torch.float32


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Cut rows into slices of at most `BLOCK_ELEMENTS` elements, at least one row each."""
    step = max(1, BLOCK_ELEMENTS // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def budget(library: Error, growth: float, norm_scale: float = 1.0, max_scale: float = 0.0) -> ErrorBudget:
    """Make the budget of a kernel that computes in float32 and rounds once.

    Args:
        library: The error of the library's own answer on the same inputs.
        growth: Float32 error of the computation before that rounding, in units in the last place of `norm_scale` or `max_scale`.
        norm_scale: Norm of what is summed over the norm of the reference: above 1 where terms cancel.
        max_scale: Largest magnitude that a sum of one element passes through.
    """
    slack = growth * DTYPE_EPSILON["fp32"]
    return ErrorBudget(
        relative=LIBRARY_FACTOR * library.relative + slack * norm_scale,
        max_abs=LIBRARY_FACTOR * library.max_abs + slack * max_scale,
    )


def check_size(workload: Workload, size_bytes: float) -> None:
    """Refuse a workload whose tensors no single device holds.

    Args:
        workload: The workload.
        size_bytes: Bytes of its inputs and outputs together.

    Raises:
        RequestError: They pass `LARGEST_BYTES`.
    """
    if size_bytes > LARGEST_BYTES:
        raise RequestError(
            f"{workload.problem} {workload.shape_text} in {workload.dtype} needs {size_bytes / 2**30:.0f} GiB for its inputs and outputs;"
            f" at most {LARGEST_BYTES // 2**30} GiB. Choose a smaller shape."
        )


def demand_float32_accumulation() -> None:
    """Make torch's matrix products sum in float32 from here on, in this process.

    By default cuBLAS may add the partial sums of a split in 16 bits, and a user may have allowed TF32; the problems ask for neither.
    """
    import torch

    torch.set_float32_matmul_precision("highest")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


@contextlib.contextmanager
def float32_accumulation() -> Iterator[None]:
    """Demand float32 accumulation for a while, and give the process its settings back."""
    import torch

    matmul = torch.backends.cuda.matmul
    before = {
        name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k", True))
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    }
    precision = torch.get_float32_matmul_precision()
    demand_float32_accumulation()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for name, (reduced, split_k) in before.items():
            setattr(matmul, name, reduced if split_k else (reduced, split_k))


class Call:
    """A launch that calls a library with everything bound beforehand.

    Args:
        bind: Takes inputs and outputs and returns the call, which writes into the outputs.
    """

    def __init__(self, bind: Callable[[Tensors, Tensors], Callable[[], object]]) -> None:
        self._bind = bind
        self._call: Callable[[], object] | None = None

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind the tensors."""
        demand_float32_accumulation()
        self._call = self._bind(inputs, outputs)

    def run(self) -> None:
        """Call the library once."""
        assert self._call is not None, "prepare comes before run"
        self._call()


class Returning:
    """A launch of a library that returns new tensors; `collect` copies them into the caller's, outside the timed region.

    Args:
        bind: Takes the inputs and returns the call, whose result is a tensor or a sequence that begins with the tensors in `names`.
        names: The outputs that they belong in. A returned tensor may be longer than its output (padded), not shorter.
    """

    def __init__(self, bind: Callable[[Tensors], Callable[[], object]], names: tuple[str, ...]) -> None:
        self._bind = bind
        self._names = names
        self._call: Callable[[], object] | None = None
        self._targets: Sequence[torch.Tensor] = ()
        self._result: object = None

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind the tensors, and call once: libraries plan, compile and load at their first call."""
        demand_float32_accumulation()
        self._call = self._bind(inputs)
        self._targets = [outputs[name] for name in self._names]
        self._call()
        self._result = None

    def run(self) -> None:
        """Call the library once."""
        assert self._call is not None, "prepare comes before run"
        self._result = self._call()

    def collect(self) -> None:
        """Copy what was returned: after `run`, outside the timed region, before the outputs are read."""
        import torch

        result = self._result
        returned = [result] if isinstance(result, torch.Tensor) else result
        assert isinstance(returned, list | tuple), "run comes before collect"
        for target, tensor in zip(self._targets, returned, strict=False):
            target.copy_(tensor[tuple(slice(length) for length in target.shape)])


class Compiled:
    """A launch that calls a function through torch.compile; it is compiled in `prepare`.

    Args:
        function: Takes the tensors in `arguments`. With `output` it returns a new tensor, else it writes into its last argument.
        arguments: Names of inputs and outputs, in order.
        output: The output that the returned tensor belongs in; `collect` copies it there, outside the timed region.
        mode: torch.compile's mode.
    """

    def __init__(
        self, function: Callable[..., object], arguments: tuple[str, ...], output: str | None = None, mode: str = "default"
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._output = output
        self._mode = mode
        self._call: Callable[[], object] | None = None
        self._target: torch.Tensor | None = None
        self._result: object = None

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Compile for these tensors by running once, give the outputs back what they held, and bind the tensors."""
        demand_float32_accumulation()
        compiled = compile_whole(self._function, self._mode)
        tensors = [{**inputs, **outputs}[name] for name in self._arguments]
        # the caller poisons its outputs, so they must be as they were; other tensors would be guarded by their own storage offset
        held = {name: tensor.clone() for name, tensor in outputs.items()}
        compiled(*tensors)
        for name, tensor in held.items():
            outputs[name].copy_(tensor)
        self._call = functools.partial(compiled, *tensors)
        self._target = outputs[self._output] if self._output else None
        self._result = None

    def run(self) -> None:
        """Call the compiled function once."""
        assert self._call is not None, "prepare comes before run"
        self._result = self._call()

    def collect(self) -> None:
        """Copy a returned tensor into the caller's output: after `run`, outside the timed region, before the output is read."""
        import torch

        if self._target is not None and isinstance(self._result, torch.Tensor):
            self._target.copy_(self._result)


def compile_whole(function: Callable[..., object], mode: str = "default") -> Callable[..., object]:
    """Pass a function to torch.compile: for the shapes that it is called with, as one graph."""
    import torch

    # dynamo keeps what it compiled by code object, 8 entries by default; fullgraph=True makes passing the limit an error
    torch._dynamo.config.recompile_limit = max(256, torch._dynamo.config.recompile_limit)
    return torch.compile(function, fullgraph=True, dynamic=False, mode=mode)


class _Copy:
    """A launch that copies `size_bytes / 2` bytes on a device, in parts of at most `_COPIED_BYTES`."""

    def __init__(self, size_bytes: float, device: str) -> None:
        self._bytes = max(1, round(size_bytes / 2))
        self._device = device
        self._calls: Sequence[Callable[[], object]] = ()

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Allocate what is copied; the caller's tensors are not touched."""
        import torch

        # written, not zeros: the CPU's allocator gives zeros as pages that are all one page of memory, which a copy reads from the cache
        source, target = torch.ones((2, min(self._bytes, _COPIED_BYTES)), dtype=torch.uint8, device=self._device)
        whole, rest = divmod(self._bytes, len(source))
        self._calls = [functools.partial(target.copy_, source)] * whole
        if rest:
            self._calls.append(functools.partial(target[:rest].copy_, source[:rest]))

    def run(self) -> None:
        """Copy once."""
        for call in self._calls:
            call()


def copy_roof(work: Work, device: Device) -> Mapping[str, Baseline]:
    """Return a copy that reads and writes as many bytes together as the work moves, where the work can be bound by memory, else nothing.

    Args:
        work: Its FLOPs and bytes.
        device: Where it runs.
    """
    if device.kind == "replay" or work.flops >= MEMORY_BOUND_FLOPS_PER_BYTE * work.bytes:
        return {}
    launch = _Copy(work.bytes, "cpu" if device.kind == "cpu" else "cuda:0")
    return {"copy": Baseline(launch, "roof", "a copy whose reads and writes are as many bytes as the work must move")}


def installed(module: str) -> bool:
    """Say whether a module can be found, without importing more than its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a parent is missing
        return False


def can_compile() -> bool:
    """Say whether torch.compile can generate GPU code here: it needs Triton."""
    return importlib.util.find_spec("triton") is not None

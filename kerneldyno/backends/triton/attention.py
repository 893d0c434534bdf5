"""Attention in Triton: a kernel for many queries (bound by the tensor cores) and one for few over many keys (bound by memory)."""

from dataclasses import replace

from kerneldyno.backends.triton import _attention_decode
from kerneldyno.backends.triton import _attention_prefill
from kerneldyno.backends.triton import _compile
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Space
from kerneldyno.core import Tensors
from kerneldyno.core import Workload
from kerneldyno.errors import Unsupported


# rows of one tile in which the queries of a key head are packed
_DECODE_ROWS_MAX = 64
_DIM_MAX = 256
# elements of a 16-bit dtype in the 16 B on which a row must start for wide loads and tensor maps
_DIM_STEP = 8


def decodes(workload: Workload) -> bool:
    """Say which kernel a workload takes: few queries a key head are packed into one tile, and the keys are split."""
    shape = workload.shape
    return shape["seq_q"] * (shape["heads"] // shape["kv_heads"]) <= _DECODE_ROWS_MAX


def space(workload: Workload, device: Device) -> Space:
    """The knobs of the kernel for this shape.

    Raises:
        Unsupported: For fp32, and for a head_dim above 256 or no multiple of 8.
    """
    shape = workload.shape
    if workload.dtype not in ("bf16", "fp16"):
        raise Unsupported(f"attention on triton has no variant for {workload.dtype}: bf16 and fp16 run on the tensor cores")
    for name in ("head_dim", "head_dim_v"):
        if shape[name] > _DIM_MAX or shape[name] % _DIM_STEP:
            raise Unsupported(
                f"attention on triton has no variant for {name}={shape[name]}: it takes multiples of {_DIM_STEP} up to {_DIM_MAX}"
            )
    return (_attention_decode if decodes(workload) else _attention_prefill).space(workload, device)


def programs(workload: Workload, config: Config) -> list[_compile.Program]:
    """What a configuration compiles, in the order of its launches."""
    return _attention_decode.programs(workload, config) if decodes(workload) else [_attention_prefill.program(workload, config)]


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; needs no GPU. The artifact describes the kernel that reads the keys."""
    first, *others = [_compile.build(program, config, arch) for program in programs(workload, config)]
    return replace(first, payload={**first.payload, **{other.entry: other.payload["triton_hash"] for other in others}})


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load a built configuration on the current GPU."""
    config = artifact.config
    launches = [_compile.load(program, artifact.arch) for program in programs(workload, config)]
    return launches[0] if len(launches) == 1 else SplitLaunch(launches, _attention_decode.workspaces(workload, config))


class SplitLaunch:
    """The launch over splits of the keys and the one that combines them, with fp32 results in between.

    Args:
        launches: In their order.
        workspaces: Extents of the tensors in between, by the argument that they are.
    """

    def __init__(self, launches: list[Launch], workspaces: dict[str, tuple[int, ...]]) -> None:
        self._launches = launches
        self._workspaces = workspaces

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind tensors, and allocate those in between; the launches keep them alive."""
        import torch

        device = next(iter(inputs.values())).device
        between = {name: torch.empty(extents, dtype=torch.float32, device=device) for name, extents in self._workspaces.items()}
        for launch in self._launches:
            launch.prepare(inputs, {**outputs, **between})

    def run(self) -> None:
        """Enqueue every launch on torch's current stream."""
        for launch in self._launches:
            launch.run()

"""Vector addition in Triton: the smallest kernel that has a search space."""

import triton
import triton.language as tl

from kerneldyno.backends.triton import _compile
from kerneldyno.core import Artifact
from kerneldyno.core import Config
from kerneldyno.core import Constraint
from kerneldyno.core import Device
from kerneldyno.core import Launch
from kerneldyno.core import Param
from kerneldyno.core import Space
from kerneldyno.core import Workload


@triton.jit
def add(x: tl.tensor, y: tl.tensor, out: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Add x and y [n] into out; a program adds BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(x + at, mask=inside).to(tl.float32) + tl.load(y + at, mask=inside).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def space(workload: Workload, device: Device) -> Space:
    """The knobs: elements of a program, and the warps that share them."""
    return Space(
        [
            Param("block", (256, 512, 1024, 2048, 4096, 8192), "elements that one program adds"),
            Param("num_warps", (1, 2, 4, 8, 16), "warps of a program"),
        ],
        [
            Constraint(lambda block, num_warps: block >= 32 * num_warps, "every thread has at least 1 element"),
            Constraint(
                lambda block, num_warps: block <= 64 * 32 * num_warps, "a thread has at most 64 elements: two inputs fill 128 registers"
            ),
        ],
    )


def program(workload: Workload, config: Config) -> _compile.Program:
    """What a configuration compiles and launches."""
    n, block = workload.shape["n"], config["block"]
    blocks = triton.cdiv(n, block)
    return _compile.Program(add, workload.dtype, {"n": n}, {"BLOCK": block}, lambda sm_count: (blocks, 1, 1), config["num_warps"])


def build(workload: Workload, config: Config, arch: str) -> Artifact:
    """Compile one configuration; needs no GPU."""
    return _compile.build(program(workload, config), config, arch)


def load(artifact: Artifact, workload: Workload) -> Launch:
    """Load a built configuration on the current GPU."""
    return _compile.load(program(workload, artifact.config), artifact.arch)

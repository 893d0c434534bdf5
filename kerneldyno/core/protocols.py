"""What a problem, a backend, a kernel and a launch must offer: structural, so a module or an object will do.

A module is enough: `backends/triton/gemm.py` with the functions `space`, `build` and `load` is a `Kernel`,
`backends/triton/__init__.py` with `name` and `probe` a `Backend`, `problems/gemm.py` a `Problem`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Protocol

from kerneldyno.core.records import Artifact
from kerneldyno.core.records import Availability
from kerneldyno.core.records import Baseline
from kerneldyno.core.records import Config
from kerneldyno.core.records import Device
from kerneldyno.core.records import Dim
from kerneldyno.core.records import ErrorBudget
from kerneldyno.core.records import Shape
from kerneldyno.core.records import Work
from kerneldyno.core.records import Workload
from kerneldyno.core.space import Space


if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]


class Launch(Protocol):
    """A kernel ready to run. Holds its tensors after `prepare`; `run` may then be called any number of times.

    A baseline that cannot write into the caller's outputs also has `collect() -> None`, which copies its result there; it is
    called after `run`, before the outputs are checked, and never timed.

    A kernel that must arrange itself by the values of its inputs (the tiles of a routing) also has `layout() -> None`, which
    enqueues that work as `run` does. `prepare` calls it, and it is timed apart: the work that a server would do once a routing.
    """

    def prepare(self, inputs: Tensors, outputs: Tensors) -> None:
        """Bind tensors; build tensor maps and workspaces. Never inside the timed region."""
        ...

    def run(self) -> None:
        """Enqueue one launch sequence on torch's current stream (on a CPU: run it) and return."""
        ...


class Problem(Protocol):
    """An operation, written once: what goes in, what must come out, how right is right, how much work it is."""

    @property
    def name(self) -> str:
        """The word in `problem=`."""
        ...

    @property
    def dims(self) -> Mapping[str, Dim]:
        """Legal shape keys, in the order in which a shape is printed."""
        ...

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Legal dtypes, the default first."""
        ...

    def shapes(self) -> Mapping[str, Shape]:
        """Named cases from real models: {"llama3-70b-gate-up-4k": {"m": 4096, ...}}."""
        ...

    def check(self, workload: Workload) -> None:
        """Raise `errors.RequestError` where dims that are each legal do not go together."""
        ...

    def inputs(self, workload: Workload, device: str) -> Tensors:
        """Seeded inputs on a torch device ("cpu", "cuda:0"), normal by default."""
        ...

    def outputs(self, workload: Workload, device: str) -> Tensors:
        """Output tensors, allocated but not filled: the caller poisons them."""
        ...

    def reference(self, workload: Workload, inputs: Tensors) -> Tensors:
        """The plain answer in float32 or float64, on the inputs' device."""
        ...

    def tolerance(self, workload: Workload, inputs: Tensors, reference: Tensors) -> ErrorBudget:
        """The budget, from the error that the library's own low-precision answer has on these inputs."""
        ...

    def work(self, workload: Workload) -> Work:
        """FLOPs, and bytes if each input is read once and each output written once."""
        ...

    def baselines(self, workload: Workload, device: Device) -> Mapping[str, Baseline]:
        """What to compare with on this device, the library first; an entry that cannot run here is left out."""
        ...


class Backend(Protocol):
    """A DSL or compiler."""

    @property
    def name(self) -> str:
        """The word in `backend=`."""
        ...

    @property
    def device_kind(self) -> str:
        """The kind of device its kernels run on: "cuda" or "cpu"."""
        ...

    def probe(self, device: Device | None) -> Availability:
        """Say whether it is usable on the device (None: no device of its kind here), or why not and what to do.

        Must not import the DSL more than needed to know its version, and must not touch the GPU.
        """
        ...


class Kernel(Protocol):
    """One kernel family: a (problem, backend) pair."""

    def space(self, workload: Workload, device: Device) -> Space:
        """The knobs for this workload on this device. Raises `errors.Unsupported` where it has no variant for it."""
        ...

    def build(self, workload: Workload, config: Config, arch: str) -> Artifact:
        """Compile one configuration, in a process that sees no GPU. Any exception is a build error."""
        ...

    def load(self, artifact: Artifact, workload: Workload) -> Launch:
        """Load what `build` made, in the process that owns the device."""
        ...

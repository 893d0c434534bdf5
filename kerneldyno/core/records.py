"""Frozen records that travel between the layers; no dicts do."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING
from typing import Any
from typing import Literal


if TYPE_CHECKING:
    from kerneldyno.core.protocols import Launch

Value = int | float | str | bool
Shape = Mapping[str, Value]
Config = Mapping[str, Value]

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of one element of each supported dtype."""

DTYPE_EPSILON: Mapping[str, float] = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}
"""Distance from 1 to the next number. Source: IEEE 754-2019 table 3.5 (binary32, binary16); bfloat16 has 7 stored bits."""


def canonical(value: Any) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces, so that equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=dict)


def digest(value: Any) -> str:
    """Return the first 20 hex digits of the SHA-256 of `canonical(value)` (80 bits: no clash is to be expected)."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:20]


class Status(StrEnum):
    """How a configuration ended. Every one is a row in the database: a failure is a result."""

    OK = "ok"
    WRONG_RESULT = "wrong_result"
    NONDETERMINISTIC = "nondeterministic"
    BUILD_ERROR = "build_error"
    BUILD_TIMEOUT = "build_timeout"
    OUT_OF_RESOURCES = "out_of_resources"
    LAUNCH_ERROR = "launch_error"
    RUN_TIMEOUT = "run_timeout"
    WORKER_DIED = "worker_died"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Dim:
    """One legal shape key of a problem.

    Attributes:
        default: The value where the user gives none; its type is the key's type.
        meaning: One line for `tune list problem=...`.
        unit: "rows", "elements", or "" for a switch or a name.
        minimum: Least value of a number.
        maximum: Greatest value of a number.
        choices: The allowed words, where the key is a name.
        like: The dim before this one whose value it takes where the user gives none; "" for `default`.
        default_cpu: The default on a CPU, where a GPU's would take minutes a launch; None for `default`.
    """

    default: Value
    meaning: str
    unit: str = ""
    minimum: float = 1
    maximum: float = 2**31 - 1
    choices: tuple[str, ...] = ()
    like: str = ""
    default_cpu: Value | None = None

    def default_on(self, device_kind: str) -> Value:
        """The default on a kind of device ("cuda", "cpu")."""
        return self.default_cpu if device_kind == "cpu" and self.default_cpu is not None else self.default


@dataclass(frozen=True, slots=True)
class Workload:
    """A problem at one shape, dtype and seed: what all backends compete on.

    Attributes:
        problem: The problem's name.
        shape: Every dim of the problem with its value, defaults filled in.
        dtype: fp32, fp16 or bf16.
        seed: Seed of the inputs.
    """

    problem: str
    shape: Shape
    dtype: str
    seed: int = 0

    @property
    def shape_text(self) -> str:
        """The shape as a user would write it: `m=4096 n=4096 k=4096 layout=nt`."""
        return " ".join(f"{key}={_word(value)}" for key, value in self.shape.items())

    @property
    def key(self) -> str:
        """The canonical text; equal workloads have equal keys whatever the order of the shape's entries."""
        dims = " ".join(f"{key}={_word(self.shape[key])}" for key in sorted(self.shape))
        return f"{self.problem} {dims} dtype={self.dtype} seed={self.seed}"


def _word(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Device:
    """Where kernels run.

    Attributes:
        kind: "cuda", "cpu" or "replay".
        name: What the driver calls it ("NVIDIA H200"), or the CPU's model name.
        arch: The compiler's target: "sm_90a"; "x86_64" or "aarch64" for a CPU.
        index: Ordinal among the machine's devices of this kind.
        sm_count: Streaming multiprocessors; on a CPU the cores this process may use.
        memory_bytes: Device memory; on a CPU the machine's memory.
        smem_per_block_bytes: Most shared memory one block may opt in to; 0 on a CPU.
        smem_per_sm_bytes: Shared memory of one multiprocessor; 0 on a CPU.
        registers_per_sm: 32-bit registers of one multiprocessor; 0 on a CPU.
        max_threads_per_block: Most threads of a block; on a CPU the cores this process may use.
        l2_bytes: Size of the L2 cache; on a CPU of its last-level cache.
        driver: Driver version; on a CPU the kernel release.
    """

    kind: Literal["cuda", "cpu", "replay"]
    name: str
    arch: str
    index: int = 0
    sm_count: int = 1
    memory_bytes: int = 0
    smem_per_block_bytes: int = 0
    smem_per_sm_bytes: int = 0
    registers_per_sm: int = 0
    max_threads_per_block: int = 1
    l2_bytes: int = 0
    driver: str = ""

    @property
    def spec(self) -> str:
        """The word that chooses it: `cuda:0`, `cpu`."""
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions of every compiler and library that could change a result ({"triton": "3.6.0", ...})."""

    versions: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Identity of this set of versions."""
        return digest(self.versions)


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can be used here.

    Attributes:
        usable: True where it can compile and run on the device that was asked about.
        reason: Why not, in one line; empty where usable.
        remedy: What to install or choose instead; empty where usable.
        versions: Versions of what it would use.
    """

    usable: bool
    reason: str = ""
    remedy: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Work:
    """What a workload must do at least.

    Attributes:
        flops: Floating-point operations.
        bytes: Bytes moved if each input is read once and each output written once.
    """

    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Error:
    """How far an output is from the reference.

    Attributes:
        relative: Frobenius norm of the difference over that of the reference.
        max_abs: Largest absolute difference of one element; infinity where an element is not finite.
    """

    relative: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """The error that a right kernel may have, derived from the library's own low-precision error.

    Both bounds must hold: the norm finds a small error everywhere, the maximum finds one wrong element.

    Attributes:
        relative: Bound on `Error.relative`.
        max_abs: Bound on `Error.max_abs`.
    """

    relative: float
    max_abs: float

    def admits(self, error: Error) -> bool:
        """Say whether an error keeps both bounds (a NaN keeps none)."""
        return error.relative <= self.relative and error.max_abs <= self.max_abs


SOLVING_ROLES = ("kernel", "library", "peer")
"""Roles in a comparison that solve the problem: they are verified, and one of them is the fastest."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Something to show beside the kernels that is not ours.

    Attributes:
        launch: Runs it, timed as a kernel is, and verified where it solves the problem (library, peer).
        role: "library" (what a user would call otherwise), "peer" (another tuned kernel), "roof" (a copy: a bound, not a solution) or
            "step" (preparing work that is in no other row's time, such as the sorting of a routing).
        meaning: One line for the table's legend.
    """

    launch: "Launch"
    role: Literal["library", "peer", "roof", "step"]
    meaning: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """What one configuration compiled to.

    Attributes:
        config: The configuration.
        arch: The target it was compiled for.
        source: The generated or written source text.
        entry: Name of the kernel's entry point.
        binary: Machine code (.so, .cubin), or empty where the compiler's own cache on disk holds it.
        payload: What `load` needs besides (grid, shared memory, cache keys); JSON values only.
        registers: Registers a thread; None where unknown.
        smem_bytes: Shared memory a block, static and dynamic; None where unknown.
        spill_bytes: Spill stores plus loads a thread; None where unknown.
        threads: Threads a block (CPU: threads of the team); None where unknown.
        texts: Other listings by name ("ptx", "ttgir"), for `tune show`.
        compile_s: Seconds the compiler took.
    """

    config: Config
    arch: str
    source: str
    entry: str
    binary: bytes = b""
    payload: Mapping[str, Any] = field(default_factory=dict)
    registers: int | None = None
    smem_bytes: int | None = None
    spill_bytes: int | None = None
    threads: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    compile_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one configuration.

    Attributes:
        status: How it ended.
        samples_us: Every timed launch, in microseconds; empty unless status is ok.
        median_us: Their median.
        low_us: Lower end of the 95% interval of the median.
        high_us: Upper end of it.
        error: Distance from the reference, where it ran.
        sm_clock_mhz: SM clock right after timing; None where unknown.
        power_w: Board power right after timing; None where unknown.
        artifact: Key of the artifact in the cache, where it was built.
        message: The error text, shortened; empty where ok.
        build_s: Seconds the build took, 0 where the cache had it.
        measure_s: Seconds that load, verification and timing took.
        registers: From the artifact.
        smem_bytes: From the artifact.
        spill_bytes: From the artifact.
    """

    status: Status
    samples_us: tuple[float, ...] = ()
    median_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    error: Error | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    artifact: str | None = None
    message: str = ""
    build_s: float = 0.0
    measure_s: float = 0.0
    registers: int | None = None
    smem_bytes: int | None = None
    spill_bytes: int | None = None

"""What a request comes to, as frozen records: the grammar writes them, the tuner and the readers take them."""

import shlex
from dataclasses import dataclass
from dataclasses import field
from typing import Literal

from kerneldyno.core import Shape
from kerneldyno.core import Workload


Verb = Literal["run", "list", "doctor", "compare", "help", "version"]
Format = Literal["table", "json", "csv"]


@dataclass(frozen=True, slots=True)
class Options:
    """Everything of a request but what to work on.

    Attributes:
        trials: Configurations to have measured for each (backend, workload), those in the database counted; None: no limit.
        budget_s: Seconds of search for the whole command; each study gets an even share of what is left. None: no limit.
        seed: Seed of the sampler (and, in the workload, of the inputs).
        sampler: Name of the sampler, lower case: "tpe", "random", "cmaes", "gp", "qmc", "grid", ...
        db: Path of the database, or an SQLAlchemy URL.
        format: How a table is printed.
        fresh: Measure again what the database holds.
        plugins: Local plugin files, absolute paths.
        workers: Compile processes; None: chosen from the cores.
        build_timeout_s: Seconds after which a compile process is killed.
        run_timeout_s: Seconds after which the measuring process is killed over one configuration.
        top: Entries of each backend in the final comparison.
        limit: Rows of a table; None: all.
    """

    trials: int | None = None
    budget_s: float | None = None
    seed: int = 0
    sampler: str = "tpe"
    db: str = "results.db"
    format: Format = "table"
    fresh: bool = False
    plugins: tuple[str, ...] = ()
    workers: int | None = None
    build_timeout_s: float = 120.0
    run_timeout_s: float = 60.0
    top: int = 3
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One workload on one device, and the backends that compete on it.

    Attributes:
        workload: What to compute.
        device: `cpu`, `cuda:0`.
        backends: The backends asked for; empty: every usable one that has a kernel (`choose.jobs` fills it in).
    """

    workload: Workload
    device: str
    backends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """What a reading verb shows; an empty field lets everything through.

    Attributes:
        problems: Problem names.
        backends: Backend names.
        dtypes: fp32, fp16, bf16.
        shapes: Partial shapes; a workload is shown where it agrees with any of them.
        devices: `cpu`, `cuda:0`.
    """

    problems: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole request.

    Attributes:
        verb: What to do.
        jobs: What to search, for the verb run.
        selection: What to show, for the verbs that read.
        options: The rest.
        words: The canonical words that repeat the request.
    """

    verb: Verb
    jobs: tuple[Job, ...] = ()
    selection: Selection = field(default_factory=Selection)
    options: Options = field(default_factory=Options)
    words: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command that repeats the request, for a shell."""
        return shlex.join(("tune", *self.words))

"""Every key that a request may carry, declared once: type, meaning, range, and the verbs that take it."""

from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
from typing import Any


VERBS = {
    "run": "search for the fastest configuration, then compare (the default verb)",
    "list": "problems with their dims and shapes, backends and whether they are usable, kernels, plugins that failed",
    "doctor": "what this machine has, what it lacks and how to get it",
    "compare": "the table of results: shapes down, backends across",
    "help": "this text (also --help, -h)",
    "version": "the version (also --version)",
}


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """What is declared of one key.

    Attributes:
        doc: One line for the help.
        verbs: The verbs that take it.
        many: True where commas give several values.
        minimum: Least value of a number.
        choices: Allowed words.
        duration: True for a time: seconds, or with a unit (90s, 10m, 1h30m).
    """

    doc: str
    verbs: tuple[str, ...] = ("run",)
    many: bool = False
    minimum: float | None = None
    choices: tuple[str, ...] = ()
    duration: bool = False


def _key(default: Any, doc: str, verbs: str = "run", **more: Any) -> Any:
    info = KeyInfo(doc, tuple(verbs.split()), **more)
    if info.many:
        return field(default_factory=list, metadata={"info": info})
    return field(default=default, metadata={"info": info})


@dataclass
class Keys:
    """The keys with their types and defaults; OmegaConf reads the types from here. `shape.*` comes from the problem."""

    problem: list[str] = _key(None, "what to compute", "run list compare", many=True)
    backend: list[str] = _key(None, "who competes; none: every usable one", "run list compare", many=True)
    shape: list[str] = _key(None, "a named case (`tune list problem=gemm` names them); shape.m=... sets one dim", "run compare", many=True)
    dtype: list[str] = _key(None, "fp32, fp16 or bf16; none: bf16 on a GPU, fp32 on a CPU", "run compare", many=True)
    device: list[str] = _key(None, "cuda:0, cuda or cpu; none: where the backend runs", "run list doctor compare", many=True)
    trials: int | None = _key(
        None, "configurations of each backend and shape, those in the database counted; none: 60, or what the budget allows", minimum=1
    )
    budget: str | None = _key(None, "time for the whole search: 90s, 10m, 1h30m, or seconds", duration=True)
    seed: int = _key(0, "makes the sequence of configurations, and the inputs, repeatable", minimum=0)
    sampler: str = _key("tpe", "any sampler of Optuna: tpe, random, cmaes, gp, qmc, grid, ...")
    fresh: bool = _key(False, "measure again what the database holds: true or false")
    top: int = _key(3, "entries of each backend in the final, interleaved comparison", minimum=1)
    workers: int | None = _key(None, "compile processes; none: from the number of cores", minimum=1)
    build_timeout: str = _key("120s", "time after which a compile process is killed", duration=True)
    run_timeout: str = _key("60s", "time after which a running kernel is killed", duration=True)
    db: str = _key("results.db", "the database: a path or an SQLAlchemy URL", "run doctor compare")
    format: str = _key("table", "table, json or csv", "run list doctor compare", choices=("table", "json", "csv"))
    limit: int | None = _key(None, "rows of the table", "compare", minimum=1)
    plugin: list[str] = _key(None, "a local file with PROBLEMS, BACKENDS or KERNELS", "run list doctor compare", many=True)
    config: str | None = _key(None, "a YAML file with any of these keys; words on the line win", "run list doctor compare")


INFO: dict[str, KeyInfo] = {item.name: item.metadata["info"] for item in fields(Keys)}
"""The declaration of each key, in the order of the help and of the canonical words."""

"""What a request asks to work on: shapes, dtypes and devices, checked against the problems, into jobs or a selection; and back."""

import difflib
import itertools
import re
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import make_dataclass

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kerneldyno.core import DTYPE_BYTES
from kerneldyno.core import Dim
from kerneldyno.core import Problem
from kerneldyno.core import Shape
from kerneldyno.core import Value
from kerneldyno.core import Workload
from kerneldyno.errors import RequestError
from kerneldyno.errors import nearest
from kerneldyno.errors import unknown
from kerneldyno.plan import Job
from kerneldyno.plan import Options
from kerneldyno.plan import Selection
from kerneldyno.registry import Registry
from kerneldyno.words import SHAPE
from kerneldyno.words import duration_text
from kerneldyno.words import order_of
from kerneldyno.words import quote_value
from kerneldyno.words import word_of


Texts = Mapping[str, Sequence[str]]
"""The values of each key as canonical texts."""


def device_word(word: str) -> str:
    """Write a device as it is known everywhere: `cpu`, `cuda:0`. Raises `errors.RequestError` for another word."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", word):
        hint = nearest(word, ("cpu", "cuda", "cuda:0"))
        question = f" Did you mean '{hint}'?" if hint else ""
        raise RequestError(f"unknown device '{word}'.{question} Valid: cpu, cuda, cuda:N (N counts from 0).")
    return "cuda:0" if word == "cuda" else word


def _dim_value(problem: str, key: str, dim: Dim, text: str) -> Value:
    word = f"{SHAPE}{key}={text}"
    if isinstance(dim.default, bool):
        if text.lower() not in ("true", "false"):
            raise RequestError(f"{word}: true or false is needed")
        return text.lower() == "true"
    if isinstance(dim.default, str):
        if dim.choices and text not in dim.choices:
            raise unknown(f"value for {SHAPE}{key}=", text, dim.choices)
        return text
    kind = type(dim.default)
    try:
        typed = OmegaConf.structured(make_dataclass("Dims", [(key, kind, dim.default)]))
        OmegaConf.update(typed, key, text)
        value = kind(typed[key])
    except OmegaConfBaseException:
        number = "a whole number" if kind is int else "a number"
        raise RequestError(f"{word}: {number} is needed ({problem}'s {key}: {dim.meaning})") from None
    if not dim.minimum <= value <= dim.maximum:
        raise RequestError(f"{word}: {problem}'s {key} goes from {dim.minimum} to {dim.maximum}")
    return value


def _partial_shapes(problem: Problem, texts: Texts) -> list[Shape]:
    """The product of named cases and single dims, holding only what was asked for."""
    dims = problem.dims
    asked = {key.removeprefix(SHAPE): found for key, found in texts.items() if key.startswith(SHAPE)}
    for key in asked:
        if key not in dims:
            raise unknown(f"shape key of {problem.name}", f"{SHAPE}{key}", [f"{SHAPE}{name}" for name in dims])
    bases: list[Shape] = [{}]
    if names := texts.get("shape"):
        cases = problem.shapes()
        for name in names:
            if name not in cases:
                raise _unknown_case(problem.name, name, cases)
        bases = [cases[name] for name in names]
    choices = [[(key, _dim_value(problem.name, key, dims[key], text)) for text in asked[key]] for key in dims if key in asked]
    return [{**base, **dict(chosen)} for base in bases for chosen in itertools.product(*choices)]


def _unknown_case(problem: str, name: str, cases: Mapping[str, Shape]) -> RequestError:
    # gemm has more than a hundred named shapes: name the near ones and where the list is
    near = difflib.get_close_matches(name, cases, n=6, cutoff=0.4)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    others = f" Near: {', '.join(near[1:])}." if near[1:] else ""
    return RequestError(f"unknown shape of {problem} '{name}'.{hint}{others} `tune list problem={problem}` names all {len(cases)}.")


def _dtypes(problem: Problem, texts: Texts) -> Sequence[str]:
    for dtype in texts.get("dtype", ()):
        if dtype not in problem.dtypes:
            raise unknown(f"dtype of {problem.name}", dtype, problem.dtypes)
    return texts.get("dtype", ())


def jobs_of(
    texts: Texts, options: Options, registry: Registry, devices: tuple[str, ...], default_kind: Callable[[], str]
) -> tuple[Job, ...]:
    """Make the jobs of a search: the product of everything that commas sweep, without repeats.

    Args:
        texts: The request.
        options: Its seed goes into the workloads.
        registry: Where problems and backends are.
        devices: The devices asked for.
        default_kind: Gives "cuda" or "cpu" where neither devices nor backends were asked for.

    Raises:
        errors.RequestError: A shape, a dtype or a backend does not fit the problem.
    """
    if not texts.get("problem"):
        raise RequestError(f"which problem? Write problem=NAME. Valid: {', '.join(registry.problems())}.")
    jobs: dict[tuple[str, str], Job] = {}
    for name in texts["problem"]:
        problem = registry.load_problem(name)
        for device, backends in _places(name, texts.get("backend", ()), registry, devices, default_kind).items():
            dtypes = _dtypes(problem, texts) or [problem.dtypes[0] if device != "cpu" or "fp32" not in problem.dtypes else "fp32"]
            for partial, dtype in itertools.product(_partial_shapes(problem, texts), dtypes):
                workload = Workload(name, _completed(problem, partial, device.partition(":")[0]), dtype, options.seed)
                problem.check(workload)
                jobs[workload.key, device] = Job(workload, device, backends)
    return tuple(jobs.values())


def _completed(problem: Problem, partial: Shape, device_kind: str) -> Shape:
    """Fill in what the user did not give: a default, or what was given for the dim that this one is like."""
    shape: dict[str, Value] = {}
    for key, dim in problem.dims.items():
        inherited = shape[dim.like] if dim.like in partial else dim.default_on(device_kind)
        shape[key] = partial.get(key, inherited)
    return shape


def shortened(problem: Problem, shape: Shape, device_kind: str) -> Shape:
    """Leave out what a request need not say: the dims that are at the value they take when they are not given."""
    kept: dict[str, Value] = dict(shape)
    for key in reversed(list(shape)):
        rest = {name: value for name, value in kept.items() if name != key}
        if _completed(problem, rest, device_kind) == dict(shape):
            kept = rest
    return kept


def _places(
    problem: str, backends: Sequence[str], registry: Registry, devices: tuple[str, ...], default_kind: Callable[[], str]
) -> dict[str, tuple[str, ...]]:
    """Which backends compete on which device: those given, else where the backends named run, else this machine's best."""
    for backend in backends:
        registry.kernel_ref(problem, backend)
    if devices or not backends:
        place = devices or ("cuda:0" if default_kind() == "cuda" else "cpu",)
        return dict.fromkeys(place, tuple(backends))
    found: dict[str, tuple[str, ...]] = {}
    for backend in backends:
        device = "cpu" if registry.load_backend(backend).device_kind == "cpu" else "cuda:0"
        found[device] = (*found.get(device, ()), backend)
    return found


def selection_of(texts: Texts, registry: Registry, devices: tuple[str, ...]) -> Selection:
    """Make what a reading verb shows.

    Args:
        texts: The request.
        registry: Where problems are.
        devices: The devices asked for.

    Raises:
        errors.RequestError: A shape or a dtype does not fit the problem, or a shape is given without one.
    """
    names = tuple(texts.get("problem", ()))
    shapes: dict[str, Shape] = {}
    asked = any(key == "shape" or key.startswith(SHAPE) for key in texts)
    if asked and not names:
        raise RequestError(f"a shape belongs to a problem: add problem=NAME. Valid: {', '.join(registry.problems())}.")
    for name in names if asked or "dtype" in texts else ():
        problem = registry.load_problem(name)
        _dtypes(problem, texts)
        if asked:
            shapes |= {repr(sorted(shape.items())): shape for shape in _partial_shapes(problem, texts)}
    for dtype in texts.get("dtype", ()):
        if dtype not in DTYPE_BYTES:
            raise unknown("dtype", dtype, DTYPE_BYTES)
    return Selection(names, tuple(texts.get("backend", ())), tuple(texts.get("dtype", ())), tuple(shapes.values()), devices)


def job_words(job: Job, options: Options, **changes: str) -> tuple[str, ...]:
    """The words that search one job alone.

    Args:
        job: The job.
        options: The options it ran with; those at their default are left out.
        changes: Words by key to put instead or besides.
    """
    found: dict[str, str] = {"problem": job.workload.problem}
    if job.backends:
        found["backend"] = ",".join(map(quote_value, job.backends))
    found |= {f"{SHAPE}{key}": quote_value(word_of(value)) for key, value in job.workload.shape.items()}
    found |= {"dtype": job.workload.dtype, "device": job.device}
    default = Options()
    plain = ("trials", "seed", "sampler", "fresh", "top", "workers", "db")
    found |= {key: quote_value(word_of(getattr(options, key))) for key in plain if getattr(options, key) != getattr(default, key)}
    for key, attribute in (("budget", "budget_s"), ("build_timeout", "build_timeout_s"), ("run_timeout", "run_timeout_s")):
        if getattr(options, attribute) != getattr(default, attribute):
            found[key] = duration_text(getattr(options, attribute))
    if options.plugins:
        found["plugin"] = ",".join(map(quote_value, options.plugins))
    found |= changes
    return tuple(f"{key}={found[key]}" for key in sorted(found, key=lambda key: order_of(key)[0]))

"""`tune list`: problems, shapes, backends, kernels and plugins that failed. Needs neither torch nor a DSL."""

from typing import Any

from rich.console import Console

from kerneldyno.choose import availability
from kerneldyno.console.show import console
from kerneldyno.console.show import print_json
from kerneldyno.console.show import table
from kerneldyno.core import Device
from kerneldyno.core import Dim
from kerneldyno.core import Problem
from kerneldyno.errors import KerneldynoError
from kerneldyno.measure import device as machine
from kerneldyno.plan import Plan
from kerneldyno.registry import Registry
from kerneldyno.words import word_of


def show(plan: Plan, registry: Registry) -> int:
    """Print what can be named in a request.

    Args:
        plan: Its selection narrows the problems and the backends down, its format chooses table or JSON.
        registry: Where to look.

    Returns:
        The exit code, 0.
    """
    registry.check_plugins()
    problems = {}
    for name in plan.selection.problems or registry.problems():
        try:
            problems[name] = registry.load_problem(name)
        except KerneldynoError:
            problems[name] = None  # its line is among the failures
    backends = backend_rows(registry, plan.selection.backends or registry.backends(), plan.selection.devices)
    if plan.options.format == "json":
        print_json(
            {
                "problems": [_problem_json(name, problem, registry) for name, problem in problems.items()],
                "backends": backends,
                "failures": [{"name": found.name, "origin": found.origin, "reason": found.reason} for found in registry.failures],
            }
        )
        return 0
    out = console()
    if plan.selection.problems:
        for name, problem in problems.items():
            _print_problem(out, name, problem, registry)
    else:
        _print_problems(out, problems, registry)
    _print_backends(out, backends)
    if registry.failures:
        out.print("\nCannot be used", style="bold")
        for failure in registry.failures:
            out.print(f"{failure.name} (from {failure.origin}): {failure.reason}", soft_wrap=True)
    if not plan.selection.problems and problems:
        out.print(f"\nDims and named shapes: tune list problem={next(iter(problems))}")
    return 0


def backend_rows(registry: Registry, names: tuple[str, ...], specs: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Say of each backend where it runs, whether it is usable, and if not, why and what to do.

    Args:
        registry: Where to look.
        names: The backends.
        specs: The device to ask about (the first counts); empty: the first one of the backend's own kind.
    """
    chosen = machine.detect(specs[0]) if specs else None
    found = machine.devices()
    rows = []
    for name in names:
        try:
            kind = registry.load_backend(name).device_kind
        except KerneldynoError:
            kind = ""
        device: Device | None = chosen or next((candidate for candidate in found if candidate.kind == kind), None)
        state = availability(name, registry, device)
        rows.append(
            {
                "name": name,
                "origin": registry.backend_ref(name).origin,
                "device_kind": kind,
                "device": device.spec if device else None,
                "usable": state.usable,
                "reason": state.reason,
                "remedy": state.remedy,
                "versions": dict(state.versions),
                "kernels": [problem for problem in registry.problems() if name in registry.kernels(problem)],
            }
        )
    return rows


def _problem_json(name: str, problem: Problem | None, registry: Registry) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "origin": registry.problem_ref(name).origin, "backends": list(registry.kernels(name))}
    if problem is not None:
        dims = [
            {
                "name": key,
                "default": dim.default,
                "default_cpu": dim.default_on("cpu"),
                "like": dim.like or None,
                "meaning": dim.meaning,
                "unit": dim.unit,
                "range": _range_json(dim),
            }
            for key, dim in problem.dims.items()
        ]
        row |= {"dims": dims, "dtypes": list(problem.dtypes), "shapes": {case: dict(shape) for case, shape in problem.shapes().items()}}
    return row


def _range_json(dim: Dim) -> list[Any]:
    if isinstance(dim.default, bool):
        return [False, True]
    return list(dim.choices) if isinstance(dim.default, str) else [dim.minimum, dim.maximum]


def _allowed(dim: Dim) -> str:
    if isinstance(dim.default, bool):
        return "true, false"
    return ", ".join(dim.choices) if isinstance(dim.default, str) else f"{dim.minimum} to {dim.maximum}"


def _print_problems(out: Console, problems: dict[str, Problem | None], registry: Registry) -> None:
    made = table("problem", "dims", "dtypes", "named shapes", "kernels in", title="Problems", right=("named shapes",))
    for name, problem in problems.items():
        kernels = ", ".join(registry.kernels(name)) or "none"
        if problem is None:
            made.add_row(name, "cannot be used, see below", "", "", kernels)
        else:
            dims = " ".join(f"{key}={_word(dim)}" for key, dim in problem.dims.items())
            made.add_row(name, dims, ", ".join(problem.dtypes), str(len(problem.shapes())), kernels)
    out.print(made)


def _word(dim: Dim) -> str:
    return str(dim.default).lower() if isinstance(dim.default, bool) else str(dim.default)


def _default_words(dim: Dim) -> str:
    """The default, the dim it follows where that one is given, and the default on a CPU where it is another."""
    words = _word(dim) + (f", or {dim.like}" if dim.like else "")
    return words if dim.default_cpu is None else f"{words} (CPU {dim.default_cpu})"


def _print_problem(out: Console, name: str, problem: Problem | None, registry: Registry) -> None:
    kernels = ", ".join(registry.kernels(name)) or "none"
    if problem is None:
        out.print(f"{name}: cannot be used, see below; kernels in {kernels}\n")
        return
    out.print(f"{name}: dtypes {', '.join(problem.dtypes)}; kernels in {kernels}\n")
    dims = table("key", "default", "allowed", "meaning", right=("default",))
    for key, dim in problem.dims.items():
        dims.add_row(f"shape.{key}", _default_words(dim), _allowed(dim), dim.meaning + (f" ({dim.unit})" if dim.unit else ""))
    out.print(dims)
    cases = problem.shapes()
    if cases:
        varied = [key for key in problem.dims if len({shape[key] for shape in cases.values()}) > 1]
        shapes = table("named shape", *varied)
        for case, shape in cases.items():
            shapes.add_row(f"shape={case}", *(word_of(shape[key]) for key in varied))
        out.print()
        out.print(shapes)
        if same := [f"{key}={word_of(value)}" for key, value in next(iter(cases.values())).items() if key not in varied]:
            out.print(f"\nThe same in all: {' '.join(same)}")
    out.print()


def _print_backends(out: Console, rows: list[dict[str, Any]]) -> None:
    out.print()
    made = table("backend", "runs on", "usable", "versions, or why not and what to do", "kernels for", title="Backends")
    for row in rows:
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        detail = versions if row["usable"] else ". ".join(part.rstrip(".") for part in (row["reason"], row["remedy"]) if part)
        made.add_row(row["name"], row["device_kind"] or "?", "yes" if row["usable"] else "no", detail, ", ".join(row["kernels"]))
    out.print(made)

"""`tune compare`: one table a problem, shapes down, backends and baselines across; JSON and CSV a row for each of them."""

import sys
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kerneldyno.console.show import console
from kerneldyno.console.show import print_csv
from kerneldyno.console.show import print_json
from kerneldyno.console.show import table
from kerneldyno.console.show import time_text
from kerneldyno.core import SOLVING_ROLES
from kerneldyno.core import Status
from kerneldyno.core import Work
from kerneldyno.errors import KerneldynoError
from kerneldyno.jobs import shortened
from kerneldyno.plan import Plan
from kerneldyno.plan import Selection
from kerneldyno.registry import Registry
from kerneldyno.store import EmptyStore
from kerneldyno.store import open_store
from kerneldyno.store.query import ranking
from kerneldyno.store.records import Filters
from kerneldyno.store.records import RankRow
from kerneldyno.store.shipped import load_shipped


# the order of columns: what one would use otherwise, then ours, then others' tuned kernels, then the bound, then what comes before
_ROLES = ("library", "kernel", "peer", "roof", "step")

_LONG_SHAPE = 5  # dims; a shape of more is shown by the name of its case and what differs from the defaults

# above this many operations a byte a kernel is shown in TFLOP/s, below in GB/s: the ridge of a GPU lies at 20 to 300
_RIDGE_FLOPS_PER_BYTE = 30.0

_COLUMNS = (
    "problem shape dtype device arch name role backend status median_us low_us high_us ratio ratio_low ratio_high tied_first verified "
    "roof_fraction tflops gbps counts trials tuning_s config error_relative layout_us sm_clock_mhz power_w environment seed rounds "
    "conditions playoff kernel_digest command created_at source message"
).split()


def show(plan: Plan, registry: Registry) -> int:
    """Print the comparison that a request selects.

    Args:
        plan: Its selection and its options (`db`, `format`, `limit`).
        registry: Where the problems' work is known.

    Returns:
        The exit code, 0.

    Raises:
        errors.StoreError: The database cannot be read.
    """
    chosen = plan.selection
    filters = Filters(chosen.problems, chosen.backends, chosen.dtypes, chosen.shapes, chosen.devices, plan.options.limit)
    rows = _rows(plan.options.db, filters)
    if not rows:
        words = f"problem={chosen.problems[0]}" if chosen.problems else f"problem={next(iter(registry.problems()))}"
        print(f"tune: neither {plan.options.db} nor the shipped results hold anything that fits. To measure: tune {words}", file=sys.stderr)
    elif all(row.source == "shipped" for row in rows):
        names = ", ".join(sorted({row.device.name for row in rows}))
        print(f"tune: {plan.options.db} holds nothing that fits; these results ship with kerneldyno, from {names}", file=sys.stderr)
    print_rows(rows, plan.options.format, registry)
    return 0


def _rows(db: str, filters: Filters) -> list[RankRow]:
    """What the database ranks, or the shipped results where it holds nothing that fits."""
    try:
        engine = open_store(db, readonly=True)
    except EmptyStore:
        return ranking(load_shipped(), filters)
    try:
        return ranking(engine, filters) or ranking(load_shipped(), filters)
    finally:
        engine.dispose()


def selection_of(plan: Plan) -> Selection:
    """What a finished search should be compared on: its own workloads, with every backend that the database holds for them."""
    return Selection(
        problems=tuple(dict.fromkeys(job.workload.problem for job in plan.jobs)),
        dtypes=tuple(dict.fromkeys(job.workload.dtype for job in plan.jobs)),
        shapes=tuple({repr(sorted(job.workload.shape.items())): job.workload.shape for job in plan.jobs}.values()),
        devices=tuple(dict.fromkeys(job.device for job in plan.jobs)),
    )


def print_rows(rows: Sequence[RankRow], form: str, registry: Registry) -> None:
    """Print ranking rows as a table, JSON or CSV.

    Args:
        rows: The rows.
        form: "table", "json" or "csv".
        registry: Where the problems' work is known.
    """
    if form == "table":
        _print_tables(rows, registry)
        return
    roofs = _roofs(rows)
    flat = [_flat(row, roofs, registry) for row in rows]
    if form == "json":
        print_json(flat)
    else:
        print_csv(flat, _COLUMNS)


def _place(row: RankRow) -> tuple[str, str, str]:
    return row.workload.key, row.device.kind, row.device.name


def _roofs(rows: Iterable[RankRow]) -> dict[tuple[str, str, str], float]:
    return {_place(row): row.median_us for row in rows if row.role == "roof" and row.median_us}


def _work(row: RankRow, registry: Registry) -> Work | None:
    if row.role == "step":
        return None  # it does something else than the problem's work
    try:
        return registry.load_problem(row.workload.problem).work(row.workload)
    except KerneldynoError:
        return None  # the problem of a plugin that is not here; its times are still true


def _flat(row: RankRow, roofs: Mapping[tuple[str, str, str], float], registry: Registry) -> dict[str, Any]:
    work = _work(row, registry)
    roof = roofs.get(_place(row)) if row.role != "step" else None
    seconds = row.median_us * 1e-6 if row.median_us else None
    found: dict[str, Any] = {name: getattr(row, name) for name in _COLUMNS if hasattr(row, name)}
    found |= {
        "problem": row.workload.problem,
        "shape": dict(row.workload.shape),
        "dtype": row.workload.dtype,
        "device": row.device.name,
        "arch": row.device.arch,
        "status": str(row.status),
        "counts": {str(status): count for status, count in row.counts.items()},
        "config": dict(row.config) if row.config is not None else None,
        "environment": dict(row.environment.versions),
        "conditions": dict(row.conditions),
        "created_at": row.created_at.isoformat(),
        "roof_fraction": roof / row.median_us if roof and row.median_us else None,
        "tflops": work.flops / seconds * 1e-12 if work and seconds else None,
        "gbps": work.bytes / seconds * 1e-9 if work and seconds else None,
    }
    return {name: found[name] for name in _COLUMNS}


def _print_tables(rows: Sequence[RankRow], registry: Registry) -> None:
    groups: dict[tuple[str, str, str], list[RankRow]] = {}
    for row in rows:
        groups.setdefault((row.workload.problem, row.workload.dtype, row.device.name), []).append(row)
    roofs = _roofs(rows)
    out = console()
    for (problem, dtype, device), group in groups.items():
        names = {row.name: row.role for row in sorted(group, key=lambda row: (_ROLES.index(row.role), row.name))}
        heads = {name: name if role == "kernel" else f"{name} ({role})" for name, role in names.items()}
        made = table("shape", *heads.values(), title=f"{problem} in {dtype} on {device}", right=tuple(heads.values()))
        made.padding = (0, 3, 0, 0)
        workloads: dict[str, list[RankRow]] = {}
        for row in group:
            workloads.setdefault(row.workload.key, []).append(row)
        for position, found in enumerate(workloads.values()):
            if position:
                made.add_row()
            by_name = {row.name: row for row in found}
            cells = [_cell(by_name[name], roofs, registry) if name in by_name else "" for name in names]
            seed = f"\nseed={found[0].workload.seed}" if found[0].workload.seed else ""
            made.add_row(_shape_words(found[0], registry) + seed, *cells)
        out.print()
        out.print(made)
    if rows:
        out.print(_legend(rows))


def _cell(row: RankRow, roofs: Mapping[tuple[str, str, str], float], registry: Registry) -> str:
    """Four lines at most: time, ratio with interval, rate, statuses."""
    lines = []
    if row.median_us is not None:
        lines.append(time_text(row.median_us) + (" *" if row.tied_first else ""))
        if row.ratio is not None and row.role in ("kernel", "peer"):
            interval = f" [{row.ratio_low:.2f}, {row.ratio_high:.2f}]" if row.ratio_low is not None and row.ratio_high is not None else ""
            lines.append(f"{row.ratio:.2f}x{interval}")
        roof = roofs.get(_place(row))
        fraction = f", {roof / row.median_us:.0%} of roof" if roof and row.role in SOLVING_ROLES else ""
        lines.append(_rate(row, row.median_us, registry) + fraction)
        if row.layout_us is not None:
            lines.append(f"layout {time_text(row.layout_us)}")
    if row.status != Status.OK:
        lines.append(str(row.status))
    elif row.role == "kernel" and not row.verified:
        lines.append("not checked again" if row.playoff else "not compared yet")
    if row.counts:
        lines.append(", ".join(f"{count} {status}" for status, count in sorted(row.counts.items(), key=lambda item: -item[1])))
    return "\n".join(filter(None, lines))


def _shape_words(row: RankRow, registry: Registry) -> str:
    """Write a shape as one asks for it; a long one as `shape=CASE` where it is one, else by the dims that are not at their default."""
    workload = row.workload
    if len(workload.shape) <= _LONG_SHAPE:
        return workload.shape_text
    try:
        problem = registry.load_problem(workload.problem)
    except KerneldynoError:
        return workload.shape_text
    for case, shape in problem.shapes().items():
        if dict(shape) == dict(workload.shape):
            return case
    return replace(workload, shape=shortened(problem, workload.shape, row.device.kind)).shape_text or "the default"


def _rate(row: RankRow, median_us: float, registry: Registry) -> str:
    work = _work(row, registry)
    if work is None:
        return ""
    if work.flops > _RIDGE_FLOPS_PER_BYTE * work.bytes:
        tflops = work.flops / median_us * 1e-6
        return f"{tflops:.1f} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:.1f} GFLOP/s"
    gbps = work.bytes / median_us * 1e-3
    return f"{gbps * 1e-3:.2f} TB/s" if gbps >= 1000 else f"{gbps:.3g} GB/s"


def _legend(rows: Sequence[RankRow]) -> str:
    parts = ["Median time; the ratio is the library's time over this one (above 1x is faster), with its 95% interval."]
    if any(row.tied_first for row in rows):
        parts.append("* fastest, or not told from it.")
    if any(row.role == "roof" for row in rows):
        parts.append("Roof: the same bytes copied, a bound and no solution; what reads more than it writes can pass it by some percent.")
    if any(row.layout_us is not None for row in rows):
        parts.append("Layout: what the kernel prepares for a routing, not in its time.")
    if any(row.role == "step" for row in rows):
        parts.append("Step: work that comes before and is in no other time.")
    return "\n" + "\n".join(parts)

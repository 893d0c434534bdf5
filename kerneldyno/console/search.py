"""`tune`: searches with progress, then prints the comparison and what to type next."""

import shlex
import sys
from dataclasses import replace

from kerneldyno.choose import choose
from kerneldyno.console import INTERRUPTED
from kerneldyno.console import comparison
from kerneldyno.console.progress import Progress
from kerneldyno.console.show import console
from kerneldyno.errors import NothingPassed
from kerneldyno.jobs import job_words
from kerneldyno.measure.device import detect
from kerneldyno.plan import Plan
from kerneldyno.registry import Registry
from kerneldyno.store.engine import open_store
from kerneldyno.store.write import Writer
from kerneldyno.tuner import run
from kerneldyno.tuner.events import Notice


def search(plan: Plan, registry: Registry) -> int:
    """Search every job of a plan, print the comparison, and say what to type next.

    Args:
        plan: From `grammar.parse`.
        registry: Where problems, backends and kernels are.

    Returns:
        0, or 130 after Ctrl-C.

    Raises:
        errors.NothingPassed: The search ended without one configuration that is right.
        errors.KerneldynoError: The machine, the request or the database does not allow it.
    """
    plan, left_out = choose(plan, registry, detect)
    engine = open_store(plan.options.db)
    try:
        with Progress() as progress:
            for line in left_out:
                progress(Notice(line))
            result = run(plan, registry, Writer(engine), progress)
    finally:
        engine.dispose()
    comparison.show(replace(plan, selection=comparison.selection_of(plan)), registry)
    if result.interrupted:
        print("tune: interrupted; every finished trial is in the database, and the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    if not result.passed:
        raise NothingPassed("no configuration passed; the statuses in the table say how they failed")
    if plan.options.format == "table":
        console().print(_next_steps(plan))
    return 0


def _next_steps(plan: Plan) -> str:
    """Three commands: the table again, a longer search, another shape."""
    job = plan.jobs[0]
    problem = job.workload.problem
    db = (f"db={plan.options.db}",) if plan.options.db != "results.db" else ()
    more = {"trials": str(2 * plan.options.trials)} if plan.options.trials else {"budget": "10m"}
    steps = (
        (("compare", f"problem={problem}", *db), "this table; format=json for a program"),
        (job_words(job, plan.options, **more), "search on: what the database holds is not measured again"),
        (("list", f"problem={problem}"), "shapes of real models, to use as shape=NAME"),
    )
    return "\nNext\n" + "\n".join(f"  {shlex.join(('tune', *words))}\n      {doc}" for words, doc in steps)

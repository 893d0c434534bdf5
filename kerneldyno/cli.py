"""The command: takes a request, calls what does the work, prints what came of it, and gives the exit code."""

import os
import signal
import sys
from collections.abc import Sequence

from kerneldyno import __version__
from kerneldyno.console import INTERRUPTED
from kerneldyno.errors import KerneldynoError
from kerneldyno.errors import PluginError
from kerneldyno.grammar import parse
from kerneldyno.plan import Plan
from kerneldyno.registry import Registry


def run() -> None:
    """The entry point of `tune` and `kerneldyno`."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Do what the words ask for.

    Args:
        argv: The words after the command's name.

    Returns:
        0 done, 2 the request is wrong, 3 no configuration passed, 4 the machine lacks something, 130 after Ctrl-C.
    """
    try:
        plan, registry = parse(argv, _default_kind)
        code = _VERBS[plan.verb](plan, registry)
        sys.stdout.flush()
        return code
    except KerneldynoError as error:
        print(f"tune: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # the reader (`| head`) has gone; what is still buffered must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _default_kind() -> str:
    from kerneldyno.measure.device import detect

    return detect(None).kind


def _help(plan: Plan, registry: Registry) -> int:
    from kerneldyno.console.usage import usage

    print(usage(registry), end="")
    return 0


def _version(plan: Plan, registry: Registry) -> int:
    print(f"kerneldyno {__version__}")
    return 0


def _list(plan: Plan, registry: Registry) -> int:
    from kerneldyno.console import listing

    return listing.show(plan, registry)


def _doctor(plan: Plan, registry: Registry) -> int:
    from kerneldyno.console import doctor

    return doctor.show(plan, registry)


def _compare(plan: Plan, registry: Registry) -> int:
    from kerneldyno.console import comparison

    return comparison.show(plan, registry)


def _run(plan: Plan, registry: Registry) -> int:
    for failure in registry.failures:
        if failure.name.startswith("plugin "):
            raise PluginError(f"{failure.origin} cannot be used: {failure.reason}")
    from kerneldyno.console import search

    return search.search(plan, registry)


# each verb imports what it needs, so that `tune list` works where torch, Optuna or SQLAlchemy is missing
_VERBS = {"help": _help, "version": _version, "list": _list, "doctor": _doctor, "compare": _compare, "run": _run}

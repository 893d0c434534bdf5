"""The help text, made from the declared keys, so that it cannot be out of date."""

import textwrap

from kerneldyno.keys import INFO
from kerneldyno.keys import VERBS
from kerneldyno.keys import Keys
from kerneldyno.registry import Registry


_EXAMPLES = (
    ("tune problem=softmax", "search with every usable backend, then compare"),
    ("tune problem=gemm backend=triton,cuda shape.m=1,16,4096 trials=100 budget=10m", "commas sweep"),
    ("tune problem=gemm shape=llama3-70b-gate-up-4k", "a named shape"),
    ("tune list problem=gemm", "dims, dtypes and named shapes"),
    ("tune compare problem=gemm format=json", "results"),
)


def usage(registry: Registry) -> str:
    """Write the help.

    Args:
        registry: Names the problems and the backends.
    """
    lines = ["tune [VERB] key=value ...", "", "Tunes GPU and CPU kernels written in different DSLs, and compares them fairly.", "", "Verbs"]
    lines += [_entry(verb, doc) for verb, doc in VERBS.items()]
    lines += ["", "Keys (a repeated command continues its search; commas give several values where it says so)"]
    for name, info in INFO.items():
        default = Keys.__dataclass_fields__[name].default
        plain = isinstance(default, str | int) and not isinstance(default, bool)
        note = "; several" if info.many else f"; default {default}" if plain else ""
        verbs = f" [{', '.join(info.verbs)}]"
        lines.append(_entry(f"{name}=", info.doc + note + verbs))
        if name == "shape":
            lines.append(_entry("shape.DIM=", "one dim of the problem, as in shape.m=4096; several [run, compare]"))
    lines += ["", f"Problems: {', '.join(registry.problems())}", f"Backends: {', '.join(registry.backends())}", "", "Examples"]
    width = max(len(command) for command, _ in _EXAMPLES)
    lines += [f"  {command:<{width}}  {doc}" for command, doc in _EXAMPLES]
    lines += ["", "Exit codes: 0 done, 2 the request is wrong, 3 no configuration passed, 4 the machine lacks something, 130 after Ctrl-C"]
    return "\n".join(lines) + "\n"


def _entry(name: str, text: str) -> str:
    return textwrap.fill(text, width=110, initial_indent=f"  {name:<15}", subsequent_indent=" " * 17)

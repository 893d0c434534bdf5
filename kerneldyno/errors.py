"""The one family of exceptions: each says what is wrong, the nearest valid name and what to do."""

import difflib
from collections.abc import Iterable


class KerneldynoError(Exception):
    """Base of every error that a user can cause; the command prints its text and exits with `exit_code`."""

    exit_code = 2


class RequestError(KerneldynoError):
    """The request is wrong: an unknown name, a value of the wrong type or out of range."""

    exit_code = 2


class Unsupported(RequestError):
    """A kernel has no variant for this workload (a dtype, a layout); raised by `Kernel.space` with the reason."""

    exit_code = 2


class Unavailable(KerneldynoError):
    """The machine lacks something: a DSL, a GPU, a compiler. The text says what to install or choose."""

    exit_code = 4


class StoreError(KerneldynoError):
    """The database cannot be used: not ours, locked, read-only, newer than this code, or the disk is full."""

    exit_code = 4


class NothingPassed(KerneldynoError):
    """The search ended without one configuration that is right."""

    exit_code = 3


class PluginError(KerneldynoError):
    """A plugin failed to import, lacks a needed attribute or takes a name that is taken."""

    exit_code = 2


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the valid name most like `word`, or None where nothing is near.

    Args:
        word: What the user wrote.
        names: The valid names.
    """
    lowered = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.5)
    return lowered[found[0]] if found else None


def unknown(kind: str, word: str, names: Iterable[str]) -> RequestError:
    """Build the error for a name that does not exist: the nearest valid one first, then all of them.

    Args:
        kind: What was looked up, in the singular ("problem", "backend").
        word: What the user wrote.
        names: The valid names.
    """
    valid = sorted(names)
    hint = nearest(word, valid)
    if hint:
        question = f" Did you mean '{hint}'?"
    else:
        far = difflib.get_close_matches(word.lower(), valid, n=1, cutoff=0.0)
        question = f" The nearest is '{far[0]}'." if far else ""
    listing = f" Valid: {', '.join(valid)}." if valid else f" There is no {kind} to choose from."
    return RequestError(f"unknown {kind} '{word}'.{question}{listing}")

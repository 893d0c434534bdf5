"""The text level of a request: words into keys and values, commas and quotes, durations; and back."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from decimal import Decimal

from kerneldyno.core import Value
from kerneldyno.errors import RequestError
from kerneldyno.errors import nearest
from kerneldyno.errors import unknown
from kerneldyno.keys import INFO
from kerneldyno.keys import VERBS


SHAPE = "shape."
"""What the keys of a problem's dims begin with."""

_OPEN = {"[": "]", "{": "}"}
_SPECIAL = re.compile(r"[,\[\]{}'\"\\]|^\s|\s$|^$")
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


@dataclass(frozen=True, slots=True)
class Request:
    """A command line, taken apart but not yet understood.

    Attributes:
        verb: What to do.
        values: The values of each key, in the order given.
    """

    verb: str
    values: dict[str, list[str]] = field(default_factory=dict)


def split_values(key: str, text: str) -> list[str]:
    """Split at commas outside quotes, brackets and braces, and take the quotes off a wholly quoted value.

    Args:
        key: For the message.
        text: What stands after the `=`.

    Raises:
        errors.RequestError: Where a value is empty or a quote or bracket stays open.
    """
    pieces: list[str] = []
    piece = ""
    closers: list[str] = []
    quote = ""
    escaped = False
    for letter in text:
        if escaped:
            escaped = False
        elif quote and letter == "\\":
            escaped = True
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _OPEN:
            closers.append(_OPEN[letter])
        elif closers and letter == closers[-1]:
            closers.pop()
        elif letter == "," and not closers:
            pieces.append(piece)
            piece = ""
            continue
        piece += letter
    if quote or closers:
        raise RequestError(f"{key}={text}: a {quote or closers[-1]} is missing")
    values = [_unquote(found.strip()) for found in [*pieces, piece]]
    if any(value is None for value in values):
        raise RequestError(f"{key}={text}: a value is missing" + (" beside a comma" if pieces else f"; write {key}=VALUE"))
    return [value for value in values if value is not None]


def _unquote(piece: str) -> str | None:
    """Take a whole piece's quotes off; None for an empty piece (a quoted empty text is a value)."""
    whole = re.fullmatch(r"""(['"])((?:\\.|(?!\1)[^\\])*)\1""", piece, re.DOTALL)
    if whole:
        return re.sub(r"\\(.)", r"\1", whole.group(2), flags=re.DOTALL)
    return piece or None


def quote_value(value: str) -> str:
    """Write a value so that `split_values` gives it back as one."""
    if not _SPECIAL.search(value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def word_of(value: Value) -> str:
    """Write a value as a user would: `true`, `4096`, `nt`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def order_of(key: str) -> tuple[int, str]:
    """Sort keys as they are declared, `shape.*` by the alphabet right after `shape`."""
    names = list(INFO)
    return (names.index("shape"), key) if key.startswith(SHAPE) else (names.index(key), "")


def seconds(key: str, text: str) -> float:
    """Read a duration: plain seconds, or with units (90s, 10m, 1h30m).

    Raises:
        errors.RequestError: Where it is not one, or not more than zero.
    """
    found = _DURATION.fullmatch(text.strip().lower())
    if not found or not any(found.groups()):
        raise RequestError(f"{key}={text} is not a time. Write seconds or a unit: {key}=90s, {key}=10m, {key}=1h30m.")
    hours, minutes, rest = (float(group or 0) for group in found.groups())
    total = hours * 3600 + minutes * 60 + rest
    if total <= 0:
        raise RequestError(f"{key}={text}: a time must be more than zero")
    return total


def duration_text(value: float) -> str:
    """Write seconds as `seconds` reads them: whole hours, minutes, else seconds."""
    for unit, size in (("h", 3600), ("m", 60)):
        if value % size == 0:
            return f"{value // size:.0f}{unit}"
    # the shortest digits that read back as the same number, without an exponent
    return f"{Decimal(repr(value)).normalize():f}s"


def read(argv: Sequence[str]) -> Request:
    """Take words apart.

    Args:
        argv: The words after the command's name.

    Raises:
        errors.RequestError: Where a word is not `key=value`, a verb is unknown, or a key is given twice.
    """
    if not argv or any(word in ("--help", "-h") for word in argv):
        return Request("help")
    if "--version" in argv:
        return Request("version")
    verb = ""
    values: dict[str, list[str]] = {}
    for position, word in enumerate(argv):
        key, equals, text = word.partition("=")
        following = argv[position + 1] if position + 1 < len(argv) else ""
        if word.startswith("-"):
            raise RequestError(_hyphen(key.lstrip("-").replace("-", "_"), text, following))
        if not equals:
            if verb or word not in VERBS:
                raise _bare(word, following, verb)
            verb = word
            continue
        key = key.strip()
        if key in values:
            raise RequestError(f"{key}= is given twice. Give several values with commas: {key}={','.join(values[key])},{text}")
        values[key] = split_values(key, text)
    return Request(verb or "run", values)


def _hyphen(key: str, text: str, following: str) -> str:
    near = key if key in INFO or key.startswith("shape.") else nearest(key, INFO)
    value = text or ("" if "=" in following or following.startswith("-") else following) or "VALUE"
    hint = f" Did you mean `{near}={value}`?" if near else ""
    return f"there are no options with hyphens; every word is key=value.{hint} `tune help` lists the keys."


def _bare(word: str, following: str, verb: str) -> RequestError:
    if word in INFO:
        value = following if following and "=" not in following else "VALUE"
        return RequestError(f"'{word}' is a key and needs a value. Did you mean `{word}={value}`?")
    key, _, value = word.partition(":")
    if key in INFO and value:
        return RequestError(f"'{word}' is not key=value. Did you mean `{key}={value}`?")
    if word in VERBS:
        return RequestError(f"'{word}' is a verb, and '{verb}' is one already: one request does one thing.")
    if verb:
        return RequestError(f"'{word}' is not key=value. After the verb every word is, as in trials=200. `tune help` lists the keys.")
    error = unknown("verb", word, VERBS)
    return RequestError(f"{error} Everything else is key=value, as in `tune problem={word}`.")

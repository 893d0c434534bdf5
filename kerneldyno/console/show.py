"""Numbers as people read them, tables, JSON and CSV."""

import csv
import json
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TextIO

from rich.console import Console
from rich.table import Table


# a table sent to a file or a pipe is not cut at the 80 columns that rich assumes there
_FILE_COLUMNS = 200


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the error through: the command has one way to end on a closed pipe."""
        raise


def console(stream: TextIO | None = None) -> Console:
    """A console on a stream, standard output by default: coloured on a terminal, plain and wide elsewhere."""
    made = _Console(file=stream or sys.stdout, markup=False, emoji=False, highlight=False)
    if not made.is_terminal:
        made.width = _FILE_COLUMNS
    return made


def time_text(microseconds: float | None) -> str:
    """Write a time with four significant digits and the unit that fits: `0.912 us`, `12.35 us`, `1.235 ms`, `2.500 s`."""
    if microseconds is None:
        return "-"
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{_digits(microseconds / size)} {unit}"
    return f"{_digits(microseconds)} us"


def _digits(value: float) -> str:
    decimals = 3 if value < 10 else 2 if value < 100 else 1
    return f"{value:.{decimals}f}"


def span_text(seconds: float) -> str:
    """Write a stretch of time to the second: `7s`, `2m05s`, `1h02m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def bytes_text(count: int) -> str:
    """Write a size in the largest binary unit that gives at least one: `227.0 KiB`, `139.8 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def table(*columns: str, title: str = "", right: Sequence[str] = ()) -> Table:
    """An empty table.

    Args:
        columns: The headings.
        title: A line above it.
        right: The headings of columns that hold numbers.
    """
    made = Table(title=title or None, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def print_json(value: Any) -> None:
    """Write one JSON value to standard output; infinities and NaN, which JSON lacks, as null."""
    print(json.dumps(_finite(value), indent=2, default=dict))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def print_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Write rows as CSV to standard output, with a heading; a mapping within a row becomes JSON text.

    Args:
        rows: The rows.
        columns: The columns, also where there are no rows.
    """
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = [row[name] for name in columns]
        writer.writerow([json.dumps(_finite(cell)) if isinstance(cell, Mapping | list | tuple) else cell for cell in cells])

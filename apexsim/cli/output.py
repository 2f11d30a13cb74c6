"""What the commands share: tables, JSON, progress, and the parsing of lists."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from apexsim.errors import UsageError

Quiet = Annotated[bool, typer.Option("--quiet", help="Print results only: no progress, no notes.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output instead of a table.")]


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=1, allow_nan=False))


def print_table(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> None:
    """A table on standard output; columns after the first ``left`` are right-aligned. Never narrower than its content."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < left else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console()
    needed = Console(width=10_000).measure(table).maximum
    Console(width=max(console.width, needed)).print(table)


def note(message: str, quiet: bool) -> None:
    """A line on standard error for a person to read."""
    if not quiet:
        Console(stderr=True, highlight=False, soft_wrap=True).print(message, markup=False)


@contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    """A progress bar on standard error where that is a terminal; none with ``quiet``."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as bar:
        yield bar


LARGEST = 1_000_000


def names(text: str | None) -> list[str] | None:
    """A comma-separated list; None stays None."""
    if text is None:
        return None
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise UsageError(f"{text!r} is not a comma-separated list")
    return items


def numbers(text: str | None, option: str) -> list[int] | None:
    """Comma-separated whole numbers and ranges, ``0,1,2`` or ``0-16``, ascending and without repeats."""
    if text is None:
        return None
    out: set[int] = set()
    for item in names(text) or []:
        low, dash, high = item.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise UsageError(f"{option}: {item!r} is not a whole number or a range such as 0-16")
        first, last = int(low), int(high if dash else low)
        if not first <= last <= LARGEST:
            raise UsageError(f"{option}: {item!r}: a range goes up, to {LARGEST} at most")
        out |= set(range(first, last + 1))
    return sorted(out)

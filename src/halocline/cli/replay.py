"""`halocline replay`: a workload through the scheduler under a fake clock, or as load on a live server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

import typer

from halocline import replay as root
from halocline.cli.options import with_record

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 10_000
"""Columns of a table that no terminal limits."""
LINE_SECONDS = 5.0
"""Where nobody can see a bar, a line is written so often for each run."""


@with_record(root.ReplaySettings, "trace")
def replay(settings: root.ReplaySettings) -> None:
    """Replay a trace: what would this arena have done with it? Or send it to a live server."""
    from rich.console import Console

    prepared = root.prepare(settings)
    with progress(prepared.names, len(prepared.workload.jobs)) as on_progress:
        record = root.run(prepared, on_progress)
    # Before anything is printed: whoever reads the tables may be gone, and an hour of work is not to go with them.
    for path in root.write(settings, record):
        typer.echo(f"written: {path}", err=True)
    # Whoever pipes the figures into a program still sees the table.
    console = Console(stderr=settings.json == "-", highlight=False)
    width = console.width if console.is_terminal else None
    for table in root.summary(record, width):
        console.print(table, width=None if width else WIDEST, crop=False)
    for remark in root.remarks(record):
        console.print(remark, markup=False, soft_wrap=True)
    for words, times in errors(record):
        console.print(f"{times} times: {words}", markup=False, soft_wrap=True)
    if settings.json == "-":
        sys.stdout.write(root.as_json(record))


def errors(record: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield what a server complained of, and how often."""
    for outcome in record["outcomes"]:
        yield from outcome.get("errors", {}).items()


@contextmanager
def progress(names: Sequence[str], jobs: int) -> Iterator[Callable[[int, Any], None]]:
    """Show how far each run is, on standard error: a bar each on a terminal, else a line now and then."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with bars(console, names, jobs) as on_progress:
            yield on_progress
    else:
        yield lines(names)


def lines(names: Sequence[str]) -> Callable[[int, Any], None]:
    """Return what writes a line about a run when it begins, when it is done, and every LINE_SECONDS between."""
    written = [-inf] * len(names)

    def on_progress(number: int, now: Any) -> None:
        if now.ended < now.jobs and time.monotonic() - written[number] < LINE_SECONDS:
            return
        written[number] = time.monotonic()
        typer.echo(
            f"{names[number]}: {now.ended:,} of {now.jobs:,} requests, {now.seconds:,.0f} s on the clock, "
            f"{now.running} run, {now.waiting} wait ({now.wall_seconds:.1f} s)",
            err=True,
        )

    return on_progress


@contextmanager
def bars(console: Console, names: Sequence[str], jobs: int) -> Iterator[Callable[[int, Any], None]]:
    """Show a bar for each run while the block lasts."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        tasks = [shown.add_task(Text(name).plain, total=jobs, state="") for name in names]

        def on_progress(number: int, now: Any) -> None:
            state = f"{now.seconds:,.0f} s, {now.running} run, {now.waiting} wait"
            shown.update(tasks[number], completed=now.ended, state=state)

        yield on_progress

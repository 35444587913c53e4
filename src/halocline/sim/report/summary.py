"""The terminal's summary: a column per run, a line per figure, and remarks that are no figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from halocline.sim.report.figure import Figure
from halocline.sim.report.figures import lines

COLUMN_WIDTH = 12
SEPARATOR_WIDTH = 3


def tables(document: Mapping[str, Any], width: int | None = None) -> list[Table]:
    """Return the table of all runs of a report; several, each of some of them, where `width` columns are too few.

    Names out of files are text, never markup.
    """
    outcomes = document["outcomes"]
    shown = lines(outcomes)
    widest = max(COLUMN_WIDTH, *(len(str(outcome["policy"])) for outcome in outcomes)) + SEPARATOR_WIDTH
    labels = max(len(figure.title) for figure, _ in shown)
    at_once = len(outcomes) if width is None else max(1, (width - labels) // widest)
    first = outcomes[0]
    title = f"{first['workload']} on {first['model']}, {first['loop']} loop"
    return [
        _table(title, [str(outcome["policy"]) for outcome in outcomes[at : at + at_once]], shown, at)
        for at in range(0, len(outcomes), at_once)
    ]


def remarks(document: Mapping[str, Any]) -> list[str]:
    """Return why requests were rejected: a sentence for each run that rejected some."""
    return [
        f"{outcome['policy']} rejected {outcome['requests']['rejected']:,} of {outcome['requests']['arrived']:,} "
        f"requests: max_model_len is {why['max_model_len']:,} tokens ({why['limited_by']}); the first was told, "
        f"{why['first']}"
        for outcome in document["outcomes"]
        if (why := outcome.get("rejections")) is not None
    ]


def _table(title: str, names: Sequence[str], shown: Sequence[tuple[Figure, list[str]]], at: int) -> Table:
    """Return a table of the runs from number `at` on that are called `names`."""
    made = Table(title=Text(title), title_justify="left", show_edge=False, pad_edge=False)
    made.add_column(Text(""), no_wrap=True)
    for name in names:
        made.add_column(Text(name), justify="right", no_wrap=True, min_width=COLUMN_WIDTH)
    group = None
    for figure, texts in shown:
        if group is not None and group != figure.group:
            made.add_section()
        group = figure.group
        made.add_row(Text(figure.title), *map(Text, texts[at : at + len(names)]))
    return made

"""The terminal's summary: a column per run, a line per figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from halocline.sim.report.figures import lines

COLUMN_WIDTH = 14


def table(document: Mapping[str, Any]) -> Table:
    """Return the table of all runs of a report. Names out of files are text, never markup."""
    outcomes = document["outcomes"]
    first = outcomes[0]
    title = f"{first['workload']} on {first['model']}, {first['loop']} loop"
    made = Table(title=Text(title), title_justify="left", show_edge=False, pad_edge=False)
    made.add_column(Text(""), no_wrap=True)
    for outcome in outcomes:
        made.add_column(Text(str(outcome["policy"])), justify="right", no_wrap=True)
    group = None
    for figure, texts in lines(outcomes):
        if group is not None and group != figure.group:
            made.add_section()
        group = figure.group
        made.add_row(Text(figure.title), *map(Text, texts))
    return made


def width(document: Mapping[str, Any]) -> int:
    """Return the columns that the table needs where no terminal says how many there are."""
    outcomes = document["outcomes"]
    titles = [len(figure.title) for figure, _ in lines(outcomes)]
    return max(titles) + sum(max(COLUMN_WIDTH, len(str(outcome["policy"]))) + 3 for outcome in outcomes)

"""Tables in markdown: read as test cases, and written anew when a change of what they say is meant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "golden"
Row = dict[str, str]
UNTOLD = ("why", "the arithmetic")
"""Columns that are for the reader only."""


def _section(file: str, heading: str) -> tuple[str, str, str]:
    # What stands before the table of a heading, its lines, and what stands after.
    text = (FOLDER / file).read_text()
    start = text.index(f"## {heading}\n")
    end = text.find("\n## ", start + 1)
    section = text[start:] if end < 0 else text[start:end]
    lines = section.splitlines(keepends=True)
    at = [number for number, line in enumerate(lines) if line.startswith("|")]
    assert len(at) > 2, f"{file} has no row under {heading!r}"
    before, body = "".join(lines[: at[0]]), "".join(lines[at[0] : at[-1] + 1])
    return text[:start] + before, body, text[start + len(before) + len(body) :]


def rows(file: str, heading: str) -> list[Row]:
    """Return the rows of the table under `heading` of `file`, each by its column names."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in _section(file, heading)[1].splitlines()]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def table(file: str, heading: str) -> pytest.MarkDecorator:
    """Parametrize a test over a table: each row is one test, named after its cells."""
    found = rows(file, heading)
    names = ["-".join(value for name, value in row.items() if name not in UNTOLD) for row in found]
    return pytest.mark.parametrize("row", found, ids=names)


def write(file: str, heading: str, new: Sequence[Row]) -> None:
    """Put `new` in place of the rows under `heading`: look at the difference before it is committed."""
    before, _, after = _section(file, heading)
    names = list(new[0])
    body = ["| " + " | ".join(line) + " |\n" for line in (names, *(list(row.values()) for row in new))]
    body.insert(1, "|" + "---|" * len(names) + "\n")
    (FOLDER / file).write_text(before + "".join(body) + after)

"""The measured figures of the decisions are those of the committed result, row by row."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from testing.source import PROJECT

FOLDER = PROJECT / "docs" / "adr"
ADRS = [
    *sorted(FOLDER.glob("*measured*.md")),
    FOLDER / "0010-no-window-rings-per-request.md",
    PROJECT / "docs" / "internals" / "README.md",
]


SOURCE = re.compile(r"--part (\w+)`, figures in\s+`(benchmarks/results/[\w.-]+\.json)`")


def flat(value: object) -> list[str]:
    """Return the numbers of a row of the result, one per cell, as they are written in a table."""
    if isinstance(value, dict):
        return [cell for part in value.values() for cell in flat(part)]
    return [str(value)]


def by_name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("adr", ADRS, ids=by_name)
def test_the_table_of_a_decision_is_the_committed_result(adr: Path) -> None:
    text = adr.read_text(encoding="utf-8")
    measured = SOURCE.findall(text)
    assert measured, f"{adr.name} names no measurement"
    for part, result in measured:
        rows = json.loads((PROJECT / result).read_text(encoding="utf-8"))[part]
        table = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in text.splitlines()
            if line.startswith("| ") and line.split("|")[1].strip() in rows
        ]
        assert [name for name, *_ in table] == list(rows), f"{adr.name} lists other rows than {result}"
        for name, *cells in table:
            there = flat(rows[name])
            missing = [cell for cell in cells if cell not in there]
            assert not missing, f"{adr.name}, {name}: {missing} are not in {result}"

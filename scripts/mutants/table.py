"""The tables of mutants: faults as data, one TOML file per layer of the core beside this file.

    [[mutant]]
    name = "a demand that just fits is refused"          what is wrong, in words
    file = "memory/budget.py"                            below src/halocline
    old = "sum(needs) <= self.slabs"                     stands exactly once in the file
    new = "sum(needs) < self.slabs"
    tests = ["tests/unit/memory/test_budget.py"]         asked first: who should catch it, cheapest first

and, once per file, `wider`: the quick tests of the layer, asked when those pass. A text that does not stand exactly
once is an error, so that a table cannot rot unseen; `make test` looks at that, too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
SOURCES = PROJECT / "src"
PACKAGE = "halocline"


@dataclass(frozen=True)
class Mutant:
    """One wrong change to one file."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    wider: tuple[str, ...]

    @property
    def module(self) -> str:
        """The module that the file is."""
        return ".".join((PACKAGE, *Path(self.file).with_suffix("").parts))

    def path(self, sources: Path) -> Path:
        """Return the file under some `src` folder."""
        return sources / PACKAGE / self.file

    def applied(self, text: str) -> str:
        """Return the file's text with the fault in it. Raises ValueError unless `old` stands exactly once in it."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"the text to change stands {found} times there:\n{self.old}")
        return text.replace(self.old, self.new)

    def change(self) -> str:
        """Return the lines that differ, old ones and new ones."""
        old, new = self.old.splitlines(), self.new.splitlines()
        gone, come = _beyond(old, new), _beyond(new, old)
        return f"{gone or 'nothing'} -> {come or 'nothing'}"


def _beyond(lines: Sequence[str], others: Sequence[str]) -> str:
    return " / ".join(line.strip() for line in lines if line.strip() and line not in others)


def read() -> list[Mutant]:
    """Return all mutants, table by table."""
    mutants = []
    for path in sorted(HERE.glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        wider = tuple(table["wider"])
        mutants += [Mutant(**{**row, "tests": tuple(row["tests"])}, wider=wider) for row in table["mutant"]]
    return mutants


def unfit(mutants: Sequence[Mutant], sources: Path = SOURCES) -> list[str]:
    """Return what is wrong with those mutants that cannot be applied to `sources` or are no Python then."""
    problems = []
    for mutant in mutants:
        try:
            compile(mutant.applied(mutant.path(sources).read_text(encoding="utf-8")), mutant.file, "exec")
        except (OSError, ValueError, SyntaxError) as problem:
            problems.append(f"{mutant.name!r} of {mutant.file}: {problem}")
    return problems

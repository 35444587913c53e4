"""The tables of `make mutants` are of this program: every fault still has its place, is Python, and names tests."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from testing.source import PROJECT

FEWEST = 30
LAYERS = {"memory", "cache", "schedule", "sim", "plan", "api", "disagg", "compose.py"}


@pytest.fixture(scope="module")
def table() -> ModuleType:
    path = list(sys.path)
    sys.path.insert(0, str(PROJECT / "scripts" / "mutants"))
    try:
        import table

        return table
    finally:
        sys.path[:] = path


def test_every_mutant_applies_exactly_once_and_is_python(table: ModuleType) -> None:
    assert table.unfit(table.read()) == []


def test_a_change_that_is_no_longer_there_is_told(table: ModuleType, tmp_path: Path) -> None:
    mutant = table.Mutant("a fault", "a.py", "count < 1", "count <= 1", (), ())
    source = mutant.path(tmp_path)
    source.parent.mkdir()
    for text, told in (("count < 1\n", ""), ("count > 1\n", "stands 0 times"), ("count < 1; count < 1\n", "stands 2")):
        source.write_text(text)
        (*problems,) = table.unfit([mutant], tmp_path)
        assert told in "".join(problems)
        assert bool(problems) == bool(told)


def test_a_change_is_told_by_the_lines_that_differ(table: ModuleType) -> None:
    mutant = table.Mutant("a fault", "a.py", "if a:\n    b()\n    c()", "if a:\n    d()\n    c()", (), ())
    assert mutant.change() == "b() -> d()"
    gone = table.Mutant("a fault", "a.py", "a()\nb()", "a()", (), ())
    assert gone.change() == "b() -> nothing"


def test_the_core_and_the_simulator_have_mutants_of_their_own(table: ModuleType) -> None:
    mutants = table.read()
    assert len(mutants) >= FEWEST
    assert {mutant.file.partition("/")[0] for mutant in mutants} == LAYERS
    assert len({mutant.name for mutant in mutants}) == len(mutants), "two mutants of one name"
    assert all(mutant.old != mutant.new for mutant in mutants)


def test_the_tests_that_should_catch_them_exist(table: ModuleType) -> None:
    named = {test.partition("::")[0] for mutant in table.read() for test in (*mutant.tests, *mutant.wider)}
    missing = sorted(name for name in named if not (PROJECT / name).exists())
    assert not missing, f"the tables name {missing}, which are not there"

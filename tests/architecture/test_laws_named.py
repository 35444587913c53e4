"""Every law and every scenario has a test that says its name, and every wrong policy of the field makes one fail.

Only what pytest collects counts: a test function's name or its docstring (for laws), a name `test_<id>_...` (for
scenarios). A comment or a module's docstring holds nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LAWS = [f"L{number}" for number in range(1, 14)] + [f"R{number}" for number in range(1, 5)]
SCENARIOS = [
    *(f"A{number}" for number in range(1, 17)),
    *(f"B{number}" for number in range(1, 9)),
    *("C1", "C2", "C3"),
    *(f"D{number}" for number in range(1, 8)),
    *(f"E{number}" for number in range(1, 6)),
    *(f"F{number}" for number in range(1, 5)),
    *(f"G{number}" for number in range(1, 7)),
    *(f"H{number}" for number in range(1, 10)),
    *("I1", "I2"),
]
WRONG_POLICIES = {
    "A1": "windows are given up after the next chunk is priced",
    "A2": "a second window is charged beside the cached one",
    "A4": "chunk pages are taken from room granted to others",
    "A5": "a chunk counts as computed when it is planned",
    "A6": "the check at the door asks for less than the peak",
    "A8": "windows are priced at full length",
    "A9": "one page for a window shorter than a page",
    "A10": "fullness is latched",
    "A13": "two candidates of one pass are checked against the same room",
    "A14": "price, then lock",
    "A15": "a new request overtakes a continued prefill",
    "B1": "equal page bytes for all kinds",
    "B2": "pages of equal bytes",
    "B3": "a state that grows with tokens",
    "B4": "draft and target are planned apart",
    "B5": "one draft slot per token",
    "B6": "a ring of a window per request slot",
    "B8": "one quota for device, staging and host",
    "C2": "the fullest pool is shown as the usage",
    "C3": "the same, where the arena is full",
    "D1": "one LRU over everything",
    "D2": "pages go one by one",
    "D3": "full pages decide alone",
    "E2": "a tombstone keeps its mapping",
    "E4": "a refusal does not undo the lock",
    "E5": "an abort forgets the copy on the host",
    "F1": "the return is granted too little",
    "F2": "estimates decay on a timer",
    "F4": "the longest goes",
    "G1": "a demand counted in tokens",
    "G2": "a pool sees only what it could evict itself",
    "G3": "whoever is retracted waits for its transfer again",
    "G4": "leases never end",
    "G5": "a window that grows with the reserve",
    "G6": "a window priced by new tokens",
    "H1": "one pool may evict only itself",
    "H2": "double rounding",
    "H3": "a landing state beside the working one",
    "H4": "a scalar of available bytes",
    "H5": "a pool with pins is left alone",
    "H6": "window pages are kept while decoding",
    "H7": "a decision by displayed figures",
    "H8": "no plan when sliding exceeds full",
    "H9": "a lock without a price, a pin that does not gather",
    "I1": "only full pages count",
}
BITES = re.compile(r"_bites?_|fails?_this_check|fail_this_check|drives_the_budget_negative|is_found_out")


@dataclass(frozen=True)
class Collected:
    """One collected test."""

    file: str
    name: str
    docstring: str

    def says(self, word: str) -> bool:
        """Whether name or docstring has `word` as a word of its own; in names an underscore is a space."""
        text = self.name.replace("_", " ") + "\n" + self.docstring
        return re.search(rf"(?<![A-Za-z0-9]){word}(?![A-Za-z0-9])", text, re.IGNORECASE) is not None

    def is_of(self, scenario: str) -> bool:
        """Whether its name begins with the scenario's."""
        return self.name.startswith(f"test_{scenario.lower()}_")


def read_tests(text: str, file: str) -> Iterator[Collected]:
    """Yield the test functions of a module, and those of its classes called Test..."""
    module = ast.parse(text)
    classes = [each for each in module.body if isinstance(each, ast.ClassDef) and each.name.startswith("Test")]
    for scope in (module, *classes):
        for each in scope.body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test_"):
                yield Collected(file, each.name, ast.get_docstring(each) or "")


@cache
def collected() -> tuple[Collected, ...]:
    """Return all tests of this suite but those of this file."""
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if path.name != Path(__file__).name]
    return tuple(test for path in files for test in read_tests(path.read_text(encoding="utf-8"), path.name))


@pytest.mark.parametrize("law", LAWS)
def test_a_law_is_named_by_a_test(law: str) -> None:
    assert any(test.says(law) for test in collected()), f"no collected test names {law}"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_scenario_has_a_test_of_its_name(scenario: str) -> None:
    assert any(test.is_of(scenario) for test in collected()), f"no test is called test_{scenario.lower()}_..."


@pytest.mark.parametrize("scenario", WRONG_POLICIES)
def test_a_scenario_fails_with_its_wrong_policy(scenario: str) -> None:
    tests = [test for test in collected() if test.is_of(scenario)]
    assert any(BITES.search(test.name) for test in tests), f"{scenario}: nothing bites {WRONG_POLICIES[scenario]!r}"


def test_the_inventory_notices_what_is_missing() -> None:
    """A scenario that only a comment or a helper names is not held, and A1 is not A12."""
    text = '"""A1 is here."""\ndef helper_a1_x():\n    """A1."""\ndef test_a12_x():\n    """Holds L13."""\n    # L3\n'
    (only,) = read_tests(text, "test_x.py")
    assert not only.is_of("A1")
    assert only.is_of("A12")
    assert only.says("L13")
    assert not only.says("L3")
    assert not only.says("L1")


def test_make_laws_looks_wherever_a_test_is_marked_so() -> None:
    """Its folders come in the order of their longest tests, so that the processes end together; none may be missing."""
    (folders,) = re.findall(
        r"^LONG_LAWS := (.*)$", (TESTS.parent / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    marked = {
        file.relative_to(TESTS).parts[0] for file in TESTS.rglob("test_*.py") if "mark.laws" in file.read_text("utf-8")
    }
    assert {f"tests/{folder}" for folder in marked - {"architecture"}} == set(folders.split())

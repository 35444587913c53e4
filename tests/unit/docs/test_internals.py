"""docs/internals: every worked example is run, and every number in bold is one that the example beside it gives."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from testing.source import PROJECT

PAGES = sorted(page for page in (PROJECT / "docs" / "internals").glob("*.md") if page.name != "README.md")
CODE = re.compile(r"^```pycon\n(.*?)^```", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\*\*([0-9][0-9,.]*)\*\*")


def by_name(path: Path) -> str:
    return path.stem


def sections(text: str) -> dict[str, str]:
    """Return the text under each `### ` heading."""
    parts = re.split(r"^### (.*)$", text, flags=re.MULTILINE)
    bodies = (re.split(r"^## ", body, flags=re.MULTILINE)[0] for body in parts[2::2])
    return dict(zip(parts[1::2], bodies, strict=True))


def answers(section: str) -> str:
    """Return what the examples of a section print, digit groups joined."""
    examples = [each for code in CODE.findall(section) for each in doctest.DocTestParser().get_examples(code)]
    return "".join(example.want for example in examples).replace(",", " ,").replace("_", "")


def test_the_pages_of_the_memory_manager_are_there() -> None:
    assert {path.stem for path in PAGES} >= {"arena", "budget", "reclaim", "tree"}


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_the_examples_of_a_page_give_what_it_says(page: Path) -> None:
    """All of a page run in one namespace, top to bottom, as a reader would type them."""
    text = page.read_text(encoding="utf-8")
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    names: dict[str, object] = {}
    failures: list[str] = []
    count = 0
    for match in CODE.finditer(text):
        line = text[: match.start()].count("\n") + 1
        test = doctest.DocTestParser().get_doctest(match.group(1), {}, f"{page.name}:{line}", str(page), line)
        test.globs = names  # functions of earlier blocks see what later ones define
        count += len(test.examples)
        runner.run(test, out=failures.append, clear_globs=False)
    assert not failures, "".join(failures)
    assert count >= 10, f"{page.name} has only {count} examples"


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_case_has_a_worked_number_and_no_number_is_without_its_example(page: Path) -> None:
    found = sections(page.read_text(encoding="utf-8"))
    cases = {title: body for title, body in found.items() if title.startswith("Case ")}
    assert len(cases) >= 5, f"{page.name} has {len(cases)} cases"
    for title, body in found.items():
        numbers = [number.rstrip(".,").replace(",", "") for number in NUMBER.findall(body)]
        printed = re.findall(r"\d+(?:\.\d+)?", answers(body))
        missing = [number for number in numbers if number not in printed]
        assert not missing, f"{page.name}, {title!r}: nothing prints {missing}"
        assert numbers or title not in cases, f"{page.name}, {title!r} has no worked number"


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_the_modules_that_a_page_points_to_are_there(page: Path) -> None:
    names = re.findall(r"`(?:memory|cache|schedule)/\w+\.py`", page.read_text(encoding="utf-8"))
    assert names, f"{page.name} points to no module"
    for name in names:
        assert (PROJECT / "src" / "halocline" / name.strip("`")).exists(), f"{page.name} points to {name}"

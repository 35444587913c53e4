"""The plans that documents show are what the program prints."""

from __future__ import annotations

import re
import shlex

import pytest

from halocline.cli.main import main
from testing.source import PROJECT

PAGES = [PROJECT / "docs" / "reference" / "plan.md", PROJECT / "README.md"]
SHOWN = [
    (page.name, command, text)
    for page in PAGES
    for command, text in re.findall(
        r"```\n\$ halocline (plan [^\n]*)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
    )
]


def test_both_pages_show_a_plan() -> None:
    assert {name for name, _, _ in SHOWN} == {page.name for page in PAGES}
    assert len(SHOWN) >= 4


@pytest.mark.parametrize(("name", "command", "text"), SHOWN, ids=[f"{name}: {command}" for name, command, _ in SHOWN])
def test_a_plan_in_a_document_is_what_is_printed(
    capsys: pytest.CaptureFixture[str], name: str, command: str, text: str
) -> None:
    main(shlex.split(command))
    shown = capsys.readouterr()
    printed = [line.rstrip() for line in (shown.out + shown.err).splitlines()]
    assert printed == text.splitlines(), f"{name} shows something else than `halocline {command}` prints"

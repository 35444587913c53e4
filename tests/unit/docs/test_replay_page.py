"""The replay that documents show is what the program prints, and what they say of it is what their table has.

Each policy is a run of its own, some seconds long: a figure of the scheduler that changes must be written anew.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import fields

import pytest

from halocline.cli.main import main
from halocline.cli.options import default_text, flag_of
from halocline.config import Config
from halocline.sim.generators import workload_named
from halocline.sim.settings import ReplaySettings
from testing.source import PROJECT

PAGES = [PROJECT / "README.md", PROJECT / "docs" / "how-to" / "how-much-does-the-arena-buy.md"]
SHOWN = re.compile(r"```sh\nhalocline (replay [^`]*)```\n\n```\n( +┃.*?)```", re.DOTALL)
POLICIES = ("shared", "static:0.8", "full")

Cells = dict[str, dict[str, str]]
"""By policy and by figure."""


def cells(table: str) -> Cells:
    """Return the cells of a table as it is printed."""
    head, *rows = (re.split("[┃│]", line) for line in table.splitlines() if re.search("[┃│]", line))
    return {policy.strip(): {row[0].strip(): row[at].strip() for row in rows} for at, policy in enumerate(head) if at}


def shown() -> list[tuple[str, Cells]]:
    """Return the command and the table of each page."""
    found = [match for page in PAGES for match in SHOWN.findall(page.read_text(encoding="utf-8"))]
    return [(command.replace("\\\n", " "), cells(table)) for command, table in found]


def test_both_pages_show_the_same_replay() -> None:
    one, other = shown()
    assert one == other
    assert tuple(one[1]) == POLICIES
    assert len(one[1]["shared"]) >= 5


@pytest.mark.parametrize(
    "policy", [POLICIES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in POLICIES[1:])]
)
def test_a_replay_in_a_document_is_what_is_printed(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    command, table = shown()[0]
    asked = shlex.split(command)
    asked[asked.index("--policy") + 1] = policy
    del asked[asked.index("--html") :]
    assert main(asked) == 0
    printed = cells(capsys.readouterr().out)[policy]
    assert table[policy] == {figure: printed.get(figure) for figure in table[policy]}


def test_the_how_to_names_the_flags_with_which_a_replay_decides_as_a_server_does_by_default() -> None:
    served, replayed = ({each.name: each.default for each in fields(of)} for of in (Config, ReplaySettings))
    text = PAGES[1].read_text(encoding="utf-8")
    for name in ("admission", "step_tokens", "max_running_requests"):
        assert served[name] != replayed[name]
        assert f"{flag_of(name)} {default_text(served[name])}" in text


def test_a_flip_leaves_out_what_the_how_to_says() -> None:
    text = (PROJECT / "docs" / "how-to" / "bring-your-own-workload.md").read_text(encoding="utf-8")
    ((workload, requests, asked),) = re.findall(r"`(flip:60:[^`]*)` has ([\d,]+) requests, not ([\d,]+)", text)
    assert f"{len(workload_named(workload).jobs):,}" == requests != asked


def test_what_the_how_to_says_of_its_replay_is_in_its_table() -> None:
    text = " ".join(PAGES[1].read_text(encoding="utf-8").split())
    shared, split = (shown()[1][1][policy] for policy in ("shared", "static:0.8"))
    means = [float(run["concurrency: mean"]) for run in (shared, split)]
    seconds = [float(run["run: seconds"].removesuffix(" s")) for run in (shared, split)]
    held = [run["arena: held while memory is short"] for run in (shared, split)]
    ratio = f"{means[0] / means[1]:.1f}"
    for said in (
        f"{means[0]:.2f} / {means[1]:.2f} = {ratio} here",
        f"it is {seconds[1] / seconds[0]:.1f} times and not {ratio}:",
        f"{held[0]} of all bytes are in use while somebody waits for memory. At {held[1]} a wall",
    ):
        assert said in text

"""No two features exclude each other: greedy tokens equal `generate` for every pair of values of all of them (L11).

The features are those that an operator may combine: prefix cache, host arena, mixed chunks, retraction, static split,
disaggregation over each link and between workers with other pages, pages of unequal length, guaranteed and expected
grants. Real workers run every row, as `testing.group` says; a row passes only when what it names has happened, every
audit of every turn was clean, and nothing was left behind (`testing.pairwise`).

`make test` has two of the rows and what must make a row fail; all of them are behind the marker `e2e`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from allpairspy import AllPairs

from halocline.disagg.landings import Landings
from halocline.disagg.nixl_agent import missing
from halocline.memory.layout import PoolLayout
from halocline.memory.retention import Full
from halocline.model.host_pages import HostPages
from halocline.schedule import send
from halocline.schedule.events import Arrive, PoolPages
from testing import group, pairwise
from testing.pairwise import LINKS, Row, run
from testing.serving import NOT_FINITE, PAGES

AXES: dict[str, Sequence[str]] = {
    # Windows and full layers, full ones only, windows only, chunked ones, sinks, soft caps, shared K and V, full layers
    # with wider heads, K and V of different width.
    "family": [
        *("gemma3", "llama", "mistral", "llama4", "gpt-oss", "gemma2", "gemma3n", "gemma4", "deepseek-v3"),
    ],
    "pages": list(PAGES),
    "link": LINKS,  # and below the one by a library that may not be installed
    "cache": ["on", "off"],
    "host": ["none", "ample"],
    "chunks": ["mixed", "whole"],
    "retraction": ["none", "forced"],
    "policy": ["shared", "static"],
    "admission": ["expected", "guaranteed"],
    "attention": ["cpu", "reference", "blocked"],
}
ROWS = [Row(**dict(zip(AXES, values, strict=True))) for values in AllPairs(list(AXES.values()))]
QUICK = [
    Row(link="shm, other pages", host="ample", retraction="forced", policy="static"),
    Row(link="tcp", cache="off", chunks="whole", admission="guaranteed", pages="16 full, 4 local"),
]


def test_every_pair_of_values_occurs_in_some_row() -> None:
    seen = {
        (one, getattr(row, one), other, getattr(row, other)) for row in ROWS for one, other in product(AXES, repeat=2)
    }
    missing = [
        (one, x, other, y)
        for one, other in product(AXES, repeat=2)
        for x, y in product(AXES[one], AXES[other])
        if one != other and (one, x, other, y) not in seen
    ]
    assert missing == []


@pytest.mark.parametrize("row", QUICK, ids=str)
def test_two_workers_answer_as_generate_does(row: Row) -> None:
    _check(row)


@pytest.mark.e2e
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_pair_of_features_answers_as_generate_does(row: Row) -> None:
    _check(row)


@pytest.mark.e2e
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(
    "row",
    [
        Row(link="nixl", chunks="whole", cache="off"),
        Row(family="gpt-oss", link="nixl", retraction="forced", host="ample", cache="off", admission="expected"),
        Row(family="llama4", link="nixl, other pages", retraction="forced", policy="static", pages="2 full, 16 local"),
    ],
    ids=str,
)
def test_links_by_the_nixl_library_answer_as_generate_does(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    _check(row)


def _check(row: Row) -> None:
    outcome = run(row)
    assert outcome.wrong == ()
    assert outcome.missing == ()


# ---- a row that cannot fail shows nothing


def words(value: object) -> str:
    """Name a case by its machine and its row."""
    return getattr(value, "__name__", str(value))


Machine = Callable[[pytest.MonkeyPatch], None]


def lands_pages_in_wrong_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page of a landing is written where the next one belongs; its checksum is right there, too."""
    opens = Landings.open

    def shifted(self: Landings, key: object, start: int, fill: int, pools: tuple[PoolPages, ...]) -> None:
        opens(self, key, start, fill, tuple(replace(run, pages=np.roll(run.pages, 1)) for run in pools))  # type: ignore[arg-type]

    monkeypatch.setattr(Landings, "open", shifted)


def skips_the_first_page_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a window's tail the sender leaves out the first page, and the receiver does not miss it."""
    wanted = send._first_wanted

    def late(pool: PoolLayout, start: int, prompt_tokens: int) -> int:
        return wanted(pool, start, prompt_tokens) + (not isinstance(pool.retention, Full))

    monkeypatch.setattr(send, "_first_wanted", late)
    monkeypatch.setattr(Landings, "missing", lambda self, key: 0)


def loses_what_goes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to the host arena are planned and never made."""
    monkeypatch.setattr(HostPages, "offload", lambda self, work: None)


@pytest.mark.parametrize(
    ("machine", "row"),
    [
        (lands_pages_in_wrong_places, Row(cache="off")),
        (skips_the_first_page_of_windows, Row(link="tcp", cache="off", chunks="whole")),
        pytest.param(lands_pages_in_wrong_places, Row(link="tcp, other pages"), marks=pytest.mark.e2e),
        pytest.param(skips_the_first_page_of_windows, Row(family="gpt-oss"), marks=pytest.mark.e2e),
        pytest.param(
            loses_what_goes_to_the_host, Row(cache="off", host="ample", retraction="forced"), marks=pytest.mark.e2e
        ),
    ],
    ids=words,
)
def test_a_wrong_machine_is_found_by_its_tokens(monkeypatch: pytest.MonkeyPatch, machine: Machine, row: Row) -> None:
    machine(monkeypatch)
    try:
        wrong = run(row).wrong
    except AssertionError as said:
        # Memory that nobody has written may hold what is no number at all, which the engine itself reports.
        wrong = (str(said),) if NOT_FINITE in str(said) else ()
    assert wrong != ()


def computes_every_prompt_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are right, and nothing of what the row is about has happened."""
    event_of = group.event_of

    def local(command: object) -> object:
        event = event_of(command)  # type: ignore[arg-type]
        return replace(event, route="here") if isinstance(event, Arrive) else event

    monkeypatch.setattr(group, "event_of", local)


def has_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena is so large that nobody has to leave."""
    sized = pairwise.sized
    monkeypatch.setattr(pairwise, "sized", lambda *given: replace(sized(*given), kv_bytes=1 << 20))
    pairwise.configs.cache_clear()


@pytest.mark.parametrize(
    ("machine", "row", "missing"),
    [
        (computes_every_prompt_itself, Row(cache="off", chunks="whole"), "pages travelled"),
        pytest.param(
            has_room_for_all, Row(cache="off", retraction="forced"), "an answer was retracted", marks=pytest.mark.e2e
        ),
    ],
    ids=words,
)
def test_a_row_in_which_nothing_happened_is_found(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, row: Row, missing: str
) -> None:
    machine(monkeypatch)
    try:
        assert f"not as it must be: {missing}" in run(row).missing
    finally:
        pairwise.configs.cache_clear()

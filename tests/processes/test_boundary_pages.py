"""The boundary for other pages: of 1 and of 16 tokens, unequal per pool, and unequal between the two workers.

As `test_boundary`, in rooms that are one slab too small for three lives, just large enough, and one slab too small for
four. Where a slab holds several pages of a pool, lives share slabs: three of 37 pages, eight to a slab, take 14 slabs
and not three times five; whoever rounds each life up to slabs would let two come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from halocline.memory.budget import Budget
from halocline.memory.demand import Demand, floor_demand, resident
from halocline.memory.sizing import static_caps
from testing.boundary import JUNIORS, LAYERS, MODEL, Prefills, answers, base_config, decode_settings, juniors, pressure
from testing.models import save_tiny
from testing.pair import worker
from testing.rooms import Cut, Life

LIFE = Life(460, 130)
FULL, WINDOW = "full", "sliding-2047"
CUTS = {
    "1": Cut(LAYERS, 1),
    "16": Cut(LAYERS, 16),
    "128": Cut(LAYERS, 128),
    "16+128": Cut(LAYERS, {FULL: 16, WINDOW: 128}),
    "128+16": Cut(LAYERS, {FULL: 128, WINDOW: 16}),
    "1+128": Cut(LAYERS, {FULL: 1, WINDOW: 128}),
}
"""By the page lengths of the full and of the window pool."""
LESS, EXACT, NEXT = (3, -1), (3, 0), (4, -1)
"""Lives that fit a room just so, and the slabs that are added to it: two, three and three come back."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("pages"), "gemma3", **MODEL)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return answers(juniors(LIFE.prompt_tokens, LIFE.new_tokens))


@pytest.fixture(scope="module")
def prefills() -> Iterator[Prefills]:
    made = Prefills()
    with made.stack:
        yield made


@pytest.mark.parametrize("ratio", [None, "0.5", "1.0", "1.5"])
@pytest.mark.parametrize("pages", CUTS)
@pytest.mark.parametrize("life", [LIFE, Life(1, 640), Life(2050, 100)])
def test_counting_agrees_with_the_one_price_and_the_one_predicate(pages: str, ratio: str | None, life: Life) -> None:
    cut, lives = CUTS[pages], [life] * JUNIORS
    room = cut.smallest(lives[: JUNIORS - 1], ratio)
    for slabs in range(room.layout.slabs - 2, room.layout.slabs + 3):
        room = cut.room(slabs, ratio)
        caps = None if ratio is None else static_caps(room.layout, float(ratio))
        assert room.life(life) == resident(room.layout, life.prompt_tokens, life.new_tokens)
        assert room.floor == floor_demand(room.layout)
        assert ratio is None or room.shares == caps
        budget, floor = Budget(room.layout, caps), Demand(room.floor)
        fits = [budget.fits_empty(floor.plus(Demand(room.lives(lives[:number])))) for number in range(JUNIORS + 1)]
        assert fits == [number <= room.come_back(lives) for number in range(JUNIORS + 1)]


SAME = [
    (pages, pages, "shm", ratio, room)
    for pages in ("1", "16", "16+128", "128+16")
    for ratio, room in (*product([None], (LESS, EXACT, NEXT)), *product(["1.0"], (LESS, EXACT)))
]
FULL_SHARE_IS_SMALLER = [("16", "16", "shm", "1.5", room) for room in (LESS, EXACT)]
UNEQUAL = [
    ("16", "128", "shm", None, EXACT),
    ("128", "1+128", "tcp", None, EXACT),
    ("16+128", "128+16", "shm", "1.0", EXACT),
    ("128+16", "1", "tcp", "1.0", EXACT),
]
CASES = sorted([*SAME, *FULL_SHARE_IS_SMALLER, *UNEQUAL], key=lambda case: (case[2], case[0]))  # few prefill workers


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("there", "pages", "link_kind", "ratio", "just"),
    CASES,
    ids=[
        f"{there}-to-{here}-{link_kind}-{ratio or 'shared'}-{fit}{more:+}"
        for there, here, link_kind, ratio, (fit, more) in CASES
    ],
)
def test_as_many_come_back_as_have_their_whole_lives(
    folder: Path,
    expected: list[list[int]],
    prefills: Prefills,
    there: str,
    pages: str,
    link_kind: str,
    ratio: str | None,
    just: tuple[int, int],
) -> None:
    fit, more = just
    cut, lives = CUTS[pages], [LIFE] * JUNIORS
    room = cut.room(cut.smallest(lives[:fit], ratio).layout.slabs + more, ratio)
    count = room.come_back(lives)
    assert count == (fit - 1 if more < 0 else fit)
    asked = juniors(LIFE.prompt_tokens, LIFE.new_tokens)
    base = base_config(folder, link_kind)
    prefill = prefills.at(replace(base, role="prefill", page_tokens=CUTS[there].setting))
    settings = decode_settings(room, cut.setting, asked)
    with worker(replace(base, role="decode", **settings)) as decode:
        made = pressure(prefill, decode, room, asked)
        seen = made.run()
        assert made.left(seen) == room.left(room.lives(lives[:count]))
        assert made.end() == expected

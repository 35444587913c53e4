"""G1 with real processes: how many retracted requests come back into exactly so many pages.

A prefill and a decode worker, a model with as many full as sliding layers of equal width (W = 2047), pages of 128
tokens, so that a slab is a page in both pools. `testing.pressure` says what happens, `testing.rooms` counts what must:
a life of 641 tokens takes five pages of each pool, the floor one of the window pool.

The issue counts 18 pages with the floor among them: (18 - 1) / 5 is 3, and 18 - 3 * 5 = 3 are left. Its 14, 15, 19 and
20 give 2, 3, 3, 4 beside the floor alone (15, 16, 20, 21 with it): with it among them, 15 and 20 hold but 2 and 3.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.boundary import JUNIORS, LAYERS, MODEL, answers, base_config, decode_settings, juniors, pressure
from testing.models import save_tiny
from testing.pair import pair
from testing.rooms import Cut, Life, Room

CUT = Cut(LAYERS, 128)
LIFE = Life(512, 129)
FLOOR = 1


def room_of(pages: int, ratio: str | None) -> Room:
    """Return a room of so many pages in each pool, those of the floor among them."""
    return CUT.room(2 * pages, ratio)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("equal"), "gemma3", **MODEL)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return answers(juniors(LIFE.prompt_tokens, LIFE.new_tokens))


@pytest.mark.parametrize("ratio", ["1.0", None])
def test_the_pages_of_the_issue_are_counted_beside_the_floor_but_for_its_18(ratio: str | None) -> None:
    def come_back(pages: int) -> int:
        return room_of(pages, ratio).come_back([LIFE] * JUNIORS)

    assert {pages: come_back(pages + FLOOR) for pages in (14, 15, 18, 19, 20)} == {14: 2, 15: 3, 18: 3, 19: 3, 20: 4}
    assert {pages: come_back(pages) for pages in (14, 15, 18, 19, 20)} == {14: 2, 15: 2, 18: 3, 19: 3, 20: 3}


def check(folder: Path, expected: list[list[int]], room: Room, link_kind: str, count: int, left: list[int]) -> None:
    assert room.come_back([LIFE] * JUNIORS) == count
    asked = juniors(LIFE.prompt_tokens, LIFE.new_tokens)
    settings = decode_settings(room, CUT.setting, asked)
    with pair(base_config(folder, link_kind), prefill={"page_tokens": CUT.setting}, decode=settings) as (first, second):
        made = pressure(first, second, room, asked)
        seen = made.run()
        assert list(made.left(seen)) == left
        assert made.end() == expected


@pytest.mark.parametrize(
    ("ratio", "link_kind", "left"), [("1.0", "shm", [3, 3]), pytest.param(None, "tcp", [6], marks=pytest.mark.e2e)]
)
def test_exactly_three_of_four_come_back_into_18_pages_per_pool(
    folder: Path, expected: list[list[int]], ratio: str | None, link_kind: str, left: list[int]
) -> None:
    check(folder, expected, room_of(18, ratio), link_kind, 3, left)


@pytest.mark.e2e
@pytest.mark.parametrize("ratio", ["1.0", None])
@pytest.mark.parametrize(("beside_floor", "count"), [(14, 2), (15, 3), (18, 3), (19, 3), (20, 4)])
def test_one_page_more_or_less_decides_how_many_come_back(
    folder: Path, expected: list[list[int]], ratio: str | None, beside_floor: int, count: int
) -> None:
    left = beside_floor + FLOOR - 5 * count
    check(folder, expected, room_of(beside_floor + FLOOR, ratio), "shm", count, [left, left] if ratio else [2 * left])

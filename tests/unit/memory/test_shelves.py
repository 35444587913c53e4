"""Which slab is filled next, and what the shelves remember of slabs that fill, empty and come back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.memory.shelves import SCALAR_SLABS, Shelves
from testing.memory import profile


def shelves(*live: int, per_slab: int = 4) -> Shelves:
    """Make shelves whose slab i has `live[i]` pages."""
    made = Shelves(len(live), per_slab)
    for slab, count in enumerate(live):
        made.put(slab, count)
    return made


def test_one_page_goes_to_the_fullest_slab_with_a_hole():
    some = shelves(1, 3, 4, 2)
    assert some.fill_one() == 1
    assert some.fill == [1, 4, 4, 2]
    assert some.fill_one() == 3


def test_of_equally_full_slabs_the_last_one_to_come_is_filled():
    assert shelves(2, 2, 1).fill_one() == 1


def test_without_a_hole_no_slab_is_named():
    assert shelves(4, 0, 4).fill_one() is None
    assert shelves(4, 0, 4).pull_fullest(3) == ([], 0)


def test_the_fullest_slabs_are_pulled_until_there_are_holes_enough():
    some = shelves(1, 3, 4, 2, 3)
    slabs, holes = some.pull_fullest(3)
    assert (sorted(slabs[:2]), slabs[2:], holes) == ([1, 4], [3], 4)
    assert list(some.emptiest()) == [0, 2]


def test_only_as_many_of_one_shelf_are_pulled_as_are_needed():
    some = shelves(2, 2, 2)
    assert some.pull_fullest(3) == ([2, 1], 4)


def lower(some: Shelves, slabs: list[int], counts: list[int]) -> list[int]:
    return some.lower(np.array(slabs, np.int64), np.array(counts, np.int64))


def test_full_slabs_are_named_last_and_in_order():
    some = shelves(4, 1, 4, 3)
    assert list(some.emptiest()) == [1, 3, 0, 2]
    assert some.by_level() == [[], [1], [], [3], [0, 2]]


def test_a_slab_that_loses_all_its_pages_is_named_and_stands_nowhere():
    some = shelves(4, 2, 3)
    assert lower(some, [0, 1, 2], [4, 2, 1]) == [0, 1]
    assert list(some.emptiest()) == [2]


@pytest.mark.parametrize("act", [lambda s: lower(s, [0], [3]), lambda s: [s.lower_one(0) for _ in range(3)]])
def test_a_slab_cannot_lose_more_than_it_has(act):
    with pytest.raises(AssertionError, match="slab 0 loses"):
        act(shelves(2))


def test_a_shelf_that_has_become_empty_is_passed_over():
    some = shelves(3, 1)
    some.lower_one(0)  # from shelf 3 to shelf 2: nobody has looked at shelf 3 since
    assert 3 in some.stocked()
    assert some.fill_one() == 0
    assert some.fill == [3, 1]


ACTS = st.lists(st.tuples(st.sampled_from(("fill_one", "lower_one", "pull")), st.integers(1, 9)), max_size=60)


@given(ACTS)
@profile(300)
def test_any_history_leaves_every_slab_on_the_shelf_of_its_live_pages(history):
    """Against a plain list of live pages: what is filled is always a fullest slab with a hole."""
    live, some = [0, 1, 2, 3, 4, 2, 1], shelves(0, 1, 2, 3, 4, 2, 1)
    for act, number in history:
        with_holes = [count for count in live if 0 < count < 4]
        if act == "fill_one":
            slab = some.fill_one()
            assert (slab is None) == (not with_holes)
            if slab is not None:
                assert live[slab] == max(with_holes)
                live[slab] += 1
        elif act == "pull":
            slabs, holes = some.pull_fullest(number)
            assert holes == sum(4 - live[slab] for slab in slabs)
            assert sorted((live[s] for s in slabs), reverse=True) == sorted(with_holes, reverse=True)[: len(slabs)]
            assert holes >= number or len(slabs) == len(with_holes)
            some.fill_up(slabs)
            for slab in slabs:
                live[slab] = 4
        else:
            slab = number % len(live)
            if live[slab]:
                live[slab] -= 1
                assert some.lower_one(slab) == (live[slab] == 0)
        assert some.fill == live
        assert some.by_level()[1:] == [
            [s for s in some.by_level()[level] if live[s] == level] for level in (1, 2, 3, 4)
        ]
        assert sorted(some.emptiest()) == [slab for slab, count in enumerate(live) if count]


LOSSES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=12)


@pytest.mark.parametrize("copies", [1, SCALAR_SLABS + 1], ids=["few", "many"])
@given(LOSSES)
@profile(50)
def test_lowering_slabs_by_several_pages_leaves_the_shelves_as_page_by_page(copies, losses):
    fills = [live for live, _ in losses] * copies
    lost = [min(live, less) for live, less in losses] * copies
    at = [slab for slab, less in enumerate(lost) if less]
    page_by_page, at_once = shelves(*fills), shelves(*fills)
    emptied = lower(at_once, at, [lost[slab] for slab in at])
    assert emptied == [slab for slab in at if [page_by_page.lower_one(slab) for _ in range(lost[slab])][-1]]
    assert at_once.fill == page_by_page.fill
    assert at_once.by_level() == page_by_page.by_level()
    filled = [level for level, slabs in enumerate(at_once.by_level()[:4]) if slabs]
    assert set(filled) <= set(at_once.stocked())


@pytest.mark.parametrize("others", [0, SCALAR_SLABS], ids=["few", "many"])
def test_slabs_cannot_lose_more_than_they_have(others):
    with pytest.raises(AssertionError, match=r"slab 1 loses 3 of 2 pages"):
        lower(shelves(*[2] * (2 + others)), list(range(2 + others)), [2, 3, *[2] * others])

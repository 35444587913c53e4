"""Where pages go: holes of the fullest slabs first, then whole free slabs; and what a move and a free do to handles."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from halocline.memory.pool import GENERATION, NO_POOL, Pool, SlabStock
from testing.memory import layout


def pool(*, per_slab: int = 3, slabs: int = 4) -> Pool:
    return Pool(0, layout(full=per_slab, slabs=slabs).pools[0], SlabStock(slabs))


def pages(*of):
    return np.array(of, np.int64)


def test_new_pages_open_as_few_slabs_as_hold_them():
    some = pool()
    assert some.take(4).tolist() == [0, 1, 2, 3]
    assert (some.slabs, some.holes, len(some.stock.free)) == (2, 2, 2)


def test_the_fullest_slab_with_a_hole_is_filled_first():
    some = pool()
    some.take(9)
    some.drop(pages(0, 1, 5, 7, 8))  # slab 0 keeps one page, slab 1 two, slab 2 one
    assert some.take(1).tolist() == [5]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8])
def test_holes_are_filled_before_a_slab_is_opened(count):
    some = pool()
    some.take(9)
    some.drop(pages(0, 1, 5, 7, 8))
    taken = some.take(count)
    assert len(set(taken.tolist())) == count
    assert some.slabs == (3 if count <= 5 else 4)
    assert int(some.live.sum()) == some.live_pages == 4 + count


def test_a_slab_without_live_pages_leaves_the_pool():
    some = pool()
    some.take(6)
    some.drop(pages(3, 4, 5))
    assert some.slabs == 1
    assert some.stock.owner == [0, NO_POOL, NO_POOL, NO_POOL]


def test_dropping_more_than_a_slab_holds_is_noticed():
    some = pool()
    some.take(2)
    with pytest.raises(AssertionError, match="loses 1 of 0 pages"):
        some.drop(pages(0, 1, 2))


@pytest.mark.parametrize(("count", "short"), [(2, 0), (3, 1), (5, 1), (6, 2)])
def test_the_slabs_that_new_pages_lack_are_counted_after_the_holes(count, short):
    some = pool()
    some.take(1)
    assert some.slabs_short(count) == short


def test_a_handle_follows_its_page():
    some = pool()
    some.take(4)
    some.swap(pages(3), pages(8))
    assert some.place[3] == 8
    assert some.index_at[[3, 8]].tolist() == [8, 3]


def test_a_freed_page_gets_a_new_generation():
    some = pool()
    index = some.index_at[some.take(2)]
    some.retire(index[:1])
    assert some.handle_of[index].tolist() == [GENERATION, 1]


def test_freeing_one_page_and_freeing_in_bulk_do_the_same():
    one_by_one, in_bulk = pool(), pool()
    for some in (one_by_one, in_bulk):
        some.take(7)
    for page in (1, 6, 2):
        one_by_one.retire_one(page)
    in_bulk.retire(pages(1, 6, 2))
    assert one_by_one.fill == in_bulk.fill == [1, 3, 0, 0]
    assert one_by_one.handle_of.tolist() == in_bulk.handle_of.tolist()
    assert one_by_one.stock.free == in_bulk.stock.free


def test_a_restored_pool_changes_its_own_pages_one_by_one_and_in_bulk():
    some = pool()
    some.take(4)
    copy = pickle.loads(pickle.dumps(some))
    handle = copy.deal(1, 7).item()
    assert (copy.live.tolist()[:5], some.live.tolist()[:5]) == ([1, 1, 1, 1, 1], [1, 1, 1, 1, 0])
    assert copy.is_held(handle, 7)
    copy.retire_one(handle)
    copy.drop(pages(0))
    assert copy.live.tolist()[:5] == [0, 1, 1, 1, 0]
    assert (copy.take_one(), copy.take_one(), copy.handle_of.item(4)) == (0, 4, handle + GENERATION)
    assert some.handle_of.item(4) == handle


def test_the_emptiest_slabs_are_offered_first_and_pinned_ones_never():
    some = pool()
    some.take(12)
    some.drop(pages(0, 3, 4, 6))
    some.pinned_in_slab[1] = 1
    assert list(some.emptiest(kept=[3])) == [0, 2]


def test_hidden_slabs_are_not_filled():
    some = pool()
    some.take(9)
    some.drop(pages(0, 3, 4))
    some.hide([0])
    assert sorted(some.take(2).tolist()) == [3, 4]
    some.abandon([0])
    assert (some.slabs, some.live_pages, some.fill[0]) == (2, 6, 0)


def test_more_slabs_than_are_free_cannot_be_taken():
    with pytest.raises(AssertionError, match="takes 5 slabs, 4 are free"):
        pool().take(13)

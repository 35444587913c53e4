"""Borders of the arena at which a small fault would go unseen elsewhere: each test is the one that catches it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from halocline.errors import InvariantError
from halocline.memory.demand import Demand
from halocline.memory.evictable import EvictionQueue
from halocline.memory.grant import Order
from testing.memory import World, arena, as_handles


def held(some: World, *pages: int):
    holding = some.reserve(Demand(pages))
    assert holding is not None
    some.commit_all()
    return holding


def test_an_order_that_is_refused_in_its_second_pool_gives_its_first_one_back():
    some = World(arena(full=3, sliding=2, slabs=6))
    other, owner = some.reserve(Demand((1, 0))), some.reserve(Demand((2, 1)))
    before = pickle.dumps(some.arena)
    with pytest.raises(InvariantError, match="cannot commit 2 pages of sliding"):
        some.arena.commit([Order(other.grant, Demand((1, 0))), Order(owner.grant, Demand((2, 2)))])
    assert pickle.dumps(some.arena) == before


def test_a_pool_at_its_cap_evicts_its_own_pages_although_slabs_are_free():
    """Two of six slabs are its share, both full of cached pages: the new page takes a cached one's place."""
    caps = (2, None)
    some = World(arena(full=3, sliding=2, slabs=6, caps=caps), caps)
    old = held(some, 6, 0)
    some.cache(old, 0, list(old.handles[0]))
    some.release(old)
    held(some, 1, 0)
    assert some.arena.pools[0].slabs == 2
    assert some.evictions == 1
    some.check()


def locked(some: World) -> list[list[int]]:
    """Lock one cached page of the first pool."""
    owner = held(some, 2, 1)
    pages = [owner.handles[0][:1], []]
    some.cache(owner, 0, pages[0])
    assert some.lock(pages, Demand((0, 0))) is not None
    return pages


def test_a_lock_is_released_once():
    some = World(arena(full=3, sliding=2, slabs=6))
    pages = locked(some)
    some.unlock(pages)
    before = pickle.dumps(some.arena)
    with pytest.raises(InvariantError, match=r"cannot unlock .* cached by the tree"):
        some.arena.unlock([as_handles(of_pool) for of_pool in pages])
    assert pickle.dumps(some.arena) == before


def test_a_locked_page_is_not_evicted():
    some = World(arena(full=3, sliding=2, slabs=6))
    pages = locked(some)
    before = pickle.dumps(some.arena)
    with pytest.raises(InvariantError, match=r"cannot evict .* locked in the tree"):
        some.arena.evict(0, as_handles(pages[0]))
    assert pickle.dumps(some.arena) == before


def test_what_is_queued_again_is_seen_once_and_last():
    queue = EvictionQueue(8)
    queue.push(np.array([1, 2, 3]))
    queue.push(np.array([1]))
    assert queue.first(1).tolist() == [2]
    assert queue.first(8).tolist() == [2, 3, 1]

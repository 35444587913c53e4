"""What is kept, over many sessions: loose window pages go first, a session goes whole, a tail fills its slabs."""

from __future__ import annotations

import pytest

from halocline.cache.keys import token_key
from halocline.cache.marks import Marks
from halocline.cache.node import TOMBSTONE
from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Order
from halocline.memory.pool import INDEX_MASK
from halocline.memory.retention import Full, Sliding
from testing.cache import HYBRID, PREFIX, CacheWorld, arena_of, session

SESSIONS = 8


def served(slabs: int = 200) -> CacheWorld:
    world = CacheWorld(arena_of(*HYBRID, slabs=slabs))
    for number in range(SESSIONS):
        world.serve(session(number))
    return world


def squeeze(world: CacheWorld, pages: Demand) -> list[int]:
    """Commit `pages` for somebody else; return how many cached ones died per pool."""
    grant = world.arena.reserve("another", pages)
    assert isinstance(grant, Grant)
    done = world.arena.commit([Order(grant, pages)])
    extra = world.tree.forget(done.evicted)
    assert world.tree.audit() == []
    return [len(died) + len(more) for died, more in zip(done.evicted, extra, strict=True)]


def fill_up(world: CacheWorld) -> int:
    """Let somebody take all free slabs; return how many loose window pages are cached then."""
    free = len(world.arena.stock.free) + world.arena.pools[1].holes
    assert squeeze(world, Demand((0, free))) == [0, 0]
    return world.arena.pools[1].queue.length


def whole_sessions(world: CacheWorld) -> int:
    keys = [token_key(session(number)) for number in range(SESSIONS)]
    return sum(world.tree.match(key).boundary_tokens >= PREFIX for key in keys)


def test_pages_that_left_a_window_all_go_before_any_full_page_or_tail():
    world = served()
    loose = fill_up(world)
    assert loose > SESSIONS
    for _ in range(loose):
        assert squeeze(world, Demand((0, 1))) == [0, 1]
    assert whole_sessions(world) == SESSIONS


def test_it_bites_when_nothing_is_marked(monkeypatch):
    monkeypatch.setattr(Marks, "mark", lambda *_, **__: None)
    world = served()
    for _ in range(fill_up(world) // 2):
        squeeze(world, Demand((0, 1)))
    assert whole_sessions(world) < SESSIONS


@pytest.mark.parametrize("pool", [0, 1])
def test_a_session_goes_whole_whichever_pool_is_short(pool):
    """Afterwards no full page is kept that leads to no boundary: neither pool pays with a part of many sessions."""
    world = served()
    loose = fill_up(world)
    squeeze(world, Demand((0, loose)))
    holes = [of_pool.holes for of_pool in world.arena.pools]
    squeeze(world, Demand((holes[number] + 1) * (pool == number) for number in range(2)))
    assert {len(node.pages[0]) for node in world.tree.forest.nodes.values()} == {PREFIX // 4 + 1}
    assert len(world.tree.forest.nodes) == SESSIONS - 1
    assert whole_sessions(world) == SESSIONS - 1


def test_a_tail_begins_where_its_slab_begins():
    """W = 9 reads three pages before a boundary; what lies before them in the same slab of five is kept, too."""
    world = CacheWorld(arena_of((Full(), 4, 5), (Sliding(9), 4, 5), slabs=40))
    world.serve(range(4 * 13 + 1))
    (mark,) = world.tree.marks.marks.values()
    pages = mark.node.pages[1]
    assert (pages != TOMBSTONE).all()
    slabs = world.arena.pools[1].place[pages & INDEX_MASK] // 5
    kept = world.tree.marks.tail(mark, 1)
    first = len(pages) - len(kept)
    assert first <= 10, "the window of boundary 52 begins in page 10"
    assert slabs[first] == slabs[10]
    assert slabs[first - 1] != slabs[first]

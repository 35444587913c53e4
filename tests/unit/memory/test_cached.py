"""Units of cached pages that grow: what a window passes later joins what was ranked before."""

from __future__ import annotations

import pytest

from halocline.errors import InvariantError
from halocline.memory.demand import Demand
from halocline.memory.evictable import Place, Unit
from halocline.memory.grant import Order
from testing.memory import World, arena, as_handles


def cached_world(pages: int = 6) -> tuple[World, list[int]]:
    """Return a world of three slabs of four pages that caches `pages`, all loose, and their handles."""
    world = World(arena(full=4, slabs=3))
    owner = world.reserve(Demand((pages,)))
    world.commit_all()
    handles = list(owner.handles[0])
    world.cache(owner, 0, handles)
    world.release(owner)
    return world, handles


def ranked(world: World, handles: list[int], worth: float = 1.0, bundle: int = 0) -> Unit:
    return world.arena.rank([as_handles(handles)], worth, Place(bundle=bundle))


def test_pages_that_join_a_unit_die_with_it():
    world, handles = cached_world()
    unit = ranked(world, handles[:2])
    world.arena.join(0, [(unit, as_handles(handles[4:5]))])
    assert unit.left == [3]
    assert world.arena.audit() == []
    owner = world.reserve(Demand((10,)))
    done = world.arena.commit([Order(owner.grant, Demand((10,)))])
    # Four must go. The three loose ones are too few, and with the whole unit one of them is enough.
    assert sorted(done.evicted[0].tolist()) == sorted([*handles[:3], handles[4]])
    assert world.arena.audit() == []


def test_pages_join_several_units_in_one_call():
    world, handles = cached_world()
    first, second = ranked(world, handles[:1]), ranked(world, handles[1:2], worth=2.0)
    world.arena.join(0, [(first, as_handles(handles[2:3])), (second, as_handles(handles[3:6]))])
    assert (first.left, second.left) == ([2], [4])
    assert world.arena.pools[0].queue.length == 0
    assert world.arena.audit() == []


def test_a_page_that_was_locked_and_comes_back_counts_once():
    world, handles = cached_world()
    unit = ranked(world, handles[:3])
    grant = world.arena.lock("request", [as_handles(handles[:1])], Demand((0,)))
    world.arena.unlock([as_handles(handles[:1])])
    world.arena.join(0, [(unit, as_handles(handles[:1]))])
    assert unit.left == [3]
    world.arena.unrank(unit)
    assert world.arena.pools[0].queue.length == 6
    assert world.arena.audit() == []
    world.arena.release(grant)


@pytest.mark.parametrize("twice", [True, False])
def test_a_page_that_belongs_to_a_unit_cannot_join_one(twice):
    world, handles = cached_world()
    unit, other = ranked(world, handles[:2]), ranked(world, handles[2:4])
    with pytest.raises(InvariantError, match=rf"cannot join page .* belongs to unit {unit.id}"):
        world.arena.join(0, [(unit if twice else other, as_handles(handles[:1]))])
    assert world.arena.audit() == []


def test_a_held_page_cannot_join_a_unit():
    world, handles = cached_world()
    unit = ranked(world, handles[:2])
    world.arena.lock("request", [as_handles(handles[4:5])], Demand((0,)))
    with pytest.raises(InvariantError, match="cannot join page"):
        world.arena.join(0, [(unit, as_handles(handles[4:5]))])


def test_a_unit_that_goes_page_by_page_keeps_its_pages():
    world, handles = cached_world()
    unit = ranked(world, handles[:2], bundle=1)
    with pytest.raises(InvariantError, match="goes 1 pages at a time"):
        world.arena.join(0, [(unit, as_handles(handles[4:5]))])
    assert world.arena.audit() == []


def test_nothing_joins_a_unit_that_has_ended():
    world, handles = cached_world()
    unit = ranked(world, handles[:2])
    world.arena.unrank(unit)
    with pytest.raises(InvariantError, match="has ended"):
        world.arena.join(0, [(unit, as_handles(handles[4:5]))])
    assert world.arena.audit() == []


def test_a_unit_that_would_share_a_page_of_its_second_pool_is_refused_with_nothing_changed():
    world = World(arena(full=4, sliding=2, slabs=4))
    owner = world.reserve(Demand((2, 2)))
    world.commit_all()
    pages = [list(of_pool) for of_pool in owner.handles]
    for pool, handles in enumerate(pages):
        world.cache(owner, pool, handles)
    world.release(owner)
    unit = world.arena.rank([as_handles([]), as_handles(pages[1][:1])], 1.0, Place())
    with pytest.raises(InvariantError, match=rf"cannot rank page .* belongs to unit {unit.id}"):
        world.arena.rank([as_handles(pages[0]), as_handles(pages[1])], 1.0, Place())
    assert world.arena.audit() == []


def test_a_lock_cannot_ask_for_less_than_nothing():
    world, handles = cached_world()
    before = list(world.arena.budget.promised)
    with pytest.raises(InvariantError, match="counted from 0"):
        world.arena.lock("request", [as_handles(handles[:1])], Demand((-1,)))
    assert world.arena.budget.promised == before
    assert world.arena.audit() == []

"""How room is made: which slabs are vacated, where pages go, what is evicted, and what pins must have."""

from __future__ import annotations

from halocline.memory.demand import Demand
from halocline.memory.evictable import Place
from halocline.memory.grant import NO_HANDLES, Move
from halocline.memory.moves import MOST_VACATED
from testing.memory import World, arena, as_handles, can_place


def holding(world: World, *pages: int):
    made = world.reserve(Demand(pages))
    assert made is not None
    world.commit_all()
    return made


def keep(world: World, owner, pool: int, *places: int) -> None:
    """Free every page of `owner` that is not at one of `places`, and give up the room."""
    gone = [
        h
        for h, place in zip(owner.handles[pool], world.places(pool, owner.handles[pool]), strict=True)
        if place not in places
    ]
    world.free(owner, pool, gone)
    world.arena.shrink(owner.grant, owner.grant.held)


def test_the_emptiest_slab_is_vacated_into_the_fullest_one_with_a_hole():
    world = World(arena(full=3, state=1, slabs=3))
    owner = holding(world, 9, 0)
    keep(world, owner, 0, 0, 1, 3, 6, 7)  # two pages, one, two
    world.reserve(Demand((0, 1)))
    done = world.commit_all()
    assert done.moves == (Move(0, source=3, target=8),)
    world.check()


def test_no_page_moves_while_holes_and_free_slabs_suffice():
    world = World(arena(full=3, state=1, slabs=4))
    keep(world, holding(world, 9, 0), 0, 0, 3, 6)
    world.reserve(Demand((6, 1)))
    assert world.commit_all().moves == ()


def test_several_slabs_of_several_pools_are_vacated_in_one_pass():
    world = World(arena(full=3, sliding=2, state=1, slabs=6))
    keep(world, holding(world, 9, 0, 0), 0, 0, 3, 6)
    keep(world, holding(world, 0, 6, 0), 1, 6, 8, 10)
    world.reserve(Demand((0, 0, 3)))
    done = world.commit_all()
    assert {move.pool for move in done.moves} == {0, 1}
    assert len(done.moves) == 3
    world.check()


def test_a_pinned_page_stays_and_others_come_to_it():
    world = World(arena(full=3, state=1, slabs=3))
    owner = holding(world, 9, 0)
    keep(world, owner, 0, 0, 3, 4, 6, 7)
    world.pin([[h for h in owner.handles[0] if world.places(0, [h]) == [0]], []])
    world.reserve(Demand((0, 1)))
    done = world.commit_all()
    assert {move.target for move in done.moves} <= {1, 2, 5, 8}
    assert 0 not in {move.source for move in done.moves}
    world.check()


def test_a_new_page_may_stand_where_a_moved_page_stood():
    """The moves read before the forward writes; the bytes are checked by the world."""
    world = World(arena(full=2, state=1, slabs=2))
    owner = holding(world, 4, 0)
    keep(world, owner, 0, 0, 2)
    newcomer = world.reserve(Demand((0, 1)))
    done = world.commit_all()
    (move,) = done.moves
    assert world.places(1, newcomer.handles[1]) == [move.source // 2]
    world.check()


def test_cached_pages_are_evicted_in_told_order_and_only_as_many_as_are_short():
    world = World(arena(full=3, state=1, slabs=3))
    owner = holding(world, 9, 0)
    told = [owner.handles[0][at] for at in (8, 0, 4, 5)]
    world.cache(owner, 0, told)
    world.arena.shrink(owner.grant, owner.grant.held)
    world.reserve(Demand((0, 1)))
    done = world.commit_all()
    assert done.evicted[0].tolist() == told[:3]
    world.check()


def test_a_commit_that_fits_into_holes_evicts_nothing():
    world = World(arena(full=3, slabs=2))
    owner = holding(world, 6)
    world.cache(owner, 0, owner.handles[0][:3])
    world.free(owner, 0, owner.handles[0][:1])
    done = world.commit([(owner, Demand((1,)), None)])
    assert done.evicted[0].tolist() == []


def scattered(slabs: int = 3) -> tuple[World, list[int]]:
    """One held page in each of `slabs` slabs, the rest of the slabs cached; returns the held handles."""
    world = World(arena(full=3, state=1, slabs=slabs))
    owner = holding(world, 3 * slabs, 0)
    held = owner.handles[0][::3]
    world.cache(owner, 0, [h for h in owner.handles[0] if h not in held])
    world.arena.shrink(owner.grant, owner.grant.held)
    return world, held


def test_a_pin_that_would_raise_the_need_waits_for_the_next_commit_which_gathers():
    world, held = scattered()
    pin = world.pin([held, []])
    assert not pin.is_in_force
    assert world.arena.awaits_commit
    done = world.commit([])
    assert pin.is_in_force
    assert len(done.moves) == 2
    assert len({place // 3 for place in world.places(0, held)}) == 1
    world.check()


def test_gathering_evicts_cached_pages_only_where_no_hole_is_left():
    world, held = scattered()
    world.free(world.holdings[0], 0, [])
    spare = world.cached[0][0]  # beside the first held page
    world.arena.evict(0, world.arena.pools[0].handle_of[[spare & 0xFFFFFFFF]])
    world.cached[0].remove(spare)
    world.pin([held, []])
    done = world.commit([])
    assert sum(map(len, done.evicted)) == 1
    world.check()


def test_gathering_and_vacating_go_in_one_pass():
    """A deferred pin and a new state in the same commit: the places that gathering left are no targets."""
    world, held = scattered()
    world.pin([held, []])
    state = world.reserve(Demand((0, 1)))
    world.commit_all()
    assert state.handles[1]
    world.check()


def test_cached_pages_that_find_no_place_beside_a_gathering_are_evicted():
    """Four slabs; all holes that are left are places which the gathering's pages leave in this same pass."""
    world = World(arena(full=3, state=1, slabs=5))
    owner = holding(world, 15, 0)
    held = owner.handles[0][::3]
    world.cache(owner, 0, [h for at, h in enumerate(owner.handles[0]) if at % 3 == 1 or at in (2, 5)])
    world.free(owner, 0, [h for h in owner.handles[0] if h not in held])
    world.arena.shrink(owner.grant, owner.grant.held)
    world.pin([held, []])
    world.reserve(Demand((0, 1)))
    world.commit_all()
    world.check()


def test_a_pin_within_the_need_is_in_force_at_once():
    world = World(arena(full=3, slabs=3))
    owner = world.reserve(Demand((9,)))
    world.commit([(owner, Demand((3,)), None)])
    assert world.pin([owner.handles[0]]).is_in_force


def test_a_deferred_pin_costs_the_budget_nothing_and_may_end_before_its_commit():
    world, held = scattered()
    pin = world.pin([held, []])
    assert world.arena.budget.pinned_slabs == [0, 0]
    assert world.arena.fits(Demand((6, 0)))
    assert can_place(world, Demand((6, 0)))
    world.unpin(pin)
    assert not world.arena.awaits_commit
    assert world.commit([]).moves == ()
    world.check()


def test_a_deferred_pin_comes_into_force_without_moves_once_it_fits():
    world, held = scattered()
    pin = world.pin([held, []])
    world.arena.extend(world.holdings[0].grant, Demand((9, 0)))
    assert world.commit([]).moves == ()
    assert pin.is_in_force
    world.check()


def four_units_over_all_slabs() -> World:
    """Four cached units of a page in each of 12 slabs, beside 4 free slabs: whoever goes, no slab empties by it."""
    world = World(arena(full=4, state=1, slabs=16))
    owner = holding(world, 48, 0)
    by_place = dict(zip(world.places(0, owner.handles[0]), owner.handles[0], strict=True))
    world.cache(owner, 0, list(owner.handles[0]))
    world.release(owner)
    for first in range(4):
        unit = as_handles([by_place[place] for place in range(first, 48, 4)])
        world.arena.rank([unit, NO_HANDLES], 1.0 + first, Place())
    return world


def test_a_few_slabs_are_vacated_and_nothing_goes_beyond_the_plan():
    world = four_units_over_all_slabs()
    world.reserve(Demand((0, 4 + MOST_VACATED)))
    done = world.commit_all()
    assert (len(done.evicted[0]), len(done.moves)) == (24, 2 * MOST_VACATED)
    assert world.arena.audit() == []


def test_where_many_slabs_would_be_vacated_the_next_unit_goes_instead():
    world = four_units_over_all_slabs()
    world.reserve(Demand((0, 4 + 2 * MOST_VACATED)))
    done = world.commit_all()
    assert (len(done.evicted[0]), len(done.moves)) == (48, 0), "36 pages would do, with 8 moves"
    assert world.arena.audit() == []


def test_held_pages_are_moved_however_many_slabs_that_takes():
    world = World(arena(full=4, state=1, slabs=16))
    keep(world, holding(world, 48, 0), 0, *range(0, 48, 4))
    world.reserve(Demand((0, 4 + 2 * MOST_VACATED)))
    assert len(world.commit_all().moves) == 2 * MOST_VACATED
    world.check()


def test_what_empties_no_slab_is_not_evicted_for_it_to_the_last():
    """Twenty slabs with a held page each, and in every slab one page of each of three units."""
    world = World(arena(full=4, state=1, slabs=24))
    held = holding(world, 80, 0)
    handles = dict(zip(world.places(0, held.handles[0]), held.handles[0], strict=True))
    for unit in range(1, 4):
        taken = [handles[place] for place in range(unit, 80, 4)]
        world.cache(held, 0, taken)
        world.arena.rank([as_handles(taken), NO_HANDLES], float(unit), Place())
    world.arena.shrink(held.grant, held.grant.held)
    world.reserve(Demand((0, 9)))
    done = world.commit_all()
    assert (len(done.evicted[0]), len(done.moves)) == (40, 10), "one unit of three is left, and five slabs are vacated"
    assert world.arena.audit() == []

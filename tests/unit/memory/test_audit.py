"""The audit finds what is broken on purpose, under the law's number and with the right sign."""

from __future__ import annotations

import numpy as np
import pytest

from halocline.memory.demand import Demand
from halocline.memory.evictable import Place
from halocline.memory.grant import NO_HANDLES
from halocline.memory.pool import CACHED, FREE, HELD, TRANSFER
from testing.memory import World, arena


def busy() -> World:
    """Held, borrowed, cached, locked and pinned pages in two pools."""
    world = World(arena(full=3, sliding=2, slabs=6))
    owner = world.reserve(Demand((6, 2)), "request-7")
    step = world.reserve(Demand((2, 1)), "step")
    world.commit([(owner, Demand((6, 2)), None)])
    cached = owner.handles[0][3:]
    world.cache(owner, 0, cached)
    world.arena.shrink(owner.grant, owner.grant.held)
    world.commit([(owner, Demand((1, 0)), step.grant)])
    world.lock([cached[:1], []], Demand((1, 0)))
    world.pin([owner.handles[0][:1], []])
    world.check()
    return world


def move_a_page_counter(a):
    a.budget.held[0] += 2


def lose_a_page(a):
    a.pools[0].state[a.pools[0].index_at[0]] = FREE


def forget_an_owner(a):
    grant = next(iter(a.owners.grants.values()))
    grant.asked[0] -= 1


def give_a_page_to_an_ended_grant(a):
    a.pools[0].owner[a.pools[0].index_at[0]] = 999


def promise_more_than_there_is(a):
    grant = next(iter(a.owners.grants.values()))
    grant.asked[1] += 100
    grant.room[1] += 100
    a.budget.promised[1] += 100


def give_a_slab_to_two_pools(a):
    a.pools[1].live[0] = 1


def free_a_slab_twice(a):
    a.stock.free.append(a.stock.free[-1])


def swap_only_half(a):
    a.pools[0].place[0] = a.pools[0].place[1]


def free_a_pinned_page(a):
    pool = a.pools[0]
    index = a.pins.open[0].handles[0] & 0xFFFFFFFF
    pool.handle_of[index] += 1 << 32


def forget_a_pinned_slab(a):
    a.pools[0].pinned_in_slab.clear()


def miscount_pinned_slabs(a):
    a.budget.pinned_slabs[0] = 0


def rank_both_cached(a):
    cached = np.flatnonzero(a.pools[0].state == CACHED)
    return a.rank([a.pools[0].handle_of[cached], NO_HANDLES], 1.0, Place())


def forget_a_page_that_belongs_to_a_unit(a):
    unit = rank_both_cached(a)
    unit.index = (unit.index[0][:1], *unit.index[1:])


def hang_on_a_unit_that_does_not_know(a):
    unit = rank_both_cached(a)
    unit.over = unit


def drop_a_page_from_the_queue(a):
    a.pools[0].queue.pop(1)


def miscount_locked(a):
    a.budget.locked[0] -= 1


def orphan_a_transfer(a):
    pool = a.pools[0]
    pool.state[pool.index_at[1]] = TRANSFER


def lose_a_loan(a):
    borrower = next(grant for grant in a.owners.grants.values() if grant.loans)
    borrower.loans.clear()


def spill_bytes(a):
    a.stock.free.pop()


def exceed_a_cap(a):
    a.budget.caps[0] = 1


def lose_the_receipts_of_a_grant(a):
    next(iter(a.owners.grants.values())).receipts.clear()


def put_a_slab_on_the_wrong_shelf(a):
    shelves = a.pools[0]._shelves._shelves
    level = next(level for level, shelf in enumerate(shelves) if shelf)
    shelves[level % a.pools[0].per_slab + 1].update(shelves[level])
    shelves[level].clear()


def overlook_a_shelf_with_holes(a):
    a.pools[0]._shelves._stocked = 0


def hand_out_a_strange_handle(a):
    a.pools[0].handle_of[-1] += 1


def let_a_pin_wait_for_ever(a):
    a.pins.deferred[0].append(a.pins.open[0])


def close_a_grant_that_still_counts(a):
    next(iter(a.owners.grants.values())).is_open = False


@pytest.mark.parametrize(
    ("sabotage", "law", "words"),
    [
        (put_a_slab_on_the_wrong_shelf, "L1", "stand on the shelf"),
        (overlook_a_shelf_with_holes, "L1", "shelves that are not empty"),
        (hand_out_a_strange_handle, "L2", "handles do not name their own place in the tables"),
        (let_a_pin_wait_for_ever, "L5", "pins wait for a commit"),
        (close_a_grant_that_still_counts, "L1", "'request-7' is closed and still counts"),
        (move_a_page_counter, "L1", "held pages: 2 missing"),
        (lose_a_page, "L1", "live without an owner"),
        (forget_an_owner, "L1", "'request-7': 1 counted twice"),
        (give_a_page_to_an_ended_grant, "L1", "whose grant has ended"),
        (lose_the_receipts_of_a_grant, "L1", "the receipts of 'request-7'"),
        (promise_more_than_there_is, "L3", "held and promised pages need"),
        (give_a_slab_to_two_pools, "L2", "counted twice: it holds live pages of 2 pools"),
        (free_a_slab_twice, "L2", "listed twice"),
        (swap_only_half, "L2", "not one-to-one"),
        (free_a_pinned_page, "L5", "pinned by 'transfer' was freed"),
        (forget_a_pinned_slab, "L5", "pinned slabs are"),
        (miscount_pinned_slabs, "L5", "pinned slabs: 1 counted twice"),
        (drop_a_page_from_the_queue, "L6", "1 pages wait for eviction, 2 are cached"),
        (forget_a_page_that_belongs_to_a_unit, "L6", "names 1 of its 2 pages"),
        (hang_on_a_unit_that_does_not_know, "L6", "does not know of it"),
        (miscount_locked, "L6", "locked pages: 1 counted twice"),
        (orphan_a_transfer, "L1", "in transfer without a pin"),
        (lose_a_loan, "L3", "borrowed pages: 1 missing"),
        (spill_bytes, "L13", "bytes:"),
        (exceed_a_cap, "L3", "its cap is 1"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_audit_names_the_law_that_is_broken(sabotage, law, words):
    world = busy()
    sabotage(world.arena)
    found = [(violation.law, violation.message) for violation in world.arena.audit()]
    assert [message for broken, message in found if broken == law and words in message], found


def test_a_clean_arena_has_no_violations():
    assert busy().arena.audit() == []


def test_states_are_what_the_names_say():
    world = busy()
    state = world.arena.pools[0].state
    assert [int((state == kind).sum()) for kind in (HELD, CACHED)] == [4, 2]

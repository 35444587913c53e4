"""The facade: what each act answers, what it refuses to do, and that a question or a refusal changes nothing."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from halocline.errors import InvariantError
from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Order, Refusal
from testing.memory import World, arena, as_handles

NONE = as_handles([])


def world(**shape) -> World:
    return World(arena(**{"full": 3, "sliding": 2, "slabs": 6, **shape}))


def granted(some: World, *pages: int, owner: str = "request-7"):
    holding = some.reserve(Demand(pages), owner)
    assert holding is not None
    return holding


def running(some: World, *pages: int, owner: str = "request-7"):
    holding = granted(some, *pages, owner=owner)
    some.commit_all()
    return holding


# ---- grants


def test_a_grant_is_all_or_nothing():
    some = world()
    before = pickle.dumps(some.arena)
    refusal = some.arena.reserve("a", Demand((18, 1)))
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.slabs_missing, refusal.extra) == ("memory", 1, (18, 1))
    assert pickle.dumps(some.arena) == before


def test_handles_come_per_order_and_per_pool():
    some = world()
    first, second = granted(some, 3, 1), granted(some, 1, 2)
    done = some.commit([(first, Demand((2, 0)), None), (second, Demand((1, 2)), None)])
    assert [[len(handles) for handles in of_order] for of_order in done.handles] == [[2, 0], [1, 2]]
    assert first.grant.held == (2, 0)
    assert some.arena.budget.promised == [1, 1]


def test_a_commit_of_nothing_gives_nothing():
    done = world().arena.commit([])
    assert (done.handles, done.moves) == ((), ())


def test_several_orders_of_one_grant_add_up():
    some = world()
    owner, step, floor = granted(some, 1, 0), granted(some, 1, 0), granted(some, 1, 0)
    some.commit([(owner, Demand((2, 0)), step.grant), (owner, Demand((1, 0)), floor.grant)])
    assert owner.grant.held == (3, 0)
    some.free(owner, 0, owner.handles[0][:1])
    assert (floor.grant.held, step.grant.held) == ((0, 0), (1, 0))
    some.check()


def test_freed_pages_grow_the_promise_back():
    some = world()
    owner = running(some, 4, 2)
    some.free(owner, 0, owner.handles[0][:3])
    assert (owner.grant.demand, owner.grant.held, owner.grant.room) == ((4, 2), (1, 2), [3, 0])
    some.check()


def test_a_step_grant_is_empty_again_when_borrowed_pages_are_freed():
    """What a chunk holds beyond its window is borrowed; the scheduler frees it when the step is applied."""
    some = world()
    owner, step = granted(some, 2, 2), granted(some, 0, 2, owner="step")
    some.commit([(owner, Demand((2, 4)), step.grant)])
    some.free(owner, 1, owner.handles[1][:2])
    assert step.grant.held == (0, 0)
    some.release(step)
    some.check()


def test_a_step_grant_is_not_released_while_its_pages_are_lent():
    some = world()
    owner, step = granted(some, 2, 2), granted(some, 0, 2, owner="step")
    some.commit([(owner, Demand((2, 4)), step.grant)])
    with pytest.raises(InvariantError, match=r"'step'.* is released while \(0, 2\) of its pages are lent"):
        some.arena.release(step.grant)
    some.check()


def test_a_borrower_that_is_released_pays_back():
    some = world()
    owner, step = granted(some, 2, 2), granted(some, 0, 2, owner="step")
    some.commit([(owner, Demand((2, 4)), step.grant)])
    some.release(owner)
    assert (step.grant.held, some.arena.budget.promised) == ((0, 0), [0, 2])
    some.check()


def test_a_release_gives_up_pages_and_promise():
    some = world()
    owner = granted(some, 6, 4)
    some.commit([(owner, Demand((5, 1)), None)])
    some.release(owner)
    assert some.arena.figures().used_bytes == 0
    assert some.arena.budget.promised == [0, 0]
    some.check()


def test_a_demand_shrinks_to_what_is_held_and_no_further():
    some = world()
    owner = granted(some, 4, 2)
    some.commit([(owner, Demand((3, 0)), None)])
    some.arena.shrink(owner.grant, Demand((3, 0)))
    with pytest.raises(InvariantError, match=r"cannot shrink to \(2, 0\)"):
        some.arena.shrink(owner.grant, Demand((2, 0)))
    some.check()


def test_a_demand_does_not_grow_by_shrinking():
    some = world()
    owner = granted(some, 4, 2)
    with pytest.raises(InvariantError, match="cannot shrink"):
        some.arena.shrink(owner.grant, Demand((3, 3)))


def test_an_extension_is_all_or_nothing():
    some = world()
    owner = granted(some, 4, 2)
    assert isinstance(some.arena.extend(owner.grant, Demand((18, 3))), Refusal)
    assert owner.grant.demand == (4, 2)
    assert some.arena.extend(owner.grant, Demand((15, 2))) is owner.grant
    some.check()


def test_an_extension_to_less_is_a_defect():
    some = world()
    owner = granted(some, 4, 2)
    with pytest.raises(InvariantError, match="extends its demand"):
        some.arena.extend(owner.grant, Demand((5, 1)))


def test_an_extension_takes_over_what_was_borrowed():
    some = world()
    owner, step = granted(some, 2, 2), granted(some, 0, 2, owner="step")
    some.commit([(owner, Demand((2, 4)), step.grant)])
    some.arena.extend(owner.grant, Demand((2, 4)))
    some.release(step)
    some.check()


def test_extensions_of_a_step_are_all_or_nothing():
    some = world()
    one, two = granted(some, 4, 2), granted(some, 1, 0)
    before = pickle.dumps((some.arena.budget.promised, one.grant.demand, two.grant.demand))
    # Pool 0 has room for 10 pages more beside pool 1's slab: either would fit alone.
    assert isinstance(some.arena.extend_all([(one.grant, (7, 0)), (two.grant, (7, 0))]), Refusal)
    assert pickle.dumps((some.arena.budget.promised, one.grant.demand, two.grant.demand)) == before
    assert some.arena.extend_all([(one.grant, (5, 0)), (two.grant, (5, 0))]) == [one.grant, two.grant]
    assert one.grant.demand == (9, 2)
    assert two.grant.demand == (6, 0)
    assert some.arena.extend_all([]) == []
    some.check()


def test_an_extension_by_less_than_nothing_is_a_defect():
    some = world()
    one, two = granted(some, 4, 2), granted(some, 1, 0)
    with pytest.raises(InvariantError, match="extends its demand"):
        some.arena.extend_all([(one.grant, (2, 0)), (two.grant, (2, -1))])
    some.check()


# ---- defects of the caller: raised with names, before anything has changed


@pytest.mark.parametrize("orders", [[(3, 0)], [(1, 1), (2, 0)], [(1, 0), (1, 1), (1, 0)]])
def test_a_commit_beyond_the_grant_is_raised_and_changes_nothing(orders):
    some = world()
    owner, step = granted(some, 1, 1), granted(some, 1, 0, owner="step")
    before = pickle.dumps(some.arena)
    with pytest.raises(InvariantError, match=r"grant of 'request-7' .* cannot commit"):
        some.arena.commit([Order(owner.grant, Demand(pages), step.grant) for pages in orders])
    assert pickle.dumps(some.arena) == before


def test_a_negative_order_is_raised():
    some = world()
    with pytest.raises(InvariantError, match="cannot commit -1 pages of full"):
        some.arena.commit([Order(granted(some, 1, 1).grant, Demand((-1, 0)))])


def test_an_order_for_another_number_of_pools_is_raised():
    some = world()
    owner = granted(some, 1, 1)
    with pytest.raises(InvariantError, match="not of 2 pools"):
        some.arena.commit([Order(owner.grant, Demand((1, 0, 0)))])
    some.check()


def test_a_broken_budget_is_found_before_a_commit_changes_anything():
    some = world(slabs=2)
    owner = granted(some, 6, 0)
    owner.grant.asked[1] = owner.grant.room[1] = some.arena.budget.promised[1] = 1
    before = pickle.dumps(some.arena)
    with pytest.raises(InvariantError, match=r"L3: granted pages \(6, 1\) cannot be committed"):
        some.arena.commit([Order(owner.grant, Demand((6, 1)))])
    assert pickle.dumps(some.arena) == before


@pytest.mark.parametrize("act", ["commit", "extend", "shrink", "release", "free"])
def test_a_released_grant_can_do_nothing(act):
    some = world()
    owner = running(some, 2, 0)
    some.release(owner)
    acts = {
        "commit": lambda: some.arena.commit([Order(owner.grant, Demand((1, 0)))]),
        "extend": lambda: some.arena.extend(owner.grant, Demand((3, 0))),
        "shrink": lambda: some.arena.shrink(owner.grant, Demand((2, 0))),
        "release": lambda: some.arena.release(owner.grant),
        "free": lambda: some.arena.free(owner.grant, 0, NONE),
    }
    with pytest.raises(InvariantError, match="'request-7'"):
        acts[act]()
    some.check()


def test_a_double_free_names_the_last_owner():
    some = world()
    owner = running(some, 2, 0)
    handles = as_handles(owner.handles[0])
    some.free(owner, 0, owner.handles[0][:1])
    with pytest.raises(
        InvariantError, match=r"stale handle 0 of generation 0: .* free and was last held by 'request-7'"
    ):
        some.arena.free(owner.grant, 0, handles)
    some.check()


def test_a_page_named_twice_in_one_call_is_a_double_free():
    some = world()
    owner = running(some, 2, 0)
    with pytest.raises(InvariantError, match=r"twice in one call: page 1 .* held by 'request-7'"):
        some.arena.free(owner.grant, 0, as_handles([1, 0, 1]))
    some.check()


@pytest.mark.parametrize("count", [1, 2])
def test_nobody_frees_the_pages_of_another(count):
    some = world()
    owner, thief = running(some, 2, 0), granted(some, 2, 0, owner="thief")
    with pytest.raises(InvariantError, match=r"'thief' lets go of page 0 .* held by 'request-7'"):
        some.arena.free(thief.grant, 0, as_handles(owner.handles[0][:count]))
    some.check()


def test_a_stale_handle_is_caught_in_a_page_table_and_names_who_has_the_page_now():
    some = world()
    owner = running(some, 2, 0)
    handles = as_handles(owner.handles[0])
    some.release(owner)
    running(some, 2, 0, owner="request-8")
    with pytest.raises(InvariantError, match=r"stale handle 0 of generation 0: it means page 0 .*'request-8'"):
        some.arena.physical(0, handles)


def test_a_number_that_was_never_a_handle_is_caught():
    with pytest.raises(InvariantError, match="full has no handle 18: it ends at 17"):
        world().arena.physical(0, as_handles([3, 18]))


def test_a_handle_that_was_not_given_out_yet_is_caught_when_freed():
    some = world()
    owner = running(some, 1, 0)
    with pytest.raises(InvariantError, match=r"'request-7' lets go of page 5 .* free and was last held by 'nobody'"):
        some.arena.free(owner.grant, 0, as_handles([5]))


# ---- the cache's seam


def test_cached_pages_leave_the_grant_and_stay_readable():
    some = world()
    owner = running(some, 4, 0)
    kept = owner.handles[0][:2]
    some.cache(owner, 0, kept)
    assert owner.grant.room == [2, 0]
    assert some.places(0, kept) == [0, 1]
    assert some.arena.figures().cached_bytes == 2 * some.arena.layout.pools[0].stride_bytes
    some.check()


def test_a_lock_that_does_not_fit_changes_nothing():
    """A14 and H9: it fits before the lock, not after."""
    some = world()
    owner = running(some, 18, 0)
    told = list(owner.handles[0])
    some.cache(owner, 0, told)
    some.release(owner)
    before = pickle.dumps(some.arena)
    assert some.arena.fits(Demand((0, 2)))
    refusal = some.arena.lock("request-8", [as_handles(told), NONE], Demand((0, 2)))
    assert isinstance(refusal, Refusal)
    assert pickle.dumps(some.arena) == before


def test_a_lock_may_extend_a_grant():
    some = world()
    owner = running(some, 4, 0)
    kept = owner.handles[0][:2]
    some.cache(owner, 0, kept)
    assert some.arena.lock(owner.grant, [as_handles(kept), NONE], Demand((5, 1))) is owner.grant
    assert owner.grant.demand == (5, 1)
    assert some.arena.budget.locked == [2, 0]
    assert some.arena.audit() == []


@pytest.mark.parametrize("verb", ["lock", "unlock", "requeue", "evict"])
def test_the_cache_touches_only_its_own_pages(verb):
    some = world()
    owner = running(some, 4, 0)
    mine = as_handles(owner.handles[0][:1])
    acts = {
        "lock": lambda: some.arena.lock("a", [mine, NONE], Demand((0, 0))),
        "unlock": lambda: some.arena.unlock([mine, NONE]),
        "requeue": lambda: some.arena.requeue(0, mine),
        "evict": lambda: some.arena.evict(0, mine),
    }
    with pytest.raises(InvariantError, match=f"cannot {verb} page 0 .* held by 'request-7'"):
        acts[verb]()
    some.check()


def test_locking_twice_is_a_defect():
    some = world()
    owner = running(some, 4, 0)
    kept = owner.handles[0][:1]
    some.cache(owner, 0, kept)
    some.lock([kept, []], Demand((0, 0)))
    with pytest.raises(InvariantError, match=r"cannot lock page 0 .* locked in the tree and came from 'request-7'"):
        some.arena.lock("b", [as_handles(kept), NONE], Demand((0, 0)))


def test_the_room_of_an_unlocked_page_goes_to_its_heir():
    some = world()
    owner = running(some, 4, 0)
    kept = owner.handles[0][:2]
    some.cache(owner, 0, kept)
    some.arena.shrink(owner.grant, owner.grant.held)
    locker = some.lock([kept, []], Demand((1, 0)))
    some.unlock([kept, []], locker)
    assert locker.grant.room == [3, 0]
    some.check()


def test_queueing_again_spares_a_page():
    some = world(slabs=2)
    owner = running(some, 6, 0)
    told = list(owner.handles[0])
    some.cache(owner, 0, told)
    some.release(owner)
    some.arena.requeue(0, as_handles(told[:2]))
    other = some.arena.reserve("b", Demand((0, 2)))
    assert isinstance(other, Grant)
    done = some.arena.commit([Order(other, Demand((0, 2)))])
    assert done.evicted[0].tolist() == told[2:5]


def test_evicted_pages_are_gone_at_once():
    some = world()
    owner = running(some, 4, 0)
    told = list(owner.handles[0])
    some.cache(owner, 0, told)
    some.arena.evict(0, as_handles(told[:3]))
    assert some.arena.budget.cached == [1, 0]
    assert some.arena.audit() == []


# ---- pins


def test_only_held_pages_are_pinned():
    some = world()
    owner = running(some, 4, 0)
    kept = owner.handles[0][:1]
    some.cache(owner, 0, kept)
    with pytest.raises(InvariantError, match=r"cannot pin page 0 .* cached by the tree"):
        some.arena.pin("transfer", [as_handles(kept), NONE])


def test_a_pinned_page_that_is_freed_belongs_to_its_transfer_until_the_pin_ends():
    some = world()
    owner = running(some, 4, 0)
    pinned = owner.handles[0][:1]
    pin = some.pin([pinned, []])
    some.free(owner, 0, pinned)
    assert (owner.grant.demand, owner.grant.room) == ((3, 0), [0, 0])
    assert some.arena.budget.transfer == [1, 0]
    some.check()
    some.unpin(pin)
    assert some.arena.budget.held == [3, 0]
    some.check()


def test_a_pinned_locked_page_returns_to_the_cache_when_lock_and_pin_are_gone():
    some = world()
    owner = running(some, 4, 0)
    kept = owner.handles[0][:1]
    some.cache(owner, 0, kept)
    some.lock([kept, []], Demand((0, 0)))
    pin = some.pin([kept, []])
    some.unlock([kept, []])
    assert some.arena.budget.cached == [0, 0]
    some.unpin(pin)
    assert some.arena.budget.cached == [1, 0]
    some.check()


def test_a_page_in_transfer_for_the_cache_can_be_locked_again():
    some = world()
    owner = running(some, 4, 0)
    kept = owner.handles[0][:1]
    some.cache(owner, 0, kept)
    some.lock([kept, []], Demand((0, 0)))
    pin = some.pin([kept, []])
    some.unlock([kept, []])
    some.lock([kept, []], Demand((0, 0)))
    some.unpin(pin)
    assert (some.arena.budget.locked, some.arena.budget.transfer) == ([1, 0], [0, 0])
    some.check()


def test_two_pins_of_one_page_end_one_by_one():
    some = world()
    owner = running(some, 4, 0)
    pinned = owner.handles[0][:1]
    first, second = some.pin([pinned, []]), some.pin([pinned, []])
    some.release(owner)
    some.unpin(first)
    assert some.arena.budget.transfer == [1, 0]
    some.unpin(second)
    assert some.arena.figures().used_bytes == 0
    some.check()


def test_a_pin_ends_once():
    some = world()
    pin = some.pin([running(some, 1, 0).handles[0], []])
    some.unpin(pin)
    with pytest.raises(InvariantError, match="pin of 'transfer' is ended twice"):
        some.arena.unpin(pin)


# ---- questions


def test_questions_change_nothing():
    some = world()
    owner = running(some, 4, 2)
    some.cache(owner, 0, owner.handles[0][:1])
    before = pickle.dumps(some.arena)
    demand = Demand((3, 1))
    a = some.arena
    answers = [a.fits(demand), a.fits_untouched(demand), a.fits_empty(demand), a.shortfall(demand), a.most(0, demand)]
    assert answers == [True, True, True, None, 5]
    a.physical(1, as_handles(owner.handles[1]))
    a.figures()
    a.audit()
    assert pickle.dumps(a) == before


def test_page_numbers_come_as_int32_in_the_order_of_the_handles():
    some = world()
    owner = running(some, 4, 0)
    pages = some.arena.physical(0, as_handles(owner.handles[0][::-1]))
    assert pages.dtype == np.int32
    assert pages.tolist() == [3, 2, 1, 0]


# ---- long lives


def test_the_receipts_of_a_long_life_stay_few():
    """A sliding window over many tokens takes and frees a page again and again."""
    some = world()
    owner = granted(some, 0, 3)
    for _ in range(1000):
        some.commit([(owner, Demand((0, 1)), None)])
        if len(owner.handles[1]) == 3:
            some.free(owner, 1, owner.handles[1][:1])
    assert len(owner.grant.receipts) < 200
    some.check()


def test_the_names_of_ended_grants_are_forgotten_once_no_page_remembers_them():
    some = world().arena
    for number in range(5000):
        grant = some.reserve(f"request-{number}", Demand((1, 0)))
        some.commit([Order(grant, Demand((1, 0)))])
        some.release(grant)
    assert len(some.owners.names) < 2500
    assert "request-4999" in some.owners.names.values()

"""A checkpoint that only one request holds is handed over, not copied: hot then costs no more than cold."""

from __future__ import annotations

import pytest

from halocline.cache.ghosts import digests
from halocline.cache.keys import token_key
from halocline.errors import InvariantError
from halocline.memory.demand import Demand, resident
from halocline.memory.grant import Grant, Refusal
from halocline.memory.retention import Full, Sliding, State
from testing.cache import CacheWorld, arena_of

POOLS = ((Full(), 16, 5), (Sliding(40), 16, 1), (State(), 1, 1))


def world(slabs: int = 60) -> CacheWorld:
    w = CacheWorld(arena_of(*POOLS, slabs=slabs))
    w.serve(range(100), chunk=48)
    return w


def test_hot_costs_what_cold_does_when_the_checkpoint_is_handed_over():
    w = world()
    cold = Demand((4, 4, 1))
    assert w.tree.hot_demand(0, cold) == w.tree.hot_demand(96, cold, hand_over=True) == cold
    assert w.tree.hot_demand(96, cold) == Demand((4, 4, 2))


def test_the_checkpoint_is_the_working_state_then():
    w = world()
    (node,) = [node for node in w.tree.forest.nodes.values() if node.end == 6]
    checkpoint = node.pages[2].tolist()
    runner = w.enter(range(100), 9, hand_over=True)
    assert runner.resumed_at == 96
    assert runner.lock.handed[2].tolist() == runner.own[2].tolist() == checkpoint
    assert len(runner.lock.pages[2]) == 0
    assert runner.lock.grant.demand[2] == runner.lock.grant.held[2] == 1
    w.check()
    assert w.tree.match(token_key(range(100))).boundary_tokens == 48  # nobody else can resume at 96 any more
    assert w._wanted(runner, 4)[2] == 0
    assert w.compute([(runner, 4)])
    w.leave(runner)
    w.check()
    assert w.arena.budget.held == w.arena.budget.promised == [0, 0, 0]


def test_a_handed_over_checkpoint_is_no_ghost():
    """Ghosts are prompts that had to go for want of room; who comes back for one of them is worth less."""
    w = world()
    prefix = digests(token_key(range(100)), 6, w.tree.shape.granule_bytes)
    runner = w.enter(range(100), 9, hand_over=True)
    assert runner.lock.handed[2].tolist()
    assert not w.tree.marks.ghosts.knows(prefix, 0)
    w.leave(runner)


def test_what_others_lock_is_copied_as_ever():
    w = world()
    first, second = w.enter(range(100)), w.enter(range(100), hand_over=True)
    assert first.lock.pages[2].tolist() == second.lock.pages[2].tolist()
    assert second.lock.handed[2].tolist() == []
    w.check()
    w.tree.drop_states(first.lock)
    w.tree.drop_states(second.lock)
    third = w.enter(range(100), hand_over=True)
    assert len(third.lock.handed[2]) == 1
    w.check()


def test_what_somebody_reads_is_copied_as_ever():
    w = world()
    runner = w.enter(range(100))
    pin = w.arena.pin("transfer", runner.lock.pages)
    w.leave(runner)
    second = w.enter(range(100), hand_over=True)
    assert len(second.lock.handed[2]) == 0
    w.check()
    with pytest.raises(InvariantError, match="it is pinned"):
        w.arena.entrust(second.lock.grant, second.lock.pages)
    w.arena.unpin(pin)
    w.tree.loosened(pin.handles)
    w.check()


def test_an_arena_of_one_state_too_few_resumes_by_handing_over():
    """A copy does not fit: the lock that would make one is refused, the one that hands over is granted."""
    w = world()
    found = w.tree.match(token_key(range(100)))
    price = resident(w.layout, 100, 9, 96)
    grant = w.arena.reserve("others", Demand((0, 0, w.arena.most(2, w.tree.hot_demand(96, price, hand_over=True)))))
    assert isinstance(grant, Grant)
    before = [pool.state.copy() for pool in w.arena.pools]
    assert isinstance(w.tree.lock(found, 96, "copies", price), Refusal)
    assert all((pool.state == state).all() for pool, state in zip(w.arena.pools, before, strict=True))
    lock = w.tree.lock(found, 96, "takes over", price, hand_over=True)
    assert not isinstance(lock, Refusal)
    assert w.arena.audit() == w.tree.audit() == []
    w.tree.close(lock)
    w.arena.release(lock.grant)
    assert w.arena.audit() == w.tree.audit() == []


def test_a_refused_hand_over_leaves_the_checkpoint_where_it_is():
    w = world()
    found = w.tree.match(token_key(range(100)))
    grant = w.arena.reserve("others", Demand((0, w.arena.most(1, Demand((0, 0, 0))), 0)))
    assert isinstance(grant, Grant)
    assert isinstance(w.tree.lock(found, 96, "late", resident(w.layout, 100, 9, 96), hand_over=True), Refusal)
    assert w.tree.match(token_key(range(100))).boundary_tokens == 96
    w.check()


def test_a_page_that_came_back_to_the_grant_that_gave_it_is_held_once():
    w = CacheWorld(arena_of(*POOLS, slabs=60))
    runner = w.enter(range(100))
    assert w.compute([(runner, 40)])
    own = [pages[:1] for pages in runner.own]
    demand = runner.lock.grant.demand
    w.arena.adopt(runner.lock.grant, own)
    w.arena.entrust(runner.lock.grant, own)
    assert runner.lock.grant.demand == demand
    w.arena.release(runner.lock.grant)
    assert w.arena.budget.held[2] == 0

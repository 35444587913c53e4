"""Locks one by one: on nodes that are split under them, ended in any order, ended twice, handed on."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from halocline.cache.charges import unique
from halocline.cache.keys import token_key
from halocline.cache.locks import LockBook
from halocline.memory.demand import Demand
from halocline.memory.grant import Refusal
from halocline.memory.pool import CACHED, INDEX_MASK, LOCKED
from halocline.memory.retention import Full, Sliding, State
from testing.cache import CacheWorld, Runner, arena_of

POOLS = ((Full(), 16, 5), (Sliding(40), 16, 1), (State(), 1, 1))
PROMPTS = {
    "all": list(range(100)),
    "a branch at 48": [*range(48), *range(500, 540)],
    "a branch at 80": [*range(80), *range(600, 640)],
    "the beginning": list(range(33)),
}


def shared_path(pools: int = 3) -> CacheWorld:
    w = CacheWorld(arena_of(*POOLS[:pools], slabs=90))
    w.serve(range(100), chunk=16)
    return w


def lockers(w: CacheWorld, pool: int) -> int:
    return int(w.tree.forest.books[pool].lockers.sum())


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_locks_on_a_node_that_others_split_end_in_any_order(order):
    """Every request splits the one path at its own boundary; each lock covers its own path, no page more."""
    w = shared_path(2)
    runners: list[Runner] = []
    for prompt in PROMPTS.values():
        runners.append(w.enter(prompt))
        w.check()
    assert [runner.resumed_at for runner in runners] == [96, 48, 80, 32]
    assert sorted(node.end for node in w.tree.forest.nodes.values()) == [2, 3, 5, 6]
    left = [6, 3, 5, 2]
    assert lockers(w, 0) == sum(left)
    for at in order:
        w.leave(runners[at])
        w.check()
        left[at] = 0
        assert lockers(w, 0) == sum(left)
        assert int((w.arena.pools[0].state == LOCKED).sum()) == max(left)
    assert w.arena.budget.held == w.arena.budget.promised == [0, 0]
    assert int((w.arena.pools[0].state == CACHED).sum()) == 6


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_checkpoint_with_several_lockers_is_unlocked_by_the_last(order):
    w = shared_path()
    runners = [w.enter(PROMPTS["all"]) for _ in range(3)]
    (state,) = runners[0].lock.pages[2] & INDEX_MASK
    for number, at in enumerate(order):
        assert w.arena.pools[2].state[state] == LOCKED
        w.tree.drop_states(runners[at].lock)
        w.tree.drop_states(runners[at].lock)  # what is dropped is dropped
        assert w.tree.forest.books[2].lockers[state] == 2 - number
        w.check()
    assert w.arena.pools[2].state[state] == CACHED


def test_a_lock_ended_twice_is_a_defect_that_changes_nothing():
    w = shared_path()
    first, second = w.enter(PROMPTS["all"]), w.enter(PROMPTS["all"])
    w.tree.close(first.lock)
    before = [books.lockers.copy() for books in w.tree.forest.books]
    with pytest.raises(AssertionError, match="ended twice"):
        w.tree.close(first.lock)
    assert all((books.lockers == was).all() for books, was in zip(w.tree.forest.books, before, strict=True))
    w.arena.release(first.lock.grant)
    w.running.remove(first)
    w.check()
    w.leave(second)
    w.check()


def test_the_audit_sees_a_locker_counted_out_twice():
    w = shared_path()
    runner = w.enter(PROMPTS["all"])
    w.tree.forest.books[0].lockers[runner.lock.node.pages[0][0] & INDEX_MASK] -= 1
    assert {violation.law for violation in w.tree.audit()} == {"L5"}


def test_the_audit_sees_a_window_that_is_not_locked_up_to_what_was_inserted():
    w = shared_path()
    runner = w.enter(PROMPTS["all"])
    runner.lock.inserted -= 1
    assert "L7" in {violation.law for violation in w.tree.audit()}
    runner.lock.inserted += 2
    assert "L7" in {violation.law for violation in w.tree.audit()}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_charge_goes_to_whoever_has_waited_longest(order):
    """Three resume at one boundary: the pages of its window are paid by one, and by the next when that one leaves."""
    w = shared_path()
    runners = [w.enter(PROMPTS["all"], 30) for _ in range(3)]
    prices = [runner.price[1] for runner in runners]
    staying = list(range(3))
    for at in order:
        paid = [prices[i] - runners[i].lock.grant.demand[1] for i in staying]
        assert paid == [3] + [0] * (len(staying) - 1)
        committed = w.arena.budget.held[1] + w.arena.budget.promised[1]
        w.leave(runners[at])
        staying.remove(at)
        assert w.arena.budget.held[1] + w.arena.budget.promised[1] == committed - prices[at]
        w.check()


def test_handles_are_each_named_once_in_the_order_they_came():
    parts = [np.array([7, 3], np.int64), np.array([3, 9, 7], np.int64), np.array([1], np.int64)]
    assert unique(np.concatenate(parts)).tolist() == [7, 3, 9, 1]


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("running", list(PROMPTS))
@pytest.mark.parametrize("pools", [2, 3])
def test_a_lock_is_refused_at_a_glance_with_the_words_of_the_whole_question(monkeypatch, pools, running, pinned):
    """Whatever another one locks of the path: the early no is said where the arena's own is said, and is the same."""
    w = shared_path(pools)
    other = w.enter(PROMPTS[running])
    if pinned:  # what only a pin keeps is of the cache and counts already
        pin = w.arena.pin("a reader", [node_pages(w, pool) for pool in range(pools)])
        w.leave(other)
    refused = 0
    for more in range(60, 90):
        demand = Demand([more, more, 1][:pools])
        early = asked(w, demand)
        with monkeypatch.context() as patch:
            patch.setattr(LockBook, "_refusal", lambda *_: None)
            assert asked(w, demand) == early
        refused += early is not None
    assert 0 < refused < 30
    if pinned:
        w.tree.loosened(loosened(w, pin))
        return
    w.leave(other)
    w.check()


def asked(w: CacheWorld, demand: Demand) -> Refusal | None:
    """Ask for the whole path and `demand`; return the no, if it is one."""
    found = w.tree.match(token_key(range(100)))
    lock = w.tree.lock(found, found.boundary_tokens, "asker", demand)
    if isinstance(lock, Refusal):
        return lock
    w.tree.close(lock)
    w.arena.release(lock.grant)
    return None


def node_pages(w: CacheWorld, pool: int) -> np.ndarray:
    """Return what is locked of a pool."""
    held = w.arena.pools[pool]
    return held.handle_of[np.flatnonzero(held.state == LOCKED)]


def loosened(w: CacheWorld, pin) -> list[np.ndarray]:
    """End a pin; return its pages."""
    w.arena.unpin(pin)
    return list(pin.handles)


def test_the_audit_sees_pages_that_stand_elsewhere_than_the_books_say():
    w = shared_path()
    w.check()
    w.tree.forest.books[1].page[w.tree.forest.books[1].node.nonzero()[0][0]] += 1
    assert [(violation.law, "1 pages stand elsewhere" in violation.message) for violation in w.tree.audit()] == [
        ("L8", True)
    ]

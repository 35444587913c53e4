"""Windows and states restored under full pages that are held and locked (H8): only what is gone is computed again."""

from __future__ import annotations

import pytest

from halocline.cache.insert import Advance, Own
from halocline.cache.keys import token_key
from halocline.cache.node import TOMBSTONE
from halocline.errors import InvariantError
from halocline.memory.demand import Demand, resident
from halocline.memory.grant import NO_HANDLES, Grant, Refusal
from halocline.memory.retention import Chunked, Full, Sliding, State
from testing.cache import CacheWorld, arena_of, lose

WINDOWED = ((Full(), 16, 5), (Sliding(40), 16, 1))


def world(*pools, slabs=200) -> CacheWorld:
    return CacheWorld(arena_of(*(pools or WINDOWED), slabs=slabs))


def gap(tokens=97) -> CacheWorld:
    """Six full pages, and of the sliding ones only 0, 1 and 2: a request of 97 tokens resumes at 48."""
    w = world()
    w.serve(range(tokens))
    lose(w, 1, [3, 4, 5])
    return w


def test_the_worked_example_of_the_books():
    """See `halocline.cache.locks`: more sliding than full pages are asked for, and no full one is taken below 96."""
    w = gap()
    full_before = w.arena.budget.held[0] + w.arena.budget.cached[0]
    runner = w.enter(range(97), 2)
    lock = runner.lock
    assert (lock.resumed_tokens, lock.inserted_tokens, lock.full_tokens) == (48, 48, 96)
    assert runner.price == Demand((7, 4))
    assert lock.grant.demand == Demand((1, 1))
    assert w.arena.budget.locked == [6, 3]
    w.check()
    assert w._wanted(runner, 48) == Demand((0, 3))
    assert w.compute([(runner, 48)])
    assert (lock.inserted_tokens, lock.full_tokens) == (96, 96)
    assert w.arena.budget.held[0] + w.arena.budget.cached[0] == full_before
    assert w.arena.budget.locked == [6, 3]  # the window before 96 is locked now, pages 0 to 2 are not any more
    assert lock.grant.demand == Demand((1, 1))
    w.check()
    assert w.compute([(runner, 1)])
    w.leave(runner)
    w.check()
    assert w.arena.budget.held == w.arena.budget.promised == [0, 0]
    assert w.tree.match(token_key(range(97))).boundary_tokens == 96


@pytest.mark.parametrize("others", range(10, 20))
def test_a_restoring_request_is_let_in_exactly_when_its_whole_price_fits(others):
    """20 slabs; the price is 7 full pages in two slabs and 4 sliding ones in four: 14 more sliding pages fit beside."""
    w = CacheWorld(arena_of(*WINDOWED, slabs=20))
    w.serve(range(97))
    lose(w, 1, [3, 4, 5])
    found = w.tree.match(token_key(range(97)))
    price = resident(w.layout, 97, 2, 48)
    grant = w.arena.reserve("others", Demand((0, others)))
    assert isinstance(grant, Grant)
    before = [pool.state.copy() for pool in w.arena.pools]
    lock = w.tree.lock(found, 48, "restores", price)
    assert isinstance(lock, Refusal) == (others > 14)
    if isinstance(lock, Refusal):
        assert all((pool.state == state).all() for pool, state in zip(w.arena.pools, before, strict=True))
        assert not w.tree.locks.open
    else:
        budget = w.arena.budget
        committed = [held + promised for held, promised in zip(budget.held, budget.promised, strict=True)]
        assert committed == [7, 4 + others]
    assert w.arena.audit() == w.tree.audit() == []


@pytest.mark.parametrize("chunk", [1, 7, 16, 20, 33, 49])
def test_a_restored_path_is_what_it_was(chunk):
    w = gap()
    (full,) = [node.pages[0].tolist() for node in w.tree.forest.nodes.values()]
    assert w.serve(range(97), chunk=chunk) == 48
    nodes = sorted(w.tree.forest.nodes.values(), key=lambda node: node.start)
    assert [handle for node in nodes for handle in node.pages[0].tolist()] == full
    assert all((node.pages[1] != TOMBSTONE).all() for node in nodes)
    assert [node.end for node in nodes] == [3, 6]
    w.check()


def test_a_cold_start_locks_the_full_pages_too():
    w = gap()
    lose(w, 1, [0])
    runner = w.enter(range(97))
    assert (runner.lock.resumed_tokens, runner.lock.full_tokens) == (0, 96)
    assert runner.lock.grant.demand == Demand((7 - 6, 4))
    assert w.compute([(runner, 97)])
    w.leave(runner)
    w.check()


@pytest.mark.parametrize(("length", "full_tokens"), [(96, 80), (97, 96), (95, 80), (200, 96)])
def test_full_pages_are_locked_up_to_the_last_token_at_most(length, full_tokens):
    w = gap()
    assert w.enter(range(length)).lock.full_tokens == full_tokens
    w.check()


def test_a_branch_beyond_the_gap_is_locked_up_to_where_the_prompts_part():
    w = gap()
    runner = w.enter([*range(70), *range(500, 540)])
    assert (runner.lock.resumed_tokens, runner.lock.full_tokens) == (48, 64)
    assert w.compute([(runner, 110 - 48)])
    w.leave(runner)
    w.check()
    branch = w.enter([*range(70), *range(700, 740)])
    assert branch.resumed_at == 64  # the second request revealed the branch and left the window before it


def test_two_who_restore_at_once_share_what_the_first_brings():
    w = gap()
    a, b = w.enter(range(97)), w.enter(range(97))
    held = w.arena.budget.held[0]
    assert w.compute([(a, 30), (b, 48)])
    w.check()
    assert w.compute([(a, 18)])
    w.check()
    assert a.lock.pages[1].tolist() == b.lock.pages[1].tolist()
    assert w.arena.budget.held[0] == held == 6
    for runner in (a, b):
        w.leave(runner)
        w.check()


def test_windows_that_are_there_beyond_the_gap_are_swapped_for():
    w = world()
    w.serve(range(97))
    lose(w, 1, [3])  # pages 4 and 5 stay, but no boundary after 48 can be resumed
    runner = w.enter(range(97))
    assert (runner.lock.resumed_tokens, runner.lock.full_tokens) == (48, 96)
    (node,) = [node for node in w.tree.forest.nodes.values() if node.end == 6]
    kept = node.pages[1][-2:].tolist()
    assert w.compute([(runner, 48)])
    assert runner.lock.pages[1][-2:].tolist() == kept
    w.check()


def test_who_leaves_in_the_gap_leaves_what_it_restored():
    w = gap()
    runner = w.enter(range(97))
    assert w.compute([(runner, 20)])
    w.leave(runner)
    w.check()
    assert w.tree.match(token_key(range(97))).boundary_tokens == 64


def test_a_retracted_request_is_protected_where_it_stopped_in_the_gap():
    w = gap()
    runner = w.enter(range(97))
    assert w.compute([(runner, 20)])
    nothing = [Own(0, NO_HANDLES)] * 2
    w.tree.advance([Advance(runner.lock, token_key(range(97)), 64, 68, nothing, protect=True)])
    w.check()
    assert 4 in [mark.node.end for mark in w.tree.marks.marks.values()]
    w.leave(runner)
    w.check()


def test_a_state_is_restored_under_full_pages_and_where_the_prompt_is_cut():
    w = world((Full(), 16, 5), (State(), 1, 1))
    w.serve(range(100))  # in one chunk that ends beyond 96: no checkpoint is left
    runner = w.enter(range(100))
    assert (runner.lock.resumed_tokens, runner.lock.full_tokens) == (0, 96)
    assert w.compute([(runner, 48)])
    w.check()
    assert w.compute([(runner, 48)])
    w.leave(runner)
    assert w.serve([*range(48), *range(900, 950)]) == 48
    assert w.serve(range(100)) == 96
    w.check()


def test_two_windows_of_different_length_are_restored_from_the_boundary_of_both():
    w = world((Full(), 16, 5), (Sliding(40), 16, 1), (Sliding(90), 16, 1), (Chunked(32), 16, 2))
    w.serve(range(97))
    lose(w, 2, [2])
    runner = w.enter(range(97))
    assert (runner.lock.resumed_tokens, runner.lock.full_tokens) == (32, 96)
    assert w.compute([(runner, 65)])
    w.leave(runner)
    assert w.tree.match(token_key(range(97))).boundary_tokens == 96
    w.check()


def test_nobody_inserts_less_than_it_has():
    w = gap()
    runner = w.enter(range(97))
    with pytest.raises(InvariantError, match="inserts from 48 to 32"):
        w.tree.advance([Advance(runner.lock, token_key(range(97)), 32, 48, [Own(0, NO_HANDLES)] * 2)])
    w.check()


def test_pages_that_are_neither_the_trees_nor_the_requests_own_are_a_defect():
    w = gap()
    runner = w.enter(range(97))
    with pytest.raises(InvariantError, match="without holding them"):
        w.tree.advance([Advance(runner.lock, token_key(range(97)), 64, 64, [Own(0, NO_HANDLES)] * 2)])

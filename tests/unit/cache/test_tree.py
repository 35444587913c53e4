"""The tree case by case: how far a match goes and why, what a lock charges, what an insertion merges."""

from __future__ import annotations

import numpy as np
import pytest

from halocline.cache.insert import Advance, Own
from halocline.cache.keys import Namespace, block_key, common_granules, token_key
from halocline.cache.tree import Tree
from halocline.errors import InvariantError
from halocline.memory.demand import Demand, resident
from halocline.memory.grant import Order, Refusal
from halocline.memory.retention import Chunked, Full, Sliding, State
from testing.cache import CacheWorld, arena_of

WINDOWED = ((Full(), 16, 5), (Sliding(40), 16, 1))


def world(*pools, slabs=200) -> CacheWorld:
    return CacheWorld(arena_of(*(pools or WINDOWED), slabs=slabs))


def reason(w: CacheWorld, tokens) -> tuple[int, str]:
    found = w.tree.match(token_key(tokens))
    return found.boundary_tokens, found.reason


@pytest.mark.parametrize(
    ("length", "boundary", "why"),
    [(15, 0, "too short"), (16, 0, "too short"), (17, 16, "whole"), (64, 48, "whole"), (65, 64, "whole")],
)
def test_one_token_is_always_left_to_compute(length, boundary, why):
    w = world()
    w.serve(range(128), chunk=16)
    assert reason(w, range(length)) == (boundary, why)


def test_a_match_says_why_it_is_not_longer():
    w = world()
    assert reason(w, range(100)) == (0, "not keyed")
    w.serve(range(100))
    assert reason(w, range(100)) == (96, "whole")
    assert reason(w, [*range(50), *range(500, 550)]) == (48, "not keyed")
    assert w.tree.match(token_key(range(100)), 40).boundary_tokens == 32
    assert w.tree.match(token_key(range(100)), 40).reason == "limited"


def test_a_match_falls_back_to_the_boundary_whose_window_is_whole():
    """At b = 96 pages 3, 4, 5 are read, at 80 pages 2, 3, 4, at 64 pages 1, 2, 3, at 48 pages 0, 1, 2."""
    w = world()
    w.serve(range(100))
    (node,) = w.tree.forest.nodes.values()
    gone = node.pages[1][3:4].copy()
    w.arena.evict(1, gone)
    w.forget([np.zeros(0, np.int64), gone])
    found = w.tree.match(token_key(range(100)))
    assert (found.boundary_tokens, found.full_tokens, found.reason) == (48, 96, "window gone")
    assert list(w.tree.boundaries(found)) == [48, 32, 16, 0]
    w.check()


def test_a_state_resumes_at_its_own_boundary_only():
    w = world((Full(), 16, 5), (State(), 1, 1))
    w.serve(range(100), chunk=48)
    found = w.tree.match(token_key(range(100)))
    assert (found.boundary_tokens, found.reason) == (96, "whole")
    assert reason(w, range(90)) == (48, "state missing")


def test_a_chunked_pool_resumes_from_where_its_attention_restarts():
    w = world((Full(), 16, 5), (Chunked(64), 16, 1))
    w.serve(range(100))
    (node,) = w.tree.forest.nodes.values()
    gone = node.pages[1][:3].copy()  # [0, 48): read at boundaries up to 48, not at 64 and later
    w.arena.evict(1, gone)
    w.forget([np.zeros(0, np.int64), gone])
    assert reason(w, range(100)) == (96, "whole")
    assert reason(w, range(60)) == (0, "window gone")


def test_keys_of_other_namespaces_do_not_match():
    w = world()
    w.serve(range(100))
    for other in (Namespace(adapter="a"), Namespace(salt="s"), Namespace(model="m")):
        assert w.tree.match(token_key(range(100), other)).reason == "not keyed"


@pytest.mark.parametrize("agree", range(9))
def test_the_border_of_an_edge_is_found_by_halving(agree):
    edge = bytes(range(1, 33))
    data = b"\0" * 8 + edge[: agree * 4] + b"\0" * 40
    assert common_granules(edge, data, 8, 4) == agree
    assert common_granules(edge, data[: 8 + agree * 4], 8, 4) == agree


def test_opaque_blocks_go_through_the_same_tree():
    arena = arena_of((Full(), 16, 5), (Sliding(40), 16, 1), slabs=60)
    tree = Tree(arena, granule_tokens=32, granule_bytes=8)
    key = block_key([7, 8, 9], 100)
    lock = tree.lock(tree.match(key), 0, "first", resident(arena.layout, 100, 1))
    step = arena.reserve("step", Demand((0, 5)))
    handles = arena.commit([Order(lock.grant, Demand((6, 6)), step)]).handles[0]
    tree.advance([Advance(lock, key, 96, 96, [Own(0, pages) for pages in handles], protect=True)])
    arena.release(step)
    tree.close(lock)
    arena.release(lock.grant)
    assert tree.match(block_key([7, 8, 9], 100)).boundary_tokens == 96
    assert tree.match(block_key([7, 8, 5], 100)).boundary_tokens == 64
    assert tree.audit() == arena.audit() == []


def test_the_worked_example_of_the_books():
    """A and B lock one prefix: see `halocline.cache.locks`. Here each also gives the tree the pages that it fills."""
    w = world((Full(), 16, 5), (Sliding(48), 16, 1))
    prompt = list(range(97))
    w.serve(prompt)
    a, b = w.enter(prompt, 40), w.enter(prompt, 40)

    def books() -> tuple[int, int, int]:
        return w.arena.budget.held[1], a.lock.grant.demand[1], b.lock.grant.demand[1]

    assert books() == (3, 1, 4)
    for runner, other in ((a, 5), (b, 6)):
        for position in range(96, 112):
            runner.tokens += [other] if position > 96 else []
            assert w.compute([(runner, 1)])
            w.check()
        # Page 3 is passed, and page 6, just filled, is the tree's and charged to whoever computed it.
        assert books() == (4, 1, 3)
    w.leave(a)
    assert b.lock.grant.demand[1] == 1
    w.check()
    w.leave(b)
    w.check()
    assert w.arena.budget.held == w.arena.budget.promised == [0, 0]


def test_full_tokens_grow_with_what_the_tree_adopts():
    w = world()
    runner = w.enter(range(100))
    assert runner.lock.full_tokens == 0
    for computed, whole in ((40, 32), (48, 48), (100, 96)):
        assert w.compute([(runner, computed - runner.computed)])
        assert runner.lock.full_tokens == whole
    w.leave(runner)
    assert w.enter(range(100)).lock.full_tokens == 96


def test_the_first_insertion_wins_and_the_second_swaps():
    w = world()
    a, b = w.enter(range(60)), w.enter(range(60))
    assert w.compute([(a, 60), (b, 60)])
    w.check()
    assert w.arena.budget.held[0] == 3 + 2  # three shared pages, and each one's last partial page
    assert a.lock.node is b.lock.node
    for runner in (a, b):
        w.leave(runner)
        w.check()


def test_a_refused_lock_changes_nothing():
    w = world(slabs=9)
    w.serve(range(60))
    before = [pool.state.copy() for pool in w.arena.pools]
    assert w.enter([*range(60), *range(900, 1400)], 2000) is None
    assert all((pool.state == state).all() for pool, state in zip(w.arena.pools, before, strict=True))
    assert len(w.tree.locks.open) == 0
    assert w.tree.lock(w.tree.match(token_key(range(10))), 0, "x", Demand((999, 0))).__class__ is Refusal
    w.check()


def test_a_stale_match_is_a_defect():
    w = world()
    w.serve(range(60))
    found = w.tree.match(token_key(range(60)))
    pages = [node.pages[0] for node in w.tree.forest.nodes.values()]
    w.arena.evict(0, pages[0])
    w.forget([pages[0], np.zeros(0, np.int64)])
    with pytest.raises(InvariantError, match="stale match"):
        w.tree.lock(found, 48, "late", Demand((9, 9)))
    w.check()


def test_a_decode_lengthens_one_node_instead_of_growing_a_chain():
    w = world()
    w.serve(range(40), output=400)
    assert len(w.tree.forest.nodes) == 2
    w.check()


def test_who_leaves_in_the_middle_of_a_step_leaves_no_hole_in_the_books():
    """B computes a chunk and has borrowed for it when A leaves: B takes A's charges over and owes the room."""
    w = world()
    w.serve(range(100))
    a, b = w.enter(range(100), 20), w.enter([*range(100), *range(900, 990)], 20)
    step = w.arena.reserve("step", Demand((0, 6)))
    wanted = w._wanted(b, 90)
    fresh = w.arena.commit([Order(b.lock.grant, wanted, step)])
    w.forget(fresh.evicted)
    w.leave(a)
    assert any(b.lock.owed)
    w.check()
    w._fill(b, 90, fresh.handles[0])
    w.advance([b])
    w.arena.release(step)
    w.check()
    assert not any(b.lock.owed)
    w.leave(b)
    w.check()


def test_a_hot_start_with_a_state_costs_one_state_more_than_a_cold_one():
    w = world((Full(), 16, 5), (State(), 1, 1))
    assert w.tree.hot_demand(0, Demand((4, 1))) == Demand((4, 1))
    assert w.tree.hot_demand(48, Demand((4, 1))) == Demand((4, 2))


def test_pages_whose_pin_ends_take_their_place_in_the_order_again():
    w = world()
    w.serve(range(100))
    runner = w.enter(range(100))
    pin = w.arena.pin(
        "transfer",
        [
            node.pages[0] if pool == 0 else runner.lock.pages[1]
            for pool, node in enumerate([*w.tree.forest.nodes.values()] * 2)
        ],
    )
    w.leave(runner)
    w.arena.unpin(pin)
    w.tree.loosened(pin.handles)
    w.check()

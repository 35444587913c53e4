"""What clients can choose freely must not cost what nobody gets back: salts, and how often a conversation goes on."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from halocline.cache.keys import Namespace
from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Order
from halocline.memory.retention import Full, Sliding
from testing.cache import HYBRID, CacheWorld, arena_of, session

TURNS = 120


@contextmanager
def frames_left(count: int) -> Iterator[None]:
    """Allow only so many nested calls, as if the tree were ten times as deep and the interpreter as it comes."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + count)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@pytest.fixture(scope="module")
def conversation() -> CacheWorld:
    """One conversation that went on a granule at a time: a chain of as many nodes, each with a mark."""
    world = CacheWorld(arena_of((Full(), 4, 4), (Sliding(5), 4, 4), slabs=TURNS))
    tokens: list[int] = []
    before = None
    for turn in range(TURNS):
        tokens += range(4 * turn, 4 * turn + 4)
        runner = world.enter([*tokens, 1])
        assert runner is not None
        if before is not None:
            world.leave(before)  # only now: so the path stays locked, which keeps this quick
        assert world.compute([(runner, len(runner.tokens) - runner.computed)])
        before = runner
    assert before is not None
    world.leave(before)
    assert len(world.tree.forest.nodes) == TURNS
    return world


def take(world: CacheWorld, grant: Grant, pages: int) -> None:
    """Commit so many full pages, evicting what must go."""
    world.forget(world.arena.commit([Order(grant, Demand([pages, 0]))]).evicted)


def test_a_salt_leaves_nothing_behind_when_its_last_page_is_evicted() -> None:
    world = CacheWorld(arena_of(*HYBRID, slabs=20))
    for number in range(40):
        runner = world.enter(session(number), namespace=Namespace(salt=str(number)))
        assert runner is not None
        assert world.compute([(runner, len(runner.tokens))])
        world.leave(runner)
    forest = world.tree.forest
    kept = {space for space, root in forest.roots.items() if root.children}
    assert set(forest.roots) == kept
    assert 0 < len(kept) < 20, "the arena holds a few sessions"
    world.check()


def test_a_salt_under_which_somebody_computes_keeps_its_root_though_nothing_is_cached() -> None:
    world = CacheWorld(arena_of(*HYBRID, slabs=20))
    space = Namespace(salt="one")
    first, second = world.enter(session(0), namespace=space), world.enter(session(1), namespace=space)
    assert first is not None
    assert second is not None
    world.leave(first)
    assert world.compute([(second, len(second.tokens))])
    assert list(world.tree.forest.roots) == [space]
    world.leave(second)
    assert world.enter(session(1), namespace=space) is not None
    assert world.hits == 52, "13 whole granules of 54 tokens"
    world.check()


def test_a_conversation_of_any_length_is_evicted_bit_by_bit_and_all_at_once(conversation: CacheWorld) -> None:
    world, pages = conversation, 4 * TURNS
    grant = world.arena.reserve("others", Demand([pages, 0]))
    assert isinstance(grant, Grant)
    with frames_left(80):
        take(world, grant, pages - TURNS)
        for _ in range(8):
            take(world, grant, 8)
        assert 0 < len(world.tree.forest.nodes) < TURNS
        take(world, grant, pages - grant.held[0])
    assert not world.tree.forest.nodes
    world.check()
    world.arena.release(grant)


def test_the_end_of_a_path_is_found_without_its_beginning() -> None:
    world = CacheWorld(arena_of((Full(), 4, 4), (Sliding(5), 4, 4), slabs=8))
    for length in (4, 8, 12):
        world.serve([*range(length), 1])
    (node,) = [node for node in world.tree.forest.nodes.values() if not node.children]
    assert [each.end for each in node.path()] == [1, 2, 3]
    assert [each.end for each in node.path(1)] == [2, 3]
    assert node.path(3) == []


def test_the_audit_sees_a_root_that_nobody_needs() -> None:
    world = CacheWorld(arena_of(*HYBRID, slabs=20))
    world.tree.forest.root(Namespace(salt="left behind"))
    (found,) = world.tree.audit()
    assert "left behind" in str(found)

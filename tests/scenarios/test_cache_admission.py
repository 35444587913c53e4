"""A2 of the scenarios on the tree and the arena: a cached window is charged once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halocline.cache.keys import token_key
from halocline.cache.lock import Lock
from halocline.cache.tree import Tree
from halocline.memory.demand import Demand, floor_demand, resident
from halocline.memory.grant import Refusal
from halocline.memory.retention import Full, Sliding
from testing.cache import CacheWorld, arena_of

SPLIT_OR_SHARED = pytest.mark.parametrize("caps", [(8, 4), None], ids=["split", "shared"])
POOLS = ((Full(), 4, 1), (Sliding(8), 4, 1))
PREFIX = tuple(range(16))
PROMPT = (*PREFIX, 90, 91, 92, 93, 94)
"""Twice the window cached, and 5 tokens left to compute."""
WINDOW_PAGES = 2
"""The last 7 positions before 16."""
Resumes = Callable[[Tree, Demand], Lock | Refusal]


def a2_world(caps: tuple[int, int] | None) -> CacheWorld:
    """S = 16 tokens, 2 W. Shared: the fewest slabs in which the request fits alone beside the floor."""
    layout = arena_of(*POOLS, slabs=1).layout
    alone = resident(layout, len(PROMPT), 2).plus(floor_demand(layout))
    assert alone == (6, 3 + 1)
    world = CacheWorld(arena_of(*POOLS, slabs=sum(caps or alone), caps=caps))
    assert not arena_of(*POOLS, slabs=sum(alone) - 1).fits_empty(alone)
    world.serve((*PREFIX, 89), chunk=4)
    return world


def charged_once(tree: Tree, price: Demand) -> Lock | Refusal:
    """Lock and price in one call: the window's cached pages stand in place of as many of the demand."""
    found = tree.match(token_key(PROMPT))
    assert found.boundary_tokens == len(PREFIX)
    return tree.lock(found, len(PREFIX), "request-7", price)


def charged_twice(tree: Tree, price: Demand) -> Lock | Refusal:
    """The wrong policy: a whole window is charged beside the one that is cached and locked."""
    found = tree.match(token_key(PROMPT))
    return tree.lock(found, len(PREFIX), "request-7", price.plus(Demand((0, WINDOW_PAGES))))


def check_a2(caps: tuple[int, int] | None, resumes: Resumes) -> None:
    world = a2_world(caps)
    price = resident(world.layout, len(PROMPT), 2, len(PREFIX))
    lock = resumes(world.tree, price)
    assert isinstance(lock, Lock), f"it must start at once: {lock.message}"
    assert len(lock.pages[1]) == WINDOW_PAGES
    assert lock.grant.demand == (6 - 4, 3 - WINDOW_PAGES)
    world.tree.close(lock)
    world.arena.release(lock.grant)
    runner = world.enter(PROMPT, 2)
    assert runner is not None
    assert runner.computed == len(PREFIX)
    assert world.compute([(runner, 5)])
    world.check()
    world.leave(runner)
    world.check()


@SPLIT_OR_SHARED
def test_a2_a_request_that_resumes_on_a_cached_window_starts_at_once(caps: tuple[int, int] | None) -> None:
    check_a2(caps, charged_once)


@SPLIT_OR_SHARED
def test_a2_bites_when_a_second_window_is_charged(caps: tuple[int, int] | None) -> None:
    with pytest.raises(AssertionError, match="must start at once"):
        check_a2(caps, charged_twice)

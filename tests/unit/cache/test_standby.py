"""The end of an output can be resumed even when what left the windows dies at once, whatever token it ends with."""

from __future__ import annotations

import numpy as np
import pytest

from halocline.cache.keys import token_key
from halocline.cache.node import gather
from halocline.memory.evictable import NO_UNIT
from halocline.memory.pool import CACHED, INDEX_MASK
from halocline.memory.retention import Chunked, Full, Sliding
from testing.cache import CacheWorld, Runner, arena_of

SHAPES = {
    "small pages": ((Full(), 16, 2), (Sliding(40), 4, 3)),
    "a window below a granule": ((Full(), 16, 2), (Sliding(9), 4, 3)),
    "two windows": ((Full(), 16, 2), (Sliding(40), 8, 3), (Sliding(20), 2, 5)),
    "chunked": ((Full(), 16, 2), (Chunked(24), 4, 3)),
    "pages of a granule": ((Full(), 16, 2), (Sliding(40), 16, 1)),
    "and of the window": ((Full(), 16, 2), (Sliding(48), 16, 1)),
}


def lose_loose(world: CacheWorld) -> None:
    """Everything that goes before any unit is gone."""
    died = []
    for number, pool in enumerate(world.arena.pools):
        loose = np.flatnonzero((pool.state == CACHED) & (world.arena.ranking.member[number] == NO_UNIT))
        died.append(pool.handle_of[loose])
        world.arena.evict(number, died[-1])
    world.forget(died)


def decode(world: CacheWorld, runner: Runner, tokens: int) -> None:
    for _ in range(tokens):
        if runner.computed == len(runner.tokens):
            runner.tokens.append(7000 + runner.computed)
        assert world.compute([(runner, 1)])
        lose_loose(world)
    world.check()


@pytest.mark.parametrize("output", [1, 14, 18, 20, 25, 29, 30, 31, 35, 62, 66, 70, 74, 77, 78])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_output_can_be_resumed_at_its_last_granule_wherever_it_ends(shape, output):
    world = CacheWorld(arena_of(*SHAPES[shape], slabs=60))
    runner = world.enter(range(50), output + 1)
    assert world.compute([(runner, 50)])
    decode(world, runner, output)
    history = [*runner.tokens, 1, 2, 3]
    world.leave(runner)
    lose_loose(world)
    assert world.tree.match(token_key(history)).boundary_tokens == (50 + output) // 16 * 16


def test_no_more_than_a_granule_stands_by_and_nothing_once_the_request_has_left():
    world = CacheWorld(arena_of(*SHAPES["small pages"], slabs=60))
    runner = world.enter(range(64), 200)
    assert world.compute([(runner, 64)])
    most = 0
    for _ in range(100):
        decode(world, runner, 1)
        cached = int((world.arena.pools[1].state == CACHED).sum())
        kept = {page for mark in world.tree.marks.marks.values() for page in world.tree.marks.tail(mark, 1).tolist()}
        most = max(most, cached - len(kept))
    assert most == 4  # G / P
    world.tree.close(runner.lock)
    lose_loose(world)
    kept = {page for mark in world.tree.marks.marks.values() for page in world.tree.marks.tail(mark, 1).tolist()}
    assert int((world.arena.pools[1].state == CACHED).sum()) == len(kept)
    assert world.tree.audit() == world.arena.audit() == []


def test_what_another_one_locks_or_a_mark_keeps_stands_by_for_nobody():
    world = CacheWorld(arena_of(*SHAPES["small pages"], slabs=90))
    runner = world.enter(range(50), 90)
    assert world.compute([(runner, 50)])
    decode(world, runner, 75)  # 125 computed: the boundary 112 reads pages 18 to 27, and 18, 19, 20 are passed

    def units() -> list[int]:
        pages = gather(runner.lock.node.path(), world.tree.shape, 1, 18, 21)
        return world.arena.ranking.member[1][pages & INDEX_MASK].tolist()

    standing = units()
    assert standing[0] != NO_UNIT
    assert len(set(standing)) == 1
    other = world.enter([*runner.tokens[:112], *range(900, 930)])
    assert other.resumed_at == 112
    assert units() == [NO_UNIT] * 3
    decode(world, runner, 1)
    assert units() == [NO_UNIT] * 3
    world.leave(other)
    world.check()
    kept = {mark.tail.id for mark in world.tree.marks.marks.values() if mark.tail is not None}
    assert set(units()) <= kept  # the other one has resumed there: its mark keeps them now
    decode(world, runner, 6)
    world.leave(runner)
    world.check()


def test_the_audit_names_what_stands_by_for_nobody():
    world = CacheWorld(arena_of(*SHAPES["small pages"], slabs=60))
    runner = world.enter(range(64), 99)
    assert world.compute([(runner, 64)])
    decode(world, runner, 62)
    assert world.tree.audit() == []
    page = next(iter(world.tree._standby._units.values()))[0][1][0] & INDEX_MASK
    world.tree.forest.books[1].mark[page] = next(iter(world.tree.marks.marks))
    assert any("that a mark keeps stand by" in violation.message for violation in world.tree.audit())
    world.tree.forest.books[1].mark[page] = 0
    lock_id = runner.lock.id
    lock = world.tree.locks.open.pop(lock_id)
    assert any("which has ended" in violation.message for violation in world.tree.audit())
    world.tree.locks.open[lock_id] = lock
    assert world.tree.audit() == []

"""The second level of the prefix cache: what is written back, what is loaded, and what is left alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from halocline.cache.keys import token_key
from halocline.cache.tier import Tier
from halocline.errors import InvariantError
from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Order
from halocline.memory.host import HostArena, HostCopies, HostCosts
from halocline.memory.pool import CACHED, LOCKED
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State
from testing.cache import HYBRID, arena_of, session
from testing.tier import TieredWorld

KINDS: dict[str, tuple[tuple[Retention, int, int], ...]] = {
    "sliding": ((Full(), 2, 2), (Sliding(4), 2, 1)),
    "one to five": HYBRID,
    "small pages": ((Full(), 4, 1), (Sliding(5), 2, 2)),
    "chunked": ((Full(), 2, 2), (Chunked(4), 2, 2)),
    "state": ((Full(), 2, 2), (State(), 1, 1)),
    "three kinds": ((Full(), 2, 2), (Sliding(3), 1, 3), (State(), 1, 1)),
    "full": ((Full(), 4, 3),),
    "windows only": ((Sliding(9), 4, 2), (Sliding(5), 2, 3)),
}


def squeeze(world: TieredWorld, *, slabs: int | None = None) -> None:
    """Let somebody take the whole arena, or so many slabs of pool 0, for a moment: everything unlocked dies."""
    pools = len(world.layout.pools)
    most = world.arena.most(0, Demand((0,) * pools))
    pages = most if slabs is None else slabs * world.layout.pools[0].pages_per_slab
    grant = world.arena.reserve("another", Demand(pages if pool == 0 else 0 for pool in range(pools)))
    assert isinstance(grant, Grant)
    world.carry_out(world.arena.commit([Order(grant, grant.demand)]))
    world.arena.release(grant)


def lose_all(world: TieredWorld) -> None:
    """Let all that nobody locks die at once, whatever else is promised."""
    died = [pool.handle_of[np.flatnonzero(pool.state == CACHED)] for pool in world.arena.pools]
    for pool, handles in enumerate(died):
        world.arena.evict(pool, handles)
    world.forget(died)


def offer(world: TieredWorld, tokens: list[int]):
    return world.tier.offer(world.tree.match(token_key(tokens)))


# ---- there and back


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_device_lost_is_loaded_from_the_host_and_is_the_trees_again(kind: str) -> None:
    world = TieredWorld(arena_of(*KINDS[kind], slabs=60), host_slabs=60)
    text = list(range(1, 42))
    world.serve(text, chunk=8)
    squeeze(world)
    assert world.tree.match(token_key(text)).boundary_tokens == 0
    world.check()
    assert world.serve(text) == 40
    world.check()
    assert world.tier.counts.loads == 1
    assert world.tier.counts.loaded_tokens == 40
    if not world.tree.shape.states:  # a state that was loaded is the working state, and no checkpoint
        assert world.serve(text) == 40
        assert world.tier.counts.loads == 1


def test_the_bytes_of_a_load_are_those_of_the_pages_in_the_window_and_of_the_full_pages_that_are_lacking() -> None:
    """W = 9, P = 4, b = 48: pages 10 and 11 of the window, whose pages are five full ones long; 12 full pages."""
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=40)
    text = session(1)
    world.serve(text)
    squeeze(world)
    full, window = (pool.stride_bytes for pool in world.layout.pools)
    found = offer(world, text)
    assert (found.verdict, found.boundary_tokens, found.device_tokens) == ("host", 52, 0)
    assert found.bytes == 13 * full + 2 * window
    world.serve(text)
    assert world.tier.counts.loaded_bytes == found.bytes


def test_full_pages_that_the_device_still_has_are_not_loaded() -> None:
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=40)
    text = session(1)
    world.serve(text)
    node = max(world.tree.forest.nodes.values(), key=lambda node: node.end)
    assert node.mark is not None
    tail = world.tree.marks.tail(node.mark, 1)
    world.arena.evict(1, tail)
    world.forget([np.zeros(0, np.int64), tail])
    world.check()
    full, window = (pool.stride_bytes for pool in world.layout.pools)
    assert world.tree.match(token_key(text)).full_tokens == 52
    assert offer(world, text).bytes == 2 * window
    assert world.serve(text) == 52
    assert world.tier.counts.written_bytes == 13 * full + 2 * window
    world.check()


def test_pages_that_merely_left_a_window_are_not_written_back() -> None:
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=40)
    world.serve(session(1))
    loose = world.arena.pools[1].queue.length
    assert loose > 0
    squeeze(world, slabs=world.arena.figures().free_bytes // world.layout.slab_bytes + loose)
    assert world.arena.pools[1].queue.length == 0
    assert world.tier.counts.written == 0
    assert not world.tier.tree.forest.nodes


def test_a_boundary_that_is_on_the_host_already_is_not_written_twice() -> None:
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=40)
    text = session(1)
    for _ in range(3):
        world.serve(text)
        squeeze(world)
    assert world.tier.counts.written == 1
    world.check()


def test_a_second_branch_writes_its_own_part_of_the_path_only() -> None:
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=40)
    one, two = [*range(24), *range(100, 125)], [*range(24), *range(200, 225)]
    world.serve(one)
    squeeze(world)
    before = world.tier.counts.written_bytes
    world.serve(two)
    squeeze(world)
    full, window = (pool.stride_bytes for pool in world.layout.pools)
    assert before == 12 * full + 2 * window
    branch = 2 * window  # the window before the branch that the second one revealed
    assert world.tier.counts.written_bytes - before in (6 * full + 2 * window, 6 * full + 2 * window + branch)
    world.check()


def test_the_branch_slack_goes_along() -> None:
    """With 8 tokens of slack the window before 52 - 8 = 44 is kept: the host resumes there, too."""
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=40, slack_tokens=8)
    text = session(1)
    world.serve(text)
    squeeze(world)
    shorter = [*text[:45], *range(7000, 7008)]
    assert offer(world, shorter).boundary_tokens == 44
    assert world.serve(shorter) == 44
    world.check()


# ---- whether to load


def test_a_load_that_takes_longer_than_computing_is_not_made() -> None:
    """52 tokens at 1 a second are 52 s; their bytes at a rate just below and just above bytes / 52 s."""
    full, window = (pool.stride_bytes for pool in arena_of(*HYBRID, slabs=1).layout.pools)
    size = 13 * full + 2 * window
    for rate, verdict, hit in ((size / 52 - 0.01, "not worth it", 0), (size / 52 + 0.01, "host", 52)):
        world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=40, costs=HostCosts(rate, 1.0))
        text = session(1)
        world.serve(text)
        squeeze(world)
        assert offer(world, text).verdict == verdict
        assert world.serve(text) == hit


def test_what_the_device_has_is_not_asked_of_the_host() -> None:
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=40)
    text = session(1)
    world.serve(text)
    found = offer(world, text)
    assert (found.verdict, found.boundary_tokens, found.device_tokens) == ("no longer", 52, 52)


def test_another_namespace_is_another_prefix_on_the_host_too() -> None:
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=40)
    text = session(1)
    world.serve(text)
    squeeze(world)
    salted = token_key(text, token_key([]).namespace.__class__(salt="other"))
    assert world.tier.offer(world.tree.match(salted)).verdict == "no longer"


# ---- the host's room


def test_the_host_keeps_what_is_worth_most_and_never_more_than_its_quota() -> None:
    """Six sessions of 33 KiB each through a host that holds three: the last ones are there."""
    world = TieredWorld(arena_of(*HYBRID, slabs=30), host_slabs=16)
    sessions = [session(number) for number in range(6)]
    for text in sessions:
        world.serve(text)
        squeeze(world)
        figures = world.host.figures()
        assert figures.used_bytes <= world.host.quota_bytes
        world.check()
    there = [offer(world, text).boundary_tokens for text in sessions]
    assert there[-1] == 52
    assert there[0] == 0
    assert 0 < sum(map(bool, there)) < 6


def test_grants_on_the_host_go_before_cached_pages() -> None:
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=8)
    text = session(1)
    world.serve(text)
    squeeze(world)
    assert offer(world, text).verdict == "host"
    demand = Demand((0, 8))
    grant = world.host.reserve("copy of a request", demand)
    assert isinstance(grant, Grant)
    done = world.host.arena.commit([Order(grant, demand)])
    world.tier.host_evicted(done.evicted)
    world.check()
    assert offer(world, text).verdict == "no longer"
    world.serve(session(2))
    squeeze(world)
    assert world.tier.counts.refused == 1
    world.check()


def test_a_load_that_finds_the_host_full_of_grants_is_not_made() -> None:
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=8)
    text = session(1)
    world.serve(text)
    squeeze(world)
    grant = world.host.reserve("copy of a request", Demand((0, 7)))  # promised: nothing is evicted yet
    assert isinstance(grant, Grant)
    assert offer(world, text).verdict == "no room"
    assert world.serve(text) == 0
    world.host.arena.release(grant)
    world.check()


def test_pages_under_a_load_are_neither_evicted_nor_written() -> None:
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=8)
    text = session(1)
    world.serve(text)
    squeeze(world)
    runner = world.enter(text)
    assert runner is not None
    read = sum(int((pool.state == LOCKED).sum()) for pool in world.host.arena.pools)
    assert read == 13 + 2
    world.serve(session(2))
    lose_all(world)
    assert world.tier.counts.refused == 1  # there was no room beside what is locked
    world.check()
    assert world.compute([(runner, 2)])
    world.leave(runner)
    world.check()
    assert not world.tier.tree.locks.open


def test_who_leaves_before_the_load_gives_the_host_its_pages_back() -> None:
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=40)
    text = session(1)
    world.serve(text)
    squeeze(world)
    runner = world.enter(text)
    assert runner is not None
    world.leave(runner)
    world.check()
    assert not any(world.host.arena.budget.locked)
    assert world.serve(text) == 52


def test_what_was_loaded_has_proven_itself_on_both_levels() -> None:
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=40)
    text = session(1)
    world.serve(text)
    squeeze(world)
    world.serve(text)
    for tree in (world.tree, world.tier.tree):
        (proven,) = [mark for mark in tree.marks.marks.values() if mark.node.end == 13]
        assert proven.proven


# ---- copies and moves


def test_places_are_told_as_they_were_before_the_moves_of_the_commit() -> None:
    """Pages that die with a commit, and those that it moves, are read where they lay."""
    moved = 0
    for seed in range(16):
        draw = random.Random(seed)
        world = TieredWorld(arena_of((Full(), 4, 7), (Sliding(5), 2, 5), slabs=9), host_slabs=30)
        for number in range(14):
            base = draw.randint(0, 3) * 100
            world.serve([*range(base, base + draw.randint(5, 30)), *range(5000 + number * 10, 5003 + number * 10)])
            world.check()
        moved += world.arena.moves_planned
    assert moved > 5


def test_the_host_moves_its_own_pages_in_the_order_of_the_work() -> None:
    moved = 0
    for seed in range(16):
        draw = random.Random(seed)
        world = TieredWorld(arena_of((Full(), 4, 7), (Sliding(5), 2, 5), slabs=9), host_slabs=5)
        for number in range(14):
            base = draw.randint(0, 3) * 100
            world.serve([*range(base, base + draw.randint(5, 30)), *range(5000 + number * 10, 5003 + number * 10)])
            world.check()
        moved += world.host.arena.moves_planned
    assert moved > 5


def test_the_worlds_see_a_copy_from_the_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instrument itself: pages told as they lie after the moves are found out."""
    monkeypatch.setattr(
        "halocline.cache.writeback.Before.places",
        lambda self, pool, handles: self._arena.pools[pool].place[handles & 0xFFFFFFFF],
    )
    with pytest.raises(AssertionError, match="host: pool"):
        test_places_are_told_as_they_were_before_the_moves_of_the_commit()


def test_nothing_is_kept_when_copies_were_perhaps_not_made() -> None:
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=40)
    world.serve(session(1))
    squeeze(world)
    world.tier.distrust()
    assert not world.tier.tree.forest.nodes
    assert offer(world, session(1)).verdict == "no longer"
    world.check()


def test_a_host_with_other_pages_is_refused() -> None:
    device, other = (TieredWorld(arena_of(*KINDS[kind], slabs=9), host_slabs=9) for kind in ("sliding", "small pages"))
    with pytest.raises((AssertionError, InvariantError), match="are not those of the device"):
        Tier(device.tree, HostArena(other.layout, 9 * other.layout.slab_bytes))


def test_the_work_of_a_write_back_names_pages_of_both_arenas() -> None:
    world = TieredWorld(arena_of(*HYBRID, slabs=40), host_slabs=40)
    world.serve(session(1))
    places = {pool: set(world.on_device[pool]) for pool in (0, 1)}
    most = world.arena.most(0, Demand((0, 0)))
    grant = world.arena.reserve("another", Demand((most, 0)))
    assert isinstance(grant, Grant)
    done = world.arena.commit([Order(grant, grant.demand)])
    world.tier.forget(done.evicted, done.moves)
    work = world.host.take_work()
    copies = [each for each in work if isinstance(each, HostCopies)]
    assert [(each.pool, len(each.device_pages)) for each in copies] == [(0, 13), (1, 2)]
    for each in copies:
        assert set(each.device_pages.tolist()) <= places[each.pool]
        assert len(set(each.host_pages.tolist())) == len(each.host_pages)

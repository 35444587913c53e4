"""L11, L12 and I1 with a host arena: tokens, decisions and quotas when retracted requests keep their pages there."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Refusal
from halocline.memory.host import HostArena, HostCopies, HostCosts, HostMoves
from halocline.memory.retention import Chunked, Full, Sliding, State
from halocline.step import StepPlan
from testing.oracle import FakeBackend
from testing.schedule import (
    FOUR_POOLS,
    FULL_AND_WINDOW,
    MIXED,
    THREE_POOLS,
    PoolSpec,
    World,
    fewest_slabs,
    greedy,
    prompt,
    rules,
    tiny_layout,
)

SHAPES: dict[str, tuple[PoolSpec, ...]] = {
    "pages-1": ((Full(), 1, 16), (Sliding(3), 1, 8)),
    "pages-4": FULL_AND_WINDOW,
    "unequal": ((Full(), 16, 1), (Sliding(9), 4, 3), (Chunked(6), 1, 5)),
    "state": THREE_POOLS,
    "four-pools": FOUR_POOLS,
    "pages-16": ((Full(), 16, 2), (Sliding(20), 16, 1)),
    "state-first": ((State(), 1, 2), (Full(), 4, 3)),
}
EOS = (3, 5, 7)
SMALL, AMPLE = 5, 60
ALWAYS = HostCosts(1e12, 1.0)


def made(shape: str, host_slabs: int, *, seed: int = 2, **changes: object) -> World:
    """Return a loaded world in the smallest arena that takes its requests, with a host arena beside it."""
    cache = bool(changes.get("prefix_cache", False))
    slabs = fewest_slabs(SHAPES[shape], 30, 40, prefix_cache=cache)
    changed = rules(**{"eos_token_ids": EOS, "host_costs": ALWAYS} | changes)
    return load(World(tiny_layout(SHAPES[shape], slabs), changed, host_slabs=host_slabs), seed)


def load(world: World, seed: int, requests: int = 16, longest: int = 40) -> World:
    """Send requests whose outputs are expected to be short, so that many are retracted."""
    draw = random.Random(seed)
    for max_tokens in (4, 8, 16, 32, 64):
        world.expect_outputs(max_tokens, 2)
    for index in range(requests):
        length, shared = draw.choice((1, 2, 5, 17, 30)), 16 if world.rules.prefix_cache else 0
        text = (*prompt(shared, index % 2), *prompt(length, index + 2))[:length] if shared else prompt(length, index)
        params = greedy(draw.randint(1, longest), ignore_eos=draw.random() < 0.3)
        world.arrive(f"r{index}", text, params, draw.choice((0, 0, 0, 1, -1)))
    return world


@pytest.mark.parametrize("shape", SHAPES)
def test_l11_whoever_is_retracted_comes_back_without_computing_anything_again(shape: str) -> None:
    world = made(shape, AMPLE).run().assert_all_finished()
    figures = world.scheduler.figures()
    assert figures.host is not None
    assert figures.totals.retractions > 0, "the arena was meant to be so small that requests are retracted"
    assert figures.totals.recomputed_tokens == 0
    assert figures.host.offloaded == figures.host.restored == figures.totals.retractions
    assert (figures.host.refused, figures.host.dropped, figures.host.copies) == (0, 0, 0)
    assert figures.host.loaded_bytes == figures.host.offloaded_bytes > 0
    assert figures.host.arena.used_bytes == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_l11_tokens_are_the_same_when_hardly_any_copy_fits(shape: str) -> None:
    world = made(shape, SMALL, seed=3, step_tokens=16).run().assert_all_finished()
    figures = world.scheduler.figures()
    assert figures.host is not None
    assert figures.totals.retractions > 0
    assert figures.host.offloaded + figures.host.refused == figures.totals.retractions


@pytest.mark.parametrize(("shape", "host_slabs"), [(shape, (SMALL, AMPLE)[i % 2]) for i, shape in enumerate(SHAPES)])
def test_l11_tokens_are_the_same_beside_the_prefix_cache(shape: str, host_slabs: int) -> None:
    """Full pages that the tree still has are locked and not loaded; what it lost comes from the copy."""
    world = made(shape, host_slabs, prefix_cache=True, step_tokens=16).run().assert_all_finished()
    figures = world.scheduler.figures()
    assert figures.host is not None
    assert figures.host.offloaded > 0
    assert figures.host.loaded_bytes <= figures.host.offloaded_bytes


class Forgets(FakeBackend):
    """A backend that leaves a part of the host's work undone: which part, its subclasses say."""

    part = ""

    def arrange(self, plan: StepPlan) -> None:
        match self.part:
            case "moves":
                super().arrange(replace(plan, offloads=tuple(w for w in plan.offloads if isinstance(w, HostCopies))))
            case "order":  # the device's moves come first
                super().arrange(replace(plan, offloads=()))
                self.host.offload(plan.offloads, self.pools)
            case part:
                super().arrange(replace(plan, **{part: ()}))


@pytest.mark.parametrize("part", ["offloads", "loads"])
@pytest.mark.parametrize("shape", ["pages-4", "state", "four-pools"])
def test_l11_the_oracle_sees_work_that_was_not_done(shape: str, part: str) -> None:
    """The instrument itself: without this, the tests above could pass with any tokens."""
    world = made(shape, AMPLE)
    backend = Forgets(world.layout, world.rules.vocab_size, EOS, AMPLE)
    backend.part = part
    world.backend = backend
    with pytest.raises(AssertionError):
        world.run().assert_all_finished()


def crowded_host(part: str) -> World:
    """Return a world whose host arena is so full of copies of two kinds that its pages move."""
    slabs = fewest_slabs(SHAPES["pages-1"], 30, 40, prefix_cache=True)
    world = World(tiny_layout(SHAPES["pages-1"], slabs), rules(prefix_cache=True, host_costs=ALWAYS), host_slabs=3)
    if part:
        backend = Forgets(world.layout, world.rules.vocab_size, (), 3)
        backend.part = part
        world.backend = backend
    return load(world, seed=2, requests=24)


def test_l11_tokens_survive_moves_inside_the_host_arena() -> None:
    world = crowded_host("").run().assert_all_finished()
    assert world.backend.host.moves_done > 0, "the host arena was meant to be so full that pages are moved"
    assert world.backend.host.pages_loaded > 0


@pytest.mark.parametrize("part", ["moves", "order"])
def test_l11_the_oracle_sees_host_pages_that_did_not_move_and_copies_that_came_too_late(part: str) -> None:
    with pytest.raises(AssertionError):
        crowded_host(part).run().assert_all_finished()


def test_l12_the_same_requests_give_the_same_decisions() -> None:
    shape = "pages-4"
    first, second = (made(shape, SMALL, prefix_cache=True).run().trace for _ in range(2))
    assert first == second
    assert first != made(shape, AMPLE, prefix_cache=True).run().trace, "the digest does not see the host's work"


@st.composite
def small_worlds(draw: st.DrawFn) -> tuple[World, int]:
    """Worlds of any page sizes, windows, policies and sizes, hardly larger than one request, with a host arena."""
    kinds = [Full(), Sliding(draw(st.integers(1, 11))), Chunked(draw(st.integers(1, 9))), State()]
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3, unique=True))
    pools = tuple(
        (kind, 1 if isinstance(kind, State) else draw(st.sampled_from((1, 2, 4, 8))), draw(st.integers(1, 6)))
        for kind in chosen
    )
    cache = draw(st.booleans())
    slabs = fewest_slabs(pools, 12, 14, prefix_cache=cache) + draw(st.integers(0, 4))
    changed = rules(
        step_tokens=draw(st.sampled_from((8, 11, 40))),
        max_running_requests=draw(st.integers(1, 8)),
        admission=draw(st.sampled_from((("expected", 0.9), ("expected", 0.1)))),
        eos_token_ids=draw(st.sampled_from(((), EOS))),
        prefix_cache=cache,
        host_costs=draw(st.sampled_from((ALWAYS, HostCosts(1e3, 40.0)))),
    )
    return World(tiny_layout(pools, slabs), changed, host_slabs=draw(st.integers(1, 12))), draw(st.integers(0, 2**20))


@settings(max_examples=25)
@given(small_worlds())
def test_l11_tokens_are_the_same_in_any_world_with_a_host_arena(drawn: tuple[World, int]) -> None:
    world, seed = drawn
    load(world, seed, requests=7, longest=14).run().assert_all_finished()


class Quota:
    """A host arena with two kinds of users, at random: grants that come and go, and cached pages that give way."""

    def __init__(self, pools: tuple[PoolSpec, ...], quota_bytes: int) -> None:
        layout = tiny_layout(pools, 4)
        self.device = Arena(layout)
        self.host = HostArena(layout, quota_bytes)
        self.grants: list[Grant] = []
        self.cached: list[set[int]] = [set() for _ in pools]
        self.refused = self.gave_way = self.moved = 0

    def copy(self, draw: random.Random, kind: str) -> None:
        """Store as many pages as one user asks for, in any mix of pools; those of the cache become evictable."""
        most = [pool.pages_per_slab for pool in self.device.layout.pools]
        demand = Demand(draw.choice((0, 0, 1, 2, draw.randint(0, 3 * size))) for size in most)
        grant = self.host.reserve(kind, demand)
        if isinstance(grant, Refusal):
            self.refused += 1
            return
        commit = self.host.store(grant, [np.zeros(pages, np.int32) for pages in demand])
        for pool, died in enumerate(commit.evicted):
            assert set(died.tolist()) <= self.cached[pool], "a page of a grant gave way"
            self.cached[pool] -= set(died.tolist())
            self.gave_way += len(died)
        if kind == "retracted":
            self.grants.append(grant)
            return
        for pool, handles in enumerate(commit.handles[0]):
            self.host.arena.cache(grant, pool, handles)
            self.cached[pool] |= set(handles.tolist())
        self.host.arena.release(grant)

    def check(self) -> None:
        """I1, B8, L13, the arena's own laws, and that no copy is ordered beyond the quota's bytes."""
        figures, pools = self.host.figures(), self.host.arena.layout.pools
        assert figures.used_bytes <= figures.total_bytes <= self.host.quota_bytes
        assert figures.used_bytes + figures.hole_bytes + figures.free_bytes == figures.total_bytes
        assert self.device.figures().used_bytes == 0, "a byte of the host is counted on the device"
        assert self.host.arena.audit() == []
        assert figures.running_bytes == sum(self.host.bytes_of(grant.held) for grant in self.grants)
        assert figures.cached_bytes == self.host.bytes_of(list(map(len, self.cached)))
        for work in self.host.take_work():
            if isinstance(work, HostMoves):
                self.moved += len(work.moves)
                places = [(move.pool, max(move.source, move.target)) for move in work.moves]
            else:
                places = [(work.pool, int(work.host_pages.max()))]
            assert all((page + 1) * pools[pool].stride_bytes <= self.host.quota_bytes for pool, page in places)


@pytest.mark.parametrize("seed", range(6))
def test_i1_the_quota_is_never_exceeded_whatever_the_mix_of_kinds(seed: int) -> None:
    draw = random.Random(seed)
    shape = draw.choice((FOUR_POOLS, MIXED, THREE_POOLS, SHAPES["pages-1"]))
    slab_bytes = tiny_layout(shape, 1).slab_bytes
    quota = Quota(shape, draw.randint(2, 9) * slab_bytes + draw.randrange(slab_bytes))
    for _ in range(300):
        if quota.grants and draw.random() < 0.4:
            quota.host.arena.release(quota.grants.pop(draw.randrange(len(quota.grants))))
        else:
            quota.copy(draw, draw.choice(("retracted", "cached")))
        quota.check()
    assert quota.refused, "the quota was meant to be too small for all of it"
    assert quota.gave_way, "cached pages were meant to give way to retracted requests"


def test_i1_pages_move_inside_the_host_arena_where_holes_are_in_the_wrong_place() -> None:
    draw = random.Random(1)
    quota = Quota(SHAPES["pages-1"], 4 * tiny_layout(SHAPES["pages-1"], 1).slab_bytes)
    for _ in range(400):
        if quota.grants and draw.random() < 0.5:
            quota.host.arena.release(quota.grants.pop(draw.randrange(len(quota.grants))))
        else:
            quota.copy(draw, draw.choice(("retracted", "cached")))
        quota.check()
    assert quota.moved > 0

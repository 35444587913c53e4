"""L11 with a second level: what is written back and loaded again changes no token, in any kind of model."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from halocline.cache.tier import Tier
from halocline.memory.host import HostCosts
from halocline.memory.pool import CACHED
from halocline.step import StepPlan, StepResult
from testing.oracle import FakeBackend
from testing.schedule import (
    EVERY_KIND,
    FULL_AND_WINDOW,
    PoolSpec,
    World,
    fewest_slabs,
    greedy,
    rules,
    stem,
    tiny_layout,
)

EOS = (3, 5, 7)
CHEAP = HostCosts(1e12, 1.0)
"""Every load is worth it."""


class TwoLevels(World):
    """A world with a host arena."""

    def __init__(self, pools: tuple[PoolSpec, ...], slabs: int, host_slabs: int, **changes: object) -> None:
        changed = {"eos_token_ids": EOS, "prefix_cache": True, "host_costs": CHEAP} | changes
        super().__init__(tiny_layout(pools, slabs), rules(**changed), host_slabs=host_slabs)

    @property
    def tier(self) -> Tier:
        """The second level."""
        tier = self.scheduler._sharing.tier  # type: ignore[attr-defined]
        assert isinstance(tier, Tier)
        return tier

    def step(self) -> bool:
        """And the host never holds more than its quota."""
        done = super().step()
        assert self.host is not None
        assert self.host.figures().used_bytes <= self.host.quota_bytes
        return done


def drive(world: World, seed: int, requests: int) -> World:
    """Send prompts that part early, late or never, in turns that the device cannot hold; abort and retract some."""
    draw = random.Random(seed)
    for max_tokens in (4, 8, 16, 32, 64):
        world.expect_outputs(max_tokens, 2)
    for index in range(requests):
        text = stem(draw.choice((9, 17, 30, 30)), draw.choice((0, 1, 2, 3, 4, 5)), draw.choice((0, 0, 4, 16)))
        params = greedy(draw.randint(1, 40), ignore_eos=draw.random() < 0.3)
        world.arrive(f"r{index}", text, params, draw.choice((0, 0, 0, 1, -1)), draw.choice(("", "", "", "other")))
        for _ in range(draw.randint(0, 12)):
            world.step()
        running = sorted(r.id for r in world.scheduler._roster.live.values() if r.is_running)
        if running and draw.random() < 0.2:
            world.abort(draw.choice(running))
        elif running and draw.random() < 0.1:
            world.scheduler._roster.retract(world.scheduler._roster.live[draw.choice(running)])
    return world


@pytest.mark.parametrize("shape", EVERY_KIND)
def test_l11_tokens_are_the_same_where_prefixes_come_back_from_the_host(shape: str) -> None:
    slabs = fewest_slabs(EVERY_KIND[shape], 30, 40, prefix_cache=True)
    world = TwoLevels(EVERY_KIND[shape], slabs + 2, 3 * slabs)
    drive(world, 4, 24).run().assert_all_finished()
    figures = world.scheduler.figures().cache
    assert figures is not None
    assert figures.tier is not None
    assert figures.tier.loads > 0, figures
    assert 0 < figures.tier.hit_tokens <= figures.hit_tokens
    assert not world.tier.tree.locks.open


@pytest.mark.laws
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", EVERY_KIND)
def test_l11_tokens_are_the_same_in_many_worlds_of_two_levels(shape: str, seed: int) -> None:
    draw = random.Random(seed)
    slabs = fewest_slabs(EVERY_KIND[shape], 30, 40, prefix_cache=True) + draw.choice((0, 1, 2, 5, 12))
    world = TwoLevels(
        EVERY_KIND[shape],
        slabs,
        draw.choice((2, slabs // 2, slabs, 3 * slabs)),
        step_tokens=draw.choice((16, 64)),
        max_running_requests=draw.choice((2, 5, 8)),
        admission=draw.choice((("expected", 0.9), ("expected", 0.2), ("guaranteed",))),
        host_costs=draw.choice((CHEAP, HostCosts(64.0 * 40, 1.0))),
    )
    drive(world, seed, 40).run().assert_all_finished()


# ---- one prompt, step by step


def lost_and_asked_again(**changes: object) -> TwoLevels:
    """A prompt of 30 tokens is computed, driven out by others, and comes again."""
    world = TwoLevels(FULL_AND_WINDOW, 12, 60, **changes)
    world.arrive("first", stem(30), 2)
    world.run()
    for index in range(1, 6):
        world.arrive(f"other{index}", stem(30, branch=index), 2)
        world.run()
    assert world.tier.device.match(first_key(world)).boundary_tokens == 0
    world.arrive("again", stem(30), 2)
    return world


def first_key(world: TwoLevels) -> object:
    from halocline.cache.keys import token_key

    return token_key(stem(30))


def test_a_plan_loads_before_its_forward_and_the_pages_are_the_trees_afterwards() -> None:
    """P = 4, W = 6: at 28 the window reads positions 23 ... 27, pages 5 and 6; and 7 full pages."""
    world = lost_and_asked_again()
    plan = world.plan()
    assert plan is not None
    assert {(load.pool, len(load.device_pages)) for load in plan.loads} == {(0, 7), (1, 2)}
    (segment,) = plan.segments
    assert (segment.start, segment.tokens) == (28, 2)
    assert world.tier.tree.locks.open, "its pages on the host are locked until the load is over"
    world.apply(world.backend.run(plan))
    assert not world.tier.tree.locks.open
    assert world.tier.device.match(first_key(world)).boundary_tokens == 28
    world.run().assert_all_finished()
    assert world.cached_tokens["again"] == 28


def test_a_request_that_is_aborted_under_its_load_leaves_nothing() -> None:
    world = lost_and_asked_again()
    plan = world.plan()
    assert plan is not None
    world.abort("again")
    assert not world.tier.tree.locks.open
    assert world.tier.device.match(first_key(world)).boundary_tokens == 0, "what was not loaded is nobody's"
    world.apply(world.backend.run(plan))
    world.run().assert_all_finished()


def test_a_step_that_breaks_under_a_load_leaves_nothing_to_believe() -> None:
    world = lost_and_asked_again()
    plan = world.plan()
    assert plan is not None
    world.note_updates(world.scheduler.fail_step("the device is gone"))
    assert world.ends["again"] == "failed"
    assert not world.tier.tree.locks.open
    assert world.tier.device.match(first_key(world)).boundary_tokens == 0
    world.arrive("once more", stem(30), 2)
    world.run()
    world.assert_true_tokens()


def test_what_a_broken_step_may_have_spoiled_is_not_written_back() -> None:
    """Nothing dies in this step, and it loads: so the device is not trusted any more, and the host is."""
    world = TwoLevels(FULL_AND_WINDOW, 60, 60)
    world.arrive("first", stem(30), 2)
    world.run()
    died = [pool.handle_of[np.flatnonzero(pool.state == CACHED)] for pool in world.arena.pools]
    for pool, handles in enumerate(died):
        world.arena.evict(pool, handles)
    world.scheduler._sharing.forget(died, ())
    world.arrive("other", stem(30, branch=1), 2)
    world.run()
    world.arrive("again", stem(30), 2)
    plan = world.plan()
    assert plan is not None
    assert plan.loads
    assert not plan.offloads
    before = world.tier.counts.written
    world.note_updates(world.scheduler.fail_step("the device is gone"))
    assert world.tier.counts.written == before
    assert not any(world.arena.budget.cached)
    world.arrive("once more", stem(30), 2)
    world.run().assert_true_tokens()
    assert world.cached_tokens["once more"] == 28


def test_a_step_that_breaks_while_it_writes_back_leaves_nothing_on_the_host() -> None:
    world = TwoLevels(FULL_AND_WINDOW, 12, 60)
    for index in range(8):
        world.arrive(f"r{index}", stem(30, branch=index), 2)
        for _ in range(20):
            plan = world.plan()
            if plan is None:
                break
            if plan.offloads:
                world.note_updates(world.scheduler.fail_step("the device is gone"))
                assert not world.tier.tree.forest.nodes
                assert world.host.figures().used_bytes == 0
                return
            world.apply(world.backend.run(plan))
    raise AssertionError("nothing was written back")


class ForgetsLoads(FakeBackend):
    """A backend that loads nothing."""

    def run(self, plan: StepPlan) -> StepResult:
        return super().run(replace(plan, loads=()))


class OffloadsAfterMoves(FakeBackend):
    """A backend that copies to the host what lies there after the step's moves."""

    def run(self, plan: StepPlan) -> StepResult:
        late = FakeBackend.run(self, replace(plan, offloads=()))
        self.host.offload(plan.offloads, self.pools)
        return late


@pytest.mark.parametrize("backend", [ForgetsLoads, OffloadsAfterMoves])
def test_the_oracle_sees_a_copy_that_was_not_made_in_time(backend: type[FakeBackend]) -> None:
    slabs = fewest_slabs(FULL_AND_WINDOW, 30, 40, prefix_cache=True)
    world = TwoLevels(FULL_AND_WINDOW, slabs + 2, 3 * slabs)
    world.backend = backend(world.layout, world.rules.vocab_size, EOS, 3 * slabs)
    with pytest.raises(AssertionError):
        drive(world, 4, 24).run().assert_all_finished()


def test_without_room_on_the_host_the_device_does_what_it_did() -> None:
    """A host that holds nothing worth mentioning: the same requests, the same hits as without one."""
    texts = [stem(30, branch=index % 3) for index in range(12)]
    hits = []
    for host_slabs in (0, 1):
        world = (
            TwoLevels(FULL_AND_WINDOW, 14, 1)
            if host_slabs
            else World(tiny_layout(FULL_AND_WINDOW, 14), rules(prefix_cache=True, eos_token_ids=EOS))
        )
        for index, text in enumerate(texts):
            world.arrive(f"r{index}", text, 2)
            world.run()
        cache = world.scheduler.figures().cache
        assert cache is not None
        hits.append(cache.hit_tokens)
    assert hits[0] == hits[1]

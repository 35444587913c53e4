"""L11 with much in the cache: hits, evictions and checkpoints change no token; and faults of sharing are seen."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from halocline.cache.keys import Key
from halocline.cache.match import Walk
from halocline.cache.node import Node
from halocline.errors import InvariantError
from halocline.step import StepPlan, StepResult
from testing.oracle import FakeBackend
from testing.schedule import (
    EVERY_KIND,
    FULL_AND_WINDOW,
    THREE_POOLS,
    World,
    fewest_slabs,
    greedy,
    rules,
    stem,
    tiny_layout,
)

EOS = (3, 5, 7)


def drive(world: World, seed: int, requests: int) -> World:
    """Send prompts that part early, late or never while others run; abort and retract some of them."""
    draw = random.Random(seed)
    for max_tokens in (4, 8, 16, 32, 64):
        world.expect_outputs(max_tokens, 2)
    for index in range(requests):
        text = stem(draw.choice((1, 5, 9, 17, 30, 30)), draw.choice((0, 0, 1, 2)), draw.choice((0, 4, 16, 24)))
        params = greedy(draw.randint(1, 40), ignore_eos=draw.random() < 0.3)
        world.arrive(f"r{index}", text, params, draw.choice((0, 0, 0, 1, -1)), draw.choice(("", "", "", "other")))
        for _ in range(draw.randint(0, 5)):
            world.step()
        running = sorted(r.id for r in world.scheduler._roster.live.values() if r.is_running)
        if running and draw.random() < 0.2:
            world.abort(draw.choice(running))
        elif running and draw.random() < 0.2:
            request = world.scheduler._roster.live[draw.choice(running)]
            world.scheduler._roster.retract(request)
    return world


def assert_hits(world: World) -> None:
    cache = world.scheduler.figures().cache
    assert cache is not None
    assert cache.hit_tokens > 0, f"nobody resumed on a cached prefix: {cache.lookups}"
    assert sum(cache.evicted_pages) > 0, "nothing was evicted"


@pytest.mark.parametrize("shape", EVERY_KIND)
def test_l11_tokens_are_the_same_where_much_is_cached(shape: str) -> None:
    slabs = 2 * fewest_slabs(EVERY_KIND[shape], 30, 40, prefix_cache=True)
    world = drive(World(tiny_layout(EVERY_KIND[shape], slabs), rules(eos_token_ids=EOS, prefix_cache=True)), 4, 24)
    for index in range(8):
        world.arrive(f"new{index}", 30, 40)
    world.run().assert_all_finished()
    assert_hits(world)


@pytest.mark.laws
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shape", EVERY_KIND)
def test_l11_tokens_are_the_same_in_many_cached_worlds(shape: str, seed: int) -> None:
    draw = random.Random(seed)
    slabs = fewest_slabs(EVERY_KIND[shape], 30, 40, prefix_cache=True) + draw.choice((0, 1, 2, 5, 12))
    changed = rules(
        eos_token_ids=EOS,
        prefix_cache=True,
        step_tokens=draw.choice((16, 64)),
        max_running_requests=draw.choice((2, 5, 8)),
        admission=draw.choice((("expected", 0.9), ("expected", 0.2), ("guaranteed",))),
    )
    drive(World(tiny_layout(EVERY_KIND[shape], slabs), changed), seed, 40).run().assert_all_finished()


# --- the instrument itself: faults of sharing change tokens


def test_the_oracle_sees_a_prefix_of_other_tokens() -> None:
    """A walk that looks at the first granule of a node only resumes on pages that were computed from other tokens."""
    world = World(tiny_layout(FULL_AND_WINDOW, 60), rules(prefix_cache=True), check=False)
    tree = world.scheduler._sharing.tree  # type: ignore[attr-defined]
    walk = tree.forest.walk

    def careless(key: Key, most: int | None = None, start: Node | None = None) -> Walk:
        found = walk(key, most, start)
        whole = key.tokens // tree.shape.granule_tokens if most is None else most
        return Walk(found.path, min(found.path[-1].end, whole)) if found.path else found

    tree.forest.walk = careless
    for index in range(2):
        world.arrive(f"r{index}", stem(24, branch=index, at=6), 4)
        world.run()
    with pytest.raises(AssertionError):
        world.assert_true_tokens()


def test_the_oracle_sees_pages_that_were_evicted_and_not_forgotten() -> None:
    slabs = fewest_slabs(FULL_AND_WINDOW, 30, 40)
    world = World(tiny_layout(FULL_AND_WINDOW, slabs), rules(prefix_cache=True), check=False)
    world.scheduler._sharing.forget = lambda evicted, moves: None  # type: ignore[method-assign]
    with pytest.raises((AssertionError, InvariantError)):
        drive(world, 4, 24).run().assert_all_finished()


class ForgetsCopies(FakeBackend):
    """A backend that begins hot requests on an empty state."""

    def run(self, plan: StepPlan) -> StepResult:
        return super().run(replace(plan, copies=()))


class ForgetsSaves(FakeBackend):
    """A backend that saves no checkpoint."""

    def run(self, plan: StepPlan) -> StepResult:
        return super().run(replace(plan, saves=()))


@pytest.mark.parametrize("backend", [FakeBackend, ForgetsCopies, ForgetsSaves])
def test_the_oracle_sees_a_state_that_was_not_copied(backend: type[FakeBackend]) -> None:
    world = World(tiny_layout(THREE_POOLS, 60), rules(prefix_cache=True))
    world.backend = backend(world.layout, world.rules.vocab_size)
    for index in range(3):
        world.arrive(f"r{index}", stem(24, branch=index, at=17), 4)
        world.run()
    assert world.cached_tokens["r2"] == 16
    if backend is FakeBackend:
        world.assert_true_tokens()
        return
    with pytest.raises(AssertionError):
        world.assert_true_tokens()

"""L11: tokens do not depend on the arena's size, page sizes, chunk sizes, admission, policy, retraction or moves."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halocline.memory.retention import Chunked, Full, Sliding, State
from halocline.schedule.events import Reason
from halocline.schedule.holding import Holding
from halocline.schedule.request import Request
from halocline.step import StepPlan, StepResult
from testing.oracle import FakeBackend
from testing.schedule import (
    FOUR_POOLS,
    FULL_AND_WINDOW,
    GUARANTEED,
    THREE_POOLS,
    PoolSpec,
    World,
    fewest_slabs,
    greedy,
    prompt,
    rules,
    tiny_layout,
)

UNEQUAL: tuple[PoolSpec, ...] = ((Full(), 16, 1), (Sliding(9), 4, 3), (Chunked(6), 1, 5))
MOVING: tuple[PoolSpec, ...] = ((Full(), 1, 16), (Sliding(3), 1, 8))
SHAPES = {
    "pages-1": MOVING,
    "pages-4": FULL_AND_WINDOW,
    "pages-16": ((Full(), 16, 2), (Sliding(20), 16, 1)),
    "unequal": UNEQUAL,
    "state": THREE_POOLS,
    "four-pools": FOUR_POOLS,
    "windows-only": ((Sliding(7), 2, 2), (Sliding(3), 1, 5)),
    "state-first": ((State(), 1, 2), (Full(), 4, 3)),
}
EOS = (3, 5, 7)


def load(world: World, seed: int, requests: int = 14, longest: int = 40) -> World:
    """Send requests of mixed lengths, ends and priorities, whose outputs are expected to be short."""
    draw = random.Random(seed)
    for max_tokens in (4, 8, 16, 32, 64):
        world.expect_outputs(max_tokens, 2)
    for index in range(requests):
        params = greedy(draw.randint(1, longest), ignore_eos=draw.random() < 0.3, min_tokens=0)
        if draw.random() < 0.3:
            stop = (draw.randrange(97),)
            params = greedy(params.max_tokens, min_tokens=min(3, params.max_tokens or 0), stop_token_ids=stop)
        length, priority = draw.choice((1, 2, 4, 5, 17, 30)), draw.choice((0, 0, 0, 1, -1))
        # With the prefix cache on, prompts begin like one of two others and go on differently.
        shared = 16 if world.rules.prefix_cache else 0
        text = (*prompt(shared, index % 2), *prompt(length, index + 2))[:length] if shared else length
        world.arrive(f"r{index}", text, params, priority)
    return world


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("admission", [("expected", 0.9), ("guaranteed",)], ids=lambda rule: rule[0])
@pytest.mark.parametrize("step_tokens", [16, 64])
def test_l11_tokens_are_the_same_in_the_smallest_arena(shape: str, admission: tuple, step_tokens: int) -> None:
    slabs = fewest_slabs(SHAPES[shape], 30, 40)
    changed = rules(admission=admission, step_tokens=step_tokens, eos_token_ids=EOS)
    world = load(World(tiny_layout(SHAPES[shape], slabs), changed), seed=1)
    world.run().assert_all_finished()
    if admission[0] == "guaranteed":
        assert world.retractions == 0, f"{world.retractions} retractions although every request was guaranteed"


@pytest.mark.parametrize("shape", SHAPES)
def test_l11_tokens_survive_retraction(shape: str) -> None:
    slabs = fewest_slabs(SHAPES[shape], 30, 40)
    world = load(World(tiny_layout(SHAPES[shape], slabs), rules(eos_token_ids=EOS)), seed=2, requests=20)
    world.run().assert_all_finished()
    assert world.retractions > 0, "the arena was meant to be so small that requests are retracted"
    assert world.scheduler.figures().totals.recomputed_tokens > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_l11_tokens_are_the_same_with_the_prefix_cache_on(shape: str) -> None:
    """Prompts that begin alike in the smallest arena that takes them, with eviction and hits on the way."""
    hot = rules(step_tokens=16, eos_token_ids=EOS, prefix_cache=True)
    slabs = fewest_slabs(SHAPES[shape], 30, 40, prefix_cache=True)
    world = load(World(tiny_layout(SHAPES[shape], slabs), hot), seed=2, requests=20)
    world.run().assert_all_finished()
    cache = world.scheduler.figures().cache
    assert cache is not None
    assert sum(cache.evicted_pages) > 0, "the arena was meant to be too small to keep everything"
    assert shape == "windows-only" or cache.hit_tokens > 0, f"nobody resumed on a cached prefix: {cache.lookups}"


def moving_world(backend: type[FakeBackend] = FakeBackend) -> World:
    """Return a world in which pages are moved."""
    world = World(tiny_layout(MOVING, 8), rules(max_running_requests=16))
    world.backend = backend(world.layout, world.rules.vocab_size)
    return load(world, seed=1, requests=40, longest=60)


def test_l11_tokens_survive_moves() -> None:
    world = moving_world().run().assert_all_finished()
    assert world.backend.moves_done > 0, "the arena was meant to be so full that pages are moved"


class ForgetsMoves(FakeBackend):
    """A backend that does not carry moves out."""

    def run(self, plan: StepPlan) -> StepResult:
        return super().run(replace(plan, moves=()))


def test_l11_the_oracle_sees_a_lost_move() -> None:
    """The instrument itself: without this, the test above could pass with any tokens."""
    with pytest.raises(AssertionError):
        moving_world(ForgetsMoves).run().assert_all_finished()


def test_l11_the_oracle_sees_pages_that_moved_unnoticed() -> None:
    world = moving_world()
    world.check = False
    world.scheduler._keeper.look_up = lambda holdings, moves: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        world.run().assert_all_finished()


def test_l11_the_oracle_sees_pages_freed_a_position_too_early() -> None:
    world = load(World(tiny_layout(FULL_AND_WINDOW, 9), rules(), check=False), seed=2)
    keeper = world.scheduler._keeper
    slide = keeper.slide
    keeper.slide = lambda holding, computed: slide(holding, computed + 4)  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        world.run().assert_all_finished()


@pytest.mark.parametrize("shape", ["pages-4", "unequal", "four-pools"])
def test_l11_tokens_are_the_same_under_a_static_split(shape: str) -> None:
    pools = SHAPES[shape]
    shared = fewest_slabs(pools, 30, 40)
    caps = (shared,) * len(pools)
    world = load(World(tiny_layout(pools, shared * len(pools)), rules(eos_token_ids=EOS), caps), seed=3)
    world.run().assert_all_finished()


@st.composite
def small_worlds(draw: st.DrawFn) -> tuple[World, int]:
    """Worlds of any page sizes, windows, policies and sizes, hardly larger than one request."""
    kinds = [Full(), Sliding(draw(st.integers(1, 11))), Chunked(draw(st.integers(1, 9))), State()]
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3, unique=True))
    pools = tuple(
        (kind, 1 if isinstance(kind, State) else draw(st.sampled_from((1, 2, 4, 8))), draw(st.integers(1, 6)))
        for kind in chosen
    )
    slabs = fewest_slabs(pools, 12, 14) + draw(st.integers(0, 4))
    changed = rules(
        step_tokens=draw(st.sampled_from((8, 11, 40))),
        max_running_requests=draw(st.integers(1, 8)),
        admission=draw(st.sampled_from((("expected", 0.9), ("expected", 0.1), ("guaranteed",)))),
        eos_token_ids=draw(st.sampled_from(((), EOS))),
    )
    return World(tiny_layout(pools, slabs), changed), draw(st.integers(0, 2**20))


@given(small_worlds())
def test_l11_tokens_are_the_same_in_any_world(drawn: tuple[World, int]) -> None:
    world, seed = drawn
    load(world, seed, requests=7, longest=14).run().assert_all_finished()


@settings(max_examples=30)
@given(small_worlds())
def test_l11_tokens_are_the_same_in_any_world_with_the_prefix_cache_on(drawn: tuple[World, int]) -> None:
    world, seed = drawn
    pools = [(pool.retention, pool.page_tokens, pool.pages_per_slab) for pool in world.layout.pools]
    slabs = fewest_slabs(pools, 12, 14, prefix_cache=True) + seed % 5
    hot = World(tiny_layout(pools, slabs), replace(world.rules, prefix_cache=True))
    load(hot, seed, requests=7, longest=14).run().assert_all_finished()


@given(small_worlds())
def test_whoever_is_guaranteed_is_never_retracted_and_never_asks_again(drawn: tuple[World, int]) -> None:
    world, seed = drawn
    guaranteed = World(world.layout, replace(world.rules, admission=GUARANTEED))
    load(guaranteed, seed, requests=7, longest=14).run().assert_all_finished()
    totals = guaranteed.scheduler.figures().totals
    assert (totals.retractions, totals.extensions, totals.recomputed_tokens) == (0, 0, 0)


@given(small_worlds())
def test_whoever_came_back_or_was_granted_its_whole_life_never_asks_for_more(drawn: tuple[World, int]) -> None:
    """So no request is refused twice, and none that ignores the end of its sequence is refused at all."""
    world, seed = drawn
    expected = World(world.layout, replace(world.rules, admission=("expected", 0.1)))
    growth = expected.scheduler._growth
    extend = growth._extend

    def watched(request: Request, holding: Holding, reasons: dict[str, Reason]) -> bool:
        assert not request.retractions, f"{request.id} came back with too little: {list(request.story)}"
        assert not request.params.ignore_eos, f"{request.id} was granted too little: {list(request.story)}"
        return extend(request, holding, reasons)

    growth._extend = watched  # type: ignore[method-assign]
    load(expected, seed, requests=7, longest=14).run().assert_all_finished()

"""L11 for leaps: tokens do not depend on how many of them a step computes, and memory keeps every law meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halocline.memory.grant import Refusal
from halocline.memory.retention import Chunked, Full, Sliding, State
from halocline.schedule.events import Reason
from halocline.schedule.request import Request
from halocline.sim import oracle
from testing.schedule import (
    FOUR_POOLS,
    FULL_AND_WINDOW,
    GUARANTEED,
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

LEAPS = (1, 2, 5, 16)
EOS = (3, 5, 7)
SHAPES = {
    "full-and-window": FULL_AND_WINDOW,
    "state": THREE_POOLS,
    "four-pools": FOUR_POOLS,
    "mixed": MIXED,
    "tiny-windows": ((Full(), 8, 2), (Sliding(2), 1, 7), (Chunked(3), 2, 3)),
    "windows-only": ((Sliding(3), 2, 3),),
}


def leaping(pools: Sequence[PoolSpec], leap: int, spare_slabs: int = 0, **changes: object) -> World:
    """Return a world hardly larger than one request, all of whose prices count a leap of 16."""
    changes = {"lookahead_tokens": max(LEAPS) - 1, "step_tokens": 48, "max_running_requests": 6} | changes
    slabs = fewest_slabs(pools, 20, 40, **changes) + spare_slabs
    return World(tiny_layout(pools, slabs), rules(**changes), decode_tokens=leap)


def load(world: World, seed: int, requests: int, *, at_once: bool) -> World:
    """Let requests come in, all at once or in the middle of the others' work, and run until all are done."""
    draw = random.Random(seed)
    for max_tokens in (8, 16, 32, 64):
        world.expect_outputs(max_tokens, 2)
    for index in range(requests):
        least = draw.choice((0, 0, 3, 9))
        params = greedy(
            draw.randint(max(1, least), 40),
            ignore_eos=draw.random() < 0.3,
            min_tokens=least,
            stop_token_ids=(draw.randrange(97),) if draw.random() < 0.3 else (),
        )
        shared = 16 if world.rules.prefix_cache else 0
        length = draw.choice((1, 2, 4, 5, 17, 20))
        text = (*prompt(shared, index % 2), *prompt(length, index + 2))[:length]
        world.arrive(f"r{index}", text, params, draw.choice((0, 0, 0, 1, -1)))
        for _ in range(0 if at_once else draw.randrange(12)):
            world.step()
        if draw.random() < 0.1:
            world.abort(f"r{draw.randrange(index + 1)}")
    return world.run()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cache", [False, True], ids=["alone", "cached"])
def test_l11_tokens_are_the_same_in_leaps_of_any_length(shape: str, cache: bool) -> None:
    """In the smallest arena, with retractions, and with windows that a leap passes as a whole."""
    retracted = {}
    for leap in LEAPS:
        world = leaping(SHAPES[shape], leap, eos_token_ids=EOS, prefix_cache=cache)
        load(world, seed=4, requests=12, at_once=True).assert_all_finished()
        assert (world.leaps > 0) == (leap > 1), f"{world.leaps} steps leapt"
        retracted[leap] = world.retractions
    # Nobody outgrows its grant where windows are all there is.
    assert shape == "windows-only" or any(retracted.values()), f"the arena was meant to be too small: {retracted}"


@st.composite
def leaping_worlds(draw: st.DrawFn) -> World:
    """Worlds of any page sizes and windows, beside a leap of any length."""
    kinds = [Full(), Sliding(draw(st.integers(1, 19))), Chunked(draw(st.integers(1, 19))), State()]
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3, unique=True))
    pools = tuple(
        (kind, 1 if isinstance(kind, State) else draw(st.sampled_from((1, 2, 4, 8))), draw(st.integers(1, 6)))
        for kind in chosen
    )
    return leaping(
        pools,
        draw(st.sampled_from(LEAPS)),
        draw(st.integers(0, 6)),
        step_tokens=draw(st.sampled_from((8, 11, 48))),
        max_running_requests=draw(st.integers(1, 6)),
        admission=draw(st.sampled_from((("expected", 0.9), ("expected", 0.1), GUARANTEED))),
        eos_token_ids=draw(st.sampled_from(((), EOS))),
        prefix_cache=draw(st.booleans()),
    )


@settings(max_examples=40)
@given(leaping_worlds(), st.integers(0, 2**20), st.booleans())
def test_l11_tokens_are_the_same_in_any_world_that_leaps(world: World, seed: int, at_once: bool) -> None:
    load(world, seed, requests=7, at_once=at_once).assert_all_finished()
    if world.rules.is_guaranteed:
        totals = world.scheduler.totals
        assert (totals.retractions, totals.extensions) == (0, 0), "a leap took more than what prices count"


@settings(max_examples=40)
@given(leaping_worlds(), st.integers(0, 2**20), st.booleans())
def test_whoever_is_not_asked_again_would_be_refused_again(world: World, seed: int, at_once: bool) -> None:
    """So that nothing is decided otherwise than by asking everybody in every step."""
    filler, sharing = world.scheduler._filler, world.scheduler._sharing
    refused_again = filler._refused_again

    def watched(request: Request) -> Reason | None:
        reason = refused_again(request)
        if reason is not None:
            candidate = filler._gate.candidate(request)
            assert sharing.awaited(request, candidate.entrance, world.scheduler._roster.prefilling) is None
            answer = sharing.open(request, candidate.entrance, candidate.demand)
            assert isinstance(answer, Refusal), f"{request.id} would come in, and is told: {reason.detail}"
        return reason

    filler._refused_again = watched  # type: ignore[method-assign]
    load(world, seed, requests=7, at_once=at_once).assert_all_finished()


def test_l11_the_oracle_sees_a_leap_that_went_on_with_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instrument itself: without this, the tests above could pass with any tokens."""
    goes_on = oracle._View.goes_on
    monkeypatch.setattr(oracle._View, "goes_on", lambda view, token: goes_on(view, (token + 1) % 97))
    with pytest.raises(AssertionError, match=r"r\d+ \(limit"):
        load(leaping(FULL_AND_WINDOW, 5), seed=4, requests=12, at_once=True).assert_all_finished()


def test_l11_the_oracle_sees_a_leap_without_the_pages_of_its_last_token() -> None:
    world = leaping(FULL_AND_WINDOW, 5)
    world.check = False
    keeper = world.scheduler._keeper
    wanted = keeper.wanted_by_decode
    keeper.wanted_by_decode = lambda holding, end: wanted(holding, end - 1)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="no page for"):
        load(world, seed=4, requests=12, at_once=True)

"""Holdings: the two borders that decide when a request is touched, against a recount of every position."""

from __future__ import annotations

from itertools import pairwise

import pytest

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, resident
from halocline.memory.grant import Move, Order, Refusal
from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Chunked, Full, Sliding, State
from halocline.schedule.holding import Holding, Keeper
from halocline.units import ceil_div
from testing.schedule import PoolSpec, tiny_layout

SHAPES: dict[str, tuple[PoolSpec, ...]] = {
    "full": ((Full(), 4, 3),),
    "sliding": ((Full(), 4, 3), (Sliding(6), 4, 1)),
    "small-window": ((Full(), 2, 3), (Sliding(1), 4, 2), (Sliding(3), 8, 1)),
    "chunked": ((Chunked(6), 4, 2), (Full(), 1, 4)),
    "chunked-aligned": ((Chunked(8), 4, 2),),
    "state": ((State(), 1, 1), (Sliding(7), 2, 2)),
}
LIFE = 40


def opened(layout: ArenaLayout, prompt_tokens: int) -> tuple[Arena, Keeper, Holding]:
    arena = Arena(layout)
    keeper = Keeper(arena)
    holding = keeper.open("a", resident(layout, prompt_tokens, LIFE - prompt_tokens + 1))
    assert isinstance(holding, Holding)
    return arena, keeper, holding


def take(arena: Arena, keeper: Keeper, holding: Holding, start: int, end: int) -> Demand:
    wanted = keeper.wanted(holding, start, end)
    keeper.fill([holding], arena.commit([Order(holding.grant, wanted)]).handles)
    return wanted


@pytest.mark.parametrize("shape", SHAPES)
def test_a_page_is_wanted_exactly_from_page_until_on(shape: str) -> None:
    arena, keeper, holding = opened(tiny_layout(SHAPES[shape], 40), 1)
    for position in range(LIFE):
        wanted = keeper.wanted(holding, position, position + 1)
        if position > 0:
            assert (not wanted.is_zero) == (position >= holding.page_until), f"at {position}: {wanted}"
            assert keeper.wanted_by_decode(holding, position + 1) == wanted
        take(arena, keeper, holding, position, position + 1)
        keeper.slide(holding, position + 1)
    assert holding.grant.demand.covers(holding.pages)


@pytest.mark.parametrize("shape", SHAPES)
def test_pages_leave_exactly_at_slide_at_and_what_stays_is_seen(shape: str) -> None:
    layout = tiny_layout(SHAPES[shape], 40)
    arena, keeper, holding = opened(layout, 1)
    for position in range(LIFE):
        take(arena, keeper, holding, position, position + 1)
        before, due = holding.pages, position + 1 >= holding.slide_at
        keeper.slide(holding, position + 1)
        assert (holding.pages != before) == due, f"after {position + 1} tokens: {before} to {holding.pages}"
        for number, pool in enumerate(layout.pools):
            if isinstance(pool.retention, State):
                assert len(holding.handles[number]) == 1
                continue
            seen = range(pool.retention.first_needed(position + 1), position + 1)
            pages = {token // pool.page_tokens for token in seen}
            first = holding.first_page[number]
            held = set(range(first, first + len(holding.handles[number])))
            assert pages <= held
            assert held <= pages | {position // pool.page_tokens}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prompt_tokens", [1, 9, 20])
def test_the_hint_never_misses_a_falling_price(shape: str, prompt_tokens: int) -> None:
    """A decode's price falls only where `may_fall` says it may, so skipping the pricing elsewhere loses nothing."""
    layout = tiny_layout(SHAPES[shape], 40)
    keeper = Keeper(Arena(layout))
    for end in range(prompt_tokens + 1, LIFE + 1):
        prices = [
            resident(layout, prompt_tokens, end - prompt_tokens, computed) for computed in range(prompt_tokens, end - 1)
        ]
        for computed, (before, after) in enumerate(pairwise(prices), start=prompt_tokens + 1):
            assert after == before or keeper.may_fall(end, computed), f"{before} to {after} at {computed} of {end}"


@pytest.mark.parametrize("shape", SHAPES)
def test_repricing_only_lowers_and_always_covers_what_is_held(shape: str) -> None:
    arena, keeper, holding = opened(tiny_layout(SHAPES[shape], 40), 1)
    demand = holding.grant.demand
    for position in range(LIFE):
        take(arena, keeper, holding, position, position + 1)
        keeper.slide(holding, position + 1)
        if position + 1 < LIFE:
            keeper.reprice(holding, 1, LIFE + 1, position + 1)
        assert demand.covers(holding.grant.demand)
        assert holding.grant.demand.covers(holding.pages)
        demand = holding.grant.demand


def test_a_long_chunk_holds_its_whole_span_and_then_lets_go() -> None:
    layout = tiny_layout(((Full(), 4, 3), (Sliding(6), 4, 1)), 40)
    arena = Arena(layout)
    keeper = Keeper(arena)
    step = arena.reserve("step", Demand((0, 20)))
    assert not isinstance(step, Refusal)
    holding = keeper.open("a", resident(layout, 32, 1))
    assert isinstance(holding, Holding)
    wanted = keeper.wanted(holding, 0, 32)
    keeper.fill([holding], arena.commit([Order(holding.grant, wanted, step)]).handles)
    assert holding.pages == (8, 8)
    keeper.slide(holding, 32)
    assert holding.pages == (8, ceil_div(32, 4) - (32 - 6 + 1) // 4)
    assert not any(holding.grant.borrowed)
    keeper.close(holding)
    arena.release(step)
    assert arena.figures().used_bytes == 0
    assert arena.audit() == []


def test_a_table_that_lacks_the_window_is_a_defect() -> None:
    _, keeper, holding = opened(tiny_layout(SHAPES["sliding"], 40), 20)
    with pytest.raises(AssertionError, match="lacks page 3"):
        keeper.wanted(holding, 20, 24)


@pytest.mark.parametrize(("planned", "looked_up"), [(2, {1}), (3, {0, 1})], ids=["this-commit", "another-one-too"])
def test_after_moves_places_are_found_again_in_every_pool_that_may_have_moved(
    planned: int, looked_up: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, keeper, holding = opened(tiny_layout(SHAPES["sliding"], 40), 1)
    take(arena, keeper, holding, 0, 5)
    asked: set[int] = set()
    physical = arena.physical
    monkeypatch.setattr(arena, "physical", lambda pool, handles: asked.add(pool) or physical(pool, handles))
    arena.moves_planned += planned
    assert not keeper.is_current
    keeper.look_up([holding], [Move(1, 0, 1), Move(1, 2, 3)])
    assert keeper.is_current
    assert asked == looked_up


def test_a_leap_wants_every_page_up_to_its_last_token() -> None:
    arena, keeper, holding = opened(tiny_layout(SHAPES["sliding"], 40), 1)
    take(arena, keeper, holding, 0, 3)
    assert [keeper.wanted_by_decode(holding, end) for end in (4, 5, 8, 9, 17)] == [
        (0, 0),
        (1, 1),
        (1, 1),
        (2, 2),
        (4, 4),
    ]

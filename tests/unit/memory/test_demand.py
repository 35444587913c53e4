"""Tokens become pages: spans, chunk sizes and the floor, and the arithmetic of `Demand`."""

from __future__ import annotations

from itertools import product

import pytest

from halocline.memory.demand import (
    Demand,
    fit_chunk,
    floor_demand,
    resident,
    span,
    step_extra,
    step_price,
    zero,
)
from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Chunked, Full, Sliding, State
from halocline.units import ceil_div
from testing.layouts import small_layout

FOUR_KINDS = small_layout(Full(), Sliding(6), Chunked(10), State(), page_tokens=4)


def test_demands_add_and_subtract_pool_by_pool() -> None:
    assert Demand((3, 1)).plus(Demand((2, 5))) == (5, 6)
    assert Demand((3, 1)).minus(Demand((2, 5))) == (1, -4)


def test_what_a_demand_asks_above_another_is_never_negative() -> None:
    assert Demand((3, 1)).above(Demand((2, 5))) == (1, 0)


def test_a_demand_covers_another_only_if_it_does_in_every_pool() -> None:
    assert Demand((3, 1)).covers(Demand((3, 1)))
    assert not Demand((3, 1)).covers(Demand((2, 2)))


def test_zero_asks_for_no_page() -> None:
    assert zero(2) == (0, 0)
    assert zero(2).is_zero
    assert not Demand((0, 1)).is_zero


@pytest.mark.parametrize(
    ("pool", "start", "end", "pages"),
    [
        (0, 0, 1, (0, 1)),
        (0, 13, 17, (0, 5)),  # a full pool reads everything from position 0 on
        (1, 13, 17, (2, 5)),  # W = 6: position 13 sees 8 ... 13, page 2 on
        (1, 3, 5, (0, 2)),  # the window is not full yet
        (2, 13, 17, (2, 5)),  # A = 10: position 13 sees 10 ... 13, which begins inside page 2
        (2, 20, 21, (5, 6)),  # a new local chunk begins: nothing before it is read
        (3, 13, 17, (0, 1)),  # one state
    ],
)
def test_a_span_runs_from_the_first_page_read_to_the_last_page_written(
    pool: int, start: int, end: int, pages: tuple[int, int]
) -> None:
    assert span(FOUR_KINDS.pools[pool], start, end) == pages


def test_a_span_of_no_positions_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="computes nothing"):
        span(FOUR_KINDS.pools[0], 5, 5)


def test_a_request_needs_at_least_one_token_in_and_one_out() -> None:
    with pytest.raises(AssertionError, match="prompt token"):
        resident(FOUR_KINDS, 0, 1)
    with pytest.raises(AssertionError, match="new token"):
        resident(FOUR_KINDS, 1, 0)


def test_the_resident_price_names_every_pool() -> None:
    # T = 31 + 10 - 1 = 40: 10 full pages; W = 6: ceil(5 / 4) + 1; A = 10: ceil((10 + 4 - 2) / 4); one state.
    assert resident(FOUR_KINDS, 31, 10) == (10, 3, 3, 1)


def test_a_request_that_outgrew_its_expected_output_is_priced_for_one_more_token() -> None:
    assert resident(FOUR_KINDS, 4, 1, computed_tokens=8) == resident(FOUR_KINDS, 4, 6, computed_tokens=8)
    assert resident(FOUR_KINDS, 4, 1, computed_tokens=8)[0] == 3, "the ninth position begins a third page"


@pytest.mark.parametrize(
    ("page_tokens", "window_tokens", "chunk_tokens"), list(product((1, 4, 8), (1, 2, 8, 9), (1, 7, 8)))
)
def test_the_step_price_of_a_window_reaches_the_closed_forms_of_the_design(
    page_tokens: int, window_tokens: int, chunk_tokens: int
) -> None:
    """Aligned starts hold ceil(C / P) + ceil((W - 1) / P) pages, others at most ceil((W + C - 2) / P) + 1."""
    layout = small_layout(Sliding(window_tokens), page_tokens=page_tokens)
    starts = range(64, 64 + page_tokens)
    held = [step_price(layout, start, chunk_tokens)[0] for start in starts]
    assert held[0] == ceil_div(chunk_tokens, page_tokens) + ceil_div(window_tokens - 1, page_tokens)
    assert max(held) == ceil_div(window_tokens + chunk_tokens - 2, page_tokens) + 1


def test_a_chunk_is_charged_only_for_what_the_requests_own_grant_does_not_hold() -> None:
    own = resident(FOUR_KINDS, 40, 5)
    assert step_price(FOUR_KINDS, 16, 16) == (8, 6, 6, 1)  # local attention restarts at 10: pages 2 ... 7
    assert step_extra(FOUR_KINDS, 16, 16, own) == (0, 3, 3, 0)


LAYOUT = small_layout(Full(), Sliding(6), page_tokens={"full": 8, "sliding-6": 4})


@pytest.mark.parametrize(
    ("start", "prompt", "limit", "room", "tokens"),
    [
        (0, 100, 64, 99, 64),  # everything fits: the whole limit
        (0, 100, 63, 99, 56),  # whole granules only
        (0, 60, 99, 99, 60),  # except a prompt's last chunk
        (56, 60, 99, 99, 4),
        (0, 100, 64, 9, 48),  # 12 window pages: 3 of the own grant + 9
        (0, 100, 64, 0, 8),  # 2 pages are within the own grant
        (0, 60, 64, 11, 56),  # the last chunk does not fit, a whole granule less does
        (0, 100, 7, 99, 0),  # less than a granule is left in the step
        (0, 5, 4, 99, 0),  # also for a prompt's last chunk
        (4, 100, 64, 99, 60),  # an odd start ends at a granule boundary too
        (60, 60, 64, 99, 0),  # nothing is left to compute
    ],
)
def test_a_chunk_is_the_longest_that_fits_in_whole_granules(
    start: int, prompt: int, limit: int, room: int, tokens: int
) -> None:
    own = resident(LAYOUT, prompt, 5, start if start < prompt else 0)
    assert fit_chunk(LAYOUT, start, prompt, limit, own, lambda extra: extra[1] <= room) == tokens


def test_a_chunk_that_does_not_fit_at_all_is_of_no_token() -> None:
    own = resident(LAYOUT, 100, 1)
    assert fit_chunk(LAYOUT, 48, 100, 64, own, lambda extra: False) == 0


def test_the_whole_chunk_is_asked_for_first_and_only_the_budgets_answer_counts() -> None:
    own, asked = resident(LAYOUT, 4096, 1), []

    def fits(extra: Demand) -> bool:
        asked.append(extra)
        return True

    assert fit_chunk(LAYOUT, 0, 4096, 2048, own, fits) == 2048
    assert asked == [step_extra(LAYOUT, 0, 2048, own)]


@pytest.mark.parametrize("room", range(0, 40, 3))
def test_halving_finds_the_same_chunk_as_trying_every_length(room: int) -> None:
    own = resident(LAYOUT, 131, 9)
    for start in range(0, 131, 8):
        lengths = [end - start for end in (*range(start + 8, 131, 8), 131) if end - start <= 96]
        fitting = [length for length in lengths if step_extra(LAYOUT, start, length, own)[1] <= room]
        assert fit_chunk(LAYOUT, start, 131, 96, own, lambda extra: extra[1] <= room) == max(fitting, default=0)


def test_the_floor_is_one_granule_per_window_pool_and_a_spare_state_only_for_checkpoints() -> None:
    layout = small_layout(
        Full(), Sliding(6), Chunked(10), State(), page_tokens={"full": 16, "sliding-6": 4, "chunked-10": 8}
    )
    assert floor_demand(layout) == (0, 4, 2, 0)
    assert floor_demand(layout, checkpoints=True) == (0, 4, 2, 1)


def _mixed_layouts() -> list[ArenaLayout]:
    kinds = [(Full(), Sliding(6)), (Full(), Chunked(10)), (Sliding(3), Sliding(17)), (Full(), Chunked(12), Sliding(9))]
    lengths = [{}, {"full": 16}, {"sliding-6": 8, "sliding-3": 1, "chunked-10": 2}]
    layouts = []
    for retentions, given in product(kinds, lengths):
        names = [pool.name for pool in small_layout(*retentions).pools]
        layouts.append(small_layout(*retentions, page_tokens={name: given.get(name, 4) for name in names}))
    return layouts


@pytest.mark.parametrize(
    "layout", _mixed_layouts(), ids=lambda layout: "+".join(f"{pool.name}/{pool.page_tokens}" for pool in layout.pools)
)
def test_the_floor_always_lets_a_prefill_advance_by_a_granule(layout: ArenaLayout) -> None:
    """With its resident demand granted and the floor free, the next granule fits at every granule boundary."""
    floor, granule = floor_demand(layout), layout.granule_tokens
    for prompt, start in product((1, granule, 61, 100), range(0, 100, granule)):
        if start < prompt:
            own = resident(layout, prompt, 5, start)
            chunk = fit_chunk(layout, start, prompt, granule, own, floor.covers)
            assert chunk == min(granule, prompt - start)


@pytest.mark.parametrize("pool", [1, 2])
def test_one_page_less_than_the_floor_would_stop_a_prefill(pool: int) -> None:
    layout = small_layout(Full(), Sliding(6), Chunked(13), page_tokens=4)
    floor = floor_demand(layout).minus(Demand(int(index == pool) for index in range(3)))
    stuck = [
        (prompt, start)
        for prompt in range(1, 40)
        for start in range(0, prompt, 4)
        if not fit_chunk(layout, start, prompt, 4, resident(layout, prompt, 1, start), floor.covers)
    ]
    assert stuck

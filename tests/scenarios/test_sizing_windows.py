"""G1, G5, G6, H2 and H6 where they are questions of price: what a window costs while a request decodes.

Each check takes the formula under test as an argument; the wrong one that people met must make the same check fail.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halocline.memory.budget import Budget
from halocline.memory.demand import Demand, floor_demand, resident, span
from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Full, Sliding
from halocline.memory.sizing import longest_request
from halocline.units import ceil_div, ceil_to, floor_to
from testing.chunkings import run, sees
from testing.layouts import small_layout

Price = Callable[[ArenaLayout, int, int, int], Demand]
"""(layout, prompt, new, computed) -> pages, as `resident`."""


def layout_of(page_tokens: int, window_tokens: int) -> ArenaLayout:
    return small_layout(Full(), Sliding(window_tokens), page_tokens=page_tokens)


# --- G5: what the decode side must hold, and what must travel to it


def window_grows_with_reserve(layout: ArenaLayout, prompt: int, new: int, computed: int) -> Demand:
    """Reserve the output's tokens in the window pool as well."""
    pages = resident(layout, prompt, new, computed)
    window = layout.pools[1]
    assert isinstance(window.retention, Sliding)
    return Demand((pages[0], ceil_div(window.retention.window_tokens + new - 1, window.page_tokens)))


def check_g5_required(price: Price) -> None:
    """(P, W, fill, reserved) -> tokens in whole pages: the request is transferred whole, `reserved` tokens follow."""
    cases = {(128, 2047, 574, 0): (640, 640), (64, 128, 1000, 512): (1536, 192)}
    for (page_tokens, window_tokens, fill, reserved), tokens in cases.items():
        pages = price(layout_of(page_tokens, window_tokens), fill, reserved + 1, fill)
        assert tuple(count * page_tokens for count in pages) == tokens


def test_g5_the_decode_side_reserves_whole_full_pages_and_one_window() -> None:
    check_g5_required(resident)


def test_g5_a_window_that_grows_with_the_reserve_fails_this_check() -> None:
    with pytest.raises(AssertionError):
        check_g5_required(window_grows_with_reserve)


TAILS = {
    (16, 32, 50): 34,
    (16, 32, 47): 31,  # one engine sends 47
    (16, 128, 200): 136,
    (64, 128, 1024): 128,
    (64, 128, 1000): 168,
    (128, 2047, 574): 574,
    (64, 100, 1000): 104,
}


def tail_by_span(page_tokens: int, window_tokens: int, fill: int) -> int:
    """Count from the first page that the next token reads, as the price does."""
    first_page, _ = span(layout_of(page_tokens, window_tokens).pools[1], fill, fill + 1)
    return fill - first_page * page_tokens


def tail_of_whole_window(page_tokens: int, window_tokens: int, fill: int) -> int:
    """Count a whole window before the fill, the next token not counted: one position too many."""
    return fill - floor_to(max(0, fill - window_tokens), page_tokens)


def check_g5_tails(tail: Callable[[int, int, int], int]) -> None:
    assert {case: tail(*case) for case in TAILS} == TAILS


def test_g5_the_tail_that_travels_begins_with_the_page_that_the_next_token_reads() -> None:
    check_g5_tails(tail_by_span)


def test_g5_a_tail_of_one_position_too_many_fails_this_check() -> None:
    with pytest.raises(AssertionError):
        check_g5_tails(tail_of_whole_window)
    assert tail_of_whole_window(16, 32, 47) == 47


def test_g1_a_retracted_request_of_574_tokens_takes_five_pages_also_at_its_end() -> None:
    layout = layout_of(128, 2047)
    assert resident(layout, 574, 1) == (5, 5)
    assert resident(layout, 574, 67) == (5, 5)
    assert resident(layout, 574, 68) == (6, 6)


# --- G6: a long generation behind a short window


def check_g6(price: Price) -> None:
    """The window's part never passes its cap, so what is left of a pool of 12 pages stays what it was at admission."""
    layout = layout_of(16, 128)
    left = [12 - price(layout, 500, 4000, computed)[1] for computed in range(0, 4499, 7)]
    assert min(left) >= 0
    assert left[0] == 12 - (ceil_div(127, 16) + 1)


def test_g6_four_thousand_new_tokens_leave_the_window_demand_capped() -> None:
    check_g6(resident)


def test_g6_a_window_priced_by_new_tokens_drives_the_budget_negative() -> None:
    with pytest.raises(AssertionError):
        check_g6(window_grows_with_reserve)


# --- H2: rounded twice


def rounded_twice(layout: ArenaLayout, prompt: int, new: int, computed: int) -> Demand:
    """Round prompt and output up to pages apart, then add a page for safety."""
    pages = resident(layout, ceil_to(prompt, 4), ceil_to(new, 4) + 1, computed)
    return Demand(count + 1 for count in pages)


def check_h2(price: Price) -> None:
    """Ten positions in pages of 4 are 3 pages: an arena of three pages generates to its last position."""
    layout = small_layout(Full(), page_tokens=4, slabs=3)
    assert price(layout, 8, 3, 0) == (3,)
    outputs = [new for new in range(1, 9) if Budget(layout).fits_empty(price(layout, 8, new, 0))]
    assert outputs == [1, 2, 3, 4, 5]


def test_h2_ten_positions_in_pages_of_four_are_three_pages() -> None:
    check_h2(resident)
    assert longest_request(small_layout(Full(), page_tokens=4, slabs=3)) == 13


def test_h2_a_demand_rounded_twice_clips_feasible_outputs_and_fails_this_check() -> None:
    with pytest.raises(AssertionError):
        check_h2(rounded_twice)


# --- H6: running decodes hold one window and its straddling page


def prompt_release(page_tokens: int, window_tokens: int, fill: int, new: int) -> list[int]:
    """Return the window pages held in each decode when every page goes at the step in which the window passes it."""
    return [holding.pages for holding in run(Sliding(window_tokens), page_tokens, (fill,), new).resident]


def late_release(page_tokens: int, window_tokens: int, fill: int, new: int) -> list[int]:
    """Give up pages only when two of them are out of the window: fewer calls, one page more than the price."""
    held, counts = set(), []
    for computed in range(fill, fill + new - 1):
        held |= {position // page_tokens for position in range(max(0, computed - window_tokens + 1), computed + 1)}
        dead = {
            page
            for page in held
            if not any(
                sees(Sliding(window_tokens), computed, position)
                for position in range(page * page_tokens, min((page + 1) * page_tokens, computed + 1))
            )
        }
        if len(dead) >= 2:
            held -= dead
        counts.append(len(held))
    return counts


def check_h6(release: Callable[[int, int, int, int], list[int]], page_tokens: int, window_tokens: int) -> None:
    fill, new = 3 * window_tokens, 6 * page_tokens
    price = resident(layout_of(page_tokens, window_tokens), fill, new)[1]
    assert price == ceil_div(window_tokens - 1, page_tokens) + 1
    assert max(release(page_tokens, window_tokens, fill, new)) == price


@pytest.mark.parametrize(("page_tokens", "window_tokens"), [(1, 5), (4, 5), (4, 6), (4, 8), (16, 5), (16, 48)])
def test_h6_decodes_hold_exactly_the_price_when_every_crossing_releases(page_tokens: int, window_tokens: int) -> None:
    check_h6(prompt_release, page_tokens, window_tokens)


@pytest.mark.parametrize(("page_tokens", "window_tokens"), [(1, 5), (4, 5), (4, 8)])
def test_h6_releasing_late_fails_this_check(page_tokens: int, window_tokens: int) -> None:
    with pytest.raises(AssertionError):
        check_h6(late_release, page_tokens, window_tokens)


def test_the_floor_of_a_window_pool_does_not_depend_on_its_window() -> None:
    assert floor_demand(layout_of(16, 5)) == floor_demand(layout_of(16, 4096)) == (0, 1)

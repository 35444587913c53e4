"""A3, A7, A8, A9, A11, A12 where they are questions of price: what start-up promises and what one request may hold.

Each check takes the policy under test as an argument; the wrong policy that people met must make the same check fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from halocline.memory.budget import Budget
from halocline.memory.demand import Demand, fit_chunk, floor_demand, resident, step_price
from halocline.memory.layout import ArenaLayout, solve_layout
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State
from halocline.memory.sizing import (
    Caps,
    Limits,
    ModelLength,
    check_start,
    longest_request,
    start_problems,
    static_caps,
)
from halocline.units import GIB, MIB, ceil_div
from testing.chunkings import run
from testing.layouts import layers_of, model_layout, small_layout

Price = Callable[[ArenaLayout, int, int], Demand]


def resized(layout: ArenaLayout, slabs: int) -> ArenaLayout:
    """Return the same layout with another number of slabs."""
    return replace(layout, slabs=slabs, budget_bytes=slabs * layout.slab_bytes)


# --- A3: an arena smaller than one window, one page and one full page


def a3_layout(slabs: int) -> ArenaLayout:
    return small_layout(Full(), Sliding(128), page_tokens=256, slabs=slabs)


def without_straddle_and_floor(layout: ArenaLayout, caps: Caps | None, limits: Limits) -> list[str]:
    """Start whenever ceil(W / P) window pages and one full page are there: then warm-up hangs."""
    del limits
    least = Demand((1, ceil_div(128, 256)))
    return [] if Budget(layout, caps).fits_empty(least) else ["too small"]


def check_a3(problems: Callable[[ArenaLayout, Caps | None, Limits], list[str]]) -> None:
    limits = Limits(step_tokens=512, max_running_requests=16)
    split = a3_layout(17)
    caps = static_caps(split, 0.1)
    assert caps == (16, 1)  # 4096 full tokens, 409 window tokens: one page of 256
    assert problems(split, caps, limits) != []
    assert problems(a3_layout(3), None, limits) != []
    assert problems(a3_layout(4), None, limits) == []


def test_a3_an_arena_below_one_window_one_page_and_one_full_page_is_refused_at_start() -> None:
    check_a3(start_problems)


def test_a3_the_refusal_prints_the_arithmetic() -> None:
    layout = a3_layout(17)
    problems = start_problems(layout, static_caps(layout, 0.1), Limits(512, 16))
    assert len(problems) == 1
    assert "a window of 128 in pages of 256" in problems[0]
    assert "sliding-128: 2 + 1 (floor) pages, 1 per slab = 3 slabs of at most 1" in problems[0]


def test_a3_a_start_that_forgets_the_straddling_page_and_the_floor_fails_this_check() -> None:
    with pytest.raises(AssertionError):
        check_a3(without_straddle_and_floor)


# --- A7: a prompt longer than capacity, within the model's own maximum


def a7_layout() -> ArenaLayout:
    """Return an arena of 37,392 positions: 2,337 full pages beside one window and the floor."""
    layout = small_layout(Full(), Sliding(1024), page_tokens=16)
    assert [pool.pages_per_slab for pool in layout.pools] == [1, 1]
    return resized(layout, 2337 + 65 + 1)


def model_limit_only(layout: ArenaLayout, caps: Caps | None, limits: Limits) -> ModelLength:
    """Announce the model's own maximum, whatever the arena holds."""
    del layout, caps
    return ModelLength(limits.model_tokens or 0, "model")


def check_a7(start: Callable[[ArenaLayout, Caps | None, Limits], ModelLength]) -> None:
    layout = a7_layout()
    length = start(layout, None, Limits(512, 256, model_tokens=262_144))
    assert length == ModelLength(37_393, "arena")  # the last token is never written, so one more than the positions
    refused = Budget(layout).shortfall(resident(layout, 40_000, 1).plus(floor_demand(layout)))
    assert refused is not None
    assert refused.slabs_missing == 2500 - 2337


def test_a7_start_lowers_the_limit_to_what_fits_and_says_so() -> None:
    check_a7(check_start)
    assert "longest that fits" in check_start(a7_layout(), None, Limits(512, 256, model_tokens=262_144)).reason


def test_a7_a_start_that_announces_the_models_own_limit_fails_this_check() -> None:
    with pytest.raises(AssertionError):
        check_a7(model_limit_only)


# --- A8: windows priced at full length


def full_length(layout: ArenaLayout, prompt_tokens: int, new_tokens: int) -> Demand:
    """Price every pool as if it kept all positions."""
    return Demand(ceil_div(prompt_tokens + new_tokens - 1, pool.page_tokens) for pool in layout.pools)


def check_a8(price: Price) -> None:
    layout = model_layout("gemma-3-27b", 16 * GIB)
    exact = Demand((8 * ceil_div(65_536 + 511, 16), 8 * 65)).plus(floor_demand(layout))
    slabs = sum(ceil_div(pages, pool.pages_per_slab) for pages, pool in zip(exact, layout.pools, strict=True))
    layout = resized(layout, slabs)
    eight = Demand(8 * pages for pages in price(layout, 65_536, 512)).plus(floor_demand(layout))
    assert Budget(layout).fits_empty(eight)
    assert not Budget(resized(layout, slabs - 1)).fits_empty(eight)


def test_a8_eight_sessions_of_65k_run_together_where_the_bytes_allow() -> None:
    check_a8(resident)


def test_a8_windows_priced_at_full_length_fail_this_check() -> None:
    with pytest.raises(AssertionError):
        check_a8(full_length)


def test_a8_a_chunk_of_8192_holds_576_window_pages_not_all_1001_of_its_prompt() -> None:
    layout = small_layout(Full(), Sliding(1024), page_tokens=16)
    assert step_price(layout, 8192, 8192)[1] == 576
    assert full_length(layout, 16_016, 1)[1] == 1001
    assert resident(layout, 16_016, 64)[1] == 65


# --- A9: a window shorter than a page straddles two pages


def one_page_per_short_window(layout: ArenaLayout, prompt_tokens: int, new_tokens: int) -> Demand:
    """Grant ceil(W / P) pages: one, where W < P."""
    window = layout.pools[1].retention
    assert isinstance(window, Sliding)
    pages = resident(layout, prompt_tokens, new_tokens)
    return Demand((pages[0], ceil_div(window.window_tokens, layout.pools[1].page_tokens)))


def check_a9(price: Price) -> None:
    """Two decodes run their whole life inside what they were granted together."""
    layout = small_layout(Full(), Sliding(3), page_tokens=8)
    for prompts in product((5, 6, 7), repeat=2):
        granted = sum(price(layout, prompt, 12)[1] for prompt in prompts)
        runs = [run(Sliding(3), 8, (prompt,), 12).resident for prompt in prompts]
        assert all(a.pages + b.pages <= granted for a, b in product(*runs))


def test_a9_concurrent_decodes_never_need_more_than_their_grants_although_windows_straddle() -> None:
    check_a9(resident)


def test_a9_one_page_for_a_window_shorter_than_a_page_fails_this_check() -> None:
    with pytest.raises(AssertionError):
        check_a9(one_page_per_short_window)


# --- A11: exact fits


def last_token_written(layout: ArenaLayout, prompt_tokens: int, new_tokens: int) -> Demand:
    """Charge the KV of the last generated token, which nobody reads."""
    return resident(layout, prompt_tokens, new_tokens + 1)


def check_a11(price: Price, page_tokens: int) -> None:
    """An ignore-EOS request of 3 pages' prompt and one page's output fits exactly 4 full pages, windows and floor."""
    layout = small_layout(Full(), Sliding(2 * page_tokens), page_tokens=page_tokens)
    prompt, new = 3 * page_tokens, page_tokens + 1  # T = 4 pages exactly
    exact = 4 + 3 + 1
    demand = price(layout, prompt, new).plus(floor_demand(layout))
    assert Budget(resized(layout, exact)).fits_empty(demand)
    assert not Budget(resized(layout, exact - 1)).fits_empty(demand)


@pytest.mark.parametrize("page_tokens", [4, 64])
def test_a11_an_ignore_eos_request_that_fits_exactly_is_admissible(page_tokens: int) -> None:
    check_a11(resident, page_tokens)


@pytest.mark.parametrize("page_tokens", [4, 64])
def test_a11_charging_the_last_token_fails_this_check(page_tokens: int) -> None:
    with pytest.raises(AssertionError):
        check_a11(last_token_written, page_tokens)


def whole_granules_only(
    layout: ArenaLayout, start: int, prompt: int, limit: int, own: Demand, fits: Callable[[Demand], bool]
) -> int:
    """Round a prompt's last chunk up to a granule too: it may then never fit."""
    return fit_chunk(layout, start, ceil_div(prompt, layout.granule_tokens) * layout.granule_tokens, limit, own, fits)


def check_a11_last_chunk(fit: Callable[..., int], page_tokens: int) -> None:
    layout = small_layout(Full(), Sliding(2 * page_tokens), page_tokens=page_tokens)
    start, prompt = 4 * page_tokens, 4 * page_tokens + 3
    own = resident(layout, prompt, 1, start)
    assert fit(layout, start, prompt, 3, own, floor_demand(layout).covers) == 3


@pytest.mark.parametrize("page_tokens", [4, 64])
def test_a11_an_unaligned_final_chunk_that_fits_exactly_is_admissible(page_tokens: int) -> None:
    check_a11_last_chunk(fit_chunk, page_tokens)


@pytest.mark.parametrize("page_tokens", [4, 64])
def test_a11_a_final_chunk_rounded_to_a_granule_fails_this_check(page_tokens: int) -> None:
    with pytest.raises(AssertionError):
        check_a11_last_chunk(whole_granules_only, page_tokens)


# --- A12: the longest request as printed

KINDS: list[tuple[Retention, ...]] = [
    (Full(), Sliding(6)),
    (Full(), Sliding(9), Chunked(10)),
    (Full(), State()),
    (Full(), Sliding(3), Sliding(17), State()),
]


def without_floor(layout: ArenaLayout, caps: Caps | None) -> int:
    """Print the longest request that fits alone, but admit it only beside the floor."""
    tokens = 2
    while Budget(layout, caps).fits_empty(resident(layout, 1, tokens)):
        tokens += 1
    return tokens


def check_a12(longest: Callable[[ArenaLayout, Caps | None], int], kinds: tuple[Retention, ...], ratio: float) -> None:
    for slabs in range(12, 40, 3):
        layout = resized(small_layout(*kinds, page_tokens=4), slabs)
        caps = static_caps(layout, ratio) if ratio else None
        tokens = longest(layout, caps)
        if tokens < 2:
            continue
        budget, floor = Budget(layout, caps), floor_demand(layout)
        for prompt in range(1, tokens):
            assert budget.fits_empty(resident(layout, prompt, tokens - prompt).plus(floor))
        assert not budget.fits_empty(resident(layout, 1, tokens).plus(floor))


@pytest.mark.parametrize("ratio", [0, 0.8])
@pytest.mark.parametrize("kinds", KINDS)
def test_a12_the_longest_request_fits_in_every_split_and_one_token_more_does_not(
    kinds: tuple[Retention, ...], ratio: float
) -> None:
    check_a12(longest_request, kinds, ratio)


def test_a12_a_longest_request_found_without_the_floor_fails_this_check() -> None:
    with pytest.raises(AssertionError):
        check_a12(without_floor, KINDS[0], 0)


@pytest.mark.parametrize("kinds", KINDS)
def test_a12_the_longest_request_advances_through_its_whole_prompt_with_every_step_limit(
    kinds: tuple[Retention, ...],
) -> None:
    """In the arena that just holds it, its chunks fit beside its own grant, down to a granule a step."""
    layout = resized(small_layout(*kinds, page_tokens=4), 24)
    tokens = longest_request(layout)
    prompt = tokens - 1
    for limit in (4, 8, 11, 64):
        start = 0
        while start < prompt:
            own = resident(layout, prompt, 1, start)
            budget = Budget(layout)
            budget.promised[:] = own
            chunk = fit_chunk(layout, start, prompt, limit, own, budget.fits)
            assert chunk > 0, f"stuck at {start} of {prompt}"
            start += chunk


def test_a12_a_real_model_prints_a_longest_request_that_fits_and_cannot_be_longer() -> None:
    layout = solve_layout(layers_of((10, Full()), (52, Sliding(1024)), heads=16, dim=128), 16 * GIB)
    check = longest_request(layout)
    floor = floor_demand(layout)
    assert Budget(layout).fits_empty(resident(layout, check - 1, 1).plus(floor))
    assert not Budget(layout).fits_empty(resident(layout, check, 1).plus(floor))
    assert layout.budget_bytes - layout.arena_bytes < 64 * MIB

"""L9: the resident price is exactly the most that any way of chunking holds; the step price is what a step holds.

Method: `testing.chunkings` runs a request page by page through every way of chunking its prompt and knows no price.
Its maxima must equal the prices for every small (P, W or A, L, m, k). Then each term of the price is taken away in
turn, and the same comparison must fail: that shows that the small worlds are large enough to see every term.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halocline.memory.demand import Demand, resident, step_extra, step_price
from halocline.memory.price import pool_resident
from halocline.memory.retention import Chunked, Full, Retention, Sliding
from halocline.units import ceil_div
from testing.chunkings import chunkings, most_held, run
from testing.layouts import small_layout

PAGES = (1, 2, 4)
PROMPTS = range(1, 9)
OUTPUTS = (1, 2, 3, 5, 8)
REACHES = (1, 2, 3, 4, 5, 6, 7, 9)

Price = Callable[[Retention, int, tuple[int, int, int], int], int]
"""(retention, page_tokens, (prompt, total, boundary), lookahead) -> pages, as `pool_resident`."""


def mismatches(price: Price, retention: Retention, page_tokens: int, lookahead_tokens: int = 0) -> list[str]:
    """Return where `price` differs from what the runner holds at most, over all small requests and boundaries."""
    found = []
    for prompt, new in product(PROMPTS, OUTPUTS):
        most = most_held(retention, page_tokens, prompt, new, lookahead_tokens)
        for boundary, pages in most.items():
            priced = price(retention, page_tokens, (prompt, prompt + new - 1, boundary), lookahead_tokens)
            if priced != pages:
                found.append(f"L={prompt} m={new} computed={boundary}: priced {priced}, held {pages}")
    return found


@pytest.mark.parametrize("page_tokens", PAGES)
@pytest.mark.parametrize("reach", REACHES)
def test_l9_the_resident_price_of_a_window_is_reached_by_some_chunking_and_passed_by_none(
    reach: int, page_tokens: int
) -> None:
    assert mismatches(pool_resident, Sliding(reach), page_tokens) == []


@pytest.mark.parametrize("page_tokens", PAGES)
@pytest.mark.parametrize("reach", [3, 4, 5, 6, 7])
def test_l9_the_resident_price_of_local_chunks_is_exact_also_where_pages_straddle_them(
    reach: int, page_tokens: int
) -> None:
    assert mismatches(pool_resident, Chunked(reach), page_tokens) == []


@pytest.mark.parametrize("page_tokens", PAGES)
def test_l9_the_resident_price_of_full_attention_is_exact(page_tokens: int) -> None:
    assert mismatches(pool_resident, Full(), page_tokens) == []


@pytest.mark.parametrize("lookahead", [1, 2, 5])
@pytest.mark.parametrize("retention", [Sliding(3), Sliding(5), Chunked(3), Chunked(4), Full()])
def test_l9_the_resident_price_counts_lookahead_exactly(retention: Retention, lookahead: int) -> None:
    for page_tokens in PAGES:
        assert mismatches(pool_resident, retention, page_tokens, lookahead) == []


@pytest.mark.parametrize("retention", [Sliding(1), Sliding(3), Sliding(5), Chunked(3), Chunked(4), Full()])
def test_l9_the_step_price_is_what_the_step_holds_and_resident_plus_step_bounds_every_run(
    retention: Retention,
) -> None:
    for page_tokens, prompt, new in product(PAGES, PROMPTS, (1, 4)):
        layout = small_layout(retention, page_tokens=page_tokens)
        admitted = resident(layout, prompt, new)
        for chunks in chunkings(prompt):
            for start, tokens, held in run(retention, page_tokens, chunks, new).steps:
                assert step_price(layout, start, tokens) == (held,)
                now = resident(layout, prompt, new, start)
                assert held <= now.plus(step_extra(layout, start, tokens, now))[0]
                assert admitted.covers(now)


def without_straddle(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead: int) -> int:
    """Leave out the page that a window straddles: cap ceil((W + k - 1) / P)."""
    assert isinstance(retention, Sliding)
    return min(ceil_div(life[1], page_tokens), ceil_div(retention.window_tokens + lookahead - 1, page_tokens))


def without_own_token(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead: int) -> int:
    """Count W - 1 positions only: the page of the next decoded token is forgotten."""
    assert isinstance(retention, Sliding)
    return pool_resident(Sliding(max(1, retention.window_tokens - 1)), page_tokens, life, lookahead)


def whole_window_and_token(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead: int) -> int:
    """Count the token beside the window: W + 1 positions."""
    assert isinstance(retention, Sliding)
    return pool_resident(Sliding(retention.window_tokens + 1), page_tokens, life, lookahead)


def without_length_cap(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead: int) -> int:
    """Charge a full window to a request shorter than it."""
    assert isinstance(retention, Sliding)
    return ceil_div(retention.window_tokens + lookahead - 1, page_tokens) + 1


def caps_alone(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead: int) -> int:
    """Take the smaller of both caps, whatever alignments the life that is left can still meet."""
    assert isinstance(retention, Sliding)
    cap = ceil_div(retention.window_tokens + lookahead - 1, page_tokens) + 1
    return min(ceil_div(life[1], page_tokens), cap)


def last_token_written(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead: int) -> int:
    """Charge the KV of the last generated token: L + m positions."""
    return pool_resident(retention, page_tokens, (life[0], life[1] + 1, life[2]), lookahead)


def without_lookahead(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead: int) -> int:
    """Forget the draft tokens."""
    del lookahead
    return pool_resident(retention, page_tokens, life, 0)


def lookahead_past_the_end(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead: int) -> int:
    """Let drafts run past the last position."""
    return pool_resident(retention, page_tokens, (life[0], life[1] + lookahead, life[2]), lookahead)


def decodes_only(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead: int) -> int:
    """Forget the boundaries between prefill chunks."""
    prompt, total, boundary = life
    return pool_resident(retention, page_tokens, (prompt, total, max(boundary, prompt - 1)), lookahead)


def whole_life(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead: int) -> int:
    """Never re-price: the boundary is forgotten."""
    return pool_resident(retention, page_tokens, (life[0], life[1], 0), lookahead)


def rounded_twice(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead: int) -> int:
    """Round tokens up to whole pages first and price the result (H2)."""
    prompt, total, boundary = life
    whole = ceil_div(prompt, page_tokens) * page_tokens
    return pool_resident(retention, page_tokens, (prompt, whole + total - prompt, boundary), lookahead)


def like_full(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead: int) -> int:
    """Price a window at the full length (A8)."""
    del retention
    return pool_resident(Full(), page_tokens, life, lookahead)


def aligned_local_chunk(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead: int) -> int:
    """Forget that a local chunk may begin inside a page: ceil(A / P)."""
    assert isinstance(retention, Chunked)
    return min(ceil_div(life[1], page_tokens), ceil_div(retention.chunk_tokens + lookahead, page_tokens))


def local_chunk_like_window(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead: int) -> int:
    """Price local chunks as a sliding window of the same length."""
    assert isinstance(retention, Chunked)
    return pool_resident(Sliding(retention.chunk_tokens), page_tokens, life, lookahead)


WRONG = [
    (without_straddle, Sliding(5), 0),
    (without_own_token, Sliding(5), 0),
    (whole_window_and_token, Sliding(5), 0),
    (without_length_cap, Sliding(5), 0),
    (caps_alone, Sliding(3), 0),
    (last_token_written, Sliding(9), 0),
    (last_token_written, Full(), 0),
    (last_token_written, Chunked(7), 0),
    (without_lookahead, Sliding(3), 2),
    (without_lookahead, Chunked(3), 2),
    (lookahead_past_the_end, Sliding(5), 2),
    (lookahead_past_the_end, Full(), 2),
    (lookahead_past_the_end, Chunked(4), 2),
    (decodes_only, Sliding(4), 0),
    (decodes_only, Chunked(4), 0),
    (whole_life, Sliding(3), 0),
    (whole_life, Chunked(4), 0),
    (rounded_twice, Full(), 0),
    (rounded_twice, Sliding(9), 0),
    (like_full, Sliding(3), 0),
    (like_full, Chunked(3), 0),
    (aligned_local_chunk, Chunked(3), 0),
    (local_chunk_like_window, Chunked(4), 0),
]


@pytest.mark.parametrize(
    ("price", "retention", "lookahead"), WRONG, ids=[f"{price.__name__}-{kind}-{k}" for price, kind, k in WRONG]
)
def test_l9_a_price_with_one_term_wrong_is_found_out(price: Price, retention: Retention, lookahead: int) -> None:
    assert any(mismatches(price, retention, page_tokens, lookahead) for page_tokens in (2, 4))


@given(
    st.integers(0, 5),
    st.integers(1, 80),
    st.integers(1, 90),
    st.integers(1, 90),
    st.integers(0, 4),
    st.booleans(),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_l9_prices_of_longer_requests_equal_the_worst_boundary_counted_one_by_one(
    page_power: int, reach: int, prompt: int, new: int, lookahead: int, chunked: bool
) -> None:
    """Holdings depend on the boundary alone, so for long requests boundaries are counted instead of chunkings."""
    retention = Chunked(reach) if chunked else Sliding(reach)
    page_tokens, last = 2**page_power, prompt + new - 2

    def held(boundary: int) -> int:
        final = min(boundary + lookahead, last) if boundary >= prompt - 1 else boundary - 1
        first = boundary // reach * reach if chunked else max(0, boundary - reach + 1)
        return len({position // page_tokens for position in range(first, final + 1)})

    counted = [held(boundary) for boundary in range(last + 1)]
    counted[0] = counted[0] if prompt == 1 else 0
    priced = [
        pool_resident(retention, page_tokens, (prompt, last + 1, boundary), lookahead) for boundary in range(last + 1)
    ]
    assert priced == [max(counted[boundary:]) for boundary in range(last + 1)]


@given(st.integers(0, 4), st.integers(1, 40), st.integers(1, 60), st.integers(1, 60), st.booleans())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_repricing_at_a_later_boundary_never_gives_more(
    page_power: int, reach: int, prompt: int, new: int, chunked: bool
) -> None:
    layout = small_layout(Full(), Chunked(reach) if chunked else Sliding(reach), page_tokens=2**page_power)
    before: Demand | None = None
    for boundary in range(prompt + new - 1):
        price = resident(layout, prompt, new, boundary)
        assert before is None or before.covers(price)
        before = price

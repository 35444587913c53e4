"""Tokens become pages here and nowhere else.

`resident` prices a request between steps, `step_extra` what a chunk needs beyond that while it runs. Both are written
in whole pages per pool, rounded once; `halocline.memory.price` derives the terms.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add, sub

from halocline.memory.layout import ArenaLayout, PoolLayout
from halocline.memory.price import pool_resident
from halocline.memory.retention import Full, State
from halocline.units import ceil_div


class Demand(tuple[int, ...]):
    """Pages per pool, in the order of `ArenaLayout.pools`. The one currency of checks, charges and grants.

    `Demand(pages)` takes any iterable of counts: `pages[p]` is that of pool p.
    """

    __slots__ = ()

    def plus(self, other: Demand) -> Demand:
        """Return the sum, pool by pool."""
        return Demand(map(add, self, other))

    def minus(self, other: Demand) -> Demand:
        """Return the difference, pool by pool; may be negative."""
        return Demand(map(sub, self, other))

    def above(self, other: Demand) -> Demand:
        """Return what this asks beyond `other`, pool by pool, never negative."""
        return Demand([mine - theirs if mine > theirs else 0 for mine, theirs in zip(self, other, strict=True)])

    def covers(self, other: Demand) -> bool:
        """Whether this is at least `other` in every pool."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    @property
    def is_zero(self) -> bool:
        """Whether no page is asked for."""
        return not any(self)


def zero(pools: int) -> Demand:
    """Return the demand of no page at all, for `pools` pools."""
    return Demand((0,) * pools)


def span(pool: PoolLayout, start: int, end: int) -> tuple[int, int]:
    """Return [first_page, last_page): the pages that computing positions start ... end - 1 reads or writes.

    It begins with the page of the first position that `start` sees (0 in a full pool, start - W + 1 in a sliding one,
    floor(start / A) * A in a chunked one) and ends with the page of end - 1. A state pool gives (0, 1): its one state.
    Page numbers count from the request's position 0. Nothing is rounded before: one division for each end.
    """
    assert 0 <= start < end, f"computing positions {start} ... {end - 1} of pool {pool.name} computes nothing"
    return _first_page(pool, start), _end_page(pool, end)


def _first_page(pool: PoolLayout, start: int) -> int:
    return 0 if isinstance(pool.retention, State) else pool.retention.first_needed(start) // pool.page_tokens


def _end_page(pool: PoolLayout, end: int) -> int:
    return 1 if isinstance(pool.retention, State) else ceil_div(end, pool.page_tokens)


def resident(
    layout: ArenaLayout, prompt_tokens: int, max_new_tokens: int, computed_tokens: int = 0, lookahead_tokens: int = 0
) -> Demand:
    """Return what the request may hold at any step boundary or decode step from `computed_tokens` on (pages per pool).

    With T = L + m - 1 positions ever computed (the KV of the last generated token is never written):

    * full: ceil(T / P), because nothing is given up before the end;
    * sliding(W): the window of the next position and the page of the next token, W + k positions, touch at most
      ceil((W + k - 1) / P) + 1 pages, and never more than the ceil(T / P) there are;
    * chunked(A): from the last multiple of A on, at most ceil((A + P - gcd(A, P)) / P) pages;
    * state: 1.

    The result is the exact maximum over every way to chunk what is left (L9), hence below these caps where the rest
    of the life is too short to reach them; the derivation stands in `halocline.memory.price`. Re-pricing a request at
    a later boundary never gives more. A request that has outgrown its `max_new_tokens` (an expectation) is priced for
    one more token. `lookahead_tokens` (k) counts draft tokens and steps in flight; they never pass T.
    """
    assert prompt_tokens >= 1, f"a request has at least one prompt token, not {prompt_tokens}"
    assert max_new_tokens >= 1, f"a request asks for at least one new token, not {max_new_tokens}"
    total_tokens = max(prompt_tokens + max_new_tokens - 1, computed_tokens + 1)
    life = (prompt_tokens, total_tokens, computed_tokens)
    pages = []
    for pool in layout.pools:  # not a comprehension, which costs a tenth of all this: every boundary asks
        pages.append(pool_resident(pool.retention, pool.page_tokens, life, lookahead_tokens))  # noqa: PERF401
    return Demand(pages)


def step_price(layout: ArenaLayout, start: int, chunk_tokens: int) -> Demand:
    """Return what a chunk of C tokens at `start` holds while it runs: every page of its `span`.

    For a sliding pool that is at most ceil(C / P) + ceil((W - 1) / P) pages when `start` is a multiple of P, and
    ceil((W + C - 2) / P) + 1 otherwise.
    """
    spans = [span(pool, start, start + chunk_tokens) for pool in layout.pools]
    return Demand([last - first for first, last in spans])


def step_extra(layout: ArenaLayout, start: int, chunk_tokens: int, resident: Demand) -> Demand:
    """Return what one chunk holds beyond the request's own grant (`resident`) while it runs: the step grant's share."""
    return step_price(layout, start, chunk_tokens).above(resident)


def fit_chunk(
    layout: ArenaLayout,
    start: int,
    prompt_tokens: int,
    limit_tokens: int,
    resident: Demand,
    fits: Callable[[Demand], bool],
) -> int:
    """Return the most tokens that a chunk at `start` may compute, 0 if none: whole granules, except a prompt's last.

    A chunk ends at a multiple of the granule G or at the prompt's end, and computes at most `limit_tokens`. Its price
    only rises with its end, so the last end that fits is found by halving; `fits` (the budget's own predicate) is asked
    about `step_extra` beyond `resident`, and no other formula: a `span` begins where the chunk does, so that one end of
    it is found once.
    """
    granule = layout.granule_tokens
    last_end = min(prompt_tokens, start + limit_tokens)
    # Ends in ascending order: ends[i] = (first + i) * G, and the prompt's end as the last one when the limit allows it.
    first = start // granule + 1
    whole = max(0, last_end // granule - first + 1)
    ends_at_prompt = last_end == prompt_tokens and prompt_tokens % granule != 0 and prompt_tokens > start
    count = whole + ends_at_prompt
    granted = [(pool, _first_page(pool, start) + pages) for pool, pages in zip(layout.pools, resident, strict=True)]

    def end(index: int) -> int:
        return (first + index) * granule if index < whole else prompt_tokens

    def extra(end: int) -> Demand:
        beyond = [_end_page(pool, end) - pages for pool, pages in granted]
        return Demand([pages if pages > 0 else 0 for pages in beyond])  # noqa: FURB136

    low, high = 0, count  # chunks [0, low) are known to fit, [high, count) not to
    while low < high:
        # The longest is tried first: mostly it fits, and then one question is enough.
        middle = high - 1 if high == count else (low + high) // 2
        if fits(extra(end(middle))):
            low = middle + 1
        else:
            high = middle
    return end(low - 1) - start if low else 0


def floor_demand(layout: ArenaLayout, checkpoints: bool = False) -> Demand:
    """Return the standing grant that keeps prefill moving: one granule in each pool that gives pages up.

    A chunk of one granule that starts at a granule boundary adds G / P pages to what its request holds, and a request's
    grant covers what it holds. So G / P pages in each sliding or chunked pool let the most senior prefilling request
    always advance; a full pool needs none (its pages are in the resident price), a state pool one spare state where
    `checkpoints` are kept.
    """
    granule = layout.granule_tokens

    def pages(pool: PoolLayout) -> int:
        match pool.retention:
            case Full():
                return 0
            case State():
                return 1 if checkpoints else 0
            case _:
                return granule // pool.page_tokens

    return Demand(map(pages, layout.pools))

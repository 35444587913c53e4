"""What an empty arena holds: the longest request, and how many of one length at once.

Everything here is a question to `Budget.fits_empty` about the demands that `halocline.memory.demand` prices, so
start-up, calculator and scheduler cannot disagree. The floor (a granule per window pool) is beside every demand.
Worked example, Gemma 3 270M in 256 MiB (1,092 slabs of 240 KiB; 5 full or 1 sliding page each), 2,048 + 128 tokens:
136 full and 33 sliding pages a request; 18 of them take ceil(2448 / 5) + 594 + 1 (floor) = 1085 slabs, 19 take 1145.
"""

from __future__ import annotations

from collections.abc import Callable

from halocline.memory.budget import Budget
from halocline.memory.demand import Demand, floor_demand, resident
from halocline.memory.layout import ArenaLayout
from halocline.units import ceil_to

Caps = tuple[int | None, ...]
"""Most slabs per pool (static split); None: as many as there are."""

UNLIMITED_TOKENS = 2**31 - 1
"""The longest length that is told apart: no model reaches it, an arena without full pools may."""


def longest_request(
    layout: ArenaLayout, caps: Caps | None = None, lookahead_tokens: int = 0, checkpoints: bool = False
) -> int:
    """Return the most tokens of prompt and output together that an empty arena holds beside the floor; 0 if none.

    Every split of such a length into prompt and output fits: the price is highest for a prompt of one token, because
    then every boundary is a decode. At least 2 (one token in, one out) where anything fits at all.
    """
    budget, floor = Budget(layout, caps), floor_demand(layout, checkpoints)

    def fits(tokens: int) -> bool:
        return budget.fits_empty(resident(layout, 1, tokens - 1, 0, lookahead_tokens).plus(floor))

    most = largest(2, UNLIMITED_TOKENS, fits)
    return most if most >= 2 else 0


def concurrency(
    layout: ArenaLayout, caps: Caps | None, prompt_tokens: int, output_tokens: int, checkpoints: bool = False
) -> int:
    """Return how many such requests an empty arena holds together, each with its whole resident demand."""
    budget, floor = Budget(layout, caps), floor_demand(layout, checkpoints)
    one = resident(layout, prompt_tokens, output_tokens)

    def fits(requests: int) -> bool:
        return budget.fits_empty(Demand(pages * requests for pages in one).plus(floor))

    return max(0, largest(1, layout.slabs * max(pool.pages_per_slab for pool in layout.pools), fits))


def exact_concurrency(layout: ArenaLayout, tokens: int) -> int:
    """Return floor(budget / bytes of one request that holds `tokens`), the yardstick without slabs and floor.

    Such a request holds all its full pages, whole windows with their straddling page, and its state; no padding.
    """
    one = resident(layout, 1, tokens)
    request_bytes = sum(pages * pool.page_bytes for pages, pool in zip(one, layout.pools, strict=True))
    return layout.budget_bytes // request_bytes


def uniform_concurrency(layout: ArenaLayout, tokens: int) -> int:
    """Return how many requests of `tokens` fit the same budget when every layer keeps every position."""
    request_bytes = 0
    for pool in layout.pools:
        kept_tokens = ceil_to(tokens, pool.page_tokens) if pool.is_positional else 1
        request_bytes += pool.page_bytes * kept_tokens // pool.page_tokens
    return layout.budget_bytes // request_bytes


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest of low ... high that `fits`, which is downward closed; low - 1 if none does."""
    if not fits(low):
        return low - 1
    step = 1
    while low + step <= high and fits(low + step):  # gallop first: high may be far beyond
        low, step = low + step, 2 * step
    high = min(high, low + step - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

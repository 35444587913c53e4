"""What an empty arena holds: the longest request, and how many of one length at once.

Everything here is a question to `Budget.fits_empty` about the demands that `halocline.memory.demand` prices, so
start-up, calculator and scheduler cannot disagree. The floor (a granule per window pool) is beside every demand.
Worked example, Gemma 3 270M in 256 MiB (1,092 slabs of 240 KiB; 5 full or 1 sliding page each), 2,048 + 128 tokens:
136 full and 33 sliding pages a request; 18 of them take ceil(2448 / 5) + 594 + 1 (floor) = 1085 slabs, 19 take 1145.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from halocline.memory.budget import Budget
from halocline.memory.demand import Demand, floor_demand, resident
from halocline.memory.layout import ArenaLayout
from halocline.units import ceil_div, ceil_to

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


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests of several lengths in fixed proportions: what some of them need together."""

    pages: Demand
    """The whole resident demand of `requests` requests, summed."""
    requests: int

    def of(self, requests: int) -> Demand:
        """Return what so many requests in these proportions need, rounded up once per pool."""
        return Demand(ceil_div(pages * requests, self.requests) for pages in self.pages)


def mix_of(layout: ArenaLayout, lengths: Iterable[tuple[int, int]]) -> Mix:
    """Return the mix of requests of these `lengths` (prompt, output), at least one, as often as each is named."""
    pages, requests = [0] * len(layout.pools), 0
    for prompt_tokens, output_tokens in lengths:
        pages = [*map(sum, zip(pages, resident(layout, prompt_tokens, output_tokens), strict=True))]
        requests += 1
    assert requests, "a mix has at least one request"
    return Mix(Demand(pages), requests)


def concurrency(
    layout: ArenaLayout, caps: Caps | None, prompt_tokens: int, output_tokens: int, checkpoints: bool = False
) -> int:
    """Return how many such requests an empty arena holds together, each with its whole resident demand."""
    return mix_concurrency(layout, caps, mix_of(layout, [(prompt_tokens, output_tokens)]), checkpoints)


def mix_concurrency(layout: ArenaLayout, caps: Caps | None, mix: Mix, checkpoints: bool = False) -> int:
    """Return how many requests of a mix an empty arena holds together, each with its whole resident demand."""
    budget, floor = Budget(layout, caps), floor_demand(layout, checkpoints)

    def fits(requests: int) -> bool:
        return budget.fits_empty(mix.of(requests).plus(floor))

    return max(0, largest(1, layout.slabs * max(pool.pages_per_slab for pool in layout.pools), fits))


def exact_concurrency(layout: ArenaLayout, prompt_tokens: int, output_tokens: int) -> int:
    """Return floor(budget / bytes of one such request), the yardstick without slabs and floor.

    It holds all its full pages, whole windows with their straddling page, and its state; no padding.
    """
    one = resident(layout, prompt_tokens, output_tokens)
    request_bytes = sum(pages * pool.page_bytes for pages, pool in zip(one, layout.pools, strict=True))
    return layout.budget_bytes // request_bytes


def uniform_concurrency(layout: ArenaLayout, prompt_tokens: int, output_tokens: int) -> int:
    """Return how many such requests fit the same budget when every layer keeps every position."""
    return layout.budget_bytes // uniform_request_bytes(layout, prompt_tokens, output_tokens)


def uniform_request_bytes(layout: ArenaLayout, prompt_tokens: int, output_tokens: int) -> int:
    """Return the bytes of such a request when every layer keeps every position; states stay what they are.

    The last token of the output is never computed, so that its position is not kept here either.
    """
    positions = prompt_tokens + output_tokens - 1
    return sum(
        pool.page_bytes * ceil_to(positions if pool.is_positional else 1, pool.page_tokens) // pool.page_tokens
        for pool in layout.pools
    )


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

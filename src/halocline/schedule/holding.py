"""What one running request holds: its grant, and the handles of its pages in every pool.

    positions     0 ........ first_needed(computed) ...... computed ........ page_until
    full pool     |page|page|page|page|page|page|page|page|page|              all of them
    window pool        given up      |page|page|page|page|page|              first_page: the index of the first one left

The request is touched only when it crosses a border: `page_until` is the position at which the next page is needed,
`slide_at` the number of computed tokens at which a window lets go of its first page. Between them a decode costs
nothing here.
"""

from __future__ import annotations

from math import lcm

import numpy as np

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, resident, span
from halocline.memory.grant import Grant, Handles, Refusal
from halocline.memory.retention import NEVER, Chunked, Full, State

_NONE: Handles = np.empty(0, dtype=np.int64)


class Holding:
    """The pages of one request. Written by `Keeper` only."""

    __slots__ = ("first_page", "grant", "handles", "page_until", "slide_at")

    def __init__(self, grant: Grant, pools: int) -> None:
        """Hold nothing yet."""
        self.grant = grant
        self.handles: list[Handles] = [_NONE] * pools
        """Per pool, the handles of the pages [first_page, first_page + length)."""
        self.first_page = [0] * pools
        self.page_until = 0
        """The first position without a page in some pool."""
        self.slide_at = NEVER
        """The number of computed tokens at which some pool gives up a page."""

    @property
    def pages(self) -> Demand:
        """Pages held per pool, counted from the handles."""
        return Demand(map(len, self.handles))


class Keeper:
    """The one way in which requests get, give up and lose pages."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._layout = arena.layout
        pools = list(enumerate(arena.layout.pools))
        self._pools = len(pools)
        self._positional = [(p, pool.page_tokens) for p, pool in pools if pool.is_positional]
        # Pools that give pages up while their request lives, with what decides when.
        self._windows = [
            (p, pool.page_tokens, pool.retention) for p, pool in pools if not isinstance(pool.retention, Full | State)
        ]
        # A decode's price falls only when too little life is left to pass a worst alignment, and alignments repeat
        # within one page of a sliding pool, within lcm(A, P) of a chunked one.
        self._falls_within = max(
            (
                lcm(size, retention.chunk_tokens if isinstance(retention, Chunked) else 1)
                for _, size, retention in self._windows
            ),
            default=0,
        )

    def open(self, owner: str, demand: Demand) -> Holding | Refusal:
        """Reserve `demand` for `owner`."""
        grant = self._arena.reserve(owner, demand)
        return grant if isinstance(grant, Refusal) else Holding(grant, self._pools)

    def wanted(self, holding: Holding, start: int, end: int) -> Demand:
        """Return the pages that computing positions start ... end - 1 needs beyond those that are held."""
        pages = []
        for pool, handles, first in zip(self._layout.pools, holding.handles, holding.first_page, strict=True):
            low, high = span(pool, start, end)
            have = first + len(handles)
            assert first <= low <= have, (
                f"{holding.grant.owner}: pool {pool.name} lacks page {low}, holds {first}-{have}"
            )
            pages.append(max(0, high - have))
        return Demand(pages)

    def fill(self, holding: Holding, fresh: tuple[Handles, ...]) -> None:
        """Append the handles of newly committed pages, per pool."""
        for pool, handles in enumerate(fresh):
            if len(handles):
                held = holding.handles[pool]
                holding.handles[pool] = np.concatenate((held, handles)) if len(held) else handles
        self._find_borders(holding)

    def slide(self, holding: Holding, computed: int) -> None:
        """Give up every page that no position from `computed` on will read."""
        for pool, page_tokens, retention in self._windows:
            held = holding.handles[pool]
            gone = min(len(held), retention.first_needed(computed) // page_tokens - holding.first_page[pool])
            if gone > 0:
                self._arena.free(holding.grant, pool, held[:gone])
                holding.handles[pool] = held[gone:]
                holding.first_page[pool] += gone
        self._find_borders(holding)

    def reprice(self, holding: Holding, resumed_at: int, end: int, computed: int) -> None:
        """Lower the grant to what the rest of the life can still need; it never rises here.

        `resumed_at` and `end` are the lengths of the history at admission and at the latest end. The latest and not the
        expected one: a grant that fell towards an expected end would have to be won back when the request outlives it.
        """
        grant = holding.grant
        price = resident(self._layout, resumed_at, end - resumed_at, computed)
        if not price.covers(grant.demand):
            self._arena.shrink(grant, Demand(map(min, price, grant.demand)))

    def may_fall(self, end: int, computed: int) -> bool:
        """Whether re-pricing a decode can give anything back (a hint that saves the pricing)."""
        return end - computed <= self._falls_within

    def close(self, holding: Holding) -> None:
        """Give everything back."""
        self._arena.release(holding.grant)

    def _find_borders(self, holding: Holding) -> None:
        handles, first_page = holding.handles, holding.first_page
        holding.page_until = min(
            ((first_page[pool] + len(handles[pool])) * size for pool, size in self._positional), default=NEVER
        )
        holding.slide_at = min(
            (retention.last_reader((first_page[pool] + 1) * size - 1) + 1 for pool, size, retention in self._windows),
            default=NEVER,
        )

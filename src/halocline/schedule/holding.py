"""What one running request holds: its grant, and the handles of its pages in every pool.

    positions     0 ........ first_needed(computed) ...... computed ........ page_until
    full pool     |page|page|page|page|page|page|page|page|page|              all of them
    window pool        given up      |page|page|page|page|page|              first_page: the index of the first one left

The request is touched only when it crosses a border: `page_until` is the position at which the next page is needed,
`slide_at` the number of computed tokens at which a window lets go of its first page. Between them a decode costs
nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm
from operator import lt

import numpy as np
from numpy.typing import NDArray

from halocline.cache.lock import Lock
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, resident, span
from halocline.memory.grant import Grant, Handles, Move, Refusal
from halocline.memory.retention import NEVER, Chunked, Full, State

Places = NDArray[np.int32]
_NONE: Handles = np.empty(0, dtype=np.int64)
_NOWHERE: Places = np.empty(0, dtype=np.int32)


class Holding:
    """The pages of one request. Written by `Keeper` only."""

    __slots__ = ("first_page", "first_whole", "grant", "handles", "lock", "page_until", "places", "saved", "slide_at")

    def __init__(self, grant: Grant, pools: int, lock: Lock | None = None) -> None:
        """Hold nothing yet."""
        self.grant = grant
        self.lock = lock
        """What it has locked in the prefix cache; None without one. The first pages of its table are the tree's then,
        and of no grant: see `halocline.schedule.prefixes`."""
        self.handles: list[Handles] = [_NONE] * pools
        """Per pool, the handles of the pages [first_page, first_page + length)."""
        self.places: list[Places] = [_NOWHERE] * pools
        """Where these pages are now. Looked up in bulk for new pages and after moves only: a step of 256 long requests
        would spend a fifth of its time on looking up what has not changed. Empty where the keeper does not remember
        them: ask `Keeper.places`."""
        self.first_page = [0] * pools
        self.first_whole = [0] * pools
        """Pages before this one lack positions that nobody reads here: they are not for the prefix cache."""
        self.saved: list[Handles] = [_NONE] * pools
        """Of a state pool: the page into which this step saves a checkpoint, while it does."""
        self.page_until = 0
        """The first position without a page in some pool."""
        self.slide_at = NEVER
        """The number of computed tokens at which some pool gives up a page."""

    @property
    def is_torn(self) -> bool:
        """Whether the table begins with a page that lacks positions."""
        return any(map(lt, self.first_page, self.first_whole))

    @property
    def pages(self) -> Demand:
        """Pages in the table per pool, counted from the handles."""
        return Demand(map(len, self.handles))


class Keeper:
    """The one way in which requests get, give up and lose pages."""

    def __init__(self, arena: Arena, lookahead_tokens: int = 0, *, remembers_places: bool = True) -> None:
        self._arena = arena
        self.lookahead_tokens = lookahead_tokens
        """Tokens beyond the next one that every price counts."""
        self.remembers_places = remembers_places
        """Whether `Holding.places` is kept: for a packer that writes all of them down in every step."""
        self._moves_seen = arena.moves_planned
        self._layout = arena.layout
        pools = list(enumerate(arena.layout.pools))
        self._pools = len(pools)
        self._page_tokens = [pool.page_tokens if pool.is_positional else 0 for _, pool in pools]
        self.states = Demand(int(not pool.is_positional) for _, pool in pools)
        """One page in each state pool: what a checkpoint takes."""
        # Pools that give pages up while their request lives, with what decides when.
        self._windows = [
            (p, pool.page_tokens, pool.retention) for p, pool in pools if not isinstance(pool.retention, Full | State)
        ]
        # A decode's price falls only when too little life is left to pass a worst alignment, and alignments repeat
        # within one page of a sliding pool, within lcm(A, P) of a chunked one; it ends where the lookahead does.
        self._falls_within = lookahead_tokens + max(
            (
                lcm(size, retention.chunk_tokens if isinstance(retention, Chunked) else 1)
                for _, size, retention in self._windows
            ),
            default=0,
        )

    def open(self, owner: str, demand: Demand) -> Holding | Refusal:
        """Reserve `demand` for `owner`."""
        grant = self._arena.reserve(owner, demand)
        if isinstance(grant, Refusal):
            return grant
        holding = Holding(grant, self._pools)
        holding.slide_at = self._slide_at(holding)
        return holding

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

    def wanted_by_decode(self, holding: Holding, end: int) -> Demand:
        """Return the same for a decode that goes on up to `end`: it holds its window already, so without `span`."""
        return Demand(
            [
                max(0, -(-end // size) - first - len(handles)) if size else 0
                for size, first, handles in zip(self._page_tokens, holding.first_page, holding.handles, strict=True)
            ]
        )

    def fill(self, takers: Sequence[Holding], fresh: Iterable[tuple[Handles, ...]]) -> None:
        """Append newly committed pages: `fresh[i]` has the handles per pool for `takers[i]`."""
        for pool, handles in enumerate(zip(*fresh, strict=True)):
            if not any(map(len, handles)):
                continue
            for holding, new in zip(takers, handles, strict=True):
                if len(new):
                    holding.handles[pool] = np.concatenate((holding.handles[pool], new))
            if self.remembers_places:
                self._remember(takers, pool, handles)
        for holding in takers:
            holding.page_until = self._page_until(holding)

    def _remember(self, takers: Sequence[Holding], pool: int, fresh: Sequence[Handles]) -> None:
        places, at = self._arena.physical(pool, np.concatenate(fresh)), 0
        for holding, new in zip(takers, fresh, strict=True):
            if len(new):
                holding.places[pool] = np.concatenate((holding.places[pool], places[at : at + len(new)]))
                at += len(new)

    def begin_at(self, holding: Holding, tokens: int) -> None:
        """Let the table begin where position `tokens` first reads: what stands before is not the request's own."""
        for pool, page_tokens, retention in self._windows:
            begin = retention.first_needed(tokens) // page_tokens
            gone = begin - holding.first_page[pool]
            if gone > 0:
                holding.handles[pool], holding.places[pool] = holding.handles[pool][gone:], holding.places[pool][gone:]
                holding.first_page[pool] = begin
        holding.slide_at = self._slide_at(holding)

    def tear(self, holding: Holding, tokens: int) -> None:
        """Note that a window's first page may lack the positions that position `tokens` does not read."""
        for pool, page_tokens, retention in self._windows:
            first = retention.first_needed(tokens)
            if first % page_tokens and holding.first_page[pool] == first // page_tokens:
                holding.first_whole[pool] = holding.first_page[pool] + 1

    def wanted_at(self, holding: Holding, tokens: int) -> Demand:
        """Return the pages that a request lacks whose first `tokens` positions will stand there without a chunk."""
        return Demand(
            [
                (-(-tokens // size) if size else 1) - first - len(handles)
                for size, first, handles in zip(self._page_tokens, holding.first_page, holding.handles, strict=True)
            ]
        )

    def set_aside(self, holding: Holding) -> None:
        """Take the last new page of each state pool out of the table: a checkpoint goes there."""
        for pool, size in enumerate(self._page_tokens):
            if size == 0:
                holding.saved[pool] = holding.handles[pool][-1:]
                holding.handles[pool], holding.places[pool] = holding.handles[pool][:-1], holding.places[pool][:-1]

    def places(self, holding: Holding, pool: int) -> Places:
        """Return where the pages of the table are now, whether or not that is remembered."""
        return holding.places[pool] if self.remembers_places else self._arena.physical(pool, holding.handles[pool])

    def replace(self, holding: Holding, pool: int, first: int, handles: Handles) -> None:
        """Let `handles` stand in the table from page `first` on, counted from its front, in place of others."""
        table = holding.handles[pool].copy()
        table[first : first + len(handles)] = handles
        holding.handles[pool] = table
        if self.remembers_places:
            places = holding.places[pool].copy()
            places[first : first + len(handles)] = self._arena.physical(pool, handles)
            holding.places[pool] = places

    def begin_with(self, holding: Holding, handles: Sequence[Handles]) -> None:
        """Let a table that is empty yet begin with `handles`, per pool: pages that stand there already."""
        holding.handles = list(handles)
        if self.remembers_places:
            holding.places = [self._arena.physical(pool, of_pool) for pool, of_pool in enumerate(handles)]
        self.refresh(holding)

    @property
    def is_current(self) -> bool:
        """Whether no page has moved, for whomever, since all places were last looked up."""
        return self._moves_seen == self._arena.moves_planned

    def look_up(self, holdings: Iterable[Holding], moves: Sequence[Move]) -> None:
        """Find all places again: pages have moved. If by nothing but `moves`, then in no other pools than these."""
        are_all = self._moves_seen + len(moves) == self._arena.moves_planned
        pools = sorted({move.pool for move in moves}) if are_all else range(self._pools)
        self._moves_seen = self._arena.moves_planned
        for holding in holdings if self.remembers_places else ():
            for pool in pools:
                holding.places[pool] = self._arena.physical(pool, holding.handles[pool])

    def slide(self, holding: Holding, computed: int) -> None:
        """Give up every page that no position from `computed` on will read."""
        for pool, page_tokens, retention in self._windows:
            held = holding.handles[pool]
            gone = min(len(held), retention.first_needed(computed) // page_tokens - holding.first_page[pool])
            if gone > 0:
                self._arena.free(holding.grant, pool, held[:gone])
                holding.handles[pool] = held[gone:]
                holding.places[pool] = holding.places[pool][gone:]
                holding.first_page[pool] += gone
        holding.slide_at = self._slide_at(holding)

    def reprice(
        self, holding: Holding, resumed_at: int, end: int, computed: int, covered: Demand | None = None
    ) -> None:
        """Lower the grant to what the rest of the life can still need, less what is `covered`; it never rises here.

        `resumed_at` and `end` are the lengths of the history at admission and at the latest end. The latest and not the
        expected one: a grant that fell towards an expected end would have to be won back when the request outlives it.
        """
        grant = holding.grant
        price = resident(self._layout, resumed_at, end - resumed_at, computed, self.lookahead_tokens)
        if covered is not None:
            price = price.minus(covered)
        if not price.covers(grant.demand):
            self._arena.shrink(grant, Demand(map(min, price, grant.demand)))

    def refresh(self, holding: Holding) -> None:
        """Find the borders of a table anew that was changed elsewhere."""
        holding.page_until = self._page_until(holding)
        holding.slide_at = self._slide_at(holding)

    def passed(self, holding: Holding) -> None:
        """Find anew when a window gives up its next page: pages have left a table at its front."""
        holding.slide_at = self._slide_at(holding)

    def may_fall(self, end: int, computed: int) -> bool:
        """Whether re-pricing a decode can give anything back (a hint that saves the pricing)."""
        return end - computed <= self._falls_within

    def close(self, holding: Holding) -> None:
        """Give everything back."""
        self._arena.release(holding.grant)

    def _page_until(self, holding: Holding) -> int:
        # Only taking pages moves this border: what leaves at the front does not change where the last page ends.
        until = NEVER
        for size, first, handles in zip(self._page_tokens, holding.first_page, holding.handles, strict=True):
            if size:
                until = min(until, (first + len(handles)) * size)
        return until

    def _slide_at(self, holding: Holding) -> int:
        # Only giving pages up moves this border. A page dies when the last reader of its last position is computed.
        at = NEVER
        for pool, size, retention in self._windows:
            at = min(at, retention.last_reader((holding.first_page[pool] + 1) * size - 1) + 1)
        return at

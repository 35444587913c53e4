"""How many lives fit a room of slabs: the laws of design 2.2, 2.4 and 2.5 a second time, by counting and not by price.

    life       L prompt and m output tokens: T = L + m - 1 positions are computed, the last token's KV is never written
    needs      per pool the most pages that one of its decodes touches: position by position, no formula of a window
    room       slabs, each of `pages_per_slab` pages of one pool; in a static split each pool has its share of them
    fits       sum over pools of ceil(pages / pages_per_slab) <= slabs, and each pool within its share
    floor      one granule in every window pool, beside everything

`halocline.memory` is asked for the layout alone: how long a page is, and how many a slab holds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property

from halocline.memory.layout import ArenaLayout, LayerKV, PoolLayout, solve_layout
from halocline.memory.retention import Sliding

Pages = tuple[int, ...]
"""Pages (or slabs) per pool, in the layout's order."""
LARGE_BYTES = 1 << 30
"""Of an arena whose slabs the solver does not choose for their number."""
FEWEST_SLABS, MOST_SLABS = 4, 1 << 14
MOST_POSITIONS = 1 << 15


@dataclass(frozen=True)
class Life:
    """A request's tokens, from its first to its last."""

    prompt_tokens: int
    new_tokens: int

    @property
    def positions(self) -> int:
        """T: the positions that are ever computed."""
        return self.prompt_tokens + self.new_tokens - 1


def needs(pool: PoolLayout, life: Life) -> int:
    """Return the most pages of `pool` that one decode of this life touches."""
    window_tokens = pool.retention.window_tokens if isinstance(pool.retention, Sliding) else life.positions
    return _most_touched(life, pool.page_tokens, window_tokens)


@cache
def _most_touched(life: Life, page_tokens: int, window_tokens: int) -> int:
    return max(
        position // page_tokens - max(0, position - window_tokens + 1) // page_tokens + 1
        for position in range(life.prompt_tokens - 1, life.positions)
    )


def sum_of(left: Pages, right: Pages) -> Pages:
    """Return the sum, pool by pool."""
    return tuple(map(int.__add__, left, right))


def difference(left: Pages, right: Pages) -> Pages:
    """Return what `left` is above `right`, pool by pool."""
    return tuple(map(int.__sub__, left, right))


@dataclass(frozen=True)
class Room:
    """An arena, and how much of it each pool may have."""

    layout: ArenaLayout
    ratio: str | None = None
    """Tokens of the window pool per token of the full one, in a static split; None: one arena for both."""

    @property
    def policy(self) -> str:
        """As the setting spells it."""
        return "shared" if self.ratio is None else f"static:{self.ratio}"

    @property
    def floor(self) -> Pages:
        """One granule of every window pool."""
        granule = max(pool.page_tokens for pool in self.layout.pools)
        windows = [isinstance(pool.retention, Sliding) for pool in self.layout.pools]
        return tuple(granule // pool.page_tokens * has for has, pool in zip(windows, self.layout.pools, strict=True))

    @property
    def shares(self) -> Pages:
        """The slabs that a pool may have: the window its share in whole slabs, the full pool what rounding leaves."""
        slabs = self.layout.slabs
        if self.ratio is None:
            return (slabs,) * len(self.layout.pools)
        full, window = (pool.pages_per_slab * pool.page_tokens for pool in self.layout.pools)

        def share_of(first: int) -> int:
            return int(first * full * Fraction(self.ratio) / window)

        share = share_of(bisect_left(range(slabs), True, key=lambda first: first + share_of(first) > slabs) - 1)
        return slabs - share, share

    def life(self, life: Life) -> Pages:
        """Return what a whole life needs."""
        return tuple(needs(pool, life) for pool in self.layout.pools)

    def lives(self, lives: Sequence[Life]) -> Pages:
        """Return what they need together."""
        return tuple(sum(needs(pool, life) for life in lives) for pool in self.layout.pools)

    def slabs(self, pages: Sequence[int]) -> Pages:
        """Return the fewest slabs that hold so many pages."""
        return tuple(-(-number // pool.pages_per_slab) for number, pool in zip(pages, self.layout.pools, strict=True))

    def fits(self, *parts: Pages) -> bool:
        """Whether so many pages fit beside the floor."""
        slabs = self.slabs([*map(sum, zip(*parts, self.floor, strict=True))])
        return sum(slabs) <= self.layout.slabs and all(map(int.__le__, slabs, self.shares))

    def come_back(self, lives: Sequence[Life]) -> int:
        """Return how many of these, who stand in this line, have their whole lives granted together."""
        return max(number for number in range(len(lives) + 1) if self.fits(self.lives(lives[:number])))

    def left(self, pages: Pages) -> Pages:
        """Return what so many pages leave, the floor's included: slabs of a shared arena, pages of each share."""
        if self.ratio is None:
            return (self.layout.slabs - sum(self.slabs(pages)),)
        whole = (share * pool.pages_per_slab for share, pool in zip(self.shares, self.layout.pools, strict=True))
        return difference(tuple(whole), pages)


@dataclass(frozen=True)
class Cut:
    """Layers and how long the pages of their pools are: what a room has, whatever its size."""

    layers: tuple[LayerKV, ...]
    page_tokens: dict[str, int] | int

    @property
    def setting(self) -> str:
        """The page lengths as the setting spells them."""
        if isinstance(self.page_tokens, int):
            return str(self.page_tokens)
        return ",".join(f"{pool}={tokens}" for pool, tokens in self.page_tokens.items())

    @cached_property
    def large(self) -> ArenaLayout:
        """A layout of many slabs."""
        return solve_layout(self.layers, LARGE_BYTES, self.page_tokens)

    def room(self, slabs: int, ratio: str | None = None) -> Room:
        """Return a room of so many slabs."""
        slab_bytes = self.large.slab_bytes
        return Room(replace(self.large, slabs=slabs, budget_bytes=slabs * slab_bytes), ratio)

    def smallest(self, lives: Sequence[Life], ratio: str | None = None) -> Room:
        """Return the room of the fewest slabs in which all of these lives come back."""

        def holds(slabs: int) -> bool:
            return self.room(slabs, ratio).come_back(lives) == len(lives)

        return self.room(bisect_left(range(MOST_SLABS), True, lo=FEWEST_SLABS, key=holds), ratio)


def senior_beside(room: Room, juniors: Sequence[Life], most_prompt_tokens: int, fewest_new_tokens: int) -> Life:
    """Return the longest life beside which each of these prompts, alone, still has its pages: it takes all else.

    Its own prompt is so long at most, and so many new tokens it has at least, to outlast what happens beside it.
    """
    prompts = [room.life(Life(junior.prompt_tokens, 1)) for junior in juniors]

    def life(positions: int) -> Life:
        own = max(1, min(most_prompt_tokens, positions + 1 - fewest_new_tokens))
        return Life(own, positions + 1 - own)

    def is_too_long(positions: int) -> bool:
        taken = room.life(life(positions))
        return not all(room.fits(taken, prompt) for prompt in prompts)

    return life(bisect_left(range(MOST_POSITIONS), True, lo=1, key=is_too_long) - 1)

"""Tokens become pages here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from operator import add, sub


class Demand(tuple[int, ...]):
    """Pages per pool, in the order of `ArenaLayout.pools`. The one currency of checks, charges and grants."""

    __slots__ = ()

    def __new__(cls, pages: Iterable[int] = ()) -> Demand:
        """Make a demand of `pages[p]` pages of pool p."""
        return super().__new__(cls, pages)

    def plus(self, other: Demand) -> Demand:
        """Return the sum, pool by pool."""
        return Demand(map(add, self, other))

    def minus(self, other: Demand) -> Demand:
        """Return the difference, pool by pool; may be negative."""
        return Demand(map(sub, self, other))

    def above(self, other: Demand) -> Demand:
        """Return what this asks beyond `other`, pool by pool, never negative."""
        return Demand(max(0, mine - theirs) for mine, theirs in zip(self, other, strict=True))

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

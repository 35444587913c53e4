"""Whom to retract when a request may not be refused: fewest bytes that suffice, then least work lost.

A retraction gives back the victim's whole grant, promised pages included, and the cached pages that only victims lock.
Victims are never more than needed: each of the chosen ones is necessary, so none of them could come back in the same
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.schedule.request import Request

MOST_TRIES = 1000
"""How many sets of victims are tried, cheapest first, before a good choice must do (all of them with nine juniors)."""

Cost = tuple[int, int]
"""(bytes given back, tokens to compute again)."""


class Victims:
    """The choice among the strict juniors of one asker, for one demand."""

    def __init__(
        self, arena: Arena, extra: Demand, juniors: Sequence[Request], given_back: Callable[[Sequence[Request]], Demand]
    ) -> None:
        """`given_back` says what can be granted anew when a set of requests leaves, together."""
        self._arena = arena
        self._extra = extra
        self._juniors = juniors
        self._given_back = given_back
        self._stride_bytes = [pool.stride_bytes for pool in arena.layout.pools]

    def choose(self) -> tuple[Request, ...] | None:
        """Return whom to retract so that `extra` fits, None when even all juniors together do not suffice."""
        if self._arena.fits(self._extra):
            return ()
        if not self._suffices(self._juniors):
            return None
        return self._cheapest() or min(self._single(), self._thinned(), key=self._rank)

    def _cheapest(self) -> tuple[Request, ...] | None:
        """Return the first set of victims that suffices, in ascending order of cost; None when the tries run out.

        With juniors 0, 1, 2 ... in ascending order of cost, each set follows from exactly one that costs no more: by
        adding the junior after its last one, or by taking that junior instead of the last one.
        """
        juniors = self._ascending()
        costs = [self._cost((junior,)) for junior in juniors]
        heap: list[tuple[Cost, tuple[int, ...]]] = [(costs[0], (0,))]
        for _ in range(MOST_TRIES):
            if not heap:
                break
            (given_bytes, lost), chosen = heappop(heap)
            victims = tuple(juniors[at] for at in chosen)
            if self._suffices(victims):
                return victims
            last, after = chosen[-1], chosen[-1] + 1
            if after < len(juniors):
                more_bytes, more_lost = costs[after]
                heappush(heap, ((given_bytes + more_bytes, lost + more_lost), (*chosen, after)))
                swapped = (given_bytes + more_bytes - costs[last][0], lost + more_lost - costs[last][1])
                heappush(heap, (swapped, (*chosen[:-1], after)))
        return None

    def _single(self) -> tuple[Request, ...]:
        """Return the cheapest junior that suffices alone, all of them where none does."""
        alone = (request for request in self._ascending() if self._suffices((request,)))
        first = next(alone, None)
        return tuple(self._juniors) if first is None else (first,)

    def _thinned(self) -> tuple[Request, ...]:
        """Spare everyone who can be spared, the dearest first: what is left is minimal, though perhaps not cheapest."""
        chosen = self._ascending()
        for request in reversed(chosen.copy()):
            rest = [other for other in chosen if other is not request]
            if self._suffices(rest):
                chosen = rest
        return tuple(chosen)

    def _ascending(self) -> list[Request]:
        return sorted(self._juniors, key=lambda request: self._rank((request,)))

    def _rank(self, victims: Sequence[Request]) -> tuple[Cost, list[tuple[int, int]]]:
        return self._cost(victims), [request.key for request in victims]

    def _suffices(self, victims: Sequence[Request]) -> bool:
        return self._arena.fits(self._extra.minus(self._given_back(victims)))

    def _cost(self, victims: Sequence[Request]) -> Cost:
        given_bytes = sum(
            pages * stride
            for request in victims
            for pages, stride in zip(self._given_back((request,)), self._stride_bytes, strict=True)
        )
        return given_bytes, sum(request.computed for request in victims)

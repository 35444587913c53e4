"""Whom to retract when a request may not be refused: fewest bytes that suffice, then least work lost.

A retraction gives back the victim's whole grant, promised pages included. Victims are never more than needed: each of
the chosen ones is necessary, so none of them could come back in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, zero
from halocline.schedule.request import Request

EXACT_JUNIORS = 8
"""Up to this many juniors every subset is tried (2^8 questions, once in a retraction)."""

Cost = tuple[int, int]
"""(bytes given back, tokens to compute again)."""


class Victims:
    """The choice among the strict juniors of one asker, for one demand."""

    def __init__(self, arena: Arena, extra: Demand, juniors: Sequence[Request]) -> None:
        self._arena = arena
        self._extra = extra
        self._juniors = juniors
        self._stride_bytes = [pool.stride_bytes for pool in arena.layout.pools]

    def choose(self) -> tuple[Request, ...] | None:
        """Return whom to retract so that `extra` fits, None when even all juniors together do not suffice."""
        if self._arena.fits(self._extra):
            return ()
        if not self._suffices(self._juniors):
            return None
        singles = [request for request in self._juniors if self._suffices((request,))]
        if len(self._juniors) <= EXACT_JUNIORS:
            return self._cheapest_subset()
        if singles:
            return (min(singles, key=lambda request: (*self._cost((request,)), request.key)),)
        return self._thinned()

    def _cheapest_subset(self) -> tuple[Request, ...]:
        subsets = (
            subset
            for count in range(1, len(self._juniors) + 1)
            for subset in combinations(self._juniors, count)
            if self._suffices(subset)
        )
        return min(subsets, key=lambda subset: (*self._cost(subset), [request.key for request in subset]))

    def _thinned(self) -> tuple[Request, ...]:
        """Spare everyone who can be spared, the dearest first: what is left is minimal, though perhaps not cheapest."""
        chosen = sorted(self._juniors, key=lambda request: (*self._cost((request,)), request.key))
        for request in reversed(chosen.copy()):
            rest = [other for other in chosen if other is not request]
            if self._suffices(rest):
                chosen = rest
        return tuple(chosen)

    def _suffices(self, victims: Sequence[Request]) -> bool:
        given_back = zero(len(self._extra))
        for request in victims:
            given_back = given_back.plus(_granted(request))
        return self._arena.fits(self._extra.minus(given_back))

    def _cost(self, victims: Sequence[Request]) -> Cost:
        given_bytes = sum(
            pages * stride
            for request in victims
            for pages, stride in zip(_granted(request), self._stride_bytes, strict=True)
        )
        return given_bytes, sum(request.computed for request in victims)


def _granted(request: Request) -> Demand:
    assert request.holding is not None, f"{request.id} is {request.state.value} and holds nothing to give back"
    return request.holding.grant.demand

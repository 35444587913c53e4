"""How far each prefill goes in one step: the step's tokens, and its room beyond what requests were granted.

    token budget   |decodes|chunk of the most senior prefilling request|chunk of the next|  admissions ... |
    room           |promised to grants: untouchable|floor: the most senior only|free: the step grant takes from here|

A chunk is cut to the room there is. It never takes a page that was granted to a request, so no retraction can follow
from it; what it borrowed is back when the step has been applied.
"""

from __future__ import annotations

from dataclasses import dataclass

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, fit_chunk, step_extra, zero
from halocline.memory.grant import Grant, Order, Refusal
from halocline.schedule.request import Request

FLOOR_OWNER, STEP_OWNER = "floor", "step"
"""In whose name the floor and a step's grant stand."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, start + tokens) of `request`, computed in one step."""

    request: Request
    start: int
    tokens: int
    is_senior: bool
    """Whether it may borrow from the floor."""
    saves: bool = False
    """Whether the states at its end are saved as a checkpoint."""

    @property
    def end(self) -> int:
        """The first position after the chunk."""
        return self.start + self.tokens


class StepRoom:
    """What one step may still compute and borrow. Made by `plan`, closed by `apply` (or when nothing came of it)."""

    def __init__(self, arena: Arena, floor: Grant, tokens_left: int) -> None:
        self._arena = arena
        self._floor = floor
        self._grant: Grant | None = None
        self._floor_is_free = True
        self._nothing = zero(len(arena.layout.pools))
        self.tokens_left = tokens_left
        self.chunks: list[Chunk] = []
        self.landings: list[tuple[Request, Demand]] = []
        """Requests that came in to receive their prompts, and the pages that these take: no chunk computes them."""
        assert tokens_left >= 0, f"the decodes alone are {-tokens_left} tokens more than a step may compute"

    @property
    def held_by_chunks(self) -> Demand:
        """The step grant so far: what this step's chunks borrow from what nobody was granted."""
        return self._grant.demand if self._grant is not None else self._nothing

    def fit(self, start: int, target: int, resident: Demand) -> int:
        """Return the most tokens that a chunk at `start` of a prefill up to `target` may have now, 0 if none.

        `resident` is what its request is granted, with the cached pages that stand in for a part of its price.
        """
        if self.tokens_left == 0:
            return 0
        covered = resident.plus(self._floor.demand) if self._floor_is_free else resident
        return fit_chunk(self._arena.layout, start, target, self.tokens_left, covered, self._arena.fits)

    def take(
        self, request: Request, start: int, tokens: int, resident: Demand, checkpoint: Demand | None = None
    ) -> Refusal | None:
        """Enter a chunk of `tokens` at `start`, or say what the budget refused; `resident` as for `fit`.

        Its states are saved into the pages of `checkpoint`, if given; where there is no room for them, it goes without.
        """
        extra = step_extra(self._arena.layout, start, tokens, resident)
        saves = checkpoint is not None and self._raise(self._beyond_floor(extra.plus(checkpoint))) is None
        refusal = None if saves else self._raise(self._beyond_floor(extra))
        if refusal is None:
            self.chunks.append(Chunk(request, start, tokens, self._floor_is_free, saves))
            self.tokens_left -= tokens
        self._floor_is_free = False
        return refusal

    def drop(self, request: Request) -> None:
        """Take the chunk or the landing of `request` out: it failed before its pages were committed."""
        self.landings = [landing for landing in self.landings if landing[0] is not request]
        self.chunks = [chunk for chunk in self.chunks if chunk.request is not request]

    def pass_floor_by(self) -> None:
        """Keep the floor from everyone junior to the prefilling request that was just asked."""
        self._floor_is_free = False

    def orders(self, chunk: Chunk, wanted: Demand) -> list[Order]:
        """Return the orders for a chunk that needs `wanted` new pages: the floor lends first, then the step grant."""
        assert chunk.request.holding is not None, f"{chunk.request.id} left after its chunk was planned"
        grant = chunk.request.holding.grant
        if not chunk.is_senior:
            return [Order(grant, wanted, self._grant)]
        beyond = wanted.above(Demand(grant.room)).above(Demand(self._floor.room))
        orders = [Order(grant, wanted.minus(beyond), self._floor)]
        return orders if beyond.is_zero else [*orders, Order(grant, beyond, self._grant)]

    def close(self) -> None:
        """Give the step grant back; everything that was borrowed must be paid back by now."""
        if self._grant is not None:
            assert not any(self._grant.lent), f"{self._grant} still lends {self._grant.lent} pages at its step's end"
            self._arena.release(self._grant)
            self._grant = None
        assert not any(self._floor.lent), f"the floor still lends {self._floor.lent} pages at the step's end"

    def _beyond_floor(self, extra: Demand) -> Demand:
        return extra.above(self._floor.demand) if self._floor_is_free else extra

    def _raise(self, extra: Demand) -> Refusal | None:
        if extra.is_zero:
            return None
        if self._grant is None:
            answer = self._arena.reserve(STEP_OWNER, extra)
        else:
            answer = self._arena.extend(self._grant, self._grant.demand.plus(extra))
        if isinstance(answer, Refusal):
            return answer
        self._grant = answer
        return None

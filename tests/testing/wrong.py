"""Wrong policies, on purpose: each does what some engine did, so that a scenario proves that it bites.

A policy is a function that spoils a finished world, or a replacement for the price function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, resident
from halocline.memory.grant import Grant, Handles, Refusal
from halocline.memory.layout import ArenaLayout
from halocline.schedule.admission import Candidate
from halocline.schedule.chunk import StepRoom
from halocline.schedule.events import Reason
from halocline.schedule.request import Request, State
from halocline.schedule.retract import Victims
from halocline.units import ceil_div, ceil_to
from testing.schedule import World


def keeps_windows_while_prefilling(made: World) -> None:
    """A1: out-of-window pages are given up after the next chunk was priced, not before."""
    _settle_only(made, lambda request: request.state is not State.PREFILLING)


def keeps_windows_while_decoding(made: World) -> None:
    """H6: window pages are kept until the request ends."""
    _settle_only(made, lambda request: request.computed <= request.resumed_at)


def _settle_only(made: World, who: Callable[[Request], bool]) -> None:
    sharing = made.scheduler._sharing
    settle = sharing.settle
    sharing.settle = lambda moved: settle([request for request in moved if who(request)])  # type: ignore[method-assign]


def takes_granted_room(made: World) -> None:
    """A4: whoever wants to come in may use what others were granted and have not taken yet."""
    filler, roster, arena = made.scheduler._filler, made.scheduler._roster, made.arena
    admit = filler._try_admit

    def steal(request: Request, room: StepRoom) -> Reason | None:
        for other in (*roster.prefilling, *roster.decoding):
            if other.holding is not None:
                grant, next_token = other.holding.grant, len(other.history) + 1 - other.resumed_at
                now = resident(arena.layout, other.resumed_at, next_token, other.computed)
                left = Demand(min(have, max(held, need)) for have, held, need in zip(*_of(grant), now, strict=True))
                arena.shrink(grant, left)
        return admit(request, room)

    filler._try_admit = steal  # type: ignore[method-assign]


def _of(grant: Grant) -> tuple[Demand, Demand]:
    return grant.demand, grant.held


def lets_new_requests_overtake(made: World) -> None:
    """A15: tokens that a continued prefill cannot use go to a new request."""
    filler = made.scheduler._filler
    go_on = filler._continue_prefills

    def never_mind(room: StepRoom, reasons: dict[str, Reason]) -> int:
        go_on(room, reasons)
        return 0

    filler._continue_prefills = never_mind  # type: ignore[method-assign]


def latches_full(made: World) -> None:
    """A10: once somebody did not fit, nobody is looked at until a request has ended."""
    filler, totals = made.scheduler._filler, made.scheduler._roster.totals
    admit, latched = filler._try_admit, [-1]

    def ended() -> int:
        return totals.finished + totals.aborted + totals.failed

    def latch(request: Request, room: StepRoom) -> Reason | None:
        if latched[0] == ended():
            return Reason("memory", "full since step 0")
        reason = admit(request, room)
        latched[0] = ended() if reason is not None and reason.code == "memory" else -1
        return reason

    filler._try_admit = latch  # type: ignore[method-assign]


def counts_chunks_when_planned(made: World) -> None:
    """A5: a chunk counts as computed as soon as it is planned."""
    scheduler = made.scheduler
    plan = scheduler.plan

    def early(now: float) -> object:
        made_plan = plan(now)
        if scheduler._outstanding is not None:
            for chunk in scheduler._outstanding.room.chunks:
                chunk.request.computed = chunk.end
        return made_plan

    scheduler.plan = early  # type: ignore[assignment, method-assign]


def price_of_the_prompt_only(
    layout: ArenaLayout, prompt_tokens: int, max_new_tokens: int, computed_tokens: int = 0, lookahead_tokens: int = 0
) -> Demand:
    """A6: what is checked at the door is less than what the request will hold."""
    del max_new_tokens
    return resident(layout, prompt_tokens, 1, computed_tokens, lookahead_tokens)


def price_of_a_full_length_window(
    layout: ArenaLayout, prompt_tokens: int, max_new_tokens: int, computed_tokens: int = 0, lookahead_tokens: int = 0
) -> Demand:
    """A8: windows are priced as if they kept every position."""
    right = resident(layout, prompt_tokens, max_new_tokens, computed_tokens, lookahead_tokens)
    total = prompt_tokens + max_new_tokens - 1
    return Demand(
        ceil_div(total, pool.page_tokens) if pool.is_positional else pages
        for pages, pool in zip(right, layout.pools, strict=True)
    )


def price_of_one_window_page(
    layout: ArenaLayout, prompt_tokens: int, max_new_tokens: int, computed_tokens: int = 0, lookahead_tokens: int = 0
) -> Demand:
    """A9: a window shorter than a page is taken to need one page, though it can straddle two."""
    right = resident(layout, prompt_tokens, max_new_tokens, computed_tokens, lookahead_tokens)
    return Demand(pages if index == 0 else 1 for index, pages in enumerate(right))


def price_rounded_twice(
    layout: ArenaLayout, prompt_tokens: int, max_new_tokens: int, computed_tokens: int = 0, lookahead_tokens: int = 0
) -> Demand:
    """H2: prompt and output are each rounded up to whole granules, one token is added, and then pages are counted."""
    granule = layout.granule_tokens
    prompt, new = ceil_to(prompt_tokens, granule), ceil_to(max_new_tokens, granule)
    return resident(layout, prompt, new + 2, computed_tokens, lookahead_tokens)


def choose_the_longest(victims: Victims) -> tuple[Request, ...] | None:
    """F4: the victim is whoever is longest, whatever is missing. Stands in for `Victims.choose`."""
    if victims._arena.fits(victims._extra):
        return ()
    ordered = sorted(victims._juniors, key=lambda request: -len(request.history))
    for count in range(1, len(ordered) + 1):
        if victims._suffices(ordered[:count]):
            return tuple(ordered[:count])
    return None


def grants_only_the_next_token_on_return(made: World) -> None:
    """F1: a retracted request comes back with a small grant, and is soon retracted again."""
    gate = made.scheduler._gate
    price = gate.candidate

    def small(request: Request) -> Candidate:
        right = price(request)
        if request.retractions == 0:
            return right
        return replace(right, demand=resident(made.layout, len(request.history), 1, right.start))

    gate.candidate = small  # type: ignore[method-assign]


def estimates_decay_on_a_timer(made: World) -> None:
    """F2: what an output is expected to take sinks with every ten steps, and starts again after a hundred."""
    lengths = made.scheduler._gate.lengths
    observed = lengths.estimate
    lengths.estimate = lambda max_tokens: max(1, observed(max_tokens) - made.steps % 100 // 10)  # type: ignore[method-assign]


class SameRoomForAll(Arena):
    """A13: all candidates of one pass are judged by the room at its beginning. `begins` says when one does."""

    seen: list[int] | None = None

    def begins(self) -> None:
        """Remember what is promised now."""
        self.seen = list(self.budget.promised)

    def fits(self, extra: Demand) -> bool:
        with self._as_it_was():
            return super().fits(extra)

    def reserve(self, owner: str, demand: Demand) -> Grant | Refusal:
        with self._as_it_was():
            return super().reserve(owner, demand)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        if self.seen is None:
            yield
            return
        real, self.budget.promised = self.budget.promised, list(self.seen)
        yield
        grown = map(int.__sub__, self.budget.promised, self.seen)
        self.budget.promised = list(map(int.__add__, real, grown))


class PricesThenLocks(Arena):
    """A14: a request's demand is checked first; then its cached prefix is locked, whether or not that fits, too."""

    def lock(self, owner: str | Grant, handles: Sequence[Handles], demand: Demand) -> Grant | Refusal:
        if isinstance(owner, Grant) or not self.budget.fits(demand):
            return super().lock(owner, handles, demand)
        nothing = [0] * len(self.pools)
        promised, self.budget.promised = self.budget.promised, list(nothing)
        held, self.budget.held = self.budget.held, list(nothing)
        granted = super().lock(owner, handles, demand)
        self.budget.promised = list(map(int.__add__, promised, self.budget.promised))
        self.budget.held = list(map(int.__add__, held, self.budget.held))
        return granted

    def shortfall(self, extra: Demand) -> Refusal | None:
        """Say nothing before: who asks before it locks has counted its own prefix already."""
        del extra


def charges_a_second_window(made: World) -> None:
    """A2: a whole window is charged beside the one that is cached and locked."""
    gate = made.scheduler._gate
    price = gate.candidate

    def charged(request: Request) -> Candidate:
        right = price(request)
        windows = resident(made.layout, right.start + 1, 1, right.start).minus(
            Demand(
                ceil_div(right.start + 1, pool.page_tokens) if pool.name == "full" else 0 for pool in made.layout.pools
            )
        )
        return replace(right, demand=right.demand.plus(windows)) if right.start else right

    gate.candidate = charged  # type: ignore[method-assign]

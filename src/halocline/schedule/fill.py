"""Fills a step after its decodes: prefills that go on, then requests that come in, both most senior first.

A new request never overtakes: nobody is admitted while a prefill that has begun goes without a chunk, and the first
candidate that cannot enter stops all behind it. Only the most senior request, when it comes back after a retraction, is
asked before the prefills of its juniors: their chunks take tokens and room anew in every step, and would keep it out
until their prompts end. Whoever is refused gets a reason with numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.grant import Refusal
from halocline.schedule.admission import Candidate, Gate
from halocline.schedule.chunk import StepRoom
from halocline.schedule.delay import Delay
from halocline.schedule.events import Reason
from halocline.schedule.growth import Growth
from halocline.schedule.holding import Holding
from halocline.schedule.offload import HostDesk
from halocline.schedule.receive import Receiving
from halocline.schedule.request import Request
from halocline.schedule.roster import Roster
from halocline.schedule.rules import Rules
from halocline.schedule.sharing import Sharing, Standing

MOST_WAIT_STEPS = 16
"""How many steps a request waits for prefixes that others compute, all told."""
MOST_PASSED = 8
"""How many requests may wait so and let others pass in one step: each of them is looked up in every step."""


@dataclass(frozen=True, slots=True)
class Refused:
    """That memory was refused to `request` while others ran: `extra` pages, which did not fit beside theirs.

    It asks for the same again as long as nothing else is on record here than it was then. What others lock of its
    prefix is less as they go on, and then it asks for more; it only asks for less when the cache has got more of it.
    """

    request: Request
    extra: Demand
    retractions: int
    changes: int
    """Changes of what is cached, see `Sharing.changes`."""
    recorded: int
    """Outputs on which expectations are built."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What `request` asked for when it was last refused, and on what that depends but for the memory there is."""

    request: Request
    candidate: Candidate
    standing: Standing
    extra: Demand
    retractions: int
    recorded: int


class Filler:
    """Chunks and admissions of one step."""

    def __init__(
        self,
        arena: Arena,
        rules: Rules,
        gate: Gate,
        sharing: Sharing,
        roster: Roster,
        growth: Growth,
        desk: HostDesk,
        receiving: Receiving,
    ) -> None:
        self._arena = arena
        self._rules = rules
        self._gate = gate
        self._sharing = sharing
        self._roster = roster
        self._growth = growth
        self._desk = desk
        self._receiving = receiving
        self._has_states = any(not pool.is_positional for pool in arena.layout.pools)
        self._delay = Delay(arena, rules, roster)
        self._known: Refused | None = None
        """The last one, so that whoever was refused is not looked up, priced and locked in every step."""
        self._asked: Asked | None = None
        """The same while others prefill, whose chunks change what is cached in every step: mostly not for this one."""

    def may_admit(self) -> bool:
        """Whether somebody who waits might come in now: he was not asked yet, or what refused him is over.

        A guess that costs little. Whoever can come in, does, whatever was guessed.
        """
        head = self._roster.waiting.first()
        if head is None or self._roster.running >= self._rules.max_running_requests or self._growth.short_reason(head):
            return False
        known = self._known
        is_refused = known is not None and (known.request, known.retractions) == (head, head.retractions)
        return known is None or not is_refused or self._arena.fits(known.extra)

    def fill(self, room: StepRoom, reasons: dict[str, Reason], now: float) -> None:
        """Enter chunks into `room`; `reasons` gets an entry for who was considered and may not compute now."""
        self._return_most_senior(room, reasons)
        behind = self._continue_prefills(room, reasons)
        if behind:
            self._stand_behind(behind, room, reasons)
        elif not self._delay.holds_back(room, reasons, now):
            self._admit(room, reasons)

    def _return_most_senior(self, room: StepRoom, reasons: dict[str, Reason]) -> None:
        """Let the most senior request come back if it was retracted. Refused, it is short."""
        waiting = self._roster.waiting.first()
        if waiting is not None and waiting.retractions and waiting is self._roster.most_senior():
            reason = self._try_admit(waiting, room)
            if reason is not None:
                reasons[waiting.id] = reason

    def _continue_prefills(self, room: StepRoom, reasons: dict[str, Reason]) -> int:
        """Give each prefilling request its chunk; return how many got none: new ones come in when all are served."""
        without = 0
        entered = [chunk.request for chunk in room.chunks]
        for request in self._roster.prefilling:
            if request in entered:
                continue  # it came back a moment ago
            holding = request.holding
            assert holding is not None, f"{request.id} prefills without a grant"
            tokens, refusal = self._chunk(request, holding, request.computed, room)
            if tokens == 0 or refusal is not None:
                room.pass_floor_by()
                without += 1
                reasons[request.id] = self._step_room(room, refusal)
        return without

    def _stand_behind(self, prefills: int, room: StepRoom, reasons: dict[str, Reason]) -> None:
        """Tell the first who waits, if it was not told yet, that so many prefills that have begun go before it."""
        first = self._roster.waiting.first()
        if first is not None and first.id not in reasons:
            ahead = f"{prefills} of {len(self._roster.prefilling)} prefills that have begun got no chunk in this step"
            reasons[first.id] = self._barred(first, room) or Reason("step-room", ahead)

    def _admit(self, room: StepRoom, reasons: dict[str, Reason]) -> None:
        """Admit waiting requests in order of seniority; the first that cannot enter stops all behind it.

        Who would rather wait for a prefix that another one computes lets those behind it pass, a few of them at most.
        """
        passed = 0
        while passed < min(MOST_PASSED, len(self._roster.waiting)):
            request = self._roster.waiting[passed]
            reason = self._try_admit(request, room)
            if reason is None:
                reasons.pop(request.id, None)
                continue
            reasons[request.id] = reason
            if reason.code != "prefix":
                return
            passed += 1

    def _try_admit(self, request: Request, room: StepRoom) -> Reason | None:
        barred = self._barred(request, room) or self._refused_again(request) or self._asks_again(request, room)
        if barred is not None:
            return barred
        if request.route == "receive":
            return self._try_receive(request, room)
        candidate = self._desk.candidate(request, self._gate)
        waits = self._waits_for_prefix(request, candidate)
        if waits is not None:
            return waits
        holding = self._sharing.open(request, candidate.entrance, candidate.demand)
        copy = candidate.entrance.copy
        may_cost_more = candidate.start and self._has_states and copy is None
        if isinstance(holding, Refusal) and may_cost_more and self._roster.running == 0:
            candidate, holding = self._cheaper(request, candidate)
        if isinstance(holding, Refusal):
            self._asked = self._remembered(request, candidate, holding)
            return self._no_room(request, holding, room)
        if copy is not None:
            self._desk.prepare(holding, copy)
        tokens, refusal = self._chunk(request, holding, candidate.start, room)
        if tokens == 0 or refusal is not None:
            self._sharing.leave(request, holding, keep=False)
            return self._step_room(room, refusal)
        self._sharing.entered(request, candidate.entrance)
        self._desk.entered(request, copy)
        self._roster.admit(request, holding, candidate.start)
        self._growth.grant(request)
        return None

    def _try_receive(self, request: Request, room: StepRoom) -> Reason | None:
        """Admit a request whose prompt another worker computes: all its pages at once, and no chunk."""
        candidate = self._receiving.candidate(request, self._gate)
        holding = self._sharing.open(request, candidate.entrance, candidate.demand)
        if isinstance(holding, Refusal) and candidate.start and self._has_states and self._roster.running == 0:
            candidate = self._receiving.candidate(request, self._gate, is_cold=True)  # hot may cost more
            holding = self._sharing.open(request, candidate.entrance, candidate.demand)
        if isinstance(holding, Refusal):
            return self._no_room(request, holding, room)
        room.landings.append((request, self._receiving.enter(request, holding)))
        self._sharing.entered(request, candidate.entrance)
        self._roster.admit(request, holding, candidate.start)
        self._growth.grant(request)
        return None

    def _no_room(self, request: Request, refusal: Refusal, room: StepRoom) -> Reason:
        if self._arena.fits(refusal.extra.minus(room.held_by_chunks)):
            return self._step_room(room, refusal)  # what this step's chunks borrow is back when the step is over
        self._known = Refused(request, refusal.extra, *self._basis(request)) if self._roster.running else None
        return self._refused(request, refusal)

    def _barred(self, request: Request, room: StepRoom) -> Reason | None:
        """Say why nobody like `request` may come in now, whatever it asks for."""
        slots = self._rules.max_running_requests
        if self._roster.running >= slots:
            return Reason("slots", f"{slots} requests are running, the most that max_running_requests allows")
        takes_chunk = request.route != "receive"
        if (
            room.tokens_left == 0 and takes_chunk and not request.retractions
        ):  # who comes back may be short, and is asked
            return self._growth.short_reason(request) or self._step_room(room, None)
        return self._growth.short_reason(request)

    def _refused_again(self, request: Request) -> Reason | None:
        """Say why memory would be refused to `request` once more; None where that is not known without asking.

        While somebody prefills, the answer might be another one: to wait for a prefix, or for the step's room.
        """
        known = self._known
        if known is None or known.request is not request or not self._roster.running or len(self._roster.prefilling):
            return None
        if (known.retractions, known.changes, known.recorded) != self._basis(request):
            return None
        refusal = self._arena.shortfall(known.extra)
        return None if refusal is None else self._refused(request, refusal)

    def _asks_again(self, request: Request, room: StepRoom) -> Reason | None:
        """Answer `request` where it would ask for the same as when it was last refused; None where it must be asked.

        That is so when all is as it was on which its price depends: what the cache has of it, how much of that others
        lock, and what outputs are expected to be. So it is not looked up and priced anew because others go on.
        """
        asked = self._asked
        if asked is None or asked.request is not request or not self._roster.running:
            return None
        if (asked.retractions, asked.recorded) != (request.retractions, self._gate.lengths.recorded):
            return None
        if self._sharing.standing(request) != asked.standing:
            return None
        waits = self._waits_for_prefix(request, asked.candidate)
        if waits is not None:
            return waits
        refusal = self._arena.shortfall(asked.extra)
        return None if refusal is None else self._no_room(request, refusal, room)

    def _remembered(self, request: Request, candidate: Candidate, refusal: Refusal) -> Asked | None:
        """Return what `request` has just asked for, if it would ask for that again where its standing is the same."""
        entrance, standing = candidate.entrance, self._sharing.standing(request)
        if standing is None or entrance.copy is not None or entrance.offer is not None or entrance.hands_over:
            return None
        if entrance.start != standing.start or refusal.extra != candidate.demand.minus(standing.less):
            return None
        retractions, _, recorded = self._basis(request)
        return Asked(request, candidate, standing, refusal.extra, retractions, recorded)

    def _basis(self, request: Request) -> tuple[int, int, int]:
        return request.retractions, self._sharing.changes, self._gate.lengths.recorded

    def _waits_for_prefix(self, request: Request, candidate: Candidate) -> Reason | None:
        """Say whose work `request` waits for instead of doing it again; it never waits twice for long."""
        if request.retractions or request.waits >= MOST_WAIT_STEPS:
            return None
        awaited = self._sharing.awaited(request, candidate.entrance, self._roster.prefilling)
        if awaited is None:
            return None
        request.waits += 1
        other, agreed = awaited.request, awaited.boundary
        return Reason(
            "prefix",
            f"{other.id} has computed {other.computed} of {agreed} tokens that both begin with, {candidate.start} are "
            f"cached; it has waited {request.waits} of at most {MOST_WAIT_STEPS} steps for them",
        )

    def _cheaper(self, request: Request, hot: Candidate) -> tuple[Candidate, Holding | Refusal]:
        """Hot may cost more than cold, and nobody runs whose leaving could make room: hand the checkpoint over, or go
        without it."""
        handed = Candidate(replace(hot.entrance, hands_over=True), hot.demand)
        answer = self._sharing.open(request, handed.entrance, handed.demand)
        if not isinstance(answer, Refusal):
            return handed, answer
        cold = self._gate.priced(request, replace(hot.entrance, start=0))
        return cold, self._sharing.open(request, cold.entrance, cold.demand)

    def _chunk(self, request: Request, holding: Holding, start: int, room: StepRoom) -> tuple[int, Refusal | None]:
        """Enter the next chunk of `request` as far as there is room; return its tokens, 0 if none, and any refusal."""
        resident = holding.grant.demand.plus(self._sharing.covered(holding))
        stop = self._sharing.next_stop(request, holding, start)
        tokens = room.fit(start, stop.end, resident)
        if tokens == 0:
            return 0, None
        checkpoint = stop.checkpoint if start + tokens == stop.end else None
        return tokens, room.take(request, start, tokens, resident, checkpoint)

    def _refused(self, request: Request, refusal: Refusal) -> Reason:
        if request.retractions and request is self._roster.most_senior():
            self._growth.refuse(request, refusal)
        return Reason("memory", refusal.message)

    def _step_room(self, room: StepRoom, refusal: Refusal | None) -> Reason:
        granule = self._arena.layout.granule_tokens
        left = (
            f"{room.tokens_left} of {self._rules.step_tokens} step tokens are left, chunks are whole {granule} tokens"
        )
        return Reason(
            "step-room", f"{left}{'; ' + refusal.message if refusal else ', or the room for them is used up'}"
        )

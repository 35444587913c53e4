"""The scheduler: events in, plans out, results in, updates out.

    handle(event) -> updates        a request arrives or leaves, at any moment
    plan(now)     -> StepPlan       1. decodes get their next page, most senior first; juniors give way if they must
                                    2. prefills go on, most senior first, each as far as the step's room allows
                                    3. who waits is admitted, most senior first, until somebody does not fit
                                    4. one commit for all pages of the step
    apply(result) -> updates        computed positions advance, tokens are appended, windows slide, grants fall

It is a function of its events: no clock, no randomness, no I/O. `plan` takes pages, but nothing counts as computed
before `apply`. It is the only writer of requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from halocline.errors import ConfigError, InvariantError, OverdrawnError
from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.memory.demand import Demand, floor_demand
from halocline.memory.grant import Refusal
from halocline.schedule.admission import Gate
from halocline.schedule.audit import audit
from halocline.schedule.chunk import FLOOR_OWNER, StepRoom
from halocline.schedule.events import Abort, Accepted, Arrive, Event, NewToken, Reason, Rejected, Update
from halocline.schedule.figures import SchedulerFigures, Totals
from halocline.schedule.fill import Filler
from halocline.schedule.growth import Growth
from halocline.schedule.holding import Keeper
from halocline.schedule.orders import orders_of
from halocline.schedule.packing import pack
from halocline.schedule.prefixes import Prefixes
from halocline.schedule.request import Request, State
from halocline.schedule.results import Results
from halocline.schedule.roster import Roster
from halocline.schedule.rules import Rules
from halocline.schedule.sharing import Alone, Sharing
from halocline.step import StepPlan, StepResult

__all__ = ["Rules", "Scheduler"]

KEPT_VIOLATIONS = 64


@dataclass(frozen=True, slots=True)
class _Outstanding:
    """A planned step whose result is awaited."""

    plan: StepPlan
    decodes: tuple[Request, ...]
    room: StepRoom

    @property
    def requests(self) -> tuple[Request, ...]:
        """Everyone who is computed in this step, in the plan's order."""
        return (*self.decodes, *(chunk.request for chunk in self.room.chunks))


class Scheduler:
    """Decides who runs next, and how far, on one arena."""

    def __init__(self, arena: Arena, rules: Rules) -> None:
        """Take the floor out of an arena. Raises ConfigError when arena and rules cannot serve a single request."""
        self._arena = arena
        self._rules = rules
        granule = arena.layout.granule_tokens
        if rules.step_tokens < granule:
            raise ConfigError([f"step_tokens is {rules.step_tokens}, less than one granule of {granule} tokens"])
        floor = arena.reserve(FLOOR_OWNER, floor_demand(arena.layout, rules.prefix_cache))
        if isinstance(floor, Refusal):
            raise ConfigError([f"the arena cannot hold even the floor of one granule: {floor.message}"])
        self._floor = floor
        self._keeper = Keeper(arena)
        self._sharing: Sharing = Prefixes(arena, self._keeper) if rules.prefix_cache else Alone(arena, self._keeper)
        self._gate = Gate(arena, rules, floor.demand, self._sharing)
        refusal = self._gate.shortest_refusal()
        if refusal is not None:
            raise ConfigError([f"the arena is too small for any request: {refusal}"])
        self._roster = Roster(self._sharing)
        self._growth = Growth(arena, self._keeper, self._roster, self._sharing)
        self._results = Results(self._sharing, self._roster, self._gate.lengths)
        self._eos = frozenset(rules.eos_token_ids)
        self._filler = Filler(arena, rules, self._gate, self._sharing, self._roster, self._growth)
        self._violations: deque[Violation] = deque(maxlen=KEPT_VIOLATIONS)
        self._reasons: dict[str, Reason] = {}
        self._outstanding: _Outstanding | None = None
        self._planned_steps = 0

    # --- events

    def handle(self, event: Event) -> tuple[Update, ...]:
        """Take an event, also while a step is outstanding, and return what its client must be told."""
        if isinstance(event, Arrive):
            self._roster.outbox.append(self._arrive(event))
        else:
            self._abort(event)
        return self.take_updates()

    def take_updates(self) -> tuple[Update, ...]:
        """Return updates that no other call has returned: `plan` may have failed a request. Ask when it gave none."""
        return self._roster.take_updates()

    def _arrive(self, event: Arrive) -> Update:
        totals = self._roster.totals
        answer = self._refuse(event) or self._gate.check(event)
        if isinstance(answer, Rejected):
            totals.rejected += 1
            return answer
        request = Request(event, totals.arrived, answer.max_tokens, self._eos)
        totals.arrived += 1
        self._roster.enter(request)
        return Accepted(event.request_id, answer.max_tokens, answer.clipped)

    def _refuse(self, event: Arrive) -> Rejected | None:
        if event.request_id in self._roster.live:
            return Rejected(event.request_id, f"request {event.request_id!r} exists already")
        waiting = len(self._roster.waiting)
        if waiting >= self._rules.max_waiting_requests:
            message = f"{waiting} requests wait already, and max_waiting_requests is that; try again later"
            return Rejected(event.request_id, message, None, "overloaded")
        return None

    def _abort(self, event: Abort) -> None:
        request = self._roster.live.get(event.request_id)
        if request is None:
            return  # it ended on its own just before, or was never taken
        if event.reason == "abort":
            self._roster.totals.aborted += 1
        else:
            self._results.count_finished(request)
        self._roster.end(request)
        self._roster.outbox.append(NewToken(request.id, None, None, event.reason))

    # --- planning

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._roster.live)

    def plan(self, now: float) -> StepPlan | None:
        """Plan the next step; None when there is nothing to compute now.

        `now` is the engine's clock in seconds; only the prefill delay, if there is one, depends on it. Raises
        InvariantError while the last plan still awaits its result.
        """
        if self._outstanding is not None:
            raise InvariantError([f"step {self._outstanding.plan.step} was planned and not applied yet"])
        while True:
            before = self._roster.totals.retractions
            plan = self._plan(now)
            # When the only one left to compute gave way for a short senior, that one can go on now, or fail.
            if plan is not None or self._roster.totals.retractions == before:
                return plan

    def _plan(self, now: float) -> StepPlan | None:
        self._reasons.clear()
        roster = self._roster
        served = self._growth.reserve_decodes(self._reasons)
        decodes = roster.decoding.snapshot()
        if self._reasons:  # the most senior one may have to wait for pages of other owners
            decodes = [request for request in decodes if request.id not in self._reasons]
        room = StepRoom(self._arena, self._floor, self._rules.step_tokens - len(decodes))
        try:
            self._filler.fill(room, self._reasons, now)
            return self._commit(decodes, served, room) if decodes or room.chunks else None
        except Exception as defect:
            self._abandon([request for request, _ in served], room, defect)
            raise

    def _commit(
        self, decodes: list[Request], served: Sequence[tuple[Request, Demand]], room: StepRoom
    ) -> StepPlan | None:
        """Turn everything granted for this step into pages, and write the plan.

        It cannot fail. If it does all the same, that is a defect: it is reported as a violation and fails the request
        whose order it was (those with orders, where it was nobody's), and everyone else goes on.
        """
        orders, takers = orders_of(served, room, self._keeper)
        try:
            commit = self._arena.commit(orders)
        except InvariantError as defect:
            if not takers:
                raise  # nobody's order, and so nobody to go on without
            concerned = [takers[defect.order]] if isinstance(defect, OverdrawnError) else takers
            self._survive(defect, concerned, room)
            decodes = [request for request in decodes if not request.is_ended]
            if decodes or room.chunks:
                return self._commit(decodes, served, room)
            room.close()
            return None
        self._sharing.forget(commit.evicted)
        self._keeper.fill([request.holding for request in takers if request.holding is not None], commit.handles)
        if not self._keeper.is_current:  # this commit moved pages, or one of another owner did
            self._keeper.look_up(self._roster.holdings())
        for chunk in room.chunks:
            if chunk.saves and chunk.request.holding is not None:
                self._keeper.set_aside(chunk.request.holding)
        plan = pack(self._arena.layout, self._planned_steps, commit.moves, decodes, room.chunks)
        copies, saves = self._sharing.copies(room.chunks)
        if copies or saves:
            plan = replace(plan, copies=copies, saves=saves)
        self._planned_steps += 1
        self._outstanding = _Outstanding(plan, tuple(decodes), room)
        return plan

    def _survive(self, defect: InvariantError, concerned: Sequence[Request], room: StepRoom) -> None:
        self._violations += [Violation("L3", text) for text in defect.violations]
        for request in concerned:
            room.drop(request)
            if not request.is_ended:
                self._roster.fail(request, f"internal error, its memory could not be committed: {defect}")

    def _abandon(self, takers: Sequence[Request], room: StepRoom, defect: Exception) -> None:
        """Leave nothing behind of a plan that broke half way, which is a defect: no step will give its room back.

        Moves that it ordered will never be done, so those who are not concerned compute their pages again.
        """
        for request in (*takers, *(chunk.request for chunk in room.chunks)):
            if not request.is_ended:
                self._roster.fail(request, f"internal error while its step was planned: {defect}")
        room.close()
        self._trust_nothing()

    def _trust_nothing(self) -> None:
        """Let everyone compute again: what pages hold is not known, those of the prefix cache included."""
        for request in (*self._roster.prefilling.snapshot(), *self._roster.decoding.snapshot()):
            self._roster.retract(request, keep=False)
        self._sharing.distrust()

    # --- results

    def apply(self, result: StepResult) -> tuple[Update, ...]:
        """Take the result of the outstanding plan; return new tokens, ends and failures, in the plan's order."""
        step = self._outstanding
        if step is None or step.plan.step != result.step:
            expected = "none" if step is None else str(step.plan.step)
            raise InvariantError([f"a result of step {result.step} came, the outstanding one is {expected}"])
        self._results.take(step.decodes, step.room.chunks, result)
        self._outstanding = None  # not before: when a result breaks, `fail_step` still finds its step
        self._close_step(step)
        return self.take_updates()

    def fail_step(self, message: str) -> tuple[Update, ...]:
        """End the outstanding step when the backend raised: its requests fail and their memory is free.

        Whether its moves were carried out is unknown, so requests outside the plan, whose pages may have been moved,
        are retracted and compute theirs again, and nothing stays cached.
        """
        step = self._outstanding
        if step is None:
            return self.take_updates()
        self._outstanding = None
        for request in step.requests:
            if not request.is_ended:
                self._roster.fail(request, message)
        if step.plan.moves:
            self._trust_nothing()
        self._close_step(step)
        return self.take_updates()

    def _close_step(self, step: _Outstanding) -> None:
        step.room.close()
        totals = self._roster.totals
        totals.steps += 1
        totals.moves += len(step.plan.moves)
        totals.computed_tokens += len(step.plan.token_ids)

    # --- what others may ask

    @property
    def running(self) -> int:
        """How many requests hold a slot and memory."""
        return self._roster.running

    @property
    def waiting(self) -> int:
        """How many requests wait, retracted ones included."""
        return len(self._roster.waiting)

    @property
    def totals(self) -> Totals:
        """What was counted since the start: the live counters, to be read only. `figures` gives a copy."""
        return self._roster.totals

    def head_reason(self) -> Reason | None:
        """Return why the most senior waiting request does not run; None when nobody waits.

        The cheap question, for whoever asks at every step: `reasons` words an answer for each of them.
        """
        head = self._roster.waiting.first()
        if head is None:
            return None
        queued = Reason("queue", "it came after the last step was planned")
        return self._reasons.get(head.id) or self._growth.short_reason(head) or queued

    def reasons(self) -> dict[str, Reason]:
        """Return why each request that does not run now does not, by request id."""
        reasons = dict(self._reasons)
        slots = next((r for r in self._reasons.values() if r.code == "slots"), None)
        for before, request in enumerate(self._roster.waiting):
            if request.id not in reasons:
                queued = Reason("queue", f"{before} more senior requests wait before it for the next step")
                reasons[request.id] = self._growth.short_reason(request) or slots or queued
        return {name: reason for name, reason in reasons.items() if name in self._roster.live}

    def figures(self) -> SchedulerFigures:
        """Return counts and bytes of this moment."""
        roster = self._roster
        retracted = sum(request.state is State.RETRACTED for request in roster.waiting)
        return SchedulerFigures(
            waiting=len(roster.waiting) - retracted,
            prefilling=len(roster.prefilling),
            decoding=len(roster.decoding),
            retracted=retracted,
            totals=replace(roster.totals),
            arena=self._arena.figures(),
            cache=self._sharing.figures(),
        )

    def audit(self) -> list[Violation]:
        """Recount requests, lines, pages and the arena from scratch; an empty list is a clean bill."""
        step = self._outstanding
        busy = None if step is None else frozenset(request.id for request in step.requests)
        known = self._keeper.is_current
        found = audit(self._arena, self._roster, self._rules, self._floor, busy, places_known=known)
        return [*self._violations, *found, *self._sharing.audit()]

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

from collections.abc import Sequence
from dataclasses import dataclass, replace

from halocline.errors import ConfigError, InvariantError
from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.memory.demand import Demand, floor_demand
from halocline.memory.grant import Order, Refusal
from halocline.schedule.admission import Gate
from halocline.schedule.audit import audit
from halocline.schedule.chunk import Chunk, StepRoom
from halocline.schedule.events import Abort, Accepted, Arrive, Event, FinishReason, NewToken, Reason, Rejected, Update
from halocline.schedule.figures import SchedulerFigures
from halocline.schedule.growth import Growth
from halocline.schedule.holding import Keeper
from halocline.schedule.packing import pack
from halocline.schedule.request import Request, State
from halocline.schedule.roster import Roster
from halocline.schedule.rules import Rules
from halocline.step import Sampled, StepPlan, StepResult

__all__ = ["Rules", "Scheduler"]


@dataclass(frozen=True, slots=True)
class _Outstanding:
    """A planned step whose result is awaited."""

    plan: StepPlan
    decodes: tuple[Request, ...]
    room: StepRoom


class Scheduler:
    """Decides who runs next, and how far, on one arena."""

    def __init__(self, arena: Arena, rules: Rules) -> None:
        """Take the floor out of an arena. Raises ConfigError when arena and rules cannot serve a single request."""
        self._arena = arena
        self._rules = rules
        granule = arena.layout.granule_tokens
        if rules.step_tokens < granule:
            raise ConfigError([f"step_tokens is {rules.step_tokens}, less than one granule of {granule} tokens"])
        floor = arena.reserve("floor", floor_demand(arena.layout))
        if isinstance(floor, Refusal):
            raise ConfigError([f"the arena cannot hold even the floor of one granule: {floor.message}"])
        self._floor = floor
        self._gate = Gate(arena, rules, floor.demand)
        refusal = self._gate.shortest_refusal()
        if refusal is not None:
            raise ConfigError([f"the arena is too small for any request: {refusal}"])
        self._keeper = Keeper(arena)
        self._roster = Roster(self._keeper)
        self._growth = Growth(arena, self._keeper, self._roster)
        self._eos = frozenset(rules.eos_token_ids)
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
            self._count_finished(request)
        self._roster.end(request)
        self._roster.outbox.append(NewToken(request.id, None, None, event.reason))

    # --- planning

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._roster.live)

    def plan(self, now: float) -> StepPlan | None:
        """Plan the next step; None when there is nothing to compute now.

        `now` is the engine's clock in seconds; no decision depends on it. Raises InvariantError while the last plan
        still awaits its result.
        """
        del now
        if self._outstanding is not None:
            raise InvariantError([f"step {self._outstanding.plan.step} was planned and not applied yet"])
        self._reasons.clear()
        roster = self._roster
        served = self._growth.reserve_decodes(self._reasons)
        decodes = roster.decoding.snapshot()
        if self._reasons:  # the most senior one may have to wait for pages of other owners
            decodes = [request for request in decodes if request.id not in self._reasons]
        room = StepRoom(self._arena, self._floor, self._rules.step_tokens - len(decodes))
        if self._continue_prefills(room):
            self._admit(room)
        if not decodes and not room.chunks:
            return None
        return self._commit(decodes, served, room)

    def _continue_prefills(self, room: StepRoom) -> bool:
        """Give each prefilling request its chunk; return whether all of them got one, so that new ones may come in."""
        all_served = True
        for request in self._roster.prefilling:
            holding = request.holding
            assert holding is not None, f"{request.id} prefills without a grant"
            tokens = room.fit(request.computed, request.resumed_at, holding.grant.demand)
            refusal = room.take(request, holding, request.computed, tokens) if tokens else None
            if tokens == 0 or refusal is not None:
                room.pass_floor_by()
                all_served = False
                self._reasons[request.id] = self._step_room(room, refusal)
        return all_served

    def _admit(self, room: StepRoom) -> None:
        """Admit waiting requests in order of seniority; the first that cannot enter stops all behind it."""
        while (request := self._roster.waiting.first()) is not None:
            reason = self._try_admit(request, room)
            if reason is not None:
                self._reasons[request.id] = reason
                return

    def _try_admit(self, request: Request, room: StepRoom) -> Reason | None:
        slots = self._rules.max_running_requests
        if self._roster.running >= slots:
            return Reason("slots", f"{slots} requests are running, the most that max_running_requests allows")
        short = self._growth.short()
        if short is not None and short is not request:
            return Reason("senior-short", f"{short.id} is more senior and was refused memory")
        candidate = self._gate.candidate(request)
        tokens = room.fit(candidate.start, len(request.history), candidate.demand, candidate.demand)
        if tokens == 0:
            return self._why_not(request, candidate.demand, room)
        holding = self._keeper.open(request.id, candidate.demand)
        if isinstance(holding, Refusal):
            return self._refused(request, holding)
        refusal = room.take(request, holding, candidate.start, tokens)
        if refusal is not None:
            self._keeper.close(holding)
            return self._step_room(room, refusal)
        self._roster.admit(request, holding, candidate.start)
        self._growth.grant(request)
        return None

    def _why_not(self, request: Request, demand: Demand, room: StepRoom) -> Reason:
        refusal = self._arena.shortfall(demand)
        if refusal is None or self._arena.fits(demand.minus(room.held_by_chunks)):
            return self._step_room(room, refusal)
        return self._refused(request, refusal)

    def _refused(self, request: Request, refusal: Refusal) -> Reason:
        if request.retractions and request is self._roster.most_senior():
            self._growth.refuse(request)
        return Reason("memory", refusal.message)

    def _step_room(self, room: StepRoom, refusal: Refusal | None) -> Reason:
        granule = self._arena.layout.granule_tokens
        left = (
            f"{room.tokens_left} of {self._rules.step_tokens} step tokens are left, chunks are whole {granule} tokens"
        )
        return Reason(
            "step-room", f"{left}{'; ' + refusal.message if refusal else ', or the room for them is used up'}"
        )

    def _commit(self, decodes: list[Request], served: Sequence[tuple[Request, Demand]], room: StepRoom) -> StepPlan:
        """Turn everything granted for this step into pages, and write the plan."""
        orders: list[Order] = []
        takers: list[Request] = []
        for request, wanted in served:
            if request.holding is not None:
                orders.append(Order(request.holding.grant, wanted))
                takers.append(request)
        for chunk in room.chunks:
            asked = room.orders(chunk, self._wanted(chunk))
            orders += asked
            takers += [chunk.request] * len(asked)
        commit = self._arena.commit(orders)
        for request, handles in zip(takers, commit.handles, strict=True):
            if request.holding is not None:
                self._keeper.fill(request.holding, handles)
        plan = pack(self._arena, self._planned_steps, commit.moves, decodes, room.chunks)
        self._planned_steps += 1
        self._outstanding = _Outstanding(plan, tuple(decodes), room)
        return plan

    def _wanted(self, chunk: Chunk) -> Demand:
        assert chunk.request.holding is not None, f"{chunk.request.id} left after its chunk was planned"
        return self._keeper.wanted(chunk.request.holding, chunk.start, chunk.end)

    # --- results

    def apply(self, result: StepResult) -> tuple[Update, ...]:
        """Take the result of the outstanding plan; return new tokens, ends and failures, in the plan's order."""
        step = self._outstanding
        if step is None or step.plan.step != result.step:
            expected = "none" if step is None else str(step.plan.step)
            raise InvariantError([f"a result of step {result.step} came, the outstanding one is {expected}"])
        sampled = {got.request_id: got for got in result.sampled}
        failures = {failure.request_id: failure.message for failure in result.failures}
        totals = self._roster.totals
        for request in step.decodes:
            got = sampled.get(request.id)
            if request.state is State.DECODING and got is not None:
                request.computed += 1
                self._receive(request, got)
            else:
                self._no_token(request, failures)
        for chunk in step.room.chunks:
            self._apply_chunk(chunk, sampled, failures)
        totals.computed_tokens += len(step.plan.token_ids)
        self._close_step(step)
        return self.take_updates()

    def fail_step(self, message: str) -> tuple[Update, ...]:
        """End the outstanding step when the backend raised: its requests fail and their memory is free.

        Whether its moves were carried out is unknown, so requests outside the plan, whose pages may have been moved,
        are retracted and compute theirs again.
        """
        step = self._outstanding
        if step is None:
            return self.take_updates()
        for request in (*step.decodes, *(chunk.request for chunk in step.room.chunks)):
            if not request.is_ended:
                self._roster.fail(request, message)
        if step.plan.moves:
            for request in (*self._roster.prefilling.snapshot(), *self._roster.decoding.snapshot()):
                self._roster.retract(request)
        self._close_step(step)
        return self.take_updates()

    def _close_step(self, step: _Outstanding) -> None:
        step.room.close()
        self._outstanding = None
        self._roster.totals.steps += 1
        self._roster.totals.moves += len(step.plan.moves)

    def _apply_chunk(self, chunk: Chunk, sampled: dict[str, Sampled], failures: dict[str, str]) -> None:
        request, holding = chunk.request, chunk.request.holding
        if holding is None or request.id in failures:
            self._no_token(request, failures)
            return
        self._roster.totals.recomputed_tokens += max(0, min(chunk.end, request.high_water) - chunk.start)
        request.computed = chunk.end
        if chunk.end < request.resumed_at:
            self._settle(request)
            return
        got = sampled.get(request.id)
        if got is None:
            self._no_token(request, failures)
            return
        self._roster.start_decoding(request)
        self._receive(request, got)
        self._settle(request)

    def _receive(self, request: Request, got: Sampled) -> None:
        """Append a token; end the request if it was the last one, else let its windows slide."""
        history, token = request.history, got.token_id
        finish: FinishReason | None = None
        if token in request.stops and len(history) >= request.stops_from:
            finish = "stop"
        elif len(history) + 1 >= request.end:
            finish = "length"
        history.append(token)
        self._roster.totals.output_tokens += 1
        self._roster.outbox.append(NewToken(request.id, token, got.logprobs, finish))
        holding = request.holding
        if finish is not None:
            self._count_finished(request)
            self._roster.end(request)
        elif holding is not None and request.computed >= holding.slide_at:
            self._keeper.slide(holding, request.computed)
            if self._keeper.may_fall(request.end, request.computed):
                self._keeper.reprice(holding, request.resumed_at, request.end, request.computed)

    def _settle(self, request: Request) -> None:
        """After a chunk: give up what left the windows before anything else is priced, then lower the grant."""
        if request.holding is not None:
            self._keeper.slide(request.holding, request.computed)
            self._keeper.reprice(request.holding, request.resumed_at, request.end, request.computed)

    def _no_token(self, request: Request, failures: dict[str, str]) -> None:
        if not request.is_ended:  # an aborted request is of no interest any more
            self._roster.fail(request, failures.get(request.id, "the backend returned no token for this request"))

    def _count_finished(self, request: Request) -> None:
        self._roster.totals.finished += 1
        self._gate.lengths.record(request.max_tokens, max(1, request.output_tokens))

    # --- what others may ask

    def reasons(self) -> dict[str, Reason]:
        """Return why each request that does not run now does not, by request id."""
        reasons = dict(self._reasons)
        short = self._growth.short()
        slots = next((r for r in self._reasons.values() if r.code == "slots"), None)
        for before, request in enumerate(self._roster.waiting):
            if request.id not in reasons:
                if short is not None:
                    reason = Reason("senior-short", f"{short.id} is more senior and was refused memory")
                elif slots is not None:
                    reason = slots
                else:
                    reason = Reason("queue", f"{before} more senior requests wait before it for the next step")
                reasons[request.id] = reason
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
        )

    def audit(self) -> list[Violation]:
        """Recount requests, lines, pages and the arena from scratch; an empty list is a clean bill."""
        step = self._outstanding
        busy = () if step is None else (*step.decodes, *(chunk.request for chunk in step.room.chunks))
        return audit(self._arena, self._roster, self._rules, frozenset(request.id for request in busy))

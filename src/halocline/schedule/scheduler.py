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

from dataclasses import replace

from halocline.errors import ConfigError, InvariantError
from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.memory.demand import floor_demand
from halocline.memory.grant import Refusal
from halocline.memory.host import HostArena
from halocline.schedule.admission import Gate
from halocline.schedule.audit import audit
from halocline.schedule.backlog import work_before
from halocline.schedule.chunk import FLOOR_OWNER, StepRoom
from halocline.schedule.commit import Committer, Outstanding
from halocline.schedule.events import Abort, Accepted, Arrive, Event, NewToken, Reason, Rejected, Update
from halocline.schedule.figures import SchedulerFigures, Totals
from halocline.schedule.fill import Filler
from halocline.schedule.growth import Growth
from halocline.schedule.holding import Keeper
from halocline.schedule.leap import leap_tokens
from halocline.schedule.offload import HostDesk
from halocline.schedule.packing import Packer, Tables
from halocline.schedule.prefixes import Prefixes
from halocline.schedule.receive import Receiving
from halocline.schedule.request import Request, State
from halocline.schedule.results import Results
from halocline.schedule.roster import Roster
from halocline.schedule.rules import Rules
from halocline.schedule.send import Sending
from halocline.schedule.sharing import Alone, Sharing
from halocline.schedule.transfer import Transfers
from halocline.step import StepPlan, StepResult

__all__ = ["Rules", "Scheduler"]


class Scheduler:
    """Decides who runs next, and how far, on one arena."""

    def __init__(self, arena: Arena, rules: Rules, host: HostArena | None = None, packer: Packer | None = None) -> None:
        """Take the floor out of an arena; `host` keeps what does not fit it. Raises ConfigError when arena and rules
        cannot serve a single request.

        `packer` writes plans down, by default with all that a model's runner reads. It decides nothing.
        """
        packer = Tables() if packer is None else packer
        self._arena = arena
        self._rules = rules
        granule = arena.layout.granule_tokens
        if rules.step_tokens < granule:
            raise ConfigError([f"step_tokens is {rules.step_tokens}, less than one granule of {granule} tokens"])
        floor = arena.reserve(FLOOR_OWNER, floor_demand(arena.layout, rules.prefix_cache))
        if isinstance(floor, Refusal):
            raise ConfigError([f"the arena cannot hold even the floor of one granule: {floor.message}"])
        self._floor = floor
        self._whole_floor = floor.demand
        self._keeper = Keeper(arena, rules.lookahead_tokens, remembers_places=packer.reads_places)
        self._sharing: Sharing = (
            Prefixes(arena, self._keeper, host, rules.host_costs) if rules.prefix_cache else Alone(arena, self._keeper)
        )
        self._gate = Gate(arena, rules, floor.demand, self._sharing)
        refusal = self._gate.shortest_refusal()
        if refusal is not None:
            raise ConfigError([f"the arena is too small for any request: {refusal}"])
        self._desk = HostDesk(arena, self._keeper, self._sharing, host, rules.host_costs)
        self._roster = Roster(self._sharing, self._desk)
        self._growth = Growth(arena, self._keeper, self._roster, self._sharing)
        self._results = Results(self._sharing, self._roster, self._gate.lengths)
        receiving = Receiving(arena, self._keeper, self._sharing, self._roster, self._growth, self._results)
        sending = Sending(arena, self._sharing, self._roster)
        self._transfers = Transfers(arena, self._roster, receiving, sending)
        self._eos = frozenset(rules.eos_token_ids)
        self._committer = Committer(
            arena, packer, self._keeper, self._sharing, self._roster, self._desk, self._transfers
        )
        self._filler = Filler(
            arena, rules, self._gate, self._sharing, self._roster, self._growth, self._desk, receiving
        )
        self._reasons: dict[str, Reason] = {}
        self._outstanding: Outstanding | None = None

    # --- events

    def handle(self, event: Event) -> tuple[Update, ...]:
        """Take an event, also while a step is outstanding, and return what its client must be told."""
        if isinstance(event, Arrive):
            self._roster.outbox.append(self._arrive(event))
        elif isinstance(event, Abort):
            self._abort(event)
        else:
            self._transfers.handle(event)
        self._transfers.prune()
        self._restore_floor()
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
        self._sharing.arrived(request, answer.packed)
        totals.arrived += 1
        self._roster.enter(request)
        return Accepted(event.request_id, answer.max_tokens, answer.clipped)

    def _refuse(self, event: Arrive) -> Rejected | None:
        if event.request_id in self._roster.live:
            return Rejected(event.request_id, f"request {event.request_id!r} exists already")
        waiting = self.waiting
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

    def plan(self, now: float, decode_tokens: int = 1) -> StepPlan | None:
        """Plan the next step; None when there is nothing to compute now.

        `now` is the engine's clock in seconds; only the prefill delay, if there is one, depends on it. With a backend
        that can loop by itself, `decode_tokens` (at most 1 + `Rules.lookahead_tokens`) lets every decode compute up to
        so many tokens where nobody else is kept waiting by it: see `halocline.schedule.leap`. With 0 decodes stand
        still, after they were granted their next pages all the same, and only chunks are planned. Raises InvariantError
        while the last plan still awaits its result, or when more tokens are asked for than prices count.
        """
        if self._outstanding is not None:
            raise InvariantError([f"step {self._outstanding.plan.step} was planned and not applied yet"])
        if not 0 <= decode_tokens <= 1 + self._rules.lookahead_tokens:
            allowed = f"with lookahead_tokens {self._rules.lookahead_tokens} it may be 1 to that many more"
            raise InvariantError([f"{decode_tokens} tokens per decode are asked for; {allowed}"])
        while True:
            before = self._roster.totals.retractions
            plan = self._plan(now, decode_tokens)
            # When the only one left to compute gave way for a short senior, that one can go on now, or fail; and pages
            # that were committed by a plan without work may have to be gathered by the next one before they are pinned.
            if plan is not None or (self._roster.totals.retractions == before and not self._arena.awaits_commit):
                return plan

    def _plan(self, now: float, most_tokens: int) -> StepPlan | None:
        self._restore_floor()
        tokens = leap_tokens(max(1, most_tokens), self._roster, self._filler, self._rules)
        self._reasons.clear()
        leap = self._growth.reserve_leap(tokens) if tokens > 1 else None
        tokens, served = (1, self._growth.reserve_decodes(self._reasons)) if leap is None else (tokens, leap)
        decodes = self._roster.decoding.snapshot()
        if not most_tokens:  # they keep what they were granted, and take no page of it yet
            decodes, served = [], []
        if self._reasons:  # the most senior one may have to wait for pages of other owners
            decodes = [request for request in decodes if request.id not in self._reasons]
        room = StepRoom(self._arena, self._floor, self._rules.step_tokens - len(decodes) * tokens)
        try:
            self._filler.fill(room, self._reasons, now)
            if decodes or room.chunks or room.landings or self._arena.awaits_commit or self._desk.has_work:
                self._outstanding = self._committer.commit(decodes, tokens, served, room)
            self._transfers.committed(room)
        except Exception as defect:
            self._outstanding = None
            self._committer.abandon([request for request, _ in served], room, defect)
            raise
        self._transfers.revoke(is_idle=self._outstanding is None)
        self._transfers.prune()
        if self._outstanding is not None and not self._outstanding.plan.has_work:
            self._outstanding = None  # there is nothing to carry out and to wait for
            room.close()
            self._transfers.tell()
            self._desk.applied()  # a load of which nothing was left locks the host no longer
        return None if self._outstanding is None else self._outstanding.plan

    # --- results

    def apply(self, result: StepResult) -> tuple[Update, ...]:
        """Take the result of the outstanding plan; return new tokens, ends and failures, in the plan's order."""
        step = self._outstanding
        if step is None or step.plan.step != result.step:
            expected = "none" if step is None else str(step.plan.step)
            raise InvariantError([f"a result of step {result.step} came, the outstanding one is {expected}"])
        self._results.take(step.decodes, step.room.chunks, result, step.decode_tokens)
        self._outstanding = None  # not before: when a result breaks, `fail_step` still finds its step
        self._transfers.applied(step.room)
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
            if request.is_running:  # neither aborted nor revoked meanwhile
                self._roster.fail(request, message)
        if step.plan.moves or step.plan.loads:  # who left meanwhile may have left pages to others that were not loaded
            self._committer.trust_nothing()
        if step.plan.offloads:
            self._desk.distrust()
        self._transfers.tell()
        self._close_step(step)
        return self.take_updates()

    def _close_step(self, step: Outstanding) -> None:
        step.room.close()
        self._desk.applied()
        totals = self._roster.totals
        totals.steps += 1
        totals.moves += len(step.plan.moves)
        totals.computed_tokens += step.plan.query_starts.item(-1)
        self._transfers.prune()
        self._restore_floor()

    def _restore_floor(self) -> None:
        """Make the floor whole again: a pinned page that was borrowed from it has left with its bytes."""
        if self._floor.demand != self._whole_floor:
            self._arena.extend(self._floor, self._whole_floor)  # refused while these bytes are in use

    # --- what others may ask

    @property
    def running(self) -> int:
        """How many requests hold a slot and memory."""
        return self._roster.running

    @property
    def waiting(self) -> int:
        """How many requests wait, retracted ones included."""
        return len(self._roster.waiting) + len(self._roster.absent)

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
            return next((reason for _, reason in self._transfers.reasons()), None)
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
        reasons.update(self._transfers.reasons())
        return {name: reason for name, reason in reasons.items() if name in self._roster.live}

    def work_before(self, request_id: str) -> int:
        """Return how many tokens are computed here before this request's prompt is done: see `backlog`."""
        return work_before(self._roster.live, request_id)

    def figures(self) -> SchedulerFigures:
        """Return counts and bytes of this moment."""
        roster = self._roster
        retracted = sum(request.state is State.RETRACTED for request in (*roster.waiting, *roster.absent))
        return SchedulerFigures(
            waiting=self.waiting - retracted,
            absent=len(roster.absent),
            receiving=len(roster.receiving),
            sending=len(roster.sending),
            prefilling=len(roster.prefilling),
            decoding=len(roster.decoding),
            retracted=retracted,
            totals=replace(roster.totals),
            arena=self._arena.figures(),
            cache=self._sharing.figures(),
            host=self._desk.figures(),
        )

    def audit(self) -> list[Violation]:
        """Recount requests, lines, pages and the arena from scratch; an empty list is a clean bill."""
        step = self._outstanding
        busy = None if step is None else frozenset(request.id for request in step.requests)
        known = self._keeper.remembers_places and self._keeper.is_current
        found = audit(self._arena, self._roster, self._rules, self._floor, busy, places_known=known)
        return [
            *self._committer.violations,
            *found,
            *self._transfers.audit(),
            *self._sharing.audit(),
            *self._desk.audit(self._roster.live),
        ]

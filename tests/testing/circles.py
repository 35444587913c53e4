"""Small worlds of workers that compute prompts for each other, in which every interleaving is tried.

What happens in a world is one of two things at a time: a worker steps, or the oldest message on a wire is delivered.
Links are perfect and there are no leases: who waits in a circle waits for ever. All worlds that can be reached are
visited once, depth first. A world that was there before on the way is a livelock, one in which nothing changes any more
though a request has not ended is a circle.

Two worlds are the same when everything is equal that a scheduler without prefix cache decides by: requests, what they
hold, what is told and pinned, budgets, and messages on the wires. Where pages lie is no part of it.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from halocline.memory.arena import Arena
from halocline.memory.layout import ArenaLayout
from halocline.params import SamplingParams
from halocline.schedule.events import (
    Abort,
    Arrive,
    Computed,
    Event,
    Failed,
    Landed,
    LandingReady,
    Lost,
    NewToken,
    Offered,
    PagesReady,
    PeerAccepted,
    PeerReleased,
    PeerRevoked,
    PeerTook,
    Rejected,
    RevokeWanted,
    Update,
)
from halocline.schedule.scheduler import Rules, Scheduler
from halocline.step import Sampled, StepPlan, StepResult

Wire = tuple[int, int]
"""From which worker to which."""


class Asked(NamedTuple):
    """One client: where it asks, and where its prompt is computed."""

    name: str
    worker: int
    prefill_at: int
    """The worker itself: it computes the prompt."""
    prompt_tokens: int
    max_tokens: int
    priority: int = 0


class Offer(NamedTuple):
    name: str
    attempt: int


class Accept(NamedTuple):
    name: str
    attempt: int
    start: int


class Pages(NamedTuple):
    name: str
    attempt: int
    chunk: int


class Taken(NamedTuple):
    name: str
    attempt: int
    chunk: int


class Done(NamedTuple):
    name: str
    attempt: int
    token: int


class Release(NamedTuple):
    name: str
    attempt: int


class Revoke(NamedTuple):
    name: str
    attempt: int


Message = Offer | Accept | Pages | Taken | Done | Release | Revoke


@dataclass
class Town:
    """All workers, in their order, and what is on its way between them."""

    schedulers: list[Scheduler]
    clients: dict[str, Asked]
    wires: dict[Wire, deque[Message]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    revoked: int = 0
    rule: str = "order"
    """Whose landings give way: those of who is before the other in the order, `nobody`'s, or `everybody`'s."""

    # ---- what can happen

    def moves(self) -> Iterator[int | Wire]:
        """Yield what can be done now: let a worker step, or deliver what is first on a wire."""
        yield from sorted(wire for wire, messages in self.wires.items() if messages)
        yield from range(len(self.schedulers))

    def do(self, move: int | Wire) -> None:
        """Do it."""
        if isinstance(move, tuple):
            self._deliver(move, self.wires[move].popleft())
            return
        scheduler = self.schedulers[move]
        plan = scheduler.plan(0.0)
        self._hear(move, scheduler.take_updates())
        if plan is not None:
            self._hear(move, scheduler.apply(_result(plan)))

    # ---- messages

    def submit(self, asked: Asked) -> None:
        """Let a client ask; the offer of who computes its prompt is on its way."""
        here, there = asked.worker, asked.prefill_at
        params = SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, ignore_eos=True)
        prompt = tuple(range(1, 1 + asked.prompt_tokens))
        route = "here" if here == there else "receive"
        self._tell(here, Arrive(asked.name, prompt, params, 0, asked.priority, route=route))  # type: ignore[arg-type]
        if here != there:
            self._tell(there, Arrive(f"@{asked.name}", prompt, params, 0, asked.priority, route="send"))
            self._say(there, here, Offer(asked.name, 1))

    def _say(self, sender: int, receiver: int, message: Message) -> None:
        self.wires.setdefault((sender, receiver), deque()).append(message)

    def _deliver(self, wire: Wire, message: Message) -> None:
        sender, here = wire
        name, attempt = message.name, message.attempt
        match message:
            case Offer():
                gives_way = {"order": here < sender, "nobody": False, "everybody": True}[self.rule]
                self._tell(here, Offered(name, attempt, gives_way))
            case Accept():
                self._tell(here, PeerAccepted(f"@{name}", attempt, message.start))
            case Pages():
                self._say(here, sender, Taken(name, attempt, message.chunk))
            case Taken():
                self._tell(here, PeerTook(f"@{name}", attempt, message.chunk))
            case Done():
                request = self.schedulers[here]._roster.live.get(name)
                if request is not None and request.landing is not None and request.attempt == attempt:
                    self._tell(here, Landed(name, attempt, message.token))
                    self._say(here, sender, Release(name, attempt))
            case Release():
                self._tell(here, PeerReleased(f"@{name}", attempt))
            case Revoke():
                self._tell(here, PeerRevoked(f"@{name}", attempt))
                self._say(here, sender, Offer(name, attempt + 1))

    def _tell(self, worker: int, event: Event) -> None:
        assert not isinstance(event, Abort), "nobody leaves in these worlds"
        self._hear(worker, self.schedulers[worker].handle(event))

    def _hear(self, worker: int, updates: Sequence[Update]) -> None:
        for update in updates:
            asked = self.clients[update.request_id.removeprefix("@")]
            match update:
                case Rejected() | Failed():
                    raise AssertionError(f"worker {worker}: {update}")
                case NewToken() if update.finish_reason:
                    self.ends[asked.name] = update.finish_reason
                case LandingReady():
                    self._say(worker, asked.prefill_at, Accept(asked.name, update.attempt, update.start_tokens))
                case RevokeWanted():
                    self.revoked += 1
                    self._tell(worker, Lost(asked.name, update.attempt, "it gave way", is_final=False))
                    self._say(worker, asked.prefill_at, Revoke(asked.name, update.attempt))
                case PagesReady():
                    self._say(worker, asked.worker, Pages(asked.name, update.attempt, update.chunk))
                case Computed():
                    self._say(worker, asked.worker, Done(asked.name, update.attempt, update.token_id))
                case _:
                    pass

    # ---- what it is now

    @property
    def is_over(self) -> bool:
        """Whether everybody has all of his answer, and no worker has anything to do."""
        return len(self.ends) == len(self.clients) and not any(each.has_work for each in self.schedulers)

    def signature(self) -> Hashable:
        """Return all that what comes next depends on."""
        wires = tuple((wire, tuple(messages)) for wire, messages in sorted(self.wires.items()) if messages)
        return tuple(map(_signature, self.schedulers)), wires, tuple(sorted(self.ends))

    def told(self) -> str:
        """Say who waits for what."""
        reasons = [{name: why.code for name, why in each.reasons().items()} for each in self.schedulers]
        return f"ended: {sorted(self.ends)}; the others: {reasons}"


def _result(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, tuple(Sampled(each.request_id, 1) for each in plan.segments if each.samples))


def _signature(scheduler: Scheduler) -> Hashable:
    """Return what a scheduler without prefix cache decides by."""
    parts: Any = scheduler
    budget, transfers = parts._arena.budget, parts._transfers
    requests = tuple(
        (
            *(each.id, each.state, each.computed, len(each.history), each.attempt, each.is_called, each.retractions),
            None if each.landing is None else (each.landing.is_told, each.landing.is_revoked),
            None if each.holding is None else (tuple(each.holding.grant.demand), tuple(map(len, each.holding.handles))),
        )
        for each in parts._roster.live.values()
    )
    deliveries = tuple(
        (name, each.attempt, each.chunks, tuple(each.told), len(each.untold), tuple(each.pins), each.is_told)
        for name, each in transfers._sending._deliveries.items()
    )
    courtesy, refused, known = transfers._courtesy, parts._growth._refused, parts._filler._known
    return (
        requests,
        deliveries,
        (tuple(sorted(courtesy._yielding)), tuple(sorted(courtesy._first.items())), tuple(courtesy._held)),
        (refused and refused.id, known and (known.request.id, known.retractions, tuple(known.extra))),
        (tuple(budget.held), tuple(budget.promised), tuple(budget.pinned_slabs), parts._arena.awaits_commit),
    )


def town(workers: Sequence[tuple[ArenaLayout, Rules]], clients: Sequence[Asked], rule: str = "order") -> Town:
    """Return a world in which every client has asked."""
    made = Town([Scheduler(Arena(layout, None), rules) for layout, rules in workers], {}, rule=rule)
    for asked in clients:
        made.clients[asked.name] = asked
        made.submit(asked)
    return made


class Found(NamedTuple):
    """What came of all interleavings of a world."""

    worlds: int
    revoked: int
    """The most landings that gave way in one run."""
    fault: str
    """A circle or a livelock, and how it came about; empty: every run ends with all answers."""


def explore(begin: Town, most_worlds: int = 200_000) -> Found:
    """Try all interleavings, depth first, until the first fault."""
    is_open: dict[Hashable, bool] = {begin.signature(): True}
    """Of all worlds that were seen: whether they are on the way to where we are."""
    revoked = 0
    stack = [(begin.signature(), pickle.dumps(begin), list(begin.moves()), [False])]
    path: list[int | Wire] = []
    while stack:
        signature, frozen, moves, has_changed = stack[-1]
        if not moves:
            here: Town = pickle.loads(frozen)
            if not has_changed[0] and not here.is_over:
                return Found(len(is_open), revoked, f"a circle after {path}: {here.told()}")
            is_open[signature] = False
            stack.pop()
            if path:
                path.pop()
            continue
        move = moves.pop()
        there: Town = pickle.loads(frozen)
        there.do(move)
        mark = there.signature()
        if mark == signature:
            continue  # nothing came of it
        has_changed[0] = True
        seen = is_open.get(mark)
        if seen:
            return Found(len(is_open), revoked, f"a livelock after {[*path, move]}: {there.told()}")
        if seen is None:
            is_open[mark] = True
            revoked = max(revoked, there.revoked)
            if len(is_open) > most_worlds:
                return Found(len(is_open), revoked, f"no end after {most_worlds} worlds: {there.told()}")
            path.append(move)
            stack.append((mark, pickle.dumps(there), list(there.moves()), [False]))
    return Found(len(is_open), revoked, "")


def wander(begin: Town, random: Random, most_moves: int = 3000) -> str:
    """Let happen what chance wills, until all have ended; return a circle or what else went wrong, or nothing.

    For worlds of which there are too many to visit.
    """
    here: Town = pickle.loads(pickle.dumps(begin))
    for _ in range(most_moves):
        if here.is_over:
            return ""
        before, moves = here.signature(), list(here.moves())
        random.shuffle(moves)
        for move in moves:
            here.do(move)
            if here.signature() != before:
                break
        else:
            return f"a circle: {here.told()}"
    return f"no end after {most_moves} moves: {here.told()}"

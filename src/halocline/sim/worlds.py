"""Small worlds: the shipped scheduler, cache and arena under a fake clock, with every law checked after every step.

    python -m halocline.sim.worlds --seed 17              what happens in world 17, and its digest
    python -m halocline.sim.worlds --seed 17 --trace      every decision of it
    python -m halocline.sim.worlds --seed 0 --count 1000  a thousand of them; the exit status is 1 if a law is broken

A world is drawn from its seed alone (`halocline.sim.sketches`). The token oracle computes its steps, so that a wrong
page changes a token. Checked after every step

    L1 to L9, L13   scheduler, tree and arena recount everything (`audit`), and the bytes are added up
    L10             the most senior request never loses what it has computed; whoever waits has a reason; and in the end
                    every valid request has finished, every aborted one has ended, and nothing is held. Only those
                    may fail whose computation did, or who ran alone and found another owner's bytes in their way
    L11             every output is the oracle's without pages, an aborted one a beginning of it
    L12             the digest of all decisions depends on nothing but the seed
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, zero
from halocline.memory.grant import Grant
from halocline.params import SamplingParams
from halocline.schedule.admission import FEWEST_OBSERVED
from halocline.schedule.events import Abort, Accepted, Admitted, Arrive, Event, Failed, NewToken, Rejected, Update
from halocline.schedule.scheduler import Scheduler
from halocline.sim.oracle import FakeBackend, reference
from halocline.sim.sketches import VOCAB, Client, Lease, Sketch, Text, draw
from halocline.sim.stories import Story
from halocline.step import StepPlan

MOST_STEPS = 4000
"""No world needs more: its requests have at most some 2,000 tokens together."""
STEP_SECONDS = 1.0
TOKEN_SECONDS = 1 / 32
PLANS_PER_CHECK = 8
"""Everything is recounted after every result and abort, and after each so many-th plan while it is outstanding."""
Act = Callable[[], None]


class BrokenLawError(Exception):
    """A world broke a law; the text says which, and how it shows."""


@dataclass
class Asked:
    """One request and what its client has been told."""

    name: str
    client: Client
    turn: int
    prompt: Text
    params: SamplingParams
    arrival: int
    limit: int = 0
    output: list[int] = field(default_factory=list)
    end: str | None = None


class World:
    """One world as it runs."""

    def __init__(
        self, sketch: Sketch, make_arena: Callable[..., Arena] = Arena, note: Callable[[str], None] | None = None
    ) -> None:
        self.sketch = sketch
        self.layout, self.rules = sketch.layout, sketch.rules
        self.arena = make_arena(sketch.layout, sketch.caps)
        self.scheduler = Scheduler(self.arena, sketch.rules)
        self.backend = FakeBackend(sketch.layout, sketch.rules.vocab_size, sketch.rules.eos_token_ids)
        self.now = 0.0
        self.steps = 0
        self.leaps = 0
        self._leases = 0
        self._may_fail: set[str] = set()
        self.cached_tokens = 0
        self.asked: dict[str, Asked] = {}
        self._agenda: list[tuple[float, int, Act]] = []
        self._noted = 0
        self._floor = tuple(self.arena.budget.promised)
        self._top: tuple[str, int] | None = None
        """The most senior request, if it ran in the last plan, and the position that it computes next."""
        self._digest = hashlib.sha256()
        self._note = note
        self._learn()
        for client in sketch.clients:
            self.at(client.seconds, partial(self._arrive, client, 0, client.prompt))
        for lease in sketch.leases:
            self.at(lease.seconds, partial(self._lease, lease))

    # ---- what happens

    def at(self, seconds: float, act: Act) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._agenda, (seconds, self._noted, act))
        self._noted += 1

    def run(self, most_steps: int = MOST_STEPS) -> None:
        """Run to the end. Raises BrokenLawError, or whatever the program raises when it trips over itself."""
        while self.steps < most_steps:
            self._happen()
            if not self.scheduler.has_work:
                if not self._agenda:
                    self._check_end()
                    return
                self.now = self._agenda[0][0]
            elif not self._step():
                self._wait()
        if most_steps == MOST_STEPS:
            raise BrokenLawError(f"L10: still at work after {most_steps} steps: {self.scheduler.reasons()}")

    def _happen(self) -> None:
        while self._agenda and self._agenda[0][0] <= self.now:
            heapq.heappop(self._agenda)[2]()

    def _step(self) -> bool:
        """Plan and compute one step; what comes while it is computed is handled before its result."""
        plan = self.scheduler.plan(self.now, self.sketch.leap_tokens)
        self._take(self.scheduler.take_updates())
        if plan is None:
            return False
        self._look_at(plan)
        if self.steps % PLANS_PER_CHECK == 0:
            self._check()
        self._compute(plan)
        self.steps += 1
        self._check()
        return True

    def _compute(self, plan: StepPlan) -> None:
        kind = next((fault.kind for fault in self.sketch.breaks if fault.step == self.steps), None)
        concerned = plan.segments[:1] if kind == "request" else plan.segments if kind else ()
        self._may_fail = {segment.request_id for segment in concerned}
        self.backend.fails = self._may_fail if kind == "request" else set()
        result = None if kind == "step" else self.backend.run(plan)
        self.now += STEP_SECONDS + TOKEN_SECONDS * len(plan.token_ids)
        self._happen()
        if result is None or kind == "late step":
            self._top = None  # whoever's pages were to be moved computes them again
            self._take(self.scheduler.fail_step("the step broke"))
        else:
            self._take(self.scheduler.apply(result))
        self._may_fail = set()

    def _wait(self) -> None:
        """Let time pass when nothing can be computed: to the next event, or past a prefill delay."""
        delay = self.rules.prefill_delay_seconds
        if self._agenda:
            self.now = max(self.now, self._agenda[0][0])
        elif delay and any(reason.code == "delay" for reason in self.scheduler.reasons().values()):
            self.now += delay
        elif self.scheduler.has_work:
            raise BrokenLawError(f"L10: stuck after {self.steps} steps: {self.scheduler.reasons()}")

    def _arrive(self, client: Client, turn: int, prompt: Text) -> None:
        name = client.name if turn == 0 else f"{client.name}.{turn}"
        params = client.params if turn == 0 else params_of(client.turns[turn - 1].max_tokens)
        self.asked[name] = Asked(name, client, turn, prompt, params, len(self.asked))
        self._tell(Arrive(name, prompt, params, 0, client.priority))
        if client.abort_seconds is not None:
            self.at(self.now + client.abort_seconds, partial(self._abort, name))

    def _abort(self, name: str) -> None:
        if self.asked[name].end is None:
            self._tell(Abort(name))
            if self.asked[name].end != "abort":
                raise BrokenLawError(f"L10: {name} was aborted and has ended as {self.asked[name].end}")

    def _lease(self, lease: Lease) -> None:
        pages = int(self.arena.most(lease.pool, zero(len(self.layout.pools))) * lease.share)
        self._record("lease", lease.pool, pages)
        demand = Demand(pages if pool == lease.pool else 0 for pool in range(len(self.layout.pools)))
        granted = self.arena.reserve("another owner", demand)
        if not isinstance(granted, Grant):
            raise BrokenLawError(f"L3: {pages} pages of pool {lease.pool} fit and were refused: {granted.message}")
        self._leases += 1
        self.at(lease.until_seconds, partial(self._end_lease, granted))

    def _end_lease(self, granted: Grant) -> None:
        self.arena.release(granted)
        self._leases -= 1

    # ---- what clients are told

    def _learn(self) -> None:
        """Let the scheduler have seen requests end early, whose clients had enough: so it grants little."""
        for number, max_tokens in enumerate(self.sketch.classes_seen * FEWEST_OBSERVED):
            self.scheduler.handle(Arrive(f"before {number}", (0,), params_of(max_tokens), 0))
            self.scheduler.handle(Abort(f"before {number}", "stop"))

    def _tell(self, event: Event) -> None:
        self._record(type(event).__name__, event.request_id)
        self._take(self.scheduler.handle(event))
        if isinstance(event, Abort):
            self._check()

    def _take(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self._record(update)
            asked = self.asked[update.request_id]
            match update:
                case Accepted():
                    asked.limit = update.max_tokens
                case Admitted():
                    self.cached_tokens += update.cached_tokens
                case NewToken():
                    self._take_token(asked, update)
                case Rejected() if len(asked.prompt) + (asked.params.max_tokens or 1) > self.sketch.longest:
                    asked.end = "rejected"
                case Failed() if self._leases and "what other owners hold" in update.message:
                    asked.end = "failed"  # another owner's bytes came between: that is told, and may be
                case Failed() if update.request_id in self._may_fail:
                    asked.end = "failed"
                case Rejected() | Failed():
                    raise BrokenLawError(f"L10: {update.request_id} is valid and cannot finish: {update.message}")

    def _take_token(self, asked: Asked, update: NewToken) -> None:
        if asked.end is not None:
            raise BrokenLawError(f"L10: {update} came after its end ({asked.end})")
        if update.token_id is not None:
            asked.output.append(update.token_id)
        if update.finish_reason is None:
            return
        asked.end = update.finish_reason
        if asked.end != "abort" and asked.turn < len(asked.client.turns):
            turn = asked.client.turns[asked.turn]
            prompt = (*asked.prompt, *asked.output, *turn.more)
            self.at(self.now + turn.think_seconds, partial(self._arrive, asked.client, asked.turn + 1, prompt))

    # ---- laws

    def _look_at(self, plan: StepPlan) -> None:
        """Record a plan's decisions, and see that the most senior request goes on where it stood."""
        self._record("plan", plan.step, plan.moves, plan.copies, plan.saves)
        for segment in plan.segments:
            self._record(segment.request_id, segment.start, segment.tokens, segment.samples)
        for table in plan.tables:
            self._record(table.pages.tolist(), table.page_starts.tolist(), table.first_page.tolist())
        if len(plan.token_ids) > self.rules.step_tokens:
            raise BrokenLawError(f"{len(plan.token_ids)} tokens in a step of {self.rules.step_tokens}")
        self.leaps += any(segment.is_leap for segment in plan.segments)
        top = min((a for a in self.asked.values() if a.end is None), key=lambda a: (a.client.priority, a.arrival))
        computed = self._top[1] if self._top is not None and self._top[0] == top.name else 0
        runs = [segment for segment in plan.segments if segment.request_id == top.name]
        if runs and runs[0].start < computed:
            raise BrokenLawError(
                f"L10: {top.name}, the most senior, goes on at {runs[0].start}, had {computed} computed"
            )
        self._top = (top.name, runs[0].start + runs[0].tokens if runs else computed)

    def _check(self) -> None:
        found = self.scheduler.audit()
        if found:
            raise BrokenLawError("; ".join(f"{violation.law}: {violation.message}" for violation in found[:3]))
        figures = self.arena.figures()
        counted = figures.used_bytes + sum(pool.hole_bytes for pool in figures.pools) + figures.free_bytes
        if counted != self.layout.arena_bytes:
            raise BrokenLawError(f"L13: {counted} bytes of {self.layout.arena_bytes}")
        if len(self.scheduler.reasons()) < self.scheduler.waiting:
            raise BrokenLawError(f"L10: {self.scheduler.waiting} wait, reasons: {self.scheduler.reasons()}")

    def _check_end(self) -> None:
        retentions = [pool.retention for pool in self.layout.pools]
        for asked in self.asked.values():
            if asked.end is None:
                raise BrokenLawError(f"L10: no work is left and {asked.name} has not ended")
            if asked.end == "rejected":
                continue
            eos = self.rules.eos_token_ids
            wanted = reference(retentions, asked.prompt, asked.limit, VOCAB, params=asked.params, eos=eos)
            if asked.output != (wanted[: len(asked.output)] if asked.end in ("abort", "failed") else wanted):
                raise BrokenLawError(f"L11: {asked.name} ({asked.end}) got {asked.output}, not {wanted}")
        figures = self.arena.figures()
        if figures.used_bytes != figures.cached_bytes or tuple(self.arena.budget.promised) != self._floor:
            promised = tuple(self.arena.budget.promised)
            raise BrokenLawError(f"L1: left behind: {figures.used_bytes} bytes used, {promised} pages promised")

    def _record(self, *words: object) -> None:
        text = repr(words)
        self._digest.update(text.encode())
        if self._note is not None:
            self._note(f"{self.now:9.3f} {text}")

    def story(self, fault: str | None = None, details: str = "") -> Story:
        """Return what came of it so far."""
        totals, ends = self.scheduler.totals, [asked.end for asked in self.asked.values()]
        return Story(
            self.sketch.seed,
            self.steps,
            self.now,
            len(ends),
            sum(end in ("stop", "length") for end in ends),
            ends.count("abort"),
            ends.count("failed"),
            totals.retractions,
            totals.moves,
            self.cached_tokens,
            self.leaps,
            self._digest.hexdigest()[:16],
            fault,
            details,
        )


def params_of(max_tokens: int) -> SamplingParams:
    """Return the parameters of a greedy request."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def explore(
    seed: int,
    most_steps: int = MOST_STEPS,
    *,
    make_arena: Callable[..., Arena] = Arena,
    spoil: Callable[[World], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Story:
    """Run the world of a seed and return what came of it; a broken law is its `fault` and not raised.

    `make_arena` and `spoil` are for whoever wants to see that a wrong program is found out.
    """
    world = World(draw(seed), make_arena, note)
    if spoil is not None:
        spoil(world)
    try:
        world.run(most_steps)
    except BrokenLawError as broken:
        return world.story(str(broken))
    except Exception as defect:  # what the program checks of itself, and where it trips
        return world.story(f"{type(defect).__name__}: {defect}", traceback.format_exc())
    return world.story()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run worlds from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m halocline.sim.worlds", description="Run small worlds.")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds, one after the other")
    parser.add_argument("--steps", type=int, default=MOST_STEPS, help="stop each world after so many steps")
    parser.add_argument("--trace", action="store_true", help="print every event, plan and update")
    chosen = parser.parse_args(arguments)
    broken = 0
    for seed in range(chosen.seed, chosen.seed + chosen.count):
        if chosen.count == 1:
            print("\n".join(draw(seed).describe()))
        story = explore(seed, chosen.steps, note=print if chosen.trace else None)
        print(story.line())
        if story.details and chosen.count == 1:
            print(story.details)
        broken += story.fault is not None
    if chosen.count > 1:
        print(f"{chosen.count} worlds, {broken} broke a law")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

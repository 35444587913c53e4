"""One worker of a world: the real scheduler, arena and exchange, turned as the engine's loop turns them.

A step takes time: it is planned at one moment and carried out at a later one, and what the network brings between the
two is written while the step is outstanding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from halocline.disagg import messages as wire
from halocline.disagg.actions import Key
from halocline.disagg.exchange import Exchange, LandingsLike
from halocline.disagg.network import Network
from halocline.disagg.simulated import SimulatedPost
from halocline.faults.sketch import LEASE_SECONDS, VOCAB, WorkerSketch
from halocline.faults.words import ByteBackend, ByteMemory, Watch
from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.memory.layout import ArenaLayout
from halocline.schedule.events import Abort, Event, Landed, LandingReady, Lost, Update
from halocline.schedule.scheduler import Scheduler
from halocline.step import StepPlan


class BrokenLawError(Exception):
    """A world broke a law; the text says which, and how it shows."""


class Worker:
    """One life of a worker."""

    def __init__(self, sketch: WorkerSketch, epoch: str, network: Network, make: Makers) -> None:
        rules = sketch.rules
        self.sketch = sketch
        self.arena = Arena(sketch.layout, None)
        self.scheduler = Scheduler(self.arena, rules)
        self.backend = make.backend(sketch.layout, rules.eos_token_ids)
        facts = wire.facts_of(
            sketch.layout, model="oracle", dtype="words", vocab_size=VOCAB, eos_token_ids=rules.eos_token_ids
        )
        self.memory = make.memory(self.backend, facts, self._watch)
        hello = wire.Hello(role="both", epoch=epoch, facts=facts)
        self.post: SimulatedPost = network.open(sketch.address, hello, self.memory)
        self.exchange = make.exchange(
            self.post,
            self.memory.landings,
            hello,
            lease_seconds=LEASE_SECONDS,
            work_before=self.scheduler.work_before,
            most_part_bytes=sketch.most_part_bytes,
        )
        self.network = network
        self.plan: StepPlan | None = None
        self.inbox: list[Event] = []
        self.breakdown: Literal["before", "after"] | None = None
        """Whether the next step breaks, and when: before anything of it is done, or when all of it is."""
        self.may_fail: set[str] = set()
        """Requests that were in a step which broke."""
        self.steps = 0
        self.turn = 0
        """Number of its next turn: turns of other numbers are off."""
        self.is_current = True
        self.floor = tuple(self.arena.budget.promised)
        self._updates: list[Update] = []
        self._landing_pages: dict[str, set[tuple[int, int]]] = {}
        """Pages that others may write now, by request: kept apart from what the machines believe."""

    # ---- turning

    def begin(self, now: float) -> bool:
        """Hear everything and plan a step; return whether there is one to carry out."""
        events, self.inbox = self.inbox, []
        for event in self.exchange.before(events, now):
            if isinstance(event, Landed | Lost | Abort):
                self._landing_pages.pop(event.request_id, None)
            self._updates += self.scheduler.handle(event)
        self._note_landings()
        self.plan = self.scheduler.plan(now) if self.scheduler.has_work else None
        self._updates += self.scheduler.take_updates()
        return self.plan is not None

    def finish(self, now: float) -> list[Update]:
        """Carry out what was planned, and return what clients hear."""
        if self.plan is not None:
            plan, self.plan = self.plan, None
            if self.breakdown == "before":
                self._updates += self._fail(plan)
            else:
                result = self.backend.run(plan)
                is_broken = self.breakdown == "after"
                self._updates += self._fail(plan) if is_broken else self.scheduler.apply(result)
            self.steps += 1
        self._note_landings()
        updates, self._updates = self._updates, []
        return self.exchange.after(updates, now)

    def _fail(self, plan: StepPlan) -> tuple[Update, ...]:
        """Let the step be broken: whether its moves were carried out, the scheduler cannot know."""
        self.breakdown = None
        self.may_fail |= {segment.request_id for segment in plan.segments}
        return self.scheduler.fail_step("the step broke")

    def _note_landings(self) -> None:
        for update in self._updates:
            if isinstance(update, LandingReady) and update.request_id not in self._landing_pages:
                pages = {(number, int(page)) for number, run in enumerate(update.pools) for page in run.pages}
                self._landing_pages[update.request_id] = pages

    def _watch(self, key: Key, pool: int, pages: list[int]) -> None:
        allowed = self._landing_pages.get(key.request, set())
        wrong = [page for page in pages if (pool, page) not in allowed]
        if wrong:
            raise BrokenLawError(f"fence: {key} may still write pages {wrong} of pool {pool}, which are its no more")

    # ---- what others may ask

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do but to wait."""
        return not self.scheduler.has_work and not self.post.inbox and not self.inbox

    def audit(self) -> list[Violation]:
        """Recount everything."""
        return self.scheduler.audit()

    def leftovers(self) -> list[str]:
        """Return what is still held though nobody is there, in words."""
        found = []
        figures = self.arena.figures()
        if figures.used_bytes != figures.cached_bytes:
            found.append(f"{figures.used_bytes - figures.cached_bytes} bytes are used by nobody")
        if tuple(self.arena.budget.promised) != self.floor:
            found.append(f"promised {tuple(self.arena.budget.promised)}, the floor is {self.floor}")
        landing_bytes = self.exchange.figures().landing_bytes
        if landing_bytes:
            found.append(f"landings of {landing_bytes} bytes are open")
        sessions = {name: count for name, count in self.exchange.figures().sessions.items() if count}
        if sessions:
            found.append(f"sessions {sessions}")
        if self.post.outgoing:
            found.append(f"{len(self.post.outgoing)} parcels wait to be sent")
        return found


class Makers:
    """How the parts are made that a test may want to be wrong."""

    def backend(self, layout: ArenaLayout, eos: tuple[int, ...]) -> ByteBackend:
        """Return the oracle and its arena."""
        return ByteBackend(layout, VOCAB, eos)

    def memory(self, backend: ByteBackend, facts: wire.PeerFacts, watch: Watch) -> ByteMemory:
        """Return pages and landings."""
        return ByteMemory(backend, facts, watch)

    def exchange(
        self,
        post: SimulatedPost,
        landings: LandingsLike,
        hello: wire.Hello,
        *,
        lease_seconds: float,
        work_before: Callable[[str], int],
        most_part_bytes: int,
    ) -> Exchange:
        """Return the exchange of a worker."""
        return Exchange(
            post,
            landings,
            hello,
            lease_seconds=lease_seconds,
            work_before=work_before,
            most_part_bytes=most_part_bytes,
        )

"""Builders for scheduler tests: tiny layouts, rules, and a world that steps a real scheduler over the token oracle.

`World.step` audits scheduler and arena after every plan and after every result, checks that the bytes are conserved and
that whoever does not run has a reason with numbers; `World.run` fails when work is left and nothing can be computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import lcm

from halocline.cache.keys import Namespace
from halocline.errors import ConfigError
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.host import HostArena, HostMoves
from halocline.memory.layout import ArenaLayout, PoolLayout
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State, describe
from halocline.params import SamplingParams
from halocline.schedule.events import Abort, Accepted, Admitted, Arrive, Event, Failed, NewToken, Rejected, Update
from halocline.schedule.scheduler import Rules, Scheduler
from halocline.step import StepPlan, StepResult
from testing.oracle import FakeBackend, reference

VOCAB = 97
PoolSpec = tuple[Retention, int, int]
"""(retention, page_tokens, pages_per_slab)"""

FULL_AND_WINDOW: tuple[PoolSpec, ...] = ((Full(), 4, 3), (Sliding(6), 4, 1))
THREE_POOLS: tuple[PoolSpec, ...] = ((Full(), 4, 2), (Sliding(5), 2, 3), (State(), 1, 1))
MIXED: tuple[PoolSpec, ...] = ((Full(), 4, 3), (Sliding(5), 2, 5), (State(), 1, 2))
FOUR_POOLS: tuple[PoolSpec, ...] = ((Full(), 4, 2), (Sliding(6), 2, 3), (Chunked(8), 4, 2), (State(), 1, 1))
EVERY_KIND: dict[str, tuple[PoolSpec, ...]] = {
    "full": ((Full(), 4, 2),),
    "pages-1": ((Full(), 1, 16), (Sliding(3), 1, 8)),
    "pages-4": FULL_AND_WINDOW,
    "unequal": ((Full(), 16, 1), (Sliding(9), 4, 3), (Chunked(6), 1, 5)),
    "window-below-a-granule": ((Full(), 8, 2), (Sliding(3), 2, 3)),
    "state": THREE_POOLS,
    "four-pools": FOUR_POOLS,
    "windows-only": ((Sliding(7), 2, 2), (Sliding(3), 1, 5)),
    "state-first": ((State(), 1, 2), (Full(), 4, 3)),
}
"""Mixes of pools in which laws about cached pages are tried."""


def tiny_layout(pools: Sequence[PoolSpec], slabs: int) -> ArenaLayout:
    """Return a layout of `slabs` slabs, each of which a pool cuts into the given number of pages."""
    slab_bytes = 64 * lcm(*(per_slab for _, _, per_slab in pools))
    made = tuple(
        PoolLayout(describe(retention), retention, (), tokens, slab_bytes // per_slab, per_slab, slab_bytes // per_slab)
        for retention, tokens, per_slab in pools
    )
    return ArenaLayout(made, slab_bytes, slabs, slabs * slab_bytes)


def rules(**changes: object) -> Rules:
    """Return rules that hold nobody back: 8 slots, 64 step tokens, 512 tokens of model length."""
    base = Rules(step_tokens=64, max_running_requests=8, max_model_len=512, vocab_size=VOCAB, prefix_cache=False)
    return replace(base, **changes)  # type: ignore[arg-type]


GUARANTEED = ("guaranteed",)


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    """Return `length` token ids that differ from salt to salt."""
    return tuple((position * 31 + salt * 17 + position * position * 7) % VOCAB for position in range(length))


def stem(length: int, branch: int = 0, at: int = 0) -> tuple[int, ...]:
    """Return a prompt that begins like all others, and from position `at` on like those of its `branch`."""
    return tuple((7 * position) % 5 + (branch if position >= at else 0) for position in range(length))


def greedy(max_tokens: int | None = None, **fields: object) -> SamplingParams:
    """Return greedy parameters."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


@dataclass
class World:
    """One scheduler, one arena, one fake backend, and what clients were told."""

    layout: ArenaLayout
    rules: Rules = field(default_factory=rules)
    caps: tuple[int | None, ...] | None = None
    make_scheduler: Callable[..., Scheduler] = Scheduler
    make_arena: Callable[..., Arena] = Arena
    check: bool = True
    decode_tokens: int = 1
    """How many tokens each step may leap; 0: decodes stand still."""
    host_slabs: int = 0
    """Slabs of the host arena; 0: there is none."""

    def __post_init__(self) -> None:
        self.arena = self.make_arena(self.layout, self.caps)
        self.host = HostArena(self.layout, self.host_slabs * self.layout.slab_bytes) if self.host_slabs else None
        with_host = () if self.host is None else (self.host,)
        self.scheduler = self.make_scheduler(self.arena, self.rules, *with_host)
        self.backend = FakeBackend(self.layout, self.rules.vocab_size, self.rules.eos_token_ids, self.host_slabs)
        self.arrivals: dict[str, Arrive] = {}
        self.limits: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.cached_tokens: dict[str, int] = {}
        self.rejected: dict[str, Rejected] = {}
        self.steps = 0
        self.leaps = 0
        self._digest = b""

    # --- events

    def arrive(
        self, name: str, tokens: Sequence[int] | int, params: SamplingParams | int, priority: int = 0, salt: str = ""
    ) -> Update:
        """Send a request; a number stands for a prompt of that length, or for that many greedy tokens."""
        text = prompt(tokens, len(self.arrivals)) if isinstance(tokens, int) else tuple(tokens)
        wanted = greedy(params) if isinstance(params, int) else params
        event = Arrive(name, text, wanted, 0, priority, Namespace(salt=salt))
        if name not in self.arrivals:
            self.arrivals[name] = event
        updates = self.tell(event)
        return updates[-1]

    def abort(self, name: str) -> None:
        """Send an abort."""
        self.tell(Abort(name))

    def tell(self, event: Event) -> tuple[Update, ...]:
        """Hand an event in and take note of the updates."""
        self._note("event", event.request_id)
        updates = self.scheduler.handle(event)
        self._take(updates)
        self._verify()
        return updates

    def expect_outputs(self, max_tokens: int, output_tokens: int) -> World:
        """Let the scheduler have seen 32 requests of a class end early, so that it grants little and must extend."""
        for _ in range(32):
            self.scheduler._gate.lengths.record(max_tokens, output_tokens)
        return self

    # --- steps

    def plan(self) -> StepPlan | None:
        """Plan a step, with all checks."""
        leap = (self.decode_tokens,) if self.decode_tokens != 1 else ()
        plan = self.scheduler.plan(float(self.steps), *leap)
        self._take(self.scheduler.take_updates())
        if plan is not None:
            self._note_plan(plan)
            budget = self.rules.step_tokens
            assert len(plan.token_ids) <= budget, f"{len(plan.token_ids)} tokens planned, {budget} allowed"
        self._verify()
        first, reasons = self.scheduler._roster.waiting.first(), self.scheduler.reasons()
        assert first is None or reasons[first.id].code != "queue", f"nobody says why {first.id} was not admitted"
        return plan

    def apply(self, result: StepResult) -> None:
        """Give a result back, with all checks."""
        self._take(self.scheduler.apply(result))
        self.steps += 1
        self._verify()

    def step(self) -> bool:
        """Plan, compute and apply one step; False when there was nothing to compute."""
        plan = self.plan()
        if plan is None:
            return False
        self.leaps += any(segment.is_leap for segment in plan.segments)
        self.apply(self.backend.run(plan))
        return True

    def plan_and_apply(self) -> StepPlan:
        """Step once and return the plan; there must be one."""
        plan = self.plan()
        assert plan is not None, f"nothing to compute: {self.scheduler.reasons()}"
        self.apply(self.backend.run(plan))
        return plan

    def run_until(self, reached: Callable[[], bool], most_steps: int = 500) -> World:
        """Step until `reached` is true; it is a failure when that never comes."""
        for _ in range(most_steps):
            if reached():
                return self
            assert self.step() or reached(), f"stuck after {self.steps} steps: {self.scheduler.reasons()}"
        raise AssertionError(f"not reached in {most_steps} steps; ends: {self.ends}")

    def run(self, most_steps: int = 20_000) -> World:
        """Step until no work is left; stuck work is a failure that names the reasons."""
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                return self
            moved = self.step() or not self.scheduler.has_work
            assert moved, f"stuck after {self.steps} steps: {self.scheduler.reasons()}"
        raise AssertionError(f"still at work after {most_steps} steps: {self.scheduler.reasons()}")

    def note_updates(self, updates: Sequence[Update]) -> None:
        """Take note of updates that came from elsewhere, with all checks."""
        self._take(updates)
        self._verify()

    # --- what came of it

    @property
    def totals(self) -> object:
        """The scheduler's counts."""
        return self.scheduler.figures().totals

    @property
    def retractions(self) -> int:
        """Retractions so far."""
        return self.scheduler.figures().totals.retractions

    @property
    def is_empty(self) -> bool:
        """Whether the arena holds nothing but what it caches, and has promised nothing but the floor."""
        figures = self.arena.figures()
        promised = sum(self.arena.budget.promised)
        host_is_empty = self.host is None or not sum(self.host.arena.budget.held) + sum(self.host.arena.budget.promised)
        return figures.used_bytes == figures.cached_bytes and promised == sum(self.floor) and host_is_empty

    @property
    def floor(self) -> Demand:
        """The standing grant."""
        return self.scheduler._floor.demand

    def expected(self, name: str) -> list[int]:
        """Return what `name` must get, whatever the schedule: the oracle without pages."""
        event = self.arrivals[name]
        retentions = [pool.retention for pool in self.layout.pools]
        eos = self.rules.eos_token_ids
        return reference(
            retentions, event.prompt, self.limits[name], self.rules.vocab_size, params=event.params, eos=eos
        )

    def assert_true_tokens(self) -> World:
        """Every finished request got the oracle's tokens, every unfinished or aborted one a beginning of them (L11)."""
        for name, limit in self.limits.items():
            wanted, got = self.expected(name), self.outputs[name]
            whole = self.ends.get(name) in ("length", "stop")
            assert got == (wanted if whole else wanted[: len(got)]), f"{name} (limit {limit}): {got}, not {wanted}"
        return self

    def assert_all_finished(self) -> World:
        """Everyone who was accepted finished, with the right tokens, and the memory is free."""
        left = sorted(set(self.limits) - set(self.ends))
        assert not left, f"not finished: {left}"
        assert not self.failed, self.failed
        assert self.is_empty, f"left behind: {self.arena.figures()}"
        return self.assert_true_tokens()

    @property
    def trace(self) -> str:
        """A digest of every decision: plans with their page numbers, and updates."""
        return self._digest.hex()

    # --- checks

    def _take(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self._note(update)
            name = update.request_id
            match update:
                case Accepted():
                    self.limits[name] = update.max_tokens
                    self.outputs[name] = []
                case Rejected():
                    self.rejected[name] = update
                case Admitted():
                    assert name not in self.cached_tokens, f"{name} is told twice that it was admitted"
                    self.cached_tokens[name] = update.cached_tokens
                case Failed():
                    assert name not in self.ends, f"{name} failed after its end"
                    self.failed[name] = update.message
                    self.ends[name] = "failed"
                case NewToken():
                    assert name not in self.ends, f"{name} got {update} after its end"
                    if update.token_id is not None:
                        self.outputs[name].append(update.token_id)
                    if update.finish_reason is not None:
                        self.ends[name] = update.finish_reason
        self.assert_beginning_unchanged(updates)

    def assert_beginning_unchanged(self, updates: Sequence[Update]) -> None:
        """Nobody gets more tokens than its limit."""
        for update in updates:
            if isinstance(update, NewToken):
                count, limit = len(self.outputs[update.request_id]), self.limits[update.request_id]
                assert count <= limit, f"{update.request_id} got {count} tokens of {limit}"

    def _verify(self) -> None:
        if not self.check:
            return
        found = self.scheduler.audit()
        assert not found, found
        figures = self.arena.figures()
        holes = sum(pool.hole_bytes for pool in figures.pools)
        total = figures.used_bytes + holes + figures.free_bytes
        assert total == self.layout.slabs * self.layout.slab_bytes, f"L13: {figures}"
        self._verify_host()
        reasons = self.scheduler.reasons()
        for request in self.scheduler._roster.waiting:
            reason = reasons.get(request.id)
            assert reason is not None, f"{request.id} waits without a reason"
            assert any(map(str.isdigit, reason.detail.replace(request.id, ""))), f"no numbers: {reason}"

    def _verify_host(self) -> None:
        if self.host is None:
            return
        figures = self.host.figures()
        assert figures.used_bytes + figures.hole_bytes + figures.free_bytes == figures.total_bytes, f"L13: {figures}"
        assert figures.total_bytes <= self.host.quota_bytes, f"I1: {figures} of {self.host.quota_bytes}"
        own = self.arena.figures().total_bytes
        assert own == self.layout.arena_bytes, f"B8: the device's arena has {own} bytes, laid out {self.layout}"

    def _note_plan(self, plan: StepPlan) -> None:
        self._note("plan", plan.step, plan.moves)
        for work in (*plan.offloads, *plan.loads):
            self._note(work.moves if isinstance(work, HostMoves) else (work.pool, work.device_pages, work.host_pages))
        for segment in plan.segments:
            self._note(segment.request_id, segment.start, segment.tokens, segment.samples)
        for table in plan.tables:
            self._note(table.pages.tolist(), table.page_starts.tolist(), table.first_page.tolist())

    def _note(self, *words: object) -> None:
        self._digest = hashlib.sha256(self._digest + repr(words).encode()).digest()


def world(
    pools: Sequence[PoolSpec] = FULL_AND_WINDOW,
    slabs: int = 12,
    caps: tuple[int | None, ...] | None = None,
    **rule_changes: object,
) -> World:
    """Return a world on a tiny layout."""
    return World(tiny_layout(pools, slabs), rules(**rule_changes), caps)


def takes(pools: Sequence[PoolSpec], slabs: int, prompt_tokens: int, max_tokens: int, **rule_changes: object) -> bool:
    """Return whether an arena of so many slabs takes such a request at its door."""
    try:
        made = World(tiny_layout(pools, slabs), rules(**rule_changes))
    except ConfigError:
        return False
    return isinstance(made.arrive("probe", prompt_tokens, max_tokens), Accepted)


def fewest_slabs(pools: Sequence[PoolSpec], prompt_tokens: int, max_tokens: int, **rule_changes: object) -> int:
    """Return the slabs of the smallest arena that takes such a request; one slab less is refused at the door."""
    low, high = 0, 1
    while not takes(pools, high, prompt_tokens, max_tokens, **rule_changes):
        low, high = high, 2 * high
        assert high < 2**20, "no arena takes it"
    while high - low > 1:
        middle = (low + high) // 2
        if takes(pools, middle, prompt_tokens, max_tokens, **rule_changes):
            high = middle
        else:
            low = middle
    return high

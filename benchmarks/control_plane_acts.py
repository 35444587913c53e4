"""The acts that `control_plane.py` times, and the arenas in which they happen: 1,000 running requests of Gemma 3 27B.

`Act.once` does an act, returns the seconds that it alone took, and puts the arena back as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import cycle
from operator import add, sub
from random import Random
from time import perf_counter

import numpy as np

from halocline.cache.insert import Advance, Own
from halocline.cache.keys import token_key
from halocline.cache.tree import Tree
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, resident, step_price
from halocline.memory.grant import Grant, Handles, Order, Refusal
from halocline.memory.layout import ArenaLayout, LayerKV, solve_layout
from halocline.memory.moves import reclaim_for
from halocline.memory.reclaim import Plan
from halocline.memory.retention import Full, Sliding
from halocline.params import SamplingParams
from halocline.schedule.events import Arrive
from halocline.schedule.scheduler import Rules, Scheduler
from halocline.step import Sampled, StepPlan, StepResult
from halocline.units import GIB, ceil_div

PAGE_TOKENS = 16
WINDOW_TOKENS = 1024
PROMPT_TOKENS = 12_000
RUNNING = 1000
REPLACED = 500
"""Requests that left while others came in their place, so that holes lie where a server has them."""
CACHED_PAGES = 100_000
ARENA_BYTES = 1024 * GIB
OUTPUT_TOKENS = 512
VOCABULARY = 262_144
ONE_PAGE = Demand((1, 1))


def gemma_3_27b(budget_bytes: int) -> ArenaLayout:
    """Return the arena of the benchmark's shape: pool 0 is full, pool 1 slides."""
    kinds = [Full()] * 10 + [Sliding(WINDOW_TOKENS)] * 52
    return solve_layout([LayerKV(i, kind, 16, 128, 128) for i, kind in enumerate(kinds)], budget_bytes, PAGE_TOKENS)


def granted(answer: Grant | Refusal) -> Grant:
    """Return the grant, which the arena is large enough for."""
    assert isinstance(answer, Grant), answer
    return answer


class RunningArena:
    """An arena in which 1,000 requests run, each between its window's length and four times that."""

    def __init__(self) -> None:
        self.random = Random(3)
        self.arena = Arena(gemma_3_27b(ARENA_BYTES))
        self.layout = self.arena.layout
        self.grants: list[Grant] = []
        self.pages: list[list[Handles]] = []
        """Per request and pool: its handles."""
        for number in range(RUNNING):
            self._enter(number)
        for number in range(RUNNING, RUNNING + REPLACED):
            gone = self.random.randrange(RUNNING)
            self.arena.release(self.grants.pop(gone))
            self.pages.pop(gone)
            self._enter(number)

    def _enter(self, number: int) -> None:
        prompt = self.random.randrange(WINDOW_TOKENS + PAGE_TOKENS, 4 * WINDOW_TOKENS)
        grant = granted(self.arena.reserve(f"request-{number}", resident(self.layout, prompt, OUTPUT_TOKENS)))
        first = (prompt - WINDOW_TOKENS + 1) // PAGE_TOKENS
        pages = -(-prompt // PAGE_TOKENS)
        done = self.arena.commit([Order(grant, Demand((pages, pages - first)))])
        self.grants.append(grant)
        self.pages.append(list(done.handles[0]))


class CachedArena(RunningArena):
    """The same with a tree that holds 100,000 pages: prompts of 12,000 tokens, each with the tail of its windows.

    Nothing in it is loose: the pages that left a window were freed, so every page belongs to a unit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree(self.arena)
        self.prompts: list[list[int]] = []
        while sum(self.arena.budget.cached) < CACHED_PAGES:
            self._serve([self.random.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)])
        assert not any(pool.queue.length for pool in self.arena.pools), "loose pages are cached"

    def _serve(self, prompt: list[int]) -> None:
        key, pages = token_key(prompt), PROMPT_TOKENS // PAGE_TOKENS
        lock = self.tree.lock(self.tree.match(key), 0, "session", resident(self.layout, PROMPT_TOKENS, 1))
        assert not isinstance(lock, Refusal), lock.message
        every = Demand((pages, pages))
        step = granted(self.arena.reserve("step", every.above(Demand(lock.grant.room))))
        full, sliding = self.arena.commit([Order(lock.grant, every, step)]).handles[0]
        outside = pages - (WINDOW_TOKENS + 512) // PAGE_TOKENS  # the window and the branch slack stay
        self.arena.free(lock.grant, 1, sliding[:outside])
        own = [Own(0, full), Own(outside, sliding[outside:])]
        self.tree.advance([Advance(lock, key, PROMPT_TOKENS, PROMPT_TOKENS, own, protect=True)])
        self.tree.close(lock)
        self.arena.release(lock.grant)
        self.arena.release(step)
        self.prompts.append(prompt)


class LooseArena(RunningArena):
    """The same with 100,000 cached pages that nobody has ranked: of both pools, as a prompt of 12,000 tokens has."""

    def __init__(self) -> None:
        super().__init__()
        self.arena.take_loose_as_alike()
        price = step_price(self.layout, 0, PROMPT_TOKENS)
        while sum(self.arena.budget.cached) < CACHED_PAGES:
            grant = granted(self.arena.reserve("session", price))
            for pool, handles in enumerate(self.arena.commit([Order(grant, price)]).handles[0]):
                self.arena.cache(grant, pool, handles)
            self.arena.release(grant)


class Act(ABC):
    """Something that is timed."""

    @abstractmethod
    def once(self) -> float:
        """Do it and put everything back; return the seconds that the act itself took."""


class Loop(Act):
    """A loop of the interpreter that touches no memory and takes about as long as reserving a page: the yardstick.

    Its 99th percentile is what this machine makes of any act so short, whoever wrote it.
    """

    def __init__(self, turns: int = 1100) -> None:
        self.turns = turns

    def once(self) -> float:
        begin = perf_counter()
        for _ in range(self.turns):
            pass
        return perf_counter() - begin


class Reserve(Act):
    """One more request: its price, its grant, its first page. By turns the page is what `pages` say."""

    def __init__(self, world: RunningArena, pages: Sequence[Demand]) -> None:
        self.world = world
        self.pages = cycle(pages)

    def once(self) -> float:
        arena, prompt, pages = self.world.arena, self.world.random.randrange(64, 4096), next(self.pages)
        begin = perf_counter()
        grant = granted(arena.reserve("one more", resident(arena.layout, prompt, OUTPUT_TOKENS)))
        arena.commit([Order(grant, pages)])
        seconds = perf_counter() - begin
        arena.release(grant)
        return seconds


class Extend(Act):
    """A running request that outgrows its grant: its new price, the extension, the next page in each pool."""

    def __init__(self, world: RunningArena) -> None:
        self.world = world

    def once(self) -> float:
        arena, tokens = self.world.arena, self.world.random.randrange(64, 256) * PAGE_TOKENS
        grant = granted(arena.reserve("growing", resident(arena.layout, tokens, 1, tokens - 1)))
        arena.commit([Order(grant, grant.demand)])
        begin = perf_counter()
        granted(arena.extend(grant, resident(arena.layout, tokens, 2, tokens)))
        arena.commit([Order(grant, ONE_PAGE)])
        seconds = perf_counter() - begin
        arena.release(grant)
        return seconds


class Growth(Act):
    """256 requests decode and each takes its next page in both pools; their windows have slid before."""

    def __init__(self, world: RunningArena, count: int = 256, *, is_cut: bool = False) -> None:
        self.world = world
        self.is_cut = is_cut
        self.at = world.random.sample(range(RUNNING), count)

    def once(self) -> float:
        arena, grants, pages = self.world.arena, self.world.grants, self.world.pages
        for at in self.at:
            arena.free(grants[at], 1, pages[at][1][:1])
        begin = perf_counter()
        done = arena.commit([Order(grants[at], ONE_PAGE) for at in self.at])
        handles = list(done.handles) if self.is_cut else done.handles
        seconds = perf_counter() - begin
        for at, (full, sliding) in zip(self.at, handles, strict=True):
            arena.free(grants[at], 0, full)
            pages[at][1] = np.concatenate((pages[at][1][1:], sliding))
        return seconds


class Prompt(Act):
    """All pages that a prompt of 12,000 tokens touches, taken and freed: one chunk, no window to slide."""

    def __init__(self, world: RunningArena) -> None:
        self.arena = world.arena
        self.demand = step_price(world.layout, 0, PROMPT_TOKENS)

    def once(self) -> float:
        begin = perf_counter()
        grant = granted(self.arena.reserve("prompt", self.demand))
        self.arena.commit([Order(grant, self.demand)])
        self.arena.release(grant)
        return perf_counter() - begin


class Reclaim(Act):
    """The plan of what to evict when `pages` are committed to an arena that is full to the last page.

    The budget counts pages, so what is free counts however it lies: whole slabs, and the last slab of each pool. All of
    that is asked for, too, as good as taken: commits of the same step count beside held pages. What `pages` touch is
    then missing wholly, slab by slab.
    """

    def __init__(self, world: RunningArena, pages: Demand) -> None:
        self.arena, self.pages = world.arena, pages
        budget = self.arena.budget
        self.missing = sum(map(ceil_div, pages, budget.pages_per_slab))
        live = list(map(add, budget.held, budget.cached))
        slabs = budget.slabs_by_pool(live)
        slabs[0] += budget.slabs - sum(slabs)
        self.extra = [s * k - x + more for s, k, x, more in zip(slabs, budget.pages_per_slab, live, pages, strict=True)]

    def once(self) -> float:
        begin = perf_counter()
        plan = reclaim_for(self.arena.pools, self.arena.budget, self.arena.ranking, self.extra)
        seconds = perf_counter() - begin
        assert isinstance(plan, Plan), plan
        self._check(plan)
        return seconds

    def _check(self, plan: Plan) -> None:
        budget = self.arena.budget
        full = list(map(add, map(add, budget.held, budget.cached), self.extra))
        left = list(map(sub, full, plan.evict))
        for unit, count in plan.units:
            gone = [count if pages else 0 for pages in unit.left] if unit.bundle else unit.left
            left = list(map(sub, left, gone))
        short, won = budget.slabs_needed(full) - budget.slabs, budget.slabs_needed(full) - budget.slabs_needed(left)
        assert short == self.missing, f"{short} slabs are short, not the {self.missing} that {self.pages} take"
        assert won >= short, f"the plan wins {won} of {short} slabs"


class Match(Act):
    """The key and the match of a prompt of 12,000 tokens that the tree holds, as a list of Python integers."""

    def __init__(self, world: CachedArena) -> None:
        self.world = world

    def once(self) -> float:
        prompt = [*self.world.random.choice(self.world.prompts)]  # the tokens of an arrival have just been read
        begin = perf_counter()
        found = self.world.tree.match(token_key(prompt))
        seconds = perf_counter() - begin
        assert found.boundary_tokens == PROMPT_TOKENS - PAGE_TOKENS, found.reason
        return seconds


class Step(Act):
    """Plan and apply a step in which `running` requests decode, their positions spread evenly over a page."""

    def __init__(self, running: int = 256) -> None:
        self.running = running
        arena = Arena(gemma_3_27b(ARENA_BYTES))
        rules = Rules(step_tokens=8192, max_running_requests=running, max_model_len=8192, vocab_size=VOCABULARY)
        self.scheduler = Scheduler(arena, rules)
        params = SamplingParams(temperature=0.0, max_tokens=4096, ignore_eos=True)
        random = Random(5)
        for index in range(running):
            tokens = WINDOW_TOKENS + 5 * PAGE_TOKENS + index % PAGE_TOKENS
            prompt = tuple(random.choices(range(1, VOCABULARY), k=tokens))
            self.scheduler.handle(Arrive(f"request-{index}", prompt, params, index))
        while self.scheduler.figures().decoding < running:
            plan = self.scheduler.plan(0.0)
            assert plan is not None, f"no progress: {self.scheduler.reasons()}"
            self.scheduler.apply(answers(plan))

    def once(self) -> float:
        begin = perf_counter()
        plan = self.scheduler.plan(0.0)
        planned = perf_counter() - begin
        assert plan is not None, "nobody decodes"
        assert len(plan.segments) == self.running, f"{len(plan.segments)} requests decode, not {self.running}"
        result = answers(plan)  # the backend's work
        begin = perf_counter()
        self.scheduler.apply(result)
        return planned + perf_counter() - begin


def answers(plan: StepPlan) -> StepResult:
    """Return a token for every segment that wants one."""
    return StepResult(plan.step, tuple(Sampled(s.request_id, 7) for s in plan.segments if s.samples))

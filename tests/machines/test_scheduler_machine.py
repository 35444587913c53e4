"""A state machine over the whole scheduler: anything may happen at any moment, and every law is checked after it.

Prompts begin alike, with the prefix cache on and off, with a host arena of any size and without one. Model: the token
oracle, which knows what every request must get, and `World`, which audits scheduler and arenas after every act, counts
the bytes, and asks a reason of everybody who waits. In the end foreign owners let go and all finish.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from halocline.memory.demand import Demand
from halocline.memory.grant import Grant
from halocline.schedule.events import Accepted
from halocline.step import StepPlan
from testing.schedule import (
    FOUR_POOLS,
    FULL_AND_WINDOW,
    GUARANTEED,
    MIXED,
    THREE_POOLS,
    World,
    greedy,
    rules,
    stem,
    tiny_layout,
)

EOS = (3, 5)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts, steps in halves, failures of requests and of steps, foreign owners that come and go."""

    world: World

    @initialize(
        pools=st.sampled_from((FULL_AND_WINDOW, THREE_POOLS, FOUR_POOLS, MIXED)),
        slabs=st.integers(9, 16),
        admission=st.sampled_from((("expected", 0.9), ("expected", 0.3), GUARANTEED)),
        slots=st.integers(1, 6),
        step_tokens=st.sampled_from((8, 20, 64)),
        estimate=st.integers(1, 6),
        cache=st.booleans(),
        host_slabs=st.sampled_from((0, 0, 1, 4, 12)),
    )
    def start(
        self,
        pools: tuple,
        slabs: int,
        admission: tuple,
        slots: int,
        step_tokens: int,
        estimate: int,
        cache: bool,
        host_slabs: int,
    ) -> None:
        changed = rules(
            admission=admission,
            max_running_requests=slots,
            step_tokens=step_tokens,
            eos_token_ids=EOS,
            max_model_len=60,
            prefix_cache=cache,
        )
        self.world = World(tiny_layout(pools, slabs), changed, host_slabs=host_slabs)
        for size in (2, 4, 8, 16, 32):
            self.world.expect_outputs(size, estimate)
        self.outstanding: StepPlan | None = None
        self.foreign: list[Grant] = []
        self.foreign_on_host: list[Grant] = []
        self.count = 0

    def loaded(self, name: str) -> int:
        """How many positions of a request come from the host arena in the outstanding step."""
        copy = self.world.scheduler._desk._loading.get(name)
        _, hold = getattr(self.world.scheduler._sharing, "_loading", {}).get(name, (None, None))
        return copy.tokens if copy is not None else hold.boundary_tokens if hold is not None else 0

    def pick(self, draw: int) -> str | None:
        live = sorted(self.world.scheduler._roster.live)
        return live[draw % len(live)] if live else None

    @rule(
        length=st.integers(1, 24),
        max_tokens=st.integers(1, 30) | st.none(),
        priority=st.integers(-1, 1),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 3),
        branch=st.tuples(st.integers(0, 2), st.integers(0, 24)),
        salt=st.sampled_from(("", "", "other")),
    )
    def arrive(
        self,
        length: int,
        max_tokens: int | None,
        priority: int,
        ignore_eos: bool,
        min_tokens: int,
        branch: tuple[int, int],
        salt: str,
    ) -> None:
        least = min(min_tokens, max_tokens or min_tokens)
        params = greedy(max_tokens, ignore_eos=ignore_eos, min_tokens=least)
        self.world.arrive(f"r{self.count:03}", stem(length, *branch), params, priority, salt)
        self.count += 1

    @rule(draw=st.integers(0, 99))
    def abort(self, draw: int) -> None:
        name = self.pick(draw)
        if name is not None:
            self.world.abort(name)
            assert self.world.ends[name] == "abort"

    @precondition(lambda self: self.outstanding is None)
    @rule()
    def plan(self) -> None:
        before = {request.id: request.computed for request in self.world.scheduler._roster.live.values()}
        self.outstanding = self.world.plan()
        for request in self.world.scheduler._roster.live.values():
            lock = request.holding.lock if request.holding is not None else None
            resumed = lock.resumed_tokens if lock is not None and before[request.id] == 0 else 0  # others computed it
            loaded = self.loaded(request.id)
            assert request.computed in (before[request.id], 0, resumed, loaded), "planning computed something (A5)"

    @precondition(lambda self: self.outstanding is not None)
    @rule(failing=st.integers(0, 30))
    def compute(self, failing: int) -> None:
        assert self.outstanding is not None
        names = [segment.request_id for segment in self.outstanding.segments]
        self.world.backend.fails = {names[failing]} if failing < len(names) else set()
        self.world.apply(self.world.backend.run(self.outstanding))
        self.world.backend.fails = set()
        self.outstanding = None

    @precondition(lambda self: self.outstanding is None)
    @rule(steps=st.integers(1, 12))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            if not self.world.step():
                break

    @precondition(lambda self: self.outstanding is not None)
    @rule(carried_out=st.booleans())
    def fail_step(self, carried_out: bool) -> None:
        assert self.outstanding is not None
        if carried_out:  # the backend may have done anything between nothing and everything
            self.world.backend.run(self.outstanding)
        self.world.note_updates(self.world.scheduler.fail_step("the step failed"))
        self.outstanding = None

    @rule(share=st.floats(0.1, 1.0), pool=st.integers(0, 3))
    def foreign_owner_comes(self, share: float, pool: int) -> None:
        pool %= len(self.world.layout.pools)
        nothing = Demand((0,) * len(self.world.layout.pools))
        pages = int(self.world.arena.most(pool, nothing) * share)
        if pages and len(self.foreign) < 2:
            answer = self.world.arena.reserve("foreign", Demand(pages if p == pool else 0 for p in range(len(nothing))))
            assert isinstance(answer, Grant)
            self.foreign.append(answer)

    @precondition(lambda self: self.foreign)
    @rule()
    def foreign_owner_goes(self) -> None:
        self.world.arena.release(self.foreign.pop())

    @precondition(lambda self: self.world.host is not None and len(self.foreign_on_host) < 2)
    @rule(pages=st.lists(st.integers(0, 4), min_size=4, max_size=4))
    def foreign_owner_takes_host_pages(self, pages: list[int]) -> None:
        host = self.world.host
        answer = host.reserve("foreign", Demand(pages[: len(self.world.layout.pools)]))
        if isinstance(answer, Grant):
            self.foreign_on_host.append(answer)

    @precondition(lambda self: self.foreign_on_host)
    @rule()
    def foreign_owner_leaves_the_host(self) -> None:
        self.world.host.arena.release(self.foreign_on_host.pop())

    @invariant()
    def figures_agree_with_the_lines(self) -> None:
        if self.count:
            figures, roster = self.world.scheduler.figures(), self.world.scheduler._roster
            assert figures.waiting + figures.retracted == len(roster.waiting)
            assert figures.running == roster.running <= self.world.rules.max_running_requests
            accepted = len(self.world.limits)
            totals = figures.totals
            assert accepted == len(roster.live) + totals.finished + totals.aborted + totals.failed

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if self.outstanding is not None:
            self.world.apply(self.world.backend.run(self.outstanding))
        while self.foreign:
            self.world.arena.release(self.foreign.pop())
        while self.foreign_on_host:
            self.world.host.arena.release(self.foreign_on_host.pop())
        failed_before = len(self.world.failed)
        self.world.run()
        assert len(self.world.failed) == failed_before, self.world.failed
        assert self.world.is_empty
        self.world.assert_true_tokens()
        assert isinstance(self.world.arrive("last", 1, 1), Accepted)
        self.world.run()


class LongMachine(SchedulerMachine):
    """The same, longer."""


SchedulerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestSchedulerMachine = SchedulerMachine.TestCase
LongMachine.TestCase.settings = settings(max_examples=110, stateful_step_count=60)
TestLongMachine = pytest.mark.laws(LongMachine.TestCase)

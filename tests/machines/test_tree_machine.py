"""Tree and arena as one state machine: requests that share prefixes match, lock, compute and leave.

After every act: both audits (L1, L3, L5, L6, L8 and the books of lockers and charges), the contents of every page that
a request will read (L7), and all that is promised can be committed.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from halocline.cache.keys import EVERYBODY, Namespace, token_key
from halocline.memory.demand import Demand
from halocline.memory.grant import NO_HANDLES, Order
from halocline.memory.pool import CACHED
from halocline.memory.retention import Chunked, Full, Sliding, State
from testing.cache import CacheWorld, arena_of
from testing.memory import profile

ARENAS = {
    "full + sliding": ((Full(), 2, 3), (Sliding(5), 2, 2)),
    "small pages": ((Full(), 4, 2), (Sliding(6), 1, 3)),
    "long window": ((Full(), 2, 2), (Sliding(11), 4, 2)),
    "window below a page": ((Full(), 4, 2), (Sliding(3), 2, 1)),
    "two windows": ((Full(), 2, 3), (Sliding(4), 2, 2), (Sliding(9), 1, 4)),
    "chunked": ((Full(), 2, 3), (Chunked(6), 2, 2)),
    "state": ((Full(), 2, 3), (State(), 1, 1)),
    "all three": ((Full(), 2, 3), (Sliding(5), 2, 2), (State(), 1, 1)),
    "full alone": ((Full(), 2, 2),),
    "sliding alone": ((Sliding(5), 2, 2),),
}
OTHERS = Namespace("model", "adapter", "salt")


class TreeMachine(RuleBasedStateMachine):
    world: CacheWorld

    @initialize(shape=st.sampled_from(sorted(ARENAS)), slabs=st.integers(6, 24), slack=st.integers(0, 4))
    def start(self, shape, slabs, slack):
        self.world = CacheWorld(arena_of(*ARENAS[shape], slabs=slabs), slack)
        self.prompts: list[list[int]] = [[]]

    @rule(
        old=st.integers(0, 9),
        keep=st.integers(0, 40),
        new=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        output=st.integers(1, 9),
        other=st.integers(0, 9),
        shorter=st.integers(0, 40),
        hand_over=st.booleans(),
    )
    def enter(self, old, keep, new, output, other, shorter, hand_over):
        """A prompt that begins like an earlier one; sometimes at a shorter boundary than it could (H8)."""
        tokens = [*self.prompts[old % len(self.prompts)][:keep], *new][:32]
        self.prompts.append(tokens)
        space = OTHERS if other == 0 else EVERYBODY
        self.world.enter(tokens, output, space, None if shorter > 12 else shorter, hand_over)

    @rule(new=st.lists(st.integers(0, 1), min_size=4, max_size=20), output=st.integers(1, 5), chunk=st.integers(2, 20))
    def serve(self, new, output, chunk):
        """A whole life at once, if there is room for it."""
        runner = self.world.enter(new, output)
        while runner is not None and runner.computed < runner.end - 1:
            if runner.computed == len(runner.tokens):
                runner.tokens.append(0)
            left = runner.prompt - runner.computed if runner.computed < runner.prompt else 1
            if not self.world.compute([(runner, min(chunk, left))]):
                break
        if runner is not None:
            self.prompts.append(list(runner.tokens))
            self.world.leave(runner)

    @rule(pool=st.integers(0, 2), at=st.integers(0, 30), count=st.integers(1, 3))
    def lose(self, pool, at, count):
        """Some cached pages of a window or a state go: what hangs on them is void, the full pages stay."""
        pools = self.world.tree.marks.tail_pools
        if not pools:
            return
        number = pools[pool % len(pools)]
        cached = np.flatnonzero(self.world.arena.pools[number].state == CACHED)
        if len(cached):
            gone = self.world.arena.pools[number].handle_of[np.roll(cached, at)[:count]]
            self.world.arena.evict(number, gone)
            died = [gone if p == number else NO_HANDLES for p in range(len(self.world.layout.pools))]
            self.world.forget(died)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def compute(self, data):
        """One step: chunks of some requests."""
        chunks = []
        for runner in self.world.running:
            left = runner.end - 1 - runner.computed
            if left <= 0 or not data.draw(st.booleans()):
                continue
            if runner.computed < runner.prompt:
                chunks.append((runner, data.draw(st.integers(1, runner.prompt - runner.computed))))
            else:
                if runner.computed == len(runner.tokens):
                    runner.tokens.append(data.draw(st.integers(0, 1)))
                chunks.append((runner, 1))
        self.world.compute(chunks, data.draw(st.booleans()))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def leave(self, data):
        self.world.leave(data.draw(st.sampled_from(self.world.running)))

    @precondition(lambda self: self.world.running)
    @rule()
    def everybody_computes(self):
        chunks = [(r, min(4, r.prompt - r.computed)) for r in self.world.running if r.computed < r.prompt]
        self.world.compute(chunks)

    @rule(pages=st.integers(0, 3), pool=st.integers(0, 2))
    def make_room(self, pages, pool):
        """Somebody else takes pages and frees them: cached ones are evicted."""
        pools = len(self.world.layout.pools)
        demand = Demand(pages * 3 if p == pool % pools else 0 for p in range(pools))
        if self.world.arena.fits(demand):
            grant = self.world.arena.reserve("another", demand)
            self.world.forget(self.world.arena.commit([Order(grant, demand)]).evicted)
            self.world.arena.release(grant)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def match_changes_nothing(self, tokens):
        before = pickle.dumps([sorted(self.world.tree.forest.nodes), [p.state for p in self.world.arena.pools]])
        found = self.world.tree.match(token_key(tokens))
        assert found.boundary_tokens < len(tokens)
        assert before == pickle.dumps([sorted(self.world.tree.forest.nodes), [p.state for p in self.world.arena.pools]])

    @invariant()
    def all_laws_hold(self):
        if hasattr(self, "world"):
            self.world.check()

    @invariant()
    def every_promise_can_be_kept(self):
        if hasattr(self, "world"):
            copy = pickle.loads(pickle.dumps(self.world))
            orders = [Order(r.lock.grant, Demand(r.lock.grant.room)) for r in copy.running]
            copy.forget(copy.arena.commit(orders).evicted)
            assert copy.tree.audit() == []


class LongTreeMachine(TreeMachine):
    """The same, for long."""


TestTree = TreeMachine.TestCase
TestTree.settings = profile(examples=80, steps=25)
TestTreeForLong = pytest.mark.timeout(3600)(pytest.mark.laws(LongTreeMachine.TestCase))
TestTreeForLong.settings = profile(examples=400, steps=50)

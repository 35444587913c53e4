"""The arena as a state machine: any order of acts by requests, a cache and transfers.

After every act the audit, the bytes and the naive model agree (L1, L2, L5, L6, L13), every reserve, extension and lock
was answered as the brute-force oracle answers it (L3, exactness), and all that is promised could be committed at once.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from halocline.memory.demand import Demand
from halocline.memory.grant import Grant
from testing.memory import Holding, World, arena, can_place, profile

SMALL = st.integers(0, 3)
DEMANDS = st.tuples(SMALL, SMALL, SMALL).map(Demand)
PER_SLAB = st.sampled_from((1, 2, 3, 4))
CAPS = st.none() | st.tuples(*[st.none() | st.integers(1, 3)] * 3)


class ArenaMachine(RuleBasedStateMachine):
    world: World

    @initialize(full=PER_SLAB, sliding=PER_SLAB, state=st.integers(1, 2), slabs=st.integers(1, 5), caps=CAPS)
    def start(self, full, sliding, state, slabs, caps):
        self.world = World(arena(full=full, sliding=sliding, state=state, slabs=slabs, caps=caps), caps)

    # ---- choices that any world can answer

    def holding(self, data) -> Holding:
        return data.draw(st.sampled_from(self.world.holdings), "holding")

    def some(self, data, handles: list[int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(handles), unique=True)) if handles else []

    # ---- the only no

    @rule(demand=DEMANDS)
    def reserve(self, demand):
        possible = can_place(self.world, demand)
        assert (self.world.reserve(demand) is not None) == possible

    @precondition(lambda self: self.world.holdings)
    @rule(data=st.data(), extra=DEMANDS)
    def extend(self, data, extra):
        grant = self.holding(data).grant
        possible = can_place(self.world, extra)
        assert isinstance(self.world.arena.extend(grant, grant.demand.plus(extra)), Grant) == possible

    @precondition(lambda self: any(self.world.cached))
    @rule(data=st.data(), demand=DEMANDS)
    def lock(self, data, demand):
        chosen = [self.some(data, cached) for cached in self.world.cached]
        possible = can_place(self.world, demand.plus(Demand(map(len, chosen))))
        assert (self.world.lock(chosen, demand) is not None) == possible

    # ---- acts that cannot fail

    @precondition(lambda self: any(map(sum, [h.grant.room for h in self.world.holdings])))
    @rule(data=st.data())
    def commit(self, data):
        orders = []
        for holding in self.world.holdings:
            pages = Demand(data.draw(st.integers(0, room)) for room in holding.grant.room)
            orders.append((holding, pages, None))
        self.world.commit(orders)

    @precondition(lambda self: len(self.world.holdings) > 1)
    @rule(data=st.data())
    def borrow(self, data):
        """A chunk holds more than its request's grant for one step, on a step grant's account."""
        borrower, lender = data.draw(st.permutations(self.world.holdings))[:2]
        room = borrower.grant.room
        if not lender.grant.loans:
            room = map(int.__add__, room, lender.grant.room)
        pages = Demand(data.draw(st.integers(0, count)) for count in room)
        self.world.commit([(borrower, pages, lender.grant)])

    @rule()
    def commit_everything(self):
        self.world.commit_all()

    @rule(data=st.data(), pool=st.integers(0, 2))
    def fill_a_pool_and_leave_holes(self, data, pool):
        most = self.world.arena.most(pool, Demand((0, 0, 0)))
        holding = self.world.reserve(Demand(most if pool == number else 0 for number in range(3)))
        self.world.commit_all()
        gone = self.some(data, holding.handles[pool])
        self.world.free(holding, pool, gone[::2])
        self.world.cache(holding, pool, gone[1::2])
        self.world.arena.shrink(holding.grant, holding.grant.held)

    @precondition(lambda self: self.world.holdings)
    @rule(data=st.data(), pool=st.integers(0, 2))
    def free(self, data, pool):
        holding = self.holding(data)
        self.world.free(holding, pool, self.some(data, holding.handles[pool]))

    @precondition(lambda self: self.world.holdings)
    @rule(data=st.data(), pool=st.integers(0, 2))
    def cache(self, data, pool):
        holding = self.holding(data)
        self.world.cache(holding, pool, self.some(data, holding.handles[pool]))

    @precondition(lambda self: self.world.holdings)
    @rule(data=st.data())
    def shrink(self, data):
        grant = self.holding(data).grant
        less = Demand(data.draw(st.integers(0, room)) for room in grant.room)
        self.world.arena.shrink(grant, grant.demand.minus(less))

    @precondition(lambda self: any(not any(h.grant.lent) for h in self.world.holdings))
    @rule(data=st.data())
    def release(self, data):
        free_to_go = [holding for holding in self.world.holdings if not any(holding.grant.lent)]
        self.world.release(data.draw(st.sampled_from(free_to_go)))

    @precondition(lambda self: any(self.world.locked))
    @rule(data=st.data(), inherits=st.booleans())
    def unlock(self, data, inherits):
        heir = self.holding(data) if inherits and self.world.holdings else None
        self.world.unlock([self.some(data, locked) for locked in self.world.locked], heir)

    @precondition(lambda self: any(self.world.held()))
    @rule(data=st.data())
    def pin(self, data):
        held = self.world.locked
        for holding in self.world.holdings:
            held = [mine + more for mine, more in zip(held, holding.handles, strict=True)]
        self.world.pin([self.some(data, handles) for handles in held])

    @precondition(lambda self: self.world.pins)
    @rule(data=st.data())
    def unpin(self, data):
        self.world.unpin(data.draw(st.sampled_from(self.world.pins)))

    # ---- laws

    @invariant()
    def all_laws_hold(self):
        self.world.check()

    @invariant()
    def every_outstanding_grant_commits(self):
        self.world.check_every_grant_commits()


class LongArenaMachine(ArenaMachine):
    """The same, for long."""


TestArena = ArenaMachine.TestCase
TestArenaForLong = pytest.mark.timeout(3600)(pytest.mark.laws(LongArenaMachine.TestCase))
TestArenaForLong.settings = profile(examples=500, steps=60)
TestArena.settings = profile(examples=120, steps=25)

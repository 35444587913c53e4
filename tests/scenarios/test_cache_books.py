"""What the books of the cache must hold in the field: A14, E2 to E4, G2, H8, with wrong policies that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import pytest

from halocline.cache.forest import Forest
from halocline.cache.keys import token_key
from halocline.cache.locks import Lock, LockBook
from halocline.cache.match import Walk
from halocline.cache.node import Node
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, resident
from halocline.memory.grant import Commit, Grant, Handles, Order, Refusal
from halocline.memory.pool import CACHED
from halocline.memory.retention import Retention, State
from testing.cache import HYBRID, SLACK, CacheWorld, arena_of, lose, session

RESERVE = Arena.reserve


def reuse_after_a_tombstone() -> list[str]:
    world = CacheWorld(arena_of(*HYBRID, slabs=60))
    world.serve(range(41))
    (kept,) = world.tree.forest.nodes.values()
    gone = kept.pages[1][2:3].copy()
    world.arena.evict(1, gone)
    world.forget([np.zeros(0, np.int64), gone])
    return [violation.law for violation in world.tree.audit()]


def test_e2_a_tombstone_has_no_mapping():
    assert reuse_after_a_tombstone() == []


def test_e2_bites_when_the_mapping_stays(monkeypatch):
    monkeypatch.setattr(Forest, "disown", lambda *_: None)
    assert "L8" in reuse_after_a_tombstone()


def test_e3_a_page_in_two_nodes_is_reported_as_counted_twice():
    world = CacheWorld(arena_of(*HYBRID, slabs=60))
    world.serve(range(41))
    a, b = world.enter(range(41)), world.enter(range(41))
    world.check()
    (kept,) = world.tree.forest.nodes.values()
    kept.pages[0][1] = kept.pages[0][0]
    assert any("counted twice" in violation.message for violation in world.tree.audit())
    del a, b


STATES = (*HYBRID, (State(), 1, 1))


class Refuser:
    """Says no to the n-th question of an arena that may be answered so: a reserve, a lock, room for a checkpoint."""

    def __init__(self, arena: Arena, refused: int) -> None:
        self.asked = 0
        self.refused = refused
        self._reserve, self._lock, self._extend = arena.reserve, arena.lock, arena.extend
        arena.reserve, arena.lock, arena.extend = self.reserve, self.lock, self.extend  # type: ignore[method-assign]

    def reserve(self, owner: str, demand: Demand) -> Grant | Refusal:
        return self._no(demand) or self._reserve(owner, demand)

    def lock(self, owner: str | Grant, handles: Sequence[Handles], demand: Demand) -> Grant | Refusal:
        refusal = self._no(demand) if isinstance(owner, str) else None  # what freed duplicates made room for is sure
        return refusal or self._lock(owner, handles, demand)

    def extend(self, grant: Grant, demand: Demand) -> Grant | Refusal:
        saves = len(demand) == len(STATES) and demand[-1] > grant.demand[-1]  # others hand room on, which is sure
        return (self._no(demand) if saves else None) or self._extend(grant, demand)

    def _no(self, demand: Demand) -> Refusal | None:
        self.asked += 1
        return Refusal("memory", demand, 1, "refused on purpose") if self.asked == self.refused else None


def lives_with_a_refusal(shape: tuple[tuple[Retention, int, int], ...], refused: int) -> bool:
    """Let requests that share prefixes live, the n-th question refused; return whether there were so many."""
    world = CacheWorld(arena_of(*shape, slabs=90))
    refuser = Refuser(world.arena, refused)
    for hand_over, prompts in enumerate([(range(30), range(41)), ([*range(20), *range(90, 110)], range(30))]):
        runners = [world.enter(tokens, 3, hand_over=bool(hand_over)) for tokens in prompts]
        for _ in range(4):
            left = [r for r in runners if r is not None and r.computed < r.prompt]
            world.compute([(runner, min(12, runner.prompt - runner.computed)) for runner in left])
            world.check()
        for runner in filter(None, runners):
            world.leave(runner)
            world.check()
    assert world.arena.budget.held == world.arena.budget.promised == [0] * len(shape)
    assert not world.tree.locks.open
    assert not any(world.tree.locks.waiting)
    assert not any(root.locks for root in world.tree.forest.roots.values())
    assert not any(node.locks for node in world.tree.forest.nodes.values())
    return refuser.asked >= refused


@pytest.mark.parametrize("shape", [HYBRID, STATES], ids=["windows", "windows and states"])
def test_e4_a_refusal_at_any_point_leaves_nothing_behind(shape):
    """The n-th question to the budget is refused, for every n, in the life of four requests that share prefixes."""
    refused = next(n for n in count(1) if not lives_with_a_refusal(shape, n))
    assert refused > 12


def test_e4_bites_when_a_refused_lock_is_not_undone(monkeypatch):
    """The wrong policy locks first, asks then, and forgets what it has locked when the answer is no."""
    ask = LockBook.lock

    def lock(book: LockBook, owner: str, walk: Walk, granules: int, root: Node, demand: Demand) -> Lock | Refusal:
        answer = ask(book, owner, walk, granules, root, demand)
        if isinstance(answer, Refusal) and walk.path:
            walk.path[-1].locks += 1
        return answer

    monkeypatch.setattr(LockBook, "lock", lock)
    with pytest.raises(AssertionError):
        [lives_with_a_refusal(HYBRID, n) for n in range(1, 20)]


def own_pool_only(arena: Arena, owner: str, demand: Demand) -> Grant | Refusal:
    """The wrong policy: what another pool could give up is not seen, so the cache is "full"."""
    beyond = zip(demand, arena.budget.cached, strict=True)
    if arena.fits_untouched(Demand(max(0, more - cached) for more, cached in beyond)):
        return RESERVE(arena, owner, demand)
    return Refusal("memory", demand, 1, "cache is full")


def shortfall_only(slabs: int, caps: tuple[int | None, ...] | None, demand: Demand) -> list[int] | None:
    """Fill an arena with sessions, then take `demand`; return the pages that died, None when it was refused."""
    world = CacheWorld(arena_of(*HYBRID, slabs=slabs, caps=caps))
    for number in range(8):
        world.serve(session(number))
    grant = world.arena.reserve("another", demand)
    if isinstance(grant, Refusal):
        return None
    died = world.arena.commit([Order(grant, grant.demand)]).evicted
    world.forget(died)
    world.check()
    return [len(of_pool) for of_pool in died]


G2 = {
    # 8 sessions keep 13 full and 13 sliding pages each: 104 + 104, 21 + 104 slabs. Of 140 slabs 15 are free, 1 page is.
    "shared: full pages, the sliding ones pay": (140, None, Demand((96, 0)), [0, 4]),
    "shared: more than all full pages that could go": (140, None, Demand((216, 0)), [0, 28]),
    "shared: sliding pages pay for themselves": (140, None, Demand((0, 20)), [0, 5]),
    # The split leaves 4 sliding slabs; 20 are asked for. No full page is touched, though all 104 are evictable.
    "static: the shortfall, of the pool that has it": (140, (32, 108), Demand((0, 20)), [0, 16]),
}


@pytest.mark.parametrize("case", G2)
def test_g2_the_pool_that_has_it_pays_the_shortfall(case):
    slabs, caps, demand, died = G2[case]
    assert shortfall_only(slabs, caps, demand) == died


def test_g2_bites_when_a_pool_sees_only_what_it_could_evict_itself(monkeypatch):
    monkeypatch.setattr(Arena, "reserve", own_pool_only)
    slabs, caps, demand, died = G2["shared: more than all full pages that could go"]
    assert shortfall_only(slabs, caps, demand) != died


@pytest.mark.parametrize("case", G2)
def test_g2_bites_when_the_whole_demand_is_evicted(case, monkeypatch):
    slabs, caps, demand, died = G2[case]
    commit = Arena.commit

    def evicts_all(arena: Arena, orders: list[Order]) -> Commit:
        done = commit(arena, orders)
        if orders and orders[0].grant.owner != "another":
            return done
        beyond = []
        for number, pool in enumerate(arena.pools):
            cached = np.flatnonzero(pool.state == CACHED)[: max(0, demand[number] - len(done.evicted[number]))]
            beyond.append(np.concatenate((done.evicted[number], pool.handle_of[cached])))
            arena.evict(number, pool.handle_of[cached])
        return Commit(done.handles, done.moves, tuple(beyond))

    monkeypatch.setattr(Arena, "commit", evicts_all)
    assert shortfall_only(slabs, caps, demand) != died


def restored(caps: tuple[int | None, ...] | None, plans: Callable[[Demand], bool] = lambda _: True) -> list[Demand]:
    """Windows are gone under full pages that are cached; return what the chunk that restores them takes, or nothing.

    `plans` is asked about every demand, beside the budget: the wrong policy denies some.
    """
    world = CacheWorld(arena_of(*HYBRID, slabs=30, caps=caps), SLACK)
    world.serve(range(61))
    lose(world, 1, range(7, 15))
    runner = world.enter(range(61), 2)
    assert (runner.lock.resumed_tokens, runner.lock.full_tokens) == (28, 60)
    assert world.arena.budget.locked == [15, 2]
    full_pages = world.arena.budget.held[0]
    reserve, asked = world.arena.reserve, []

    def ask(owner: str, demand: Demand) -> object:
        asked.append(demand)
        return reserve(owner, demand) if plans(demand) else Refusal("memory", demand, 1, "not planned")

    world.arena.reserve = ask  # type: ignore[method-assign]
    for _ in range(20):
        if runner.computed < 60 and not world.compute([(runner, 60 - runner.computed)]):
            continue  # the head of the queue tries again, and again
    if runner.computed < 60:
        return []
    assert world.arena.budget.held[0] == full_pages, "a full page was taken beside the locked ones"
    world.check()
    assert world.compute([(runner, 1)])
    world.leave(runner)
    world.check()
    assert world.serve(range(61)) == 60
    return asked[:1]


CAPS = [None, (4, 26)]
"""The shared arena; and a static split with room for the sliding pages of one request and what it leaves."""


@pytest.mark.parametrize("caps", CAPS)
def test_h8_a_demand_of_more_sliding_than_full_pages_is_planned_and_served(caps):
    """32 tokens are eight sliding pages and no full one; of three granted ones two are locked, so one is at hand."""
    assert restored(caps) == [Demand((0, 7))]


@pytest.mark.parametrize("caps", CAPS)
def test_h8_bites_when_more_sliding_than_full_pages_are_never_planned(caps):
    assert restored(caps, lambda demand: demand[1] <= demand[0]) == []


def tight() -> tuple[CacheWorld, list[int]]:
    """The candidate's own prefix fills what its demand would need."""
    world = CacheWorld(arena_of(*HYBRID, slabs=30))
    prompt = list(range(61))
    world.serve(prompt)
    held = world.arena.reserve("running", Demand((0, 23)))
    assert not isinstance(held, Refusal)
    world.forget(world.arena.commit([Order(held, held.demand)]).evicted)
    return world, [*prompt, *range(500, 520)]


def test_a14_the_lock_counts_before_anything_is_taken():
    world, prompt = tight()
    found = world.tree.match(token_key(prompt))
    price = resident(world.layout, len(prompt), 9, found.boundary_tokens)
    assert found.boundary_tokens == 60
    walk = world.tree.forest.walk(token_key(prompt), 15)
    wanted = world.tree.locks.wanted(walk, 15)
    reduced = world.tree.locks.reduced(price, wanted, wanted)
    assert world.arena.fits(reduced), "the wrong policy, which prices first, sees room"
    before = list(world.arena.budget.cached)
    assert isinstance(world.tree.lock(found, 60, "candidate", price), Refusal)
    assert world.arena.budget.cached == before
    world.check()


def test_a14_bites_when_the_price_comes_before_the_lock():
    world, prompt = tight()
    found = world.tree.match(token_key(prompt))
    walk = world.tree.forest.walk(token_key(prompt), 15)
    wanted = world.tree.locks.wanted(walk, 15)
    price = resident(world.layout, len(prompt), 9, found.boundary_tokens)
    grant = world.arena.reserve("candidate", world.tree.locks.reduced(price, wanted, wanted))
    assert not isinstance(grant, Refusal)
    world.forget(world.arena.commit([Order(grant, grant.demand)]).evicted)
    assert world.tree.match(token_key(prompt)).boundary_tokens < 60, "the prefix that was priced is gone"

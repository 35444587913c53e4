"""E1, E4 and E5 of the scenarios: the n-th refusal leaves nothing behind; leaks and double frees are named."""

from __future__ import annotations

import pickle

import pytest

from halocline.errors import InvariantError
from halocline.memory.arena import Arena
from halocline.memory.budget import Budget
from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Order, Refusal
from halocline.memory.pool import CACHED, LOCKED
from testing.memory import World, arena, as_handles

QUESTIONS = 9
"""How often the script below asks the budget."""


class Refuses:
    """Budget.fits, except that the n-th question is answered with no."""

    def __init__(self, patch, n: int) -> None:
        self.asked = 0
        self.n = n
        fits, shortfall = Budget.fits, Budget.shortfall
        patch.setattr(Budget, "fits", lambda budget, extra: self.count() and fits(budget, extra))
        injected = Refusal("memory", Demand((0, 0, 0)), 1, "injected: 1 slab")
        patch.setattr(Budget, "shortfall", lambda budget, extra: shortfall(budget, extra) or injected)

    def count(self) -> bool:
        self.asked += 1
        return self.asked != self.n


def serve(some: Arena) -> None:
    """Serve three requests as a scheduler does: lock a hit, commit, take a step, grow, cache; go on after a refusal."""
    cached: list[list[int]] = [[], [], []]
    for number in range(3):
        hit = [as_handles(handles[:1]) for handles in cached]
        grant = acted(some, lambda n=number, h=hit: some.lock(f"request-{n}", h, Demand((3, 2, 1))))
        if not isinstance(grant, Grant):
            continue
        for handles in cached:
            del handles[:1]
        step = acted(some, lambda: some.reserve("step", Demand((0, 2, 0))))
        pages = Demand((3, 2, 1))
        done = some.commit([Order(grant, pages)])
        if isinstance(step, Grant):
            more = some.commit([Order(grant, Demand((0, 2, 0)), step)])
            some.free(grant, 1, more.handles[0][1])
            some.release(step)
        acted(some, lambda g=grant: some.extend(g, Demand((4, 2, 1))))
        some.cache(grant, 0, done.handles[0][0])
        cached[0] += done.handles[0][0].tolist()
        some.unlock(hit)
        some.release(grant)
    some.evict(0, some.pools[0].handle_of[some.pools[0].queue.waiting()])


def acted(some: Arena, act) -> Grant | Refusal:
    """Do something that may be refused; a refusal must leave the arena as it was, to the byte."""
    before = pickle.dumps(some)
    answer = act()
    if isinstance(answer, Refusal):
        assert pickle.dumps(some) == before, "a refusal has changed something"
    return answer


def e4(kind: type[Arena], n: int, patch) -> None:
    some = kind(arena(full=2, sliding=2, state=1, slabs=8).layout)
    refuses = Refuses(patch, n)
    serve(some)
    assert refuses.asked >= n, f"the script asks only {refuses.asked} times"
    assert some.audit() == []
    assert some.figures().used_bytes == 0
    assert some.figures().promised_bytes == 0
    assert some.fits(Demand((16, 0, 0)))


@pytest.mark.parametrize("n", range(1, QUESTIONS + 1))
def test_e4_the_nth_refusal_leaves_nothing_behind(n, monkeypatch):
    e4(Arena, n, monkeypatch)


class LeakyArena(Arena):
    """Locks first and asks afterwards; a refusal leaves the pages locked."""

    def lock(self, owner, handles, demand):
        for pool, of_pool in zip(self.pools, handles, strict=True):
            index = self.owners.valid(pool, of_pool)
            pool.queue.remove(index[pool.state[index] == CACHED])
            pool.state[index] = LOCKED
            self.budget.held[pool.number] += len(index)
            self.budget.locked[pool.number] += len(index)
            self.budget.cached[pool.number] -= len(index)
        return self.reserve(owner, demand)


def test_e4_bites_a_lock_that_a_refusal_does_not_undo(monkeypatch):
    """The second lock is the first one with a hit; it asks the fourth question."""
    with pytest.raises(AssertionError, match="a refusal has changed something"):
        e4(LeakyArena, 4, monkeypatch)


def test_e1_a_leak_is_named_with_its_owner_and_count():
    """Speculation that forgets one page at a time: the grant's books say less than it holds."""
    world = World(arena(full=4, slabs=4))
    owner = world.reserve(Demand((9,)), "request-7")
    world.commit_all()
    for _ in range(3):
        owner.grant.asked[0] -= 1
    assert [str(v.message) for v in world.arena.audit() if v.law == "L1"] == [
        "full: pages of 'request-7': 3 counted twice (books 6, counted 9)",
        "full: the receipts of 'request-7' do not show the 6 pages it holds",
    ]


def test_e5_of_two_owners_that_free_the_last_page_the_second_is_named():
    world = World(arena(full=1, slabs=1))
    first = world.reserve(Demand((1,)), "request-7")
    world.commit_all()
    page = as_handles(first.handles[0])
    world.release(first)
    second = world.reserve(Demand((1,)), "request-8")
    world.commit_all()
    with pytest.raises(InvariantError, match=r"stale handle 0 of generation 0.*held by 'request-8'"):
        world.arena.free(second.grant, 0, page)
    world.check()

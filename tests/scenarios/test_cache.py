"""Prefix reuse as it goes wrong in the field: D1 to D7, A14, E2 to E4, G2, H8, with wrong policies that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from halocline.cache import node
from halocline.cache.forest import Forest
from halocline.cache.ghosts import Ghosts
from halocline.cache.keys import token_key
from halocline.cache.marks import Marks
from halocline.cache.match import Resume
from halocline.memory.demand import Demand, resident
from halocline.memory.grant import Order, Refusal
from halocline.memory.retention import Full, Sliding, State
from testing.cache import CacheWorld, arena_of, lose

HYBRID = ((Full(), 4, 5), (Sliding(9), 4, 1))
"""One to five, as 10 + 50 layers: a sliding page is five full ones."""
PREFIX = 48
SLACK = 8


def session(number: int, turn: int = 0) -> list[int]:
    """A prefix of its own, then a suffix that nobody has seen."""
    return [*range(number * 1000, number * 1000 + PREFIX), *range(900_000 + turn * 100, 900_000 + turn * 100 + 6)]


def cached_slabs(world: CacheWorld) -> float:
    pools = zip(world.arena.budget.cached, world.layout.pools, strict=True)
    return sum(pages / shape.pages_per_slab for pages, shape in pools)


def hits_in_turn(sessions: int, working_set_per_arena: float, rounds: int = 5) -> float:
    """Return the share of the prefixes that hits after the first round, over arena / working set."""
    wide = CacheWorld(arena_of(*HYBRID, slabs=sessions * 30), SLACK)
    for number in range(sessions):
        wide.serve(session(number))
    kept = sum(len(m.node.pages[0]) / 5 for m in wide.tree.marks.marks.values()) + sum(
        len(wide.tree.marks.tail(m, 1)) for m in wide.tree.marks.marks.values()
    )
    world = CacheWorld(arena_of(*HYBRID, slabs=round(kept / working_set_per_arena)), SLACK)
    hits = 0
    for turn in range(rounds):
        for number in range(sessions):
            hit = world.serve(session(number, turn * sessions + number + 1), chunk=8)
            hits += min(hit, PREFIX) if turn else 0
    world.check()
    return hits / (sessions * (rounds - 1) * PREFIX) * working_set_per_arena


# ---- D


def test_d1_a_common_prefix_always_hits():
    world = CacheWorld(arena_of(*HYBRID, slabs=24))
    common = list(range(PREFIX))
    for number in range(60):
        hit = world.serve([*common, *range(1000 + number * 20, 1000 + number * 20 + 14)])
        assert hit >= PREFIX or number < 2, f"request {number} hits {hit} of {PREFIX}"
    world.check()


@pytest.mark.parametrize("ratio", [1.1, 1.25, 2.0, 3.0])
def test_d1_sessions_in_turn_hit_for_as_many_as_fit(ratio):
    assert hits_in_turn(60, ratio) >= 0.75


def test_d1_bites_when_a_return_is_taken_for_a_first_visit(monkeypatch):
    monkeypatch.setattr(Ghosts, "knows", lambda *_: False)
    assert hits_in_turn(60, 1.25) < 0.2


def scanned() -> list[int]:
    """Sessions that were used twice, then one pass over many new ones: how many of the first still hit."""
    world = CacheWorld(arena_of(*HYBRID, slabs=80), SLACK)
    for turn in range(3):
        for number in range(5):
            world.serve(session(number, turn * 5 + number))
    for number in range(100, 200):
        world.serve(session(number, number))
    return [world.serve(session(number, 500 + number)) for number in range(5)]


def test_one_pass_over_many_new_sessions_drives_out_no_used_one():
    assert min(scanned()) >= PREFIX


def test_the_scan_bites_when_nothing_is_proven(monkeypatch):
    monkeypatch.setattr(node, "PROVEN", 0.0)
    assert min(scanned()) < PREFIX


def parked(world: CacheWorld) -> Iterable[tuple[int, int]]:
    """Yield, of every parked session, the pages of its last window that are there, and how many there should be."""
    for number in range(8):
        walk = world.tree.forest.walk(token_key(session(number)))
        last = walk.granules
        pages = node.gather(walk.path, world.tree.shape, 1, max(0, last - 2), last)
        yield int((pages != node.TOMBSTONE).sum()), len(pages)


def squeeze(world: CacheWorld, pages: int) -> None:
    grant = world.arena.reserve("another", Demand((0, pages)))
    assert not isinstance(grant, Refusal)
    world.forget(world.arena.commit([Order(grant, grant.demand)]).evicted)
    world.check()


def broken_tails(slabs: int = 60) -> int:
    world = CacheWorld(arena_of(*HYBRID, slabs=slabs))
    for number in range(8):
        world.serve(session(number))
    broken = 0
    for _ in range(20):
        squeeze(world, 1)
        broken += sum(0 < there < wanted for there, wanted in parked(world))
    return broken


def test_d2_a_tail_lives_and_dies_as_a_unit():
    assert broken_tails() == 0


def test_d2_bites_when_pages_go_one_by_one(monkeypatch):
    monkeypatch.setattr(Marks, "_rank_tail", lambda *_: None)
    monkeypatch.setattr(CacheWorld, "check", lambda _: None)  # the audit sees it, too
    assert broken_tails() > 0


def resume_over_gaps() -> None:
    world = CacheWorld(arena_of((Full(), 4, 5), (Sliding(9), 4, 1), slabs=60))
    world.serve(range(41))
    (kept,) = world.tree.forest.nodes.values()
    for page in (3, 7):
        gone = kept.pages[1][page : page + 1].copy()
        world.arena.evict(1, gone)
        world.forget([np.zeros(0, np.int64), gone])
    for length in range(1, 42):
        runner = world.enter(range(length))
        boundary = runner.computed
        window = {position // 4 for position in range(max(0, boundary - 8), boundary)}
        assert not window & {3, 7}, f"resumed at {boundary} on a window that is gone"
        longer = [b for b in range(boundary + 4, length, 4) if not {p // 4 for p in range(max(0, b - 8), b)} & {3, 7}]
        assert not longer, f"resumed at {boundary}, {longer} would do"
        world.leave(runner)
    world.check()


def test_d3_never_resumes_on_a_window_that_is_gone():
    resume_over_gaps()


def test_d3_bites_when_full_pages_decide_alone(monkeypatch):
    monkeypatch.setattr(Resume, "missing", lambda *_: None)
    with pytest.raises((AssertionError, IndexError)):
        resume_over_gaps()


def test_d4_a_draft_model_is_one_more_pool_and_resends_hit():
    world = CacheWorld(arena_of((Full(), 4, 5), (Sliding(9), 4, 1), (Sliding(5), 4, 2), slabs=60))
    world.serve(range(41))
    assert world.serve(range(41)) == 40


@pytest.mark.parametrize("shared", [4, 8, 20, 36])
def test_d5_hits_are_exact_to_a_granule(shared):
    world = CacheWorld(arena_of((Full(), 4, 5), (Sliding(9), 4, 1), slabs=90))
    for first in (100, 200, 300):
        hit = world.serve([*range(shared), *range(first, first + 50)])
        assert hit == (0 if first == 100 else shared)
    world.check()


@pytest.mark.parametrize("cuts", [True, False])
def test_d5_a_state_hits_from_the_third_use_on(cuts):
    """The second use reveals the branch; a scheduler that does not cut a chunk there never hits."""
    world = CacheWorld(arena_of((Full(), 4, 5), (State(), 1, 1), slabs=90))
    hits = [world.serve([*range(20), *range(first, first + 50)], cuts=cuts) for first in (100, 200, 300)]
    assert hits == ([0, 0, 20] if cuts else [0, 0, 0])
    world.check()


@pytest.mark.parametrize("length", range(1, 18))
def test_d6_a_full_hit_leaves_a_token_to_compute(length):
    world = CacheWorld(arena_of((Full(), 4, 5), (Sliding(9), 4, 1), slabs=60))
    world.serve(range(64))
    runner = world.enter(range(length))
    assert runner.computed == (length - 1) // 4 * 4
    assert world.compute([(runner, length - runner.computed)])
    world.leave(runner)
    world.check()


@pytest.mark.parametrize("length", [255, 256, 257])
def test_d7_a_retracted_request_hits_what_it_left(length):
    world = CacheWorld(arena_of((Full(), 256, 2), (Sliding(100), 256, 1), slabs=20))
    runner = world.enter(range(length), 300)
    assert world.compute([(runner, length)])
    for position in range(length, length + 3):
        runner.tokens.append(position)
        assert world.compute([(runner, 1)])
    history = list(runner.tokens)
    world.leave(runner)
    again = world.enter(history, 250)
    assert again.computed == (len(history) - 1) // 256 * 256
    assert world.compute([(again, len(history) - again.computed)])
    world.leave(again)
    world.check()


# ---- E


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


def refuse_when(world: CacheWorld, fits: Callable[[Demand], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, lock = world.arena.reserve, world.arena.lock
    no = Refusal("memory", Demand((0, 0)), 1, "refused on purpose")
    monkeypatch.setattr(world.arena, "reserve", lambda owner, demand: reserve(owner, demand) if fits(demand) else no)

    def locks(owner, handles, demand):
        return lock(owner, handles, demand) if not isinstance(owner, str) or fits(demand) else no

    monkeypatch.setattr(world.arena, "lock", locks)


def test_e4_a_refusal_at_any_point_leaves_nothing_behind(monkeypatch):
    """The n-th question to the budget is refused, for every n, in the life of three requests that share a prefix."""
    for refused in range(40):
        world = CacheWorld(arena_of(*HYBRID, slabs=90))
        asked = 0

        def fits(extra, world=world, refused=refused):
            nonlocal asked
            asked += 1
            return asked != refused + 1 and type(world.arena.budget).fits(world.arena.budget, extra)

        refuse_when(world, fits, monkeypatch)
        for tokens in (range(30), range(41), [*range(20), *range(90, 110)]):
            runner = world.enter(tokens, 3)
            if runner is not None:
                world.compute([(runner, min(7, runner.prompt - runner.computed))])
                world.check()
                world.leave(runner)
            world.check()
        assert world.arena.budget.held == world.arena.budget.promised == [0, 0]


# ---- H, A, G


def test_g2_the_pool_that_has_it_pays():
    world = CacheWorld(arena_of(*HYBRID, slabs=60))
    for number in range(8):
        world.serve(session(number))
    cached = list(world.arena.budget.cached)
    grant = world.arena.reserve("another", Demand((40, 0)))
    assert not isinstance(grant, Refusal)
    died = world.arena.commit([Order(grant, grant.demand)]).evicted
    world.forget(died)
    assert len(died[1]) > 0
    assert len(died[0]) == 0
    assert world.arena.budget.cached[0] == cached[0]
    world.check()


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

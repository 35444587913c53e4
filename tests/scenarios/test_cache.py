"""Prefix reuse as it goes wrong in the field: D1 to D7, with wrong policies that fail."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from halocline.cache import node
from halocline.cache.ghosts import Ghosts
from halocline.cache.keys import Key, token_key
from halocline.cache.marks import Marks
from halocline.cache.match import Resume
from halocline.memory.demand import Demand
from halocline.memory.grant import NO_HANDLES, Order, Refusal
from halocline.memory.pool import CACHED
from halocline.memory.retention import Full, Sliding, State
from testing import cache
from testing.cache import HYBRID, PREFIX, SLACK, CacheWorld, arena_of, session


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
    monkeypatch.setattr(Marks, "_free_tail", lambda marks, _: marks._nothing())
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


DRAFTS = {
    "its own window": ((Full(), 4, 5), (Sliding(9), 4, 1), (Sliding(5), 4, 2)),
    "longer than the target's": ((Full(), 4, 5), (Sliding(9), 4, 1), (Sliding(20), 4, 1)),
    "smaller pages": ((Full(), 4, 5), (Sliding(9), 4, 1), (Sliding(6), 2, 3)),
}


def resends(draft: str, gives_draft_pages: bool = True) -> list[int]:
    """Send one prompt four times, others between; the wrong policy keeps what the target computed, not the draft."""
    world = CacheWorld(arena_of(*DRAFTS[draft], slabs=60), SLACK)
    hits = []
    for turn in range(4):
        hits.append(world.serve(range(41), chunk=16, output=3))
        world.serve(session(turn + 1), chunk=16)
        if not gives_draft_pages:
            drafts = world.arena.pools[2]
            gone = drafts.handle_of[np.flatnonzero(drafts.state == CACHED)]
            world.arena.evict(2, gone)
            world.forget([NO_HANDLES, NO_HANDLES, gone])
        world.check()
    return hits


@pytest.mark.parametrize("draft", DRAFTS)
def test_d4_a_draft_model_is_one_more_pool_and_resends_hit(draft):
    assert resends(draft) == [0, 40, 40, 40]


@pytest.mark.parametrize("draft", DRAFTS)
def test_d4_bites_when_pages_of_the_draft_are_not_kept(draft):
    assert resends(draft, gives_draft_pages=False) == [0, 0, 0, 0]


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


def full_hit(length: int) -> None:
    world = CacheWorld(arena_of((Full(), 4, 5), (Sliding(9), 4, 1), slabs=60))
    world.serve(range(64))
    runner = world.enter(range(length))
    assert length > runner.computed == (length - 1) // 4 * 4, "nothing is left to compute"
    assert world.compute([(runner, length - runner.computed)])
    world.leave(runner)
    world.check()


@pytest.mark.parametrize("length", range(1, 18))
def test_d6_a_full_hit_leaves_a_token_to_compute(length):
    full_hit(length)


@pytest.mark.parametrize("length", [4, 8, 16])
def test_d6_bites_when_all_of_the_prompt_may_be_skipped(length, monkeypatch):
    def whole(tokens, namespace):
        key = token_key(tokens, namespace)
        return Key(key.data, key.tokens + 1, namespace)

    monkeypatch.setattr(cache, "token_key", whole)
    with pytest.raises(AssertionError, match="nothing is left to compute"):
        full_hit(length)


def retracted(length: int) -> None:
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


@pytest.mark.parametrize("length", [255, 256, 257])
def test_d7_a_retracted_request_hits_what_it_left(length):
    retracted(length)


@pytest.mark.parametrize("length", [255, 256, 257])
def test_d7_bites_when_tables_are_sized_by_whole_pages(length, monkeypatch):
    """Pages asked for are tokens // P: right for every length that ends with a page, one short for all others."""

    def short(world: CacheWorld, runner: cache.Runner, tokens: int) -> Demand:
        pages = (runner.computed + tokens) // 256
        return Demand(max(0, pages - first - len(own)) for first, own in zip(runner.first, runner.own, strict=True))

    monkeypatch.setattr(CacheWorld, "_wanted", short)
    with pytest.raises(AssertionError, match="lacks pages"):
        retracted(length)

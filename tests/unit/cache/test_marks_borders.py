"""Borders of what is kept: each test is the one that catches a fault which the hit rates alone would not show."""

from __future__ import annotations

from halocline.memory.grant import NO_HANDLES
from halocline.memory.pool import INDEX_MASK
from testing.cache import HYBRID, SLACK, CacheWorld, arena_of, lose, session


def test_at_most_half_of_the_arena_is_proven():
    """All sessions are used twice and fit together; beyond half of the bytes the least worthy is as any other again."""
    w = CacheWorld(arena_of(*HYBRID, slabs=120), SLACK)
    for number in range(15):
        w.serve(session(number))
        assert w.serve(session(number, 1)) > 0
        w.check()
    marks = w.tree.marks
    assert w.layout.arena_bytes // 4 < marks.proven_bytes <= w.layout.arena_bytes // 2
    assert any(not mark.proven for mark in marks.marks.values())


def evicted_session() -> tuple[CacheWorld, float]:
    """Serve a session and let its first full page die, and so all of it; return what a byte of it was worth."""
    w = CacheWorld(arena_of(*HYBRID, slabs=120), SLACK)
    w.serve(session(1))
    (mark,) = w.tree.marks.marks.values()
    lose(w, 0, [0])
    assert not w.tree.forest.nodes
    return w, mark.key


def test_the_clock_rises_to_what_was_evicted():
    """So a newcomer is worth more than what came before it and was not used since."""
    w, worth = evicted_session()
    w.serve(session(2))
    (mark,) = w.tree.marks.marks.values()
    assert worth < 1.5 * worth < mark.key


def test_who_returns_after_its_eviction_is_worth_nothing_until_it_is_used():
    w, _ = evicted_session()
    w.serve(session(1, turn=1))
    (mark,) = w.tree.marks.marks.values()
    assert (mark.returned, mark.worth) == (True, 0.0)
    assert w.serve(session(1, turn=1)) > 0
    assert (mark.returned, mark.proven) == (False, True)


def lose_all_loose(w: CacheWorld, pool: int) -> None:
    """Let every page die that belongs to no unit, as the first ones to go."""
    loose = w.arena.pools[pool].handle_of[w.arena.pools[pool].queue.waiting()]
    w.arena.evict(pool, loose)
    w.forget([loose if number == pool else NO_HANDLES for number in range(len(w.layout.pools))])


def test_a_branch_that_a_second_request_reveals_keeps_its_window():
    """The second request computes the window before the branch once more; the third one resumes there."""
    w = CacheWorld(arena_of(*HYBRID, slabs=200), SLACK)
    hits = []
    for branch in range(3):
        hits.append(w.serve([*range(48), *range(1000 * branch + 1000, 1000 * branch + 1060)], chunk=16))
        lose_all_loose(w, 1)
        w.check()
    assert hits == [0, 0, 48]


def test_what_a_mark_keeps_goes_to_a_worthier_one_as_soon_as_its_own_worth_sinks():
    """The longer prompt's mark takes the page at equal worth; used again, it has three pages to pay for and sinks."""
    w = CacheWorld(arena_of(*HYBRID, slabs=200), SLACK)
    w.serve(range(5))
    w.serve(range(13))
    short, long = w.tree.marks.marks.values()
    page = short.node.pages[1] & INDEX_MASK
    keeper = w.tree.forest.books[1].mark
    assert short.worth == long.worth
    assert keeper[page].tolist() == [long.id]
    w.enter(range(20))
    assert short.worth > long.worth
    assert keeper[page].tolist() == [short.id]
    w.check()

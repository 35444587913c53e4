"""Borders of what is kept: each test is the one that catches a fault which the hit rates alone would not show."""

from __future__ import annotations

from testing.cache import HYBRID, SLACK, CacheWorld, arena_of, session


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

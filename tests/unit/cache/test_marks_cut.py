"""A node that is cut keeps its mark where the boundary before the cut still stands; the order of units must follow."""

from __future__ import annotations

from halocline.memory.retention import Full, Sliding
from testing.cache import CacheWorld, arena_of


def test_a_mark_that_moves_to_the_cut_goes_before_the_pages_that_it_hangs_on() -> None:
    """Six granules, W = 16: the tail of boundary 96 is window page 5, pages 0 to 4 are loose.

    Full page 5 and its tail go by themselves, as when held pages are gathered. At 80 window page 4 is there: the mark
    stands at 80 now, over a node of five granules.
    """
    world = CacheWorld(arena_of((Full(), 16, 1), (Sliding(16), 16, 12), slabs=8))
    world.serve(list(range(97)))
    arena, tree = world.arena, world.tree
    assert arena.budget.cached == [6, 6]
    (node,) = tree.forest.nodes.values()
    died = [node.pages[pool][5:].copy() for pool in range(2)]
    for pool, handles in enumerate(died):
        arena.evict(pool, handles)
    tree.forget(died)
    (mark,) = tree.marks.marks.values()
    assert mark.node.end == 5
    assert tree.audit() == []

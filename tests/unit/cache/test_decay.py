"""What becomes of nodes and marks when the last page goes."""

from __future__ import annotations

from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Order
from halocline.memory.retention import Chunked, Sliding
from testing.cache import CacheWorld, arena_of, lose


def test_a_boundary_at_which_nothing_is_read_goes_with_the_last_page_of_its_node() -> None:
    """Chunks of 8 begin anew at position 8, and a window of 1 reads nothing before it: no page keeps that mark."""
    world = CacheWorld(arena_of((Chunked(8), 1, 4), (Sliding(1), 4, 5), slabs=8))
    world.serve([*range(8), 1])
    (node,) = world.tree.forest.nodes.values()
    assert node.mark is not None
    assert node.mark.bytes == 0
    grant = world.arena.reserve("others", Demand([32, 0]))
    assert isinstance(grant, Grant)
    world.forget(world.arena.commit([Order(grant, Demand([32, 0]))]).evicted)
    assert not world.tree.forest.nodes
    assert not world.tree.marks.marks
    world.check()
    world.arena.release(grant)
    world.serve([*range(8), 1])
    world.check()


def test_what_a_split_leaves_without_a_page_goes_at_once() -> None:
    """Without a full pool a node may end in tombstones: nothing of the lower half can die, so nothing would end it."""
    world = CacheWorld(arena_of((Sliding(5), 4, 4), slabs=8))
    world.serve([*range(12), 1], chunk=4)
    lose(world, 0, [1, 2])
    world.serve([*range(4), *range(50, 59)], chunk=4)
    world.check()
    assert sorted((node.start, node.end) for node in world.tree.forest.nodes.values()) == [(0, 1), (1, 3)]


def test_a_split_ends_a_boundary_at_which_nothing_is_read_with_the_last_page_of_its_node() -> None:
    world = CacheWorld(arena_of((Chunked(8), 4, 4), slabs=8))
    world.serve([*range(8), 1])  # no boundary reads its second page, which so is not kept
    world.serve([*range(4), *range(50, 55)], chunk=4)
    world.check()
    assert all(not node.is_bare for node in world.tree.forest.nodes.values())

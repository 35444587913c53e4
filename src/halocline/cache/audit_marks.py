"""What is kept, recounted: marks, their tails, and the units that the arena was told.

L7  a mark's boundary can be resumed: no tombstone in the window before it, and a state at it
L6  every cached page that a mark keeps is in its unit, every cached full page in its node's; nothing else is
and the order: no unit goes before what hangs on it, worth is that of the best mark below, proven bytes add up
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from halocline.cache.forest import Forest
from halocline.cache.locks import LockBook
from halocline.cache.marks import Marks
from halocline.cache.node import Mark, Node
from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.memory.evictable import Unit
from halocline.memory.pool import CACHED, INDEX_MASK


def audit_marks(arena: Arena, forest: Forest, locks: LockBook, marks: Marks) -> list[Violation]:
    """Return what is wrong with the marks and units of a forest."""
    found: list[Violation] = []
    for mark in marks.marks.values():
        found += _mark(arena, forest, marks, mark)
    for node in forest.nodes.values():
        found += _node(arena, locks, node)
    for pool in marks.tail_pools:
        kept = np.unique(forest.books[pool].mark).tolist()
        if set(kept) - {0} - set(marks.marks):
            found.append(Violation("L6", f"pages of pool {pool} are kept by marks that have ended"))
    for unit in arena.ranking.units.values():
        if any(hanging.order > unit.order for hanging in unit.hung.values()):
            found.append(Violation("L6", f"unit {unit.id} goes before what hangs on it"))
    proven = sum(mark.bytes for mark in marks.marks.values() if mark.proven)
    if proven != marks.proven_bytes:
        found.append(Violation("L6", f"proven marks keep {proven} bytes, the books say {marks.proven_bytes}"))
    return found


def _mark(arena: Arena, forest: Forest, marks: Marks, mark: Mark) -> Iterator[Violation]:
    if mark.node.mark is not mark or mark.node.id not in forest.nodes:
        yield Violation("L8", f"mark {mark.id} stands at a node that does not know of it")
        return
    if not marks.is_whole(mark.node):
        yield Violation("L7", f"mark {mark.id} is kept, but its window or state is gone")
    for pool in marks.tail_pools:
        index = marks.tail(mark, pool) & INDEX_MASK
        kept = index[forest.books[pool].mark[index] == mark.id]
        if len(kept) != int(np.count_nonzero(forest.books[pool].mark == mark.id)):
            yield Violation("L6", f"mark {mark.id} keeps pages of pool {pool} that are not in its tail")
        cached = kept[arena.pools[pool].state[kept] == CACHED]
        yield from _members(arena, pool, cached.tolist(), mark.tail)


def _node(arena: Arena, locks: LockBook, node: Node) -> Iterator[Violation]:
    for pool in locks.full:
        index = node.pages[pool] & INDEX_MASK
        yield from _members(arena, pool, index[arena.pools[pool].state[index] == CACHED].tolist(), node.body)
    worths = [child.worth for child in node.children.values()]
    worth = max([node.mark.worth if node.mark is not None else 0.0, *worths])
    if worth != node.worth:
        yield Violation("L6", f"node {node.id} is worth {worth}, the books say {node.worth}")


def _members(arena: Arena, pool: int, cached: list[int], unit: Unit | None) -> Iterator[Violation]:
    own = unit.id if unit is not None else 0
    wrong = [page for page in cached if arena.ranking.member[pool][page] != own]
    if wrong or (cached and not own):
        yield Violation("L6", f"{len(wrong)} pages of pool {pool} are not in the unit that keeps them")

"""How far back the tails of marks reach, and which pages stand there.

                          first page |<- slab ->|<- branch slack ->|<-- W - 1 -->| boundary
window pool    |...|...|...|...|.....|..........|..................|.............|
                                     |tail ......................................|
"""

from __future__ import annotations

import numpy as np

from halocline.cache.forest import Forest
from halocline.cache.locks import LockBook
from halocline.cache.match import Resume
from halocline.cache.node import TOMBSTONE, Mark, Node, gather
from halocline.memory.arena import Arena
from halocline.memory.grant import Handles
from halocline.memory.pool import INDEX_MASK
from halocline.memory.retention import Chunked, Retention, Sliding


def reach_of(retention: Retention) -> int:
    """Return how many tokens before a boundary a tail begins at most."""
    match retention:
        case Sliding(window_tokens):
            return window_tokens
        case Chunked(chunk_tokens):
            return chunk_tokens
        case _:
            return 0


class Reach:
    """Reads pages by boundary. Changes nothing but where a mark's tail begins."""

    def __init__(self, arena: Arena, forest: Forest, locks: LockBook, resume: Resume) -> None:
        self._arena = arena
        self._forest = forest
        self._locks = locks
        self._resume = resume

    def is_whole(self, node: Node) -> bool:
        """Whether a request could resume at `node`'s end (L7)."""
        end = node.end * self._forest.shape.granule_tokens
        return not any(
            (self.pages(node, pool, self._resume.first_page(pool, end)) == TOMBSTONE).any()
            for pool in self._locks.windows
        ) and not any(node.pages[pool][0] == TOMBSTONE for pool in self._forest.shape.states)

    def pages(self, node: Node, pool: int, first_page: int) -> Handles:
        """Return the pages of a window pool from `first_page` to the node's end; or its state. With tombstones."""
        shape = self._forest.shape
        if pool in shape.states:
            return node.pages[pool]
        per_granule = shape.pages_per_granule[pool]
        return gather(node.path(first_page // per_granule), shape, pool, first_page, node.end * per_granule)

    def extend(self, mark: Mark, serves_tokens: int) -> None:
        """Let the tail begin early enough for a boundary at `serves_tokens`, and with the slab in which that page lies.

        A slab that is the tail's alone empties when the tail dies, where one that it shares would have to be vacated.
        """
        shape = self._forest.shape
        for pool in self._locks.windows:
            first, per_slab = self._resume.first_page(pool, serves_tokens), self._arena.pools[pool].per_slab
            if first >= mark.first_page[pool]:
                continue
            mark.first_page[pool] = first
            run = gather(mark.node.path(), shape, pool, max(0, first - per_slab + 1), first + 1)
            if first < mark.node.end * shape.pages_per_granule[pool] and run[-1] != TOMBSTONE:
                places = self._arena.pools[pool].place[np.maximum(run, 0) & INDEX_MASK]
                apart = np.flatnonzero((run == TOMBSTONE) | (places // per_slab != places[-1] // per_slab))
                mark.first_page[pool] -= len(run) - 1 - (int(apart[-1]) + 1 if len(apart) else 0)


def kept_for_others(node: Node) -> int:
    """Return how far `node`'s prefix is kept for others: granules to the last node on its path with another mark."""
    above: Node | None = node
    while above is not None:
        if (above is not node and above.mark is not None) or any(child.worth > 0 for child in above.children.values()):
            return above.end
        below, above = above, above.parent
        if above is not None and any(c is not below and c.worth > 0 for c in above.children.values()):
            return above.end
    return 0

"""What becomes of the tree when pages die: tombstones, and the cascade.

    a window page or state died    its place is a tombstone (L8: no page, no mapping)
    a full page died               its granule and all below it can never be matched again: their other pages are
                                   evicted with it, the nodes below are removed, the node is cut before the granule
    a node owns nothing            it is removed, from the leaves up, unless a request's locked path ends there

A locked path is whole in the full pool, so nothing below a page that died can be locked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from halocline.cache.forest import Forest
from halocline.cache.marks import Marks
from halocline.cache.node import TOMBSTONE, Mark, Node
from halocline.memory.arena import Arena
from halocline.memory.grant import NO_HANDLES, Handles
from halocline.memory.pool import INDEX_MASK


class Decay:
    """Takes dead pages out of a forest."""

    def __init__(self, arena: Arena, forest: Forest, full: Sequence[int], marks: Marks) -> None:
        self._arena = arena
        self._forest = forest
        self._full = full
        self._marks = marks

    def forget(self, died: Sequence[Handles]) -> list[Handles]:
        """Make tombstones of `died` (per pool); return what the cascade evicted beyond them, per pool.

        To be called with every `Commit.evicted`, before anything else is asked of the tree.
        """
        touched: dict[int, Node] = {}
        cuts: dict[int, int] = {}
        marks: dict[Mark, None] = {}
        for pool, handles in enumerate(died):
            if len(handles) == 0:
                continue
            index = handles & INDEX_MASK
            for node, gone in self._forest.places(pool, index):
                touched[node.id] = node
                last = _highest(gone) + node.start * self._forest.shape.pages_per_granule[pool]
                marks.update(dict.fromkeys(self._marks.near(node, pool, last)))
                node.pages[pool][gone] = TOMBSTONE
                if pool in self._full:
                    granule = int(gone.min()) // self._forest.shape.pages_per_granule[pool]
                    cuts[node.id] = min(granule, cuts.get(node.id, granule))
            self._forest.disown(pool, index)
        extra: list[list[Handles]] = [[NO_HANDLES] for _ in died]
        for node_id, granule in cuts.items():
            if node_id in self._forest.nodes:
                marks.update(dict.fromkeys(self._cut(self._forest.nodes[node_id], granule, extra)))
        self._marks.died(marks)
        for node in touched.values():
            self.prune(node)
        return [np.concatenate(parts) for parts in extra]

    def prune(self, node: Node) -> None:
        """Remove `node` and those above it as far as they own nothing and nothing needs them."""
        while node.parent is not None and node.id in self._forest.nodes:
            if node.children or node.locks or not node.is_bare:
                return
            if node.mark is not None:  # a boundary at which nothing is read, so that nothing kept it whole or void
                self._marks.lift(node)
            self._forest.remove(node)
            node = node.parent
            if not node.children:
                self._marks.childless(node)

    def end_parted(self) -> None:
        """Remove what splits have left without a page: nothing of it can die any more, so nothing else would end it.

        Without a full pool a node may end in tombstones.
        """
        while self._forest.parted:
            self.prune(self._forest.parted.pop())

    def _cut(self, node: Node, granules: int, extra: list[list[Handles]]) -> list[Mark]:
        # Returns the marks whose tails have lost pages. Without recursion: a conversation is thousands of nodes deep.
        marks: list[Mark] = []
        for below in self._below(node):
            marks += self._strip(below, 0, extra)
        return marks + self._strip(node, granules, extra)

    def _below(self, node: Node) -> list[Node]:
        # All nodes below, children before their parents.
        found = list(node.children.values())
        for below in found:
            found.extend(below.children.values())
        return found[::-1]

    def _strip(self, node: Node, granules: int, extra: list[list[Handles]]) -> list[Mark]:
        # Cuts a childless node before its granule `granules`.
        for pool, handles in enumerate(node.pages):
            per_granule = self._forest.shape.pages_per_granule[pool]
            below = handles[granules * per_granule :]
            rest = below[below != TOMBSTONE]
            if len(rest):
                self._arena.evict(pool, rest)
                self._forest.disown(pool, rest & INDEX_MASK)
                extra[pool].append(rest)
                below[below != TOMBSTONE] = TOMBSTONE
        if granules:
            self._forest.shorten(node, granules)
        else:
            assert not node.locks, "a request's locked path ends at a page that died"
            self._forest.remove(node)
        return [node.mark] if node.mark is not None else []


def _highest(places: NDArray[np.int64]) -> int:
    # Mostly one, and else a hundred.
    return places.item(0) if len(places) == 1 else int(np.maximum.reduce(places))

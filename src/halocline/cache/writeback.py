"""What a commit takes from the device and the host should have: boundaries that die, with the pages to resume there.

A mark dies with its tail: the unit that a commit evicts. So the boundary is the unit here, too, and not the page. For
each that dies, what resuming at it reads is written down while it can still be read:

    full        all pages of [0, b), also those that are still on the device: a path on the host stands by itself
    sliding     the mark's tail, the branch slack included, as far as it is there without a gap
    state       the checkpoint at b

Pages that merely left a window belong to no mark, and nothing is written for them. Where a model has nothing but full
layers no tail dies; there a path is written when the first of its pages goes.

Worked example (Gemma 3 27B, 16-token pages, W = 1,024, a mark at b = 12,288 with 512 tokens of slack): 768 full pages
of 1.25 MiB and 96 sliding ones of 6.5 MiB, 960 + 624 = 1,584 MiB. All of the 768 sliding pages would be 4,992 MiB.

The pages that die have been retired and may have been given out anew, but nothing is written before the step runs. So
they are told by the places where they lay before the commit's moves, and are copied before these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halocline.cache.ghosts import Digests, digests
from halocline.cache.keys import Key
from halocline.cache.node import PROVEN, TOMBSTONE, Mark, Node, gather
from halocline.cache.tree import Tree
from halocline.memory.arena import Arena
from halocline.memory.grant import NO_HANDLES, Handles, Move
from halocline.memory.pool import INDEX_MASK, Places


@dataclass(frozen=True, slots=True)
class Run:
    """Pages of one pool in a row, by the places where they lie."""

    first_page: int
    """Counted from position 0; 0 for a state."""
    places: Places


@dataclass(frozen=True, slots=True)
class Dying:
    """A boundary that the device is about to lose."""

    key: Key
    """Of the prefix up to the boundary, with one token more, so that the boundary may be matched."""
    granules: int
    prefix: Digests
    proven: bool
    runs: tuple[Run, ...]
    """Per pool: what resuming there reads."""
    is_marked: bool
    """Whether somebody may come back to it, or it is only where a path is cut."""


class Before:
    """Where pages lay before the moves of the last commit."""

    def __init__(self, arena: Arena, moves: Sequence[Move]) -> None:
        self._arena = arena
        self._ends: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []
        for pool in range(len(arena.pools)):
            there = np.array([(move.source, move.target) for move in moves if move.pool == pool], np.int32)
            there = there.reshape(-1, 2)
            ends = np.concatenate((there, there[:, ::-1]))  # a move swaps two pages
            ends = ends[np.argsort(ends[:, 0])]
            self._ends.append((ends[:, 0], ends[:, 1]))

    def places(self, pool: int, handles: Handles) -> Places:
        """Return where `handles` lay, also those that the commit let die."""
        now: Places = self._arena.pools[pool].place[handles & INDEX_MASK]
        left, right = self._ends[pool]
        if len(left) == 0:
            return now
        at = np.minimum(np.searchsorted(left, now), len(left) - 1)
        return np.where(left[at] == now, right[at], now).astype(np.int32)


class Obituary:
    """Finds the boundaries of a tree that die with what a commit has evicted, before the tree forgets it."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._shape = tree.shape
        self._windows = tree.locks.windows

    def dying(self, evicted: Sequence[Handles], moves: Sequence[Move]) -> list[Dying]:
        """Return what is lost when `evicted` (per pool) is gone; the longest prefixes first."""
        before = Before(self._tree.arena, moves)
        cut = {node.id: node for pool in self._tree.locks.full for node in self._owners(pool, evicted[pool])}
        if self._tree.marks.tail_pools:
            marks = {mark.id: mark for mark in self._below(cut.values())}
            marks |= {mark.id: mark for mark in self._touched(evicted) if self._loses(mark, evicted)}
            whole = (mark for mark in marks.values() if self._tree.marks.is_whole(mark.node))
            found = [self._of_mark(mark, before) for mark in whole]
        else:
            found = [self._of_path(node, before) for node in cut.values()]
        return sorted(found, key=lambda each: -each.granules)

    def _owners(self, pool: int, died: Handles) -> list[Node]:
        return self._tree.forest.owners(pool, died & INDEX_MASK) if len(died) else []

    def _below(self, nodes: Iterable[Node]) -> Iterator[Mark]:
        # The marks at the ends of nodes that lose full pages, and below: all of them can be matched no more.
        stack = list(nodes)
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.mark is not None:
                yield node.mark

    def _touched(self, evicted: Sequence[Handles]) -> Iterator[Mark]:
        # The marks to which pages of windows and states that die may matter, some more than once.
        for pool in self._tree.marks.tail_pools:
            if len(evicted[pool]):
                for node, gone in self._tree.forest.places(pool, evicted[pool] & INDEX_MASK):
                    last = int(gone.max()) + node.start * self._shape.pages_per_granule[pool]
                    yield from self._tree.marks.near(node, pool, last)

    def _loses(self, mark: Mark, evicted: Sequence[Handles]) -> bool:
        # Whether a page that resuming at its boundary reads is among those that die.
        for pool in self._tree.marks.tail_pools:
            if len(evicted[pool]) and np.isin(self._read(mark.node, pool), evicted[pool]).any():
                return True
        return False

    def _read(self, node: Node, pool: int) -> Handles:
        # The pages of a window pool, or the state, that resuming at the node's end reads.
        if pool in self._shape.states:
            return node.pages[pool]
        first = self._tree.first_page(pool, node.end * self._shape.granule_tokens)
        return self._gathered(node, pool, first)

    def _gathered(self, node: Node, pool: int, first: int) -> Handles:
        per_granule = self._shape.pages_per_granule[pool]
        return gather(node.path(first // per_granule), self._shape, pool, first, node.end * per_granule)

    def _of_mark(self, mark: Mark, before: Before) -> Dying:
        key, runs = self._key(mark.node), []
        for pool in range(self._shape.pools):
            first, handles = 0, NO_HANDLES
            if pool in self._shape.states:
                handles = mark.node.pages[pool]
            elif pool in self._windows:
                first = min(mark.first_page[pool], self._tree.first_page(pool, key.tokens - 1))
                handles = self._gathered(mark.node, pool, first)
                gaps = np.flatnonzero(handles == TOMBSTONE)
                apart = int(gaps[-1]) + 1 if len(gaps) else 0
                first, handles = first + apart, handles[apart:]
            else:
                handles = self._gathered(mark.node, pool, 0)
            runs.append(Run(first, before.places(pool, handles)))
        return Dying(key, mark.node.end, mark.prefix, mark.proven, tuple(runs), is_marked=True)

    def _of_path(self, node: Node, before: Before) -> Dying:
        # Of a model without tails: the whole path to where a page dies.
        key, unit = self._key(node), self._shape.granule_bytes
        runs = [Run(0, before.places(pool, self._gathered(node, pool, 0))) for pool in range(self._shape.pools)]
        prefix = node.mark.prefix if node.mark is not None else digests(key, node.end, unit)
        return Dying(key, node.end, prefix, node.worth >= PROVEN, tuple(runs), is_marked=False)

    def _key(self, node: Node) -> Key:
        path = node.path()
        root = path[0].parent
        assert root is not None, f"node {node.id} has no root"
        tokens = node.end * self._shape.granule_tokens
        return Key(b"".join(each.key for each in path), tokens + 1, root.namespace)

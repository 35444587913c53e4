"""The radix trees themselves, one per namespace: walking, splitting, growing, and who owns which page.

    before   root -- A [g0 g1 g2 g3] -- B           split A after 2 granules
    after    root -- U [g0 g1] -- A [g2 g3] -- B    the lower half keeps its identity, so locks that end at A still do

Three arrays per pool say of every page index in which node it is, how many requests lock it, and to which of them it
is charged. They are by page and not by node, so that a split or a merge has nothing to rewrite but the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from halocline.cache.keys import Key, Namespace, common_granules
from halocline.cache.match import Walk
from halocline.cache.node import TOMBSTONE, Node, Shape, cut
from halocline.memory.arena import Arena
from halocline.memory.grant import Handles
from halocline.memory.pool import INDEX_MASK

NO_NODE = 0
NO_LOCK = 0


class PageBooks:
    """What the tree knows of the pages of one pool, by page index."""

    __slots__ = ("charge", "lockers", "mark", "node", "page")

    def __init__(self, pages: int) -> None:
        self.node = np.zeros(pages, np.int64)
        """Id of the node that owns the page, or NO_NODE."""
        self.page = np.zeros(pages, np.int32)
        """Which page of its path it is, counted from position 0: no split changes that. 0 for a state."""
        self.lockers = np.zeros(pages, np.int32)
        """Requests that lock it."""
        self.mark = np.zeros(pages, np.int64)
        """Id of the mark that keeps the page in its tail, or 0."""
        self.charge = np.zeros(pages, np.int64)
        """In a window pool: id of the lock whose demand is reduced by this page, or NO_LOCK."""


class Forest:
    """All trees of one arena. Only structure; what is locked or kept is decided elsewhere."""

    def __init__(self, arena: Arena, shape: Shape) -> None:
        self.shape = shape
        self.books = [PageBooks(len(pool.state)) for pool in arena.pools]
        self.roots: dict[Namespace, Node] = {}
        self.nodes: dict[int, Node] = {}
        """By id, roots left out."""
        self.parted: list[Node] = []
        """Lower halves that a split has left without a page: `Decay.end_parted` removes them."""
        self._next_id = NO_NODE + 1

    def root(self, namespace: Namespace) -> Node:
        """Return the root of `namespace`; it is made when it is first asked for."""
        root = self.roots.get(namespace)
        if root is None:
            empty = [np.zeros(0, np.int64) for _ in range(self.shape.pools)]
            root = self.roots[namespace] = Node(NO_NODE, None, b"", 0, empty, namespace)
        return root

    def walk(self, key: Key, most: int | None = None, start: Node | None = None) -> Walk:
        """Follow `key` down, `most` granules at most; from below `start` on if given. Changes nothing."""
        unit = self.shape.granule_bytes
        limit = min(key.tokens // self.shape.granule_tokens, len(key.data) // unit)
        limit = limit if most is None else min(limit, most)
        node = self.roots.get(key.namespace) if start is None else start
        path: list[Node] = []
        at = node.end if node is not None else 0
        while node is not None and at < limit:
            node = node.children.get(key.data[at * unit : (at + 1) * unit])
            if node is not None:
                agree = min(common_granules(node.key, key.data, at * unit, unit), limit - at)
                path.append(node)
                at += agree
                if agree < node.granules:
                    break
        return Walk(path, at)

    def split(self, node: Node, granules: int) -> Node:
        """Part `node` after `granules` of its own; return the new upper half."""
        assert node.parent is not None
        assert 0 < granules < node.granules, f"a node of {node.granules} granules is split after {granules}"
        unit = self.shape.granule_bytes
        upper_pages, node.pages = cut(node, self.shape, granules)
        upper = self._new(node.parent, node.key[: granules * unit], node.start, upper_pages)
        node.key = node.key[granules * unit :]
        node.start, node.granules, node.parent = upper.end, node.granules - granules, upper
        upper.children[node.key[:unit]] = node
        upper.worth = node.worth
        return upper

    def split_at(self, walk: Walk) -> Node | None:
        """Make the end of `walk` the end of a node and return that node; None when nothing agreed."""
        if not walk.path:
            return None
        last = walk.path[-1]
        if walk.granules == last.end:
            return last
        walk.path[-1] = self.split(last, walk.granules - last.start)
        if last.is_bare and not last.children and not last.locks:
            self.parted.append(last)
        return walk.path[-1]

    def end_at(self, node: Node, granules: int) -> Node:
        """Make `granules` of the path to `node` the end of a node and return that one; a root for 0."""
        assert granules <= node.end, f"the path of {node.end} granules has no end after {granules}"
        while node.parent is not None and node.start >= granules:
            node = node.parent
        return node if node.end == granules else self.split(node, granules - node.start)

    def grow(self, parent: Node, key: bytes, pages: list[Handles]) -> Node:
        """Hang a new node with `pages` under `parent`."""
        assert key[: self.shape.granule_bytes] not in parent.children, "the first insertion wins"
        return self._new(parent, key, parent.end, pages)

    def extend(self, node: Node, key: bytes, pages: list[Handles]) -> None:
        """Make a childless `node` longer by `key` and `pages`, which are all tombstones yet."""
        assert not node.children, "a node with children keeps its length"
        node.key += key
        node.granules = len(node.key) // self.shape.granule_bytes
        for pool in range(self.shape.pools):
            if pool not in self.shape.states:
                node.pages[pool] = np.concatenate((node.pages[pool], pages[pool]))

    def own(self, node: Node, pool: int, first: int, handles: Handles) -> None:
        """Note that `handles` are the node's pages from page `first` of its path on; tombstones are passed over."""
        (at,) = (handles != TOMBSTONE).nonzero()
        if len(at):
            index, books = handles[at] & INDEX_MASK, self.books[pool]
            books.node[index] = node.id
            books.page[index] = at + first

    def fill(self, node: Node, pool: int, first: int, handles: Handles) -> None:
        """Write `handles`, none of them a tombstone, over pages `first` and on of `node` in a positional `pool`."""
        begin, last = first - node.start * self.shape.pages_per_granule[pool], first + len(handles)
        node.pages[pool][begin : begin + len(handles)] = handles
        index, books = handles & INDEX_MASK, self.books[pool]
        books.node[index] = node.id
        books.page[index] = np.arange(first, last)

    def put(self, path: list[Node], pool: int, first: int, handles: Handles) -> None:
        """Write `handles` over the pages from `first` on of a positional `pool` along `path`, whose nodes own them."""
        per_granule, last = self.shape.pages_per_granule[pool], first + len(handles)
        for node in path:
            begin = node.start * per_granule
            low, high = max(first, begin), min(last, begin + len(node.pages[pool]))
            if low < high:
                part = handles[low - first : high - first]
                node.pages[pool][low - begin : high - begin] = part
                self.own(node, pool, low, part)

    def disown(self, pool: int, index: NDArray[np.int64]) -> None:
        """Note that the pages of `index` are in no node any more (L8: with the tombstone goes the mapping)."""
        self.books[pool].node[index] = NO_NODE
        self.books[pool].mark[index] = 0

    def owners(self, pool: int, index: NDArray[np.int64]) -> list[Node]:
        """Return the nodes that own the pages of `index`, once each."""
        ids = set(self.books[pool].node[index].tolist())  # few differ: np.unique takes ten times as long
        return [self.nodes[i] for i in sorted(ids) if i != NO_NODE]

    def places(self, pool: int, index: NDArray[np.int64]) -> Iterator[tuple[Node, NDArray[np.int64]]]:
        """Yield the nodes that own the pages of `index`, with the places in `Node.pages` at which these stand."""
        books, per_granule = self.books[pool], self.shape.pages_per_granule[pool]
        ids, pages = books.node[index], books.page[index].astype(np.int64)
        order = np.argsort(ids, kind="stable")
        ids, pages = ids[order], pages[order]
        ends = [*(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
        for first, end in pairwise((0, *ends)):
            if ids[first] != NO_NODE:
                node = self.nodes[ids.item(first)]
                yield node, pages[first:end] - node.start * per_granule

    def shorten(self, node: Node, granules: int) -> None:
        """Cut a childless `node` down to its first `granules`; its pages beyond them are disowned already."""
        assert not node.children, "a node with children keeps its length"
        node.pages, _ = cut(node, self.shape, granules)
        node.key = node.key[: granules * self.shape.granule_bytes]
        node.granules = granules

    def remove(self, node: Node) -> None:
        """Take a childless node that owns nothing out of its tree; the last one of a tree ends it (see `drop_root`)."""
        assert node.parent is not None
        assert not node.children, "a node with children cannot go"
        del node.parent.children[node.key[: self.shape.granule_bytes]]
        del self.nodes[node.id]
        if node.parent.is_root:
            self.drop_root(node.parent.namespace)

    def drop_root(self, namespace: Namespace) -> None:
        """Forget the root of a namespace under which nothing is kept and nobody computes.

        Clients choose salts: roots that outlived their last page would be a leak that anybody can feed.
        """
        root = self.roots.get(namespace)
        if root is not None and not root.children and not root.locks:
            del self.roots[namespace]

    def _new(self, parent: Node, key: bytes, start: int, pages: list[Handles]) -> Node:
        node = Node(self._next_id, parent, key, start, pages)
        self._next_id += 1
        node.granules = len(key) // self.shape.granule_bytes
        self.nodes[node.id] = node
        parent.children[key[: self.shape.granule_bytes]] = node
        for pool, handles in enumerate(pages):
            self.own(node, pool, start * self.shape.pages_per_granule[pool], handles)
        return node

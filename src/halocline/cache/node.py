"""One run of granules in the radix tree, and which pages it owns.

    granules   start ........................ end
    full       |page|page|page|page|page|page|          always whole: a granule without its full pages is cut off
    sliding    | -1 | -1 |page|page|page|page|          -1: a tombstone, which owns nothing
    state                                    |one|      a checkpoint exactly at the end, or -1

Handles stand page by page, with -1 for a tombstone, and nodes are not made uniform per pool. A uniform node would have
to be split wherever a window's edge falls, once per window pool and again with every page that leaves it in decode; the
matter of which positions are held would be spread over the shape of the tree. Like this the shape follows the keys
alone (plus the boundaries that were locked), and a run of held pages is one vector test.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from halocline.cache.ghosts import Digests
from halocline.cache.keys import EVERYBODY, Namespace
from halocline.memory.evictable import Unit
from halocline.memory.grant import Handles
from halocline.memory.layout import ArenaLayout

TOMBSTONE = -1
PROVEN = 1e9
"""Added to the worth of proven marks: above what any clock reaches."""


class Shape:
    """How many pages of each pool a granule has. A tree may use granules that are multiples of the layout's G."""

    __slots__ = ("granule_bytes", "granule_tokens", "pages_per_granule", "pools", "states")

    def __init__(self, layout: ArenaLayout, granule_tokens: int, granule_bytes: int) -> None:
        assert granule_tokens % layout.granule_tokens == 0, (
            f"a granule of {granule_tokens} tokens is no multiple of the layout's {layout.granule_tokens}"
        )
        self.granule_tokens = granule_tokens
        self.granule_bytes = granule_bytes
        self.pools = len(layout.pools)
        self.pages_per_granule = [
            granule_tokens // pool.page_tokens if pool.is_positional else 0 for pool in layout.pools
        ]
        """0 for a state pool: its one page stands at a node's end."""
        self.states = [number for number, pool in enumerate(layout.pools) if not pool.is_positional]

    def slots(self, pool: int, granules: int) -> int:
        """Return the pages that a node of `granules` has in `pool`."""
        return granules * self.pages_per_granule[pool] or int(pool in self.states)


class Mark:
    """A boundary that somebody may come back to. Written by `halocline.cache.marks` only."""

    __slots__ = ("bytes", "first_page", "id", "key", "node", "prefix", "proven", "returned", "tail")

    def __init__(self, mark_id: int, node: Node, prefix: Digests) -> None:
        self.id = mark_id
        self.node = node
        """It stands at this node's end."""
        self.prefix = prefix
        self.first_page = [1 << 62] * len(node.pages)
        """Per window pool: where its tail begins, counted from position 0; the branch slack is in it."""
        self.proven = False
        """Whether somebody has come back, here or earlier on the path."""
        self.returned = False
        """Whether it was evicted before and has not been used since."""
        self.bytes = 0
        """What is kept for it alone."""
        self.key = 0.0
        self.tail: Unit | None = None

    @property
    def worth(self) -> float:
        """What a byte of it is worth, on the scale of all units."""
        return self.key + (PROVEN if self.proven else 0.0)


class Node:
    """A node. Written by the tree only."""

    __slots__ = (
        "body",
        "children",
        "granules",
        "id",
        "key",
        "locks",
        "mark",
        "namespace",
        "pages",
        "parent",
        "start",
        "worth",
    )

    def __init__(
        self,
        node_id: int,
        parent: Node | None,
        key: bytes,
        start: int,
        pages: list[Handles],
        namespace: Namespace = EVERYBODY,
    ) -> None:
        self.id = node_id
        self.namespace = namespace
        """Of a root: whose tree it is."""
        self.parent = parent
        self.key = key
        self.start = start
        """Granules before the node."""
        self.granules = 0
        self.pages = pages
        """Per pool, handles or TOMBSTONE."""
        self.children: dict[bytes, Node] = {}
        """By the first granule of their keys."""
        self.locks = 0
        """Requests whose locked path ends here."""
        self.mark: Mark | None = None
        self.worth = 0.0
        """That of the best mark at its end or below."""
        self.body: Unit | None = None
        """Its full pages, while nobody locks them."""

    @property
    def end(self) -> int:
        """Granules up to the node's end."""
        return self.start + self.granules

    @property
    def is_root(self) -> bool:
        """Whether the node is a namespace's root, which has no granules."""
        return self.parent is None

    def path(self, since: int = 0) -> list[Node]:
        """Return the nodes from below the root down to this one; with `since`, only those that end after so many
        granules: a conversation may be thousands of nodes long, and windows read the last few."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None and node.end > since:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def holds(self, pool: int) -> NDArray[np.bool_]:
        """Return which pages of `pool` are there."""
        there: NDArray[np.bool_] = self.pages[pool] != TOMBSTONE
        return there

    @property
    def is_bare(self) -> bool:
        """Whether the node owns no page at all."""
        for pages in self.pages:
            if len(pages) and (pages.item(0) != TOMBSTONE or np.count_nonzero(pages != TOMBSTONE)):
                return False
        return True


def tombstones(shape: Shape, granules: int) -> list[Handles]:
    """Return a node's pages before anything is held."""
    return [np.full(shape.slots(pool, granules), TOMBSTONE, np.int64) for pool in range(shape.pools)]


def cut(node: Node, shape: Shape, granules: int) -> tuple[list[Handles], list[Handles]]:
    """Return the pages of the first `granules` of `node` and those of the rest. The state stays at the end."""
    upper, lower = [], []
    for pool, pages in enumerate(node.pages):
        per_granule = shape.pages_per_granule[pool]
        if per_granule == 0:
            upper.append(np.full(len(pages), TOMBSTONE, np.int64))
            lower.append(pages)
        else:
            upper.append(pages[: granules * per_granule].copy())
            lower.append(pages[granules * per_granule :].copy())
    return upper, lower


def gather(path: list[Node], shape: Shape, pool: int, first: int, last: int) -> Handles:
    """Return the handles of pages [first, last) of a positional `pool` along `path`, tombstones included."""
    per_granule = shape.pages_per_granule[pool]
    parts: list[Handles] = []
    for node in reversed(path):
        begin = node.start * per_granule
        if begin < last and first < begin + len(node.pages[pool]):
            parts.append(node.pages[pool][max(0, first - begin) : last - begin])
        if begin <= first:
            break
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int64)

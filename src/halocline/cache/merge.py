"""What a request brings and what the tree has, side by side: one `Merge` per pool over the inserted range.

page        first_page ........ kept_from ............. end of the range
mine        |own, or given up before  |own, all of them   |
theirs      |the tree's, or -1 where it has none or a tombstone |
             passed by the window      still read
"""

from __future__ import annotations

import msgspec

from halocline.cache.node import Node, Shape, gather
from halocline.memory.grant import Handles


class Merge:
    """One pool's pages over the inserted range, by page."""

    __slots__ = ("first_page", "is_whole", "kept_from", "mine", "pool")

    def __init__(self, pool: int, first_page: int, kept_from: int, mine: Handles, *, is_whole: bool) -> None:
        self.pool = pool
        self.first_page = first_page
        self.kept_from = kept_from
        """The first page that the request still reads."""
        self.mine = mine
        self.is_whole = is_whole
        """Whether the request has all pages of the range."""

    def look(self, path: list[Node], shape: Shape) -> Handles:
        """Return what the tree has by now: another request of the same step may have brought the same pages."""
        return gather(path, shape, self.pool, self.first_page, self.first_page + len(self.mine)).copy()


class Insertion(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Where one request's pages go in this step."""

    node: Node
    """Where the request's locked path ends: with the inserted range, or beyond it."""
    start: int
    """The granules before the range."""
    branch: Node | None
    """The node at whose end the request left the tree, if it did."""
    is_grown: bool
    """Whether `node` was made, or made longer, for the whole range."""
    merges: list[Merge]

    @property
    def is_new(self) -> bool:
        """Whether the tree has nothing of the range yet: nobody else of this step has come that way.

        Another one would end here, too, or go on below, or have split the node.
        """
        node = self.node
        return self.is_grown and node.locks == 1 and not node.children and node.start <= self.start

    def path(self) -> list[Node]:
        """Return the nodes of the range, anew each time: another request of the step may have split one."""
        return self.node.path(self.start)

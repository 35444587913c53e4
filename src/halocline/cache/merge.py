"""What a request brings and what the tree has, side by side: one `Merge` per pool over the inserted range.

page        first_page ........ kept_from ............. end of the range
mine        |own, or given up before  |own, all of them   |
theirs      |the tree's, or -1 where it has none or a tombstone |
             passed by the window      still read
"""

from __future__ import annotations

from dataclasses import dataclass

from halocline.cache.node import Node, Shape, gather
from halocline.memory.grant import Handles


class Merge:
    """One pool's pages over the inserted range, by page."""

    __slots__ = ("first_page", "kept_from", "mine", "pool")

    def __init__(self, pool: int, first_page: int, kept_from: int, mine: Handles) -> None:
        self.pool = pool
        self.first_page = first_page
        self.kept_from = kept_from
        """The first page that the request still reads."""
        self.mine = mine

    def look(self, path: list[Node], shape: Shape) -> Handles:
        """Return what the tree has by now: another request of the same step may have brought the same pages."""
        return gather(path, shape, self.pool, self.first_page, self.first_page + len(self.mine)).copy()


@dataclass(frozen=True, slots=True)
class Insertion:
    """Where one request's pages go in this step."""

    node: Node
    """Where the request's locked path ends: with the inserted range, or beyond it."""
    start: int
    """The granules before the range."""
    branch: Node | None
    """The node at whose end the request left the tree, if it did."""
    merges: list[Merge]

    def path(self) -> list[Node]:
        """Return the nodes of the range, anew each time: another request of the step may have split one."""
        return self.node.path(self.start)

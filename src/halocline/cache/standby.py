"""Pages that a running request has passed and that resuming at its last whole granule would read.

A request ends where it ends, mostly inside a granule; who comes back resumes at the boundary before. By then its window
may have passed pages that this boundary reads: loose, they would be the first to die, and the mark at the output's end
would be void before it is set. W = 40, P = 4, G = 16, 77 tokens computed:

    boundary 64 reads pages 6 ... 15      the request reads pages 9 ... 19      6, 7, 8 stand by

At most G / P pages per pool stand by; and nothing where P = G divides W: there the one page is passed in the last step
before the next boundary, so who ends with it marks it at once. What stands by is a unit that is worth what the mark
would be, and becomes loose when the request has reached its next granule, or left without a mark.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from halocline.cache.forest import Forest
from halocline.cache.insert import Advance
from halocline.cache.lock import Lock
from halocline.cache.locks import LockBook
from halocline.cache.marks import NO_MARK, Marks
from halocline.cache.match import Resume
from halocline.cache.node import TOMBSTONE, gather
from halocline.cache.reach import reach_of
from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.memory.evictable import NO_UNIT, Place, Unit
from halocline.memory.grant import NO_HANDLES, Handles
from halocline.memory.pool import CACHED, INDEX_MASK


class Standby:
    """The units of one arena's running requests."""

    def __init__(self, arena: Arena, forest: Forest, locks: LockBook, resume: Resume, marks: Marks) -> None:
        self._arena = arena
        self._forest = forest
        self._locks = locks
        self._resume = resume
        self._marks = marks
        self._pools = [pool for pool in locks.windows if self._passes_early(pool)]
        self._units: dict[int, tuple[list[Handles], Unit]] = {}
        """By lock: the pages that stand by for it, per pool, and their unit."""

    @property
    def is_needed(self) -> bool:
        """Whether in some pool a window passes pages that the boundary before still reads."""
        return bool(self._pools)

    def follow(self, each: Advance) -> None:
        """Let what `each` has passed since its last whole granule stand by, and nothing else."""
        pages: list[Handles] = [NO_HANDLES] * self._forest.shape.pools
        for pool in self._pools:
            pages[pool] = self._passed(each.lock, pool, each.computed_tokens)
        if each.lock.id in self._units and all(map(np.array_equal, pages, self._units[each.lock.id][0])):
            return
        self.end(each.lock)
        if any(map(len, pages)):
            worth = self._marks.worth_at(each.lock.node, proven=each.lock.resumed > 0)
            self._units[each.lock.id] = pages, self._arena.rank(pages, worth, Place())

    def end(self, lock: Lock) -> None:
        """Let nothing of `lock` stand by any more."""
        _, unit = self._units.pop(lock.id, ([], None))
        if unit is not None and any(unit.left):
            self._arena.unrank(unit)

    def audit(self) -> Iterator[Violation]:
        """Yield what stands by for nobody, or is another's: L6."""
        for lock_id, (pages, unit) in self._units.items():
            if lock_id not in self._locks.open:
                yield Violation("L6", f"pages stand by for lock {lock_id}, which has ended")
            for pool, handles in enumerate(pages):
                index = handles & INDEX_MASK
                mine = self._arena.ranking.member[pool][index] == unit.id
                if any(unit.left) and (self._forest.books[pool].mark[index[mine]] != NO_MARK).any():
                    yield Violation("L6", f"pages of pool {pool} that a mark keeps stand by for lock {lock_id}")

    def _passes_early(self, pool: int) -> bool:
        layout = self._arena.layout.pools[pool]
        reach = reach_of(layout.retention)
        return self._forest.shape.pages_per_granule[pool] > 1 or reach % layout.page_tokens != 0

    def _passed(self, lock: Lock, pool: int, computed: int) -> Handles:
        # Cached pages that the boundary before `computed` reads and `computed` does not, and that nobody else keeps.
        shape = self._forest.shape
        boundary = computed // shape.granule_tokens * shape.granule_tokens
        first = self._resume.first_page(pool, boundary)
        last = min(self._resume.first_page(pool, computed), lock.inserted * shape.pages_per_granule[pool])
        if first >= last:
            return NO_HANDLES
        handles = gather(lock.node.path(first // shape.pages_per_granule[pool]), shape, pool, first, last)
        handles = handles[handles != TOMBSTONE]
        index = handles & INDEX_MASK
        ours = np.isin(self._arena.ranking.member[pool][index], (NO_UNIT, self._unit_of(lock)))
        ours &= self._arena.pools[pool].state[index] == CACHED
        kept: Handles = handles[ours & (self._forest.books[pool].mark[index] == NO_MARK)]
        return kept

    def _unit_of(self, lock: Lock) -> int:
        _, unit = self._units.get(lock.id, ([], None))
        return NO_UNIT if unit is None else unit.id

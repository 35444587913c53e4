"""Who locks which page, and whose demand it reduces: counted per page, and passed on when a locker parts.

The first locker locks a page in the arena (it becomes held: it counts, and it cannot be evicted), the last one unlocks
it. A page of a window pool is charged to exactly one of its lockers; the table stands in `halocline.cache.locks`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from halocline.cache.forest import NO_LOCK, Forest
from halocline.cache.lock import Lock, Parting
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.grant import NO_HANDLES, Handles, Refusal
from halocline.memory.pool import INDEX_MASK

Pages = NDArray[np.int64]


def unique(parts: Sequence[Handles]) -> Handles:
    """Return all handles of `parts`, each once, in the order of their first appearance; within a part all differ."""
    if len(parts) < 2:
        return parts[0] if parts else NO_HANDLES
    handles = np.concatenate(parts)
    _, first = np.unique(handles, return_index=True)
    return handles[np.sort(first)]


class Charges:
    """The books of lockers and charges. Acts on the arena in the same call."""

    def __init__(self, arena: Arena, forest: Forest, windows: Sequence[int], open_locks: dict[int, Lock]) -> None:
        self._arena = arena
        self._forest = forest
        self._windows = windows
        self._open = open_locks
        self._unlocked: list[list[Handles]] = [[] for _ in arena.pools]
        self.waiting: list[dict[int, list[Lock]]] = [{} for _ in arena.pools]
        """Per window pool, by page index: lockers that are not charged, first come first charged."""

    def fresh(self, wanted: Sequence[Handles]) -> list[Handles]:
        """Return those of `wanted` (per pool) that nobody locks yet."""
        fresh: list[Handles] = []
        for books, handles in zip(self._forest.books, wanted, strict=True):
            index = handles & INDEX_MASK
            fresh.append(handles[books.lockers[index] == 0])
        return fresh

    def count_in(self, lock: Lock, pool: int, index: Pages) -> None:
        """Count `lock` as a locker of `index`, which are locked in the arena; window pages charge the first one."""
        books = self._forest.books[pool]
        if pool in self._windows:
            first = books.lockers[index] == 0
            books.charge[index[first]] = lock.id
            for page in index[~first].tolist():
                self.waiting[pool].setdefault(page, []).append(lock)
        books.lockers[index] += 1

    def part(self, parts: Sequence[Parting]) -> None:
        """End locks: the one way. All lockers that part are counted out before any charge finds its heir."""
        loose: list[list[Handles]] = [[] for _ in self._arena.pools]
        rooms: dict[int, list[int]] = {}
        unshared = [pool for pool in self._windows if not self.waiting[pool]]
        shared = [part for part in parts if part.pool not in unshared]
        for part in shared:
            self._forest.books[part.pool].lockers[part.handles & INDEX_MASK] -= 1
        for part in shared:
            index = part.handles & INDEX_MASK
            if part.pool in self._windows:
                self._pass_on(part, index, rooms)
            loose[part.pool].append(part.handles[self._forest.books[part.pool].lockers[index] == 0])
        for pool in unshared:
            alone = [part for part in parts if part.pool == pool]
            if alone:
                loose[pool].append(self._end_alone(pool, alone, rooms))
        unlocked = [unique(of_pool) for of_pool in loose]
        self._arena.unlock(unlocked)
        for pool, handles in enumerate(unlocked):
            if len(handles):
                self._unlocked[pool].append(handles)
        self._change_rooms({self._open[lock_id]: change for lock_id, change in rooms.items() if lock_id in self._open})

    def pay(self, lock: Lock) -> None:
        """Let `lock` pay what it owes, as far as its grant has room by now."""
        self._change_rooms({lock: [0] * len(lock.owed)})

    def unlocked(self) -> list[Handles]:
        """Return the pages, per pool, that were unlocked since the last call and are loose in the arena."""
        pages = [np.concatenate(parts) if parts else NO_HANDLES for parts in self._unlocked]
        self._unlocked = [[] for _ in self._unlocked]
        return pages

    def _end_alone(self, pool: int, parts: Sequence[Parting], rooms: dict[int, list[int]]) -> Handles:
        # Where nobody waits for a charge, every locked page of a window pool has one locker and is charged to it. As in
        # most steps; and then all of them are counted out at once.
        handles = np.concatenate([part.handles for part in parts])
        index, books = handles & INDEX_MASK, self._forest.books[pool]
        assert (books.lockers[index] == 1).all(), f"pages of pool {pool} with several lockers, and nobody waits"
        books.lockers[index] = 0
        books.charge[index] = NO_LOCK
        for part in parts:
            rooms.setdefault(part.lock.id, [0] * len(self._arena.pools))[pool] += len(part.handles)
        return handles

    def _pass_on(self, part: Parting, index: Pages, rooms: dict[int, list[int]]) -> None:
        # What was charged to the parting lock becomes its room; where others lock on, the next one pays with his.
        books, waiting = self._forest.books[part.pool], self.waiting[part.pool]
        pools = range(len(self._arena.pools))
        mine = books.charge[index] == part.lock.id
        received = int(np.count_nonzero(mine))
        if received:
            rooms.setdefault(part.lock.id, [0 for _ in pools])[part.pool] += received
            books.charge[index[mine]] = NO_LOCK
        if not waiting:
            return
        for page, charged in zip(index.tolist(), mine.tolist(), strict=True):
            queue = waiting.get(page)
            if queue is None:
                continue
            if charged:
                heir = queue.pop(0)
                books.charge[page] = heir.id
                rooms.setdefault(heir.id, [0 for _ in pools])[part.pool] -= 1
            else:
                queue.remove(part.lock)
            if not queue:
                del waiting[page]

    def _change_rooms(self, changes: dict[Lock, list[int]]) -> None:
        # Those who pay first, so that what others come into is there. A request that leaves in the middle of a step may
        # charge one that has no room just then: that one owes it.
        for lock, change in changes.items():
            if min(change) >= 0 and not any(lock.owed):
                continue
            net = [more - owed for more, owed in zip(change, lock.owed, strict=True)]
            less = [min(max(0, -count), room) for count, room in zip(net, lock.grant.room, strict=True)]
            lock.owed = [max(0, -count) - paid for count, paid in zip(net, less, strict=True)]
            change[:] = [max(0, count) for count in net]
            if any(less):
                self._arena.shrink(lock.grant, lock.grant.demand.minus(Demand(less)))
        heirs = [(lock.grant, more) for lock, more in changes.items() if any(more)]
        answer = self._arena.extend_all(heirs)
        assert not isinstance(answer, Refusal), f"room that locks come into is gone: {answer}"

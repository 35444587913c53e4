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


def unique(handles: Handles) -> Handles:
    """Return all of `handles`, each once, in the order of their first appearance."""
    once = dict.fromkeys(handles.tolist())  # np.unique takes 20 us before it has looked at anything
    return handles if len(once) == len(handles) else np.array(list(once), np.int64)


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
            count = int(np.count_nonzero(first))
            lock.charged[pool] += count
            if count == len(index):
                books.charge[index] = lock.id
            else:
                books.charge[index[first]] = lock.id
                for page in index[~first].tolist():
                    self.waiting[pool].setdefault(page, []).append(lock)
        books.lockers[index] += 1

    def count_first(self, lock: Lock, pool: int, index: Pages) -> None:
        """Do the same for pages that nobody can lock yet, because they have just become the tree's."""
        books = self._forest.books[pool]
        books.lockers[index] = 1
        if pool in self._windows:
            books.charge[index] = lock.id
            lock.charged[pool] += len(index)

    def part(self, parts: Sequence[Parting]) -> None:
        """End locks: the one way. All lockers that part are counted out before any charge finds its heir."""
        unlocked: list[Handles] = [NO_HANDLES for _ in self._arena.pools]
        rooms: dict[int, list[int]] = {}
        for pool in range(len(unlocked)):
            of_pool = [part for part in parts if part.pool == pool]
            if of_pool:
                unlocked[pool] = self._part(pool, of_pool, rooms)
        self._arena.unlock(unlocked)
        for pool, handles in enumerate(unlocked):
            if len(handles):
                self._unlocked[pool].append(handles)
        self._change_rooms({self._open[lock_id]: change for lock_id, change in rooms.items() if lock_id in self._open})

    def _part(self, pool: int, parts: Sequence[Parting], rooms: dict[int, list[int]]) -> Handles:
        # Returns the pages that nobody locks any more. Mostly those are all, and can be counted out at once.
        handles = parts[0].handles if len(parts) == 1 else np.concatenate([part.handles for part in parts])
        index, books = handles & INDEX_MASK, self._forest.books[pool]
        shared = books.lockers[index] > 1
        if not np.count_nonzero(shared):
            books.lockers[index] = 0
            if pool in self._windows:  # what one alone locks is charged to that one
                books.charge[index] = NO_LOCK
                for part in parts:
                    self._uncharge(part, len(part.handles), rooms)
            return handles
        at = 0
        for part in parts:  # each names a page once, two may name the same
            books.lockers[index[at : at + len(part.handles)]] -= 1
            at += len(part.handles)
        if pool in self._windows:
            at = 0
            for part in parts:
                of_part = slice(at, at + len(part.handles))
                if np.count_nonzero(shared[of_part]):
                    self._pass_on(part, index[of_part], shared[of_part], rooms)
                else:
                    books.charge[index[of_part]] = NO_LOCK
                    self._uncharge(part, len(part.handles), rooms)
                at = of_part.stop
        left = handles[books.lockers[index] == 0]
        return left if len(parts) == 1 or len(left) < 2 else unique(left)

    def _uncharge(self, part: Parting, count: int, rooms: dict[int, list[int]]) -> None:
        # What was charged to a parting lock becomes its room.
        part.lock.charged[part.pool] -= count
        self._room(rooms, part.lock.id)[part.pool] += count

    def _room(self, rooms: dict[int, list[int]], lock_id: int) -> list[int]:
        return rooms.setdefault(lock_id, [0] * len(self._arena.pools))

    def pay(self, lock: Lock) -> None:
        """Let `lock` pay what it owes, as far as its grant has room by now."""
        self._change_rooms({lock: [0] * len(lock.owed)})

    def unlocked(self) -> list[Handles]:
        """Return the pages, per pool, that were unlocked since the last call and are loose in the arena."""
        pages = [np.concatenate(parts) if parts else NO_HANDLES for parts in self._unlocked]
        self._unlocked = [[] for _ in self._unlocked]
        return pages

    def _pass_on(self, part: Parting, index: Pages, shared: NDArray[np.bool_], rooms: dict[int, list[int]]) -> None:
        # What was charged to the parting lock becomes its room; where others lock on, the next one pays with his.
        books, waiting = self._forest.books[part.pool], self.waiting[part.pool]
        mine = books.charge[index] == part.lock.id
        received = int(np.count_nonzero(mine))
        if received:
            self._uncharge(part, received, rooms)
            books.charge[index[mine]] = NO_LOCK
        for page, charged in zip(index[shared].tolist(), mine[shared].tolist(), strict=True):
            queue = waiting.get(page)
            if queue is None:  # the last of its lockers, all of whom part in this call
                continue
            if charged:
                heir = queue.pop(0)
                books.charge[page] = heir.id
                heir.charged[part.pool] += 1
                self._room(rooms, heir.id)[part.pool] -= 1
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

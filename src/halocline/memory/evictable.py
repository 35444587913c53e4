"""In which order cached pages go: a queue of page indices per pool, written in bulk, read from the front.

Entries are never searched for. An entry dies when its page is locked, evicted or queued again: its stamp is no longer
the page's latest. Dead entries are skipped at the front and swept out when they outnumber the living.

    before   |a1 b2 c3 d4|       lock b, queue a again:       |a1 b2 c3 d4 a5|  front skips a1, takes c3
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NO_STAMP = 0


class EvictionQueue:
    """First in, first evicted, over the indices 0 .. indices - 1."""

    __slots__ = ("_end", "_entries", "_front", "_next_stamp", "_stamp", "_stamps", "length")

    def __init__(self, indices: int) -> None:
        self._stamp = np.zeros(indices, np.int64)
        """Stamp under which an index waits; NO_STAMP when it does not."""
        self._entries = np.zeros(64, np.int64)
        self._stamps = np.zeros(64, np.int64)
        self._front = 0
        self._end = 0
        self._next_stamp = NO_STAMP + 1
        self.length = 0
        """Indices that wait."""

    def push(self, indices: NDArray[np.int64]) -> None:
        """Queue distinct `indices` behind all others; those that wait already lose their old place."""
        count = len(indices)
        if self._end + count > len(self._entries):
            self._sweep(count)
        self.length += count - int(np.count_nonzero(self._stamp[indices]))
        stamps = np.arange(self._next_stamp, self._next_stamp + count)
        self._next_stamp += count
        self._stamp[indices] = stamps
        self._entries[self._end : self._end + count] = indices
        self._stamps[self._end : self._end + count] = stamps
        self._end += count

    def remove(self, indices: NDArray[np.int64]) -> None:
        """Take distinct waiting `indices` out, wherever they stand."""
        assert np.all(self._stamp[indices] != NO_STAMP), f"{indices} do not all wait for eviction"
        self._stamp[indices] = NO_STAMP
        self.length -= len(indices)

    def pop(self, count: int) -> NDArray[np.int64]:
        """Take the first `count` indices out."""
        assert count <= self.length, f"{count} pages to evict, {self.length} evictable"
        taken: list[NDArray[np.int64]] = []
        while count:
            stop = min(self._end, self._front + 2 * count)
            entries = self._entries[self._front : stop]
            alive = np.flatnonzero(self._stamp[entries] == self._stamps[self._front : stop])[:count]
            chosen = entries[alive].copy()
            self._front += len(entries) if len(alive) < count else int(alive[-1]) + 1
            self._stamp[chosen] = NO_STAMP
            self.length -= len(chosen)
            count -= len(chosen)
            taken.append(chosen)
        return np.concatenate(taken) if taken else np.zeros(0, np.int64)

    def in_order(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return waiting `indices` in the order in which they would go."""
        order: NDArray[np.int64] = np.argsort(self._stamp[indices], kind="stable")
        return indices[order]

    def waiting(self) -> NDArray[np.int64]:
        """Return all waiting indices, first to go first."""
        entries = self._entries[self._front : self._end]
        alive = self._stamp[entries] == self._stamps[self._front : self._end]
        waiting: NDArray[np.int64] = entries[alive]
        return waiting

    def _sweep(self, room: int) -> None:
        # Moves the living to the front; doubles the space unless half of it is free then.
        living = self.waiting()
        size = max(64, 2 * (len(living) + room))
        entries, stamps = np.zeros(size, np.int64), np.zeros(size, np.int64)
        entries[: len(living)] = living
        stamps[: len(living)] = self._stamp[living]
        self._entries, self._stamps = entries, stamps
        self._front, self._end = 0, len(living)

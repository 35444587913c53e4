"""In which order cached pages go: loose ones first, then units by what they are worth.

A **loose** page is a choice of its own and worth nothing. A queue per pool, written in bulk, read from the front;
entries are never searched for. An entry dies when its page is locked, evicted or queued again: its stamp is no longer
the page's latest. Dead entries are skipped at the front and swept out when they outnumber the living.

    before   |a1 b2 c3 d4|       lock b, queue a again:       |a1 b2 c3 d4 a5|  front skips a1, takes c3

A **unit** is told by whoever cached its pages, who alone knows what belongs together. Either all of it goes at once (a
window's tail: without one page the others are kept for nothing), or it goes from its end, `bundle` pages at a time
(full pages: what is cut off below cannot be matched). Units hang on each other: before any page of a unit goes, all
that hangs on it has gone. So a unit is never worth less than what hangs on it, and the order of worth keeps that rule.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_STAMP = 0
NO_UNIT = 0


class Unit:
    """Cached pages that are one choice. Everybody may read it; only the arena writes it."""

    __slots__ = ("bundle", "depth", "hung", "id", "index", "left", "over", "worth")

    def __init__(self, index: tuple[NDArray[np.int64], ...], worth: float, depth: int, bundle: int) -> None:
        self.id = NO_UNIT
        self.index = index
        """Per pool, first to go first; those that were locked meanwhile are still named."""
        self.left = [len(of_pool) for of_pool in index]
        """Per pool: pages that still belong to it."""
        self.worth = worth
        """What losing one of its bytes costs, on any scale that is the same for all units; 0 for nothing."""
        self.depth = depth
        """At equal worth, deeper units go first."""
        self.bundle = bundle
        """Pages that go together; 0 when all of them do. Only a unit of one pool has a bundle."""
        self.over: Unit | None = None
        """What it hangs on."""
        self.hung: dict[int, Unit] = {}
        """What hangs on it, by id."""

    @property
    def order(self) -> tuple[float, int, int]:
        """Where it stands: the least goes first."""
        return self.worth, -self.depth, self.id


@dataclass(frozen=True, slots=True)
class Place:
    """Where a unit stands among others."""

    depth: int = 0
    bundle: int = 0
    over: Unit | None = None


class Ranking:
    """All units of an arena, per pool in the order in which they go."""

    __slots__ = ("_next_id", "by_pool", "member", "units")

    def __init__(self, indices: list[int]) -> None:
        self._next_id = NO_UNIT + 1
        self.member = [np.zeros(count, np.int64) for count in indices]
        """Per pool, by index: id of the unit to which the page belongs, or NO_UNIT."""
        self.by_pool: list[list[tuple[float, int, int]]] = [[] for _ in indices]
        """`Unit.order` of the units with pages in a pool, ascending."""
        self.units: dict[int, Unit] = {}

    def add(self, unit: Unit, over: Unit | None) -> None:
        """Enter `unit`, whose pages belong to no other, hanging on `over`."""
        unit.id = self._next_id
        self._next_id += 1
        self.units[unit.id] = unit
        self.hang(unit, over)
        for pool, index in enumerate(unit.index):
            if len(index):
                self.member[pool][index] = unit.id
        self._enter(unit)

    def join(self, unit: Unit, pool: int, index: NDArray[np.int64]) -> None:
        """Let some distinct `index`, which belong to no unit, belong to `unit` too, which goes as a whole."""
        assert unit.bundle == 0, f"unit {unit.id} goes {unit.bundle} pages at a time: its order would be lost"
        if unit.left[pool] == 0:
            insort(self.by_pool[pool], unit.order)
        pages = (self.pages(unit, pool), index)  # without those that left it: one of them may be back
        unit.index = (*unit.index[:pool], np.concatenate(pages), *unit.index[pool + 1 :])
        unit.left[pool] += len(index)
        self.member[pool][index] = unit.id

    def hang(self, unit: Unit, over: Unit | None) -> None:
        """Let `unit` hang on `over`, and on nothing else any more."""
        if unit.over is not None:
            unit.over.hung.pop(unit.id, None)
        unit.over = over
        if over is not None:
            over.hung[unit.id] = unit

    def value(self, unit: Unit, worth: float) -> None:
        """Change what `unit` is worth."""
        if worth != unit.worth:
            self._leave(unit)
            unit.worth = worth
            self._enter(unit)

    def dissolve(self, unit: Unit) -> list[NDArray[np.int64]]:
        """End `unit`; return its pages per pool: they belong to none now. What hung on it hangs on nothing."""
        self._leave(unit)
        pages = [self.pages(unit, pool) for pool in range(len(self.member))]
        for pool, index in enumerate(pages):
            self.member[pool][index] = NO_UNIT
        self._end(unit)
        return pages

    def is_of(self, unit: Unit, index: Sequence[NDArray[np.int64]]) -> bool:
        """Whether distinct `index`, per pool, are just the pages of `unit`."""
        if any(left != len(of_pool) for left, of_pool in zip(unit.left, index, strict=True)):
            return False
        return all(
            (member[of_pool] == unit.id).all()
            for member, of_pool in zip(self.member, index, strict=True)
            if len(of_pool)
        )

    def renew(self, unit: Unit, index: Sequence[NDArray[np.int64]], worth: float, place: Place) -> None:
        """Let `unit`, whose pages are `index`, stand elsewhere, as if it had just come: what hung on it hangs on none.

        It has another id from now on.
        """
        self._leave(unit)
        self._end(unit)
        unit.index = tuple(index)
        unit.worth, unit.depth, unit.bundle = worth, place.depth, place.bundle
        self.add(unit, place.over)

    def pages(self, unit: Unit, pool: int) -> NDArray[np.int64]:
        """Return the indices that still belong to `unit`, first to go first."""
        index = unit.index[pool]
        if unit.left[pool] == len(index):
            return index
        left: NDArray[np.int64] = index[self.member[pool][index] == unit.id]
        return left

    def in_order(self, pool: int) -> Iterator[Unit]:
        """Yield the units with pages in `pool`, the first to go first. The ranking must not change meanwhile."""
        return (self.units[unit_id] for _, _, unit_id in self.by_pool[pool])

    def pop(self, unit: Unit, count: int) -> list[NDArray[np.int64]]:
        """Take all pages of `unit` out, or the first `count` where it goes bundle by bundle; return them per pool."""
        pages = [self.pages(unit, pool) for pool in range(len(self.member))]
        if unit.bundle:
            pages = [index[:count] for index in pages]
        for pool, index in enumerate(pages):
            if len(index):
                self.member[pool][index] = NO_UNIT
                self._lessen(unit, pool, len(index))
        return pages

    def take_out(self, pool: int, index: NDArray[np.int64]) -> None:
        """Take distinct `index` out of their units; a unit without pages ends."""
        ids, counts = np.unique(self.member[pool][index], return_counts=True)
        self.member[pool][index] = NO_UNIT
        for unit_id, count in zip(ids.tolist(), counts.tolist(), strict=True):
            self._lessen(self.units[unit_id], pool, count)

    def _lessen(self, unit: Unit, pool: int, count: int) -> None:
        # `count` pages of `pool` belong to `unit` no more.
        left = unit.left[pool] - count
        if left == 0:
            self._leave(unit)
            unit.left[pool] = 0
            self._enter(unit)
            if not any(unit.left):
                self._end(unit)
        else:
            unit.left[pool] = left

    def _enter(self, unit: Unit) -> None:
        for pool, left in enumerate(unit.left):
            if left:
                insort(self.by_pool[pool], unit.order)

    def _leave(self, unit: Unit) -> None:
        for pool, left in enumerate(unit.left):
            if left:
                order = self.by_pool[pool]
                del order[bisect_left(order, unit.order)]

    def _end(self, unit: Unit) -> None:
        del self.units[unit.id]
        self.hang(unit, None)
        for hanging in list(unit.hung.values()):
            self.hang(hanging, None)


class EvictionQueue:
    """First in, first evicted, over the indices 0 .. indices - 1."""

    __slots__ = ("_end", "_entries", "_front", "_next_stamp", "_stamp", "_stamps", "is_ordered", "length")

    def __init__(self, indices: int) -> None:
        self._stamp = np.zeros(indices, np.int64)
        """Stamp under which an index waits; NO_STAMP when it does not."""
        self._entries = np.zeros(64, np.int64)
        self._stamps = np.zeros(64, np.int64)
        self._front = 0
        self._end = 0
        self._next_stamp = NO_STAMP + 1
        self.is_ordered = True
        """Whether first in is first evicted; else all that wait are alike, and those may go first that go easiest."""
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
        assert self._stamp[indices].all(), f"{indices} do not all wait for eviction"
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

    def first(self, count: int) -> NDArray[np.int64]:
        """Return up to `count` waiting indices, first to go first."""
        found: list[NDArray[np.int64]] = []
        at = self._front
        while count > 0 and at < self._end:
            stop = min(self._end, at + 2 * count)
            entries = self._entries[at:stop]
            alive = entries[self._stamp[entries] == self._stamps[at:stop]][:count]
            found.append(alive)
            count -= len(alive)
            at = stop
        return np.concatenate(found) if found else np.zeros(0, np.int64)

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

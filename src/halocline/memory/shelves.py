"""The slabs of one pool by how full they are: where new pages go, and which slabs are the cheapest to give away.

    shelf 1       |s7|               one live page
    ...
    shelf k - 1   |s2|s3|s9|         one hole

New pages go to the fullest slab that has a hole, so that others empty. A slab with holes stands on the shelf of its
live pages, or on none while somebody is changing them. Of slabs that are equally full the last one to come is the first
to go. Full ones, by far the most, stand nowhere: nobody looks for them, and to find one in a table of them costs a miss
of the processor's cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from halocline.units import ceil_div

SCALAR_SLABS = 64
"""Up to so many slabs are lowered one by one."""


class Shelves:
    """Live pages per slab, and the slabs in the order of that number."""

    __slots__ = ("_per_slab", "_shelves", "_stocked", "count")

    def __init__(self, slabs: int, per_slab: int) -> None:
        self._per_slab = per_slab
        self.count = array("q", [0]) * slabs
        """By slab: its live pages. Also right for slabs that stand nowhere: what they had when they were pulled."""
        self._shelves: list[dict[int, None]] = [{} for _ in range(per_slab)]
        self._stocked = 0  # bit c: shelf c may have slabs; a bit that is out of date is cleared by whoever meets it

    @property
    def fill(self) -> list[int]:
        """By slab: its live pages, for whoever looks at all of them."""
        return self.count.tolist()

    def fill_of(self, slabs: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the live pages of each of `slabs`."""
        return np.frombuffer(self.count, np.int64)[slabs]

    def put(self, slab: int, live: int) -> None:
        """Stand a slab that stands nowhere on the shelf of `live` pages."""
        self.count[slab] = live
        if 0 < live < self._per_slab:
            self._shelves[live][slab] = None
            self._stocked |= 1 << live

    def fill_up(self, slabs: NDArray[np.int64]) -> None:
        """Note that slabs that stand nowhere are full."""
        np.frombuffer(self.count, np.int64)[slabs] = self._per_slab

    def pull(self, slab: int) -> None:
        """Take `slab` off its shelf."""
        if self.count[slab] < self._per_slab:
            del self._shelves[self.count[slab]][slab]

    def fill_one(self) -> int | None:
        """Count one more live page in the fullest slab with a hole, and return the slab; None if there is none."""
        while self._stocked:
            live = self._stocked.bit_length() - 1
            shelf = self._shelves[live]
            if shelf:
                slab, _ = shelf.popitem()
                self.count[slab] = live = live + 1  # `put`, in place: every page of a decode comes this way
                if live < self._per_slab:
                    self._shelves[live][slab] = None
                    self._stocked |= 1 << live
                return slab
            self._stocked ^= 1 << live
        return None

    def pull_fullest(self, holes: int) -> tuple[list[int], int]:
        """Take the fullest slabs with holes off their shelves, until they have `holes`; return them and their holes.

        Fewer if there are no more. All but the last one are needed wholly.
        """
        chosen: list[int] = []
        found = 0
        levels = self._stocked
        while levels and found < holes:
            live = levels.bit_length() - 1
            levels ^= 1 << live
            shelf = self._shelves[live]
            wanted = ceil_div(holes - found, self._per_slab - live)
            if wanted < len(shelf):
                slabs = [shelf.popitem()[0] for _ in range(wanted)]
            else:
                slabs = list(shelf)
                shelf.clear()
                self._stocked ^= 1 << live
            found += len(slabs) * (self._per_slab - live)
            chosen += slabs
        return chosen, found

    def lower_one(self, slab: int) -> bool:
        """Take one live page from `slab`; True if it has none left, and so stands nowhere."""
        live = self.count[slab]
        assert live, f"slab {slab} loses 1 of 0 pages"
        self.count[slab] = left = live - 1  # `pull` and `put`, in place: all that decodes give up comes this way
        if live < self._per_slab:
            del self._shelves[live][slab]
        if left:
            self._shelves[left][slab] = None
            self._stocked |= 1 << left
        return not left

    def lower(self, slabs: NDArray[np.int32 | np.int64], counts: NDArray[np.int64]) -> list[int]:
        """Take `counts[i]` live pages from distinct `slabs[i]`; return those with none left, which stand nowhere."""
        if len(slabs) <= SCALAR_SLABS:
            return self._lower_one_by_one(slabs.tolist(), counts.tolist())
        fill, shelves = np.frombuffer(self.count, np.int64), self._shelves
        before = fill[slabs]
        after = before - counts
        worst = after.argmin()
        assert after[worst] >= 0, f"slab {slabs[worst]} loses {counts[worst]} of {before[worst]} pages"
        fill[slabs] = after
        stood, stands = (before < self._per_slab).nonzero()[0], after.nonzero()[0]
        if len(stood):
            for slab, live in zip(slabs[stood].tolist(), before[stood].tolist(), strict=True):
                del shelves[live][slab]
        levels = after[stands].tolist()
        for slab, live in zip(slabs[stands].tolist(), levels, strict=True):
            shelves[live][slab] = None
        for live in set(levels):
            self._stocked |= 1 << live
        emptied: list[int] = slabs[after == 0].tolist()
        return emptied

    def _lower_one_by_one(self, slabs: list[int], counts: list[int]) -> list[int]:
        emptied: list[int] = []
        fill, shelves, full = self.count, self._shelves, self._per_slab
        for slab, count in zip(slabs, counts, strict=True):
            live = fill[slab]
            fill[slab] = left = live - count
            if 0 < live < full:
                del shelves[live][slab]
            if left > 0:
                shelf = shelves[left]
                if not shelf:  # else the bit is set
                    self._stocked |= 1 << left
                shelf[slab] = None
            else:
                assert left == 0, f"slab {slab} loses {count} of {live} pages"
                emptied.append(slab)
        return emptied

    # ---- what others may look at

    def emptiest(self) -> Iterable[int]:
        """Yield the slabs, emptiest first. They must not change meanwhile."""
        yield from (slab for shelf in self._shelves for slab in shelf)
        yield from self._full()

    def by_level(self) -> list[list[int]]:
        """Return the slabs with 0, 1, 2 ... live pages, as the books have it; none of those with 0."""
        return [*map(list, self._shelves), list(self._full())]

    def stocked(self) -> list[int]:
        """Return the shelves of slabs with holes that may have some, as the books have it."""
        return [live for live in range(self._per_slab) if self._stocked >> live & 1]

    def _full(self) -> Iterable[int]:
        return (slab for slab, live in enumerate(self.count) if live == self._per_slab)

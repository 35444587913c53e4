"""The slabs of one pool by how full they are: where new pages go, and which slabs are the cheapest to give away.

    shelf 0   no slab stands here: one without live pages leaves the pool
    shelf 1   |s7|                   one live page
    ...
    shelf k   |s2|s3|s9|             full

New pages go to the fullest slab that has a hole, so that others empty. A slab stands on the shelf of its live pages, or
on none while somebody is changing them. Of slabs that are equally full the last one to come is the first to go.
"""

from __future__ import annotations

from collections.abc import Iterable

from halocline.units import ceil_div


class Shelves:
    """Live pages per slab, and the slabs in the order of that number."""

    __slots__ = ("_per_slab", "_shelves", "_stocked", "fill")

    def __init__(self, slabs: int, per_slab: int) -> None:
        self._per_slab = per_slab
        self.fill = [0] * slabs
        """By slab: its live pages. Also right for slabs that stand nowhere: what they had when they were pulled."""
        self._shelves: list[dict[int, None]] = [{} for _ in range(per_slab + 1)]
        self._stocked = 0  # bit c: shelf c may have slabs; a bit that is out of date is cleared by whoever meets it

    def put(self, slab: int, live: int) -> None:
        """Stand a slab that stands nowhere on the shelf of `live` pages; with none it stands nowhere."""
        self.fill[slab] = live
        if live:
            self._shelves[live][slab] = None
            self._stocked |= 1 << live

    def put_full(self, slabs: list[int]) -> None:
        """Stand slabs that stand nowhere on the last shelf."""
        full, fill = self._per_slab, self.fill
        for slab in slabs:
            fill[slab] = full
        self._shelves[full].update(dict.fromkeys(slabs))
        self._stocked |= 1 << full

    def pull(self, slab: int) -> None:
        """Take `slab` off its shelf."""
        del self._shelves[self.fill[slab]][slab]

    def pull_one(self) -> int | None:
        """Take the fullest slab with a hole off its shelf; None if there is none."""
        slabs, _ = self.pull_fullest(1)
        return slabs[0] if slabs else None

    def pull_fullest(self, holes: int) -> tuple[list[int], int]:
        """Take the fullest slabs with holes off their shelves, until they have `holes`; return them and their holes.

        Fewer if there are no more. All but the last one are needed wholly.
        """
        chosen: list[int] = []
        found = 0
        levels = self._stocked & ((1 << self._per_slab) - 1)
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

    def lower(self, slabs: list[int], counts: list[int]) -> list[int]:
        """Take `counts[i]` live pages from `slabs[i]`; return those that have none left, which stand nowhere."""
        emptied: list[int] = []
        fill, shelves, stocked = self.fill, self._shelves, self._stocked
        for slab, count in zip(slabs, counts, strict=True):
            live = fill[slab]
            left = live - count
            assert left >= 0, f"slab {slab} loses {count} of {live} pages"
            del shelves[live][slab]
            fill[slab] = left
            if left:
                shelves[left][slab] = None
                stocked |= 1 << left
            else:
                emptied.append(slab)
        self._stocked = stocked
        return emptied

    # ---- what others may look at

    def emptiest(self) -> Iterable[int]:
        """Yield the slabs, emptiest first. They must not change meanwhile."""
        return (slab for shelf in self._shelves for slab in shelf)

    def by_level(self) -> list[list[int]]:
        """Return the slabs that stand on each shelf, that is with 0, 1, 2 ... live pages, as the books have it."""
        return [list(shelf) for shelf in self._shelves]

    def stocked(self) -> list[int]:
        """Return the shelves that may have slabs, as the books have it."""
        return [live for live in range(self._stocked.bit_length()) if self._stocked >> live & 1]

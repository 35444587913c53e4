"""Where the pages of one pool are: slabs, free places, handles. Knows nothing of promises.

    slab    a run of pages_per_slab pages; one pool owns it while it holds a live page of that pool
    hole    a free page in a slab that the pool owns
    index   the low half of a handle; every page has one, live or free, and a move swaps the indices of two pages

    before  page 7: index 3 (live)    page 9: index 8 (free)         Move(7 -> 9)
    after   page 7: index 8 (free)    page 9: index 3 (live)         so handle 3 is now at page 9

A handle is generation << 32 | index; the generation rises when the page is freed, which makes old handles stale.
Slabs stand on shelves by their number of live pages: new pages go to the fullest slab with a hole, so that others
empty.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from halocline.memory.evictable import EvictionQueue
from halocline.memory.layout import PoolLayout
from halocline.units import ceil_div

FREE, CACHED, HELD, LOCKED, TRANSFER, TRANSFER_CACHED = range(6)
"""State of a page; from HELD on it counts as held.

TRANSFER: only a pin keeps it; TRANSFER_CACHED: the same, and it returns to the cache afterwards.
"""
NO_POOL = -1
GENERATION = 1 << 32
INDEX_MASK = GENERATION - 1

Pages = NDArray[np.int64]


class SlabStock:
    """The slabs that no pool owns, and who owns the others."""

    __slots__ = ("free", "owner", "slabs")

    def __init__(self, slabs: int) -> None:
        self.slabs = slabs
        self.free = list(range(slabs - 1, -1, -1))
        """A stack: the last one is taken next."""
        self.owner = np.full(slabs, NO_POOL, np.int16)

    def take(self, count: int, pool: int) -> list[int]:
        """Give `count` free slabs to `pool`."""
        assert count <= len(self.free), f"pool {pool} takes {count} slabs, {len(self.free)} are free"
        taken = self.free[-count:][::-1]
        del self.free[-count:]
        self.owner[taken] = pool
        return taken

    def give_back(self, slabs: list[int]) -> None:
        """Take `slabs`, which hold no live page, from their pool."""
        self.owner[slabs] = NO_POOL
        self.free.extend(slabs)


class Pool:
    """Pages of one pool. `per_slab` pages lie in a slab; arrays are over pages or over indices, as each says."""

    __slots__ = (
        "_mask", "_shelves", "claims", "fill", "handle_of", "index_at", "live", "live_pages", "number",
        "owner", "per_slab", "pinned_in_slab", "pins", "place", "queue", "scratch", "slabs", "state", "stock",
        "stride_bytes",
    )  # fmt: skip

    def __init__(self, number: int, layout: PoolLayout, stock: SlabStock) -> None:
        self.number = number
        self.per_slab = layout.pages_per_slab
        self.stride_bytes = layout.stride_bytes
        self.stock = stock
        pages = stock.slabs * self.per_slab
        assert pages < INDEX_MASK, f"{pages} pages in pool {layout.name}; page numbers are 32-bit"
        self.live = np.zeros(pages, np.uint8)
        """By page: 1 where it is not free."""
        self.index_at = np.arange(pages, dtype=np.int64)
        """By page."""
        self.place = np.arange(pages, dtype=np.int32)
        """By index: the page."""
        self.handle_of = np.arange(pages, dtype=np.int64)
        """By index: the handle that is valid now, or will be when the page is taken."""
        self.state = np.zeros(pages, np.int8)
        """By index."""
        self.owner = np.zeros(pages, np.int64)
        """By index: id of the grant that holds it, or held it last."""
        self.claims = np.zeros(pages, np.int32)
        """By index: open pins, in force or not. A claimed page is never freed or evicted."""
        self.pins = np.zeros(pages, np.int32)
        """By index: pins in force. A pinned page is never moved."""
        self.pinned_in_slab: dict[int, int] = {}
        self.scratch = np.zeros(pages, np.int32)
        self.queue = EvictionQueue(pages)
        self.fill = [0] * stock.slabs
        """By slab: live pages of this pool."""
        self._shelves: list[dict[int, None]] = [{} for _ in range(self.per_slab + 1)]
        self._mask = 0  # bit c: shelf c is not empty
        self.slabs = 0
        """Slabs that the pool owns."""
        self.live_pages = 0

    @property
    def holes(self) -> int:
        """Free pages in slabs that the pool owns."""
        return self.slabs * self.per_slab - self.live_pages

    def slabs_short(self, count: int) -> int:
        """Return the free slabs that `count` new pages take once the holes are full."""
        beyond = count - self.slabs * self.per_slab + self.live_pages
        return ceil_div(beyond, self.per_slab) if beyond > 0 else 0

    def take(self, count: int) -> Pages:
        """Make `count` free pages live: holes of the fullest slabs first, then free slabs."""
        slabs, free = self._slabs_with_room(count)
        first = slabs[0] * self.per_slab
        self.live_pages += count
        if count == 1:
            page = first + int(self.live[first : first + self.per_slab].argmin())
            self.live[page] = 1
            self._shelve(slabs[0], self.fill[slabs[0]] + 1)
            return np.array((page,), np.int64)
        rows, columns = np.nonzero(self.live.reshape(-1, self.per_slab)[slabs] == 0)
        pages: Pages = np.asarray(slabs)[rows[:count]] * self.per_slab + columns[:count]
        self.live[pages] = 1
        self._shelve_full(slabs[:-1])
        self._shelve(slabs[-1], self.per_slab - (free - count))
        return pages

    def occupy(self, pages: Pages) -> None:
        """Make distinct free `pages`, all of them holes, live."""
        self.live_pages += len(pages)
        self.live[pages] = 1
        slabs, counts = np.unique(pages // self.per_slab, return_counts=True)
        for slab, count in zip(slabs.tolist(), counts.tolist(), strict=True):
            assert self.fill[slab], f"slab {slab} is not one of pool {self.number}"
            self._shelve(slab, self.fill[slab] + count)

    def drop(self, pages: Pages) -> None:
        """Make distinct live `pages` free; a slab without live pages leaves the pool."""
        self.live_pages -= len(pages)
        self.live[pages] = 0
        emptied: list[int] = []
        if len(pages) <= 2:
            for page in pages.tolist():
                self._sink(page // self.per_slab, 1, emptied)
        else:
            slabs, counts = np.unique(pages // self.per_slab, return_counts=True)
            for slab, count in zip(slabs.tolist(), counts.tolist(), strict=True):
                self._sink(slab, count, emptied)
        if emptied:
            self._close(emptied)

    def swap(self, sources: Pages, targets: Pages) -> None:
        """Move what is at `sources` to free pages `targets`: the handles go along. `live` is the caller's business."""
        moved, free = self.index_at[sources], self.index_at[targets]
        self.place[moved], self.place[free] = targets, sources
        self.index_at[targets], self.index_at[sources] = moved, free

    def retire_one(self, index: int) -> None:
        """Free the page of `index`."""
        page = self.place.item(index)
        self.state[index] = FREE
        self.handle_of[index] += GENERATION
        self.live_pages -= 1
        self.live[page] = 0
        emptied: list[int] = []
        self._sink(page // self.per_slab, 1, emptied)
        if emptied:
            self._close(emptied)

    def expire(self, index: Pages) -> None:
        """Make the handles of distinct `index` stale; their places stay live for the caller to give up."""
        self.state[index] = FREE
        self.handle_of[index] += GENERATION

    def retire(self, index: Pages) -> None:
        """Free the pages of distinct `index`: their handles become stale."""
        self.expire(index)
        self.drop(self.place[index].astype(np.int64))

    def owned_slabs(self) -> list[int]:
        """Return the pool's slabs, emptiest first."""
        return [slab for shelf in self._shelves[1:] for slab in shelf]

    def shelves(self) -> list[list[int]]:
        """Return the slabs that stand on each shelf, that is with 0, 1, 2 ... live pages, as the books have it."""
        return [list(shelf) for shelf in self._shelves]

    def stocked_shelves(self) -> list[int]:
        """Return the shelves that are not empty, as the books have it."""
        return [level for level in range(self._mask.bit_length()) if self._mask >> level & 1]

    def emptiest(self, kept: Iterable[int]) -> Iterable[int]:
        """Yield the pool's slabs from the emptiest on, leaving out pinned ones and `kept`."""
        leave = set(kept)
        for shelf in self._shelves[1:]:
            for slab in shelf:
                if slab not in self.pinned_in_slab and slab not in leave:
                    yield slab

    def hide(self, slabs: list[int]) -> None:
        """Take `slabs` off the shelves, so that `take` does not fill them; `abandon` must follow."""
        for slab in slabs:
            self._unshelve(slab)

    def abandon(self, slabs: list[int]) -> None:
        """Give up hidden `slabs`, whose live pages have all been moved."""
        for slab in slabs:
            first = slab * self.per_slab
            self.live[first : first + self.per_slab] = 0
            self.live_pages -= self.fill[slab]
            self.fill[slab] = 0
        self._close(slabs)

    def pages_of(self, slabs: list[int]) -> Pages:
        """Return all pages of `slabs`, live or not, in the order given."""
        return (np.asarray(slabs, np.int64)[:, None] * self.per_slab + np.arange(self.per_slab)).ravel()

    def _slabs_with_room(self, count: int) -> tuple[list[int], int]:
        # Slabs to fill, all but the last one wholly, and the free pages in them.
        chosen: list[int] = []
        free = 0
        mask = self._mask & ((1 << self.per_slab) - 1)
        while mask and free < count:
            level = mask.bit_length() - 1
            mask ^= 1 << level
            shelf = self._shelves[level]
            wanted = ceil_div(count - free, self.per_slab - level)
            if wanted >= len(shelf):
                chosen.extend(shelf)
                free += len(shelf) * (self.per_slab - level)
                continue
            for slab in shelf:
                chosen.append(slab)
                free += self.per_slab - level
                wanted -= 1
                if wanted == 0:
                    break
        if free < count:
            opened = ceil_div(count - free, self.per_slab)
            chosen.extend(self.stock.take(opened, self.number))
            self.slabs += opened
            free += opened * self.per_slab
        return chosen, free

    def _unshelve(self, slab: int) -> None:
        level = self.fill[slab]
        if level:
            shelf = self._shelves[level]
            del shelf[slab]
            if not shelf:
                self._mask &= ~(1 << level)

    def _shelve(self, slab: int, level: int) -> None:
        self._unshelve(slab)
        self.fill[slab] = level
        if level:
            self._shelves[level][slab] = None
            self._mask |= 1 << level

    def _shelve_full(self, slabs: list[int]) -> None:
        level = self.per_slab
        for slab in slabs:
            if self.fill[slab]:
                self._unshelve(slab)
            self.fill[slab] = level
        if slabs:
            self._shelves[level].update(dict.fromkeys(slabs))
            self._mask |= 1 << level

    def _sink(self, slab: int, count: int, emptied: list[int]) -> None:
        level = self.fill[slab] - count
        assert level >= 0, f"slab {slab} of pool {self.number} loses {count} of {self.fill[slab]} pages"
        self._shelve(slab, level)
        if level == 0:
            emptied.append(slab)

    def _close(self, slabs: list[int]) -> None:
        self.slabs -= len(slabs)
        self.stock.give_back(slabs)

"""Where the pages of one pool are: slabs, free places, handles. Knows nothing of promises.

    slab    a run of pages_per_slab pages; one pool owns it while it holds a live page of that pool
    hole    a free page in a slab that the pool owns
    index   the low half of a handle; every page has one, live or free, and a move swaps the indices of two pages

    before  page 7: index 3 (live)    page 9: index 8 (free)         Move(7 -> 9)
    after   page 7: index 8 (free)    page 9: index 3 (live)         so handle 3 is now at page 9

A handle is generation << 32 | index; the generation rises when the page is freed, which makes old handles stale.
New pages go to the fullest slab with a hole (`halocline.memory.shelves`), so that others empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halocline.memory.evictable import EvictionQueue
from halocline.memory.layout import PoolLayout
from halocline.memory.shelves import Shelves
from halocline.units import ceil_div

FREE, CACHED, HELD, LOCKED, TRANSFER, TRANSFER_CACHED = range(6)
"""State of a page; from HELD on it counts as held.

TRANSFER: only a pin keeps it; TRANSFER_CACHED: the same, and it returns to the cache afterwards.
"""
NO_POOL = -1
GENERATION = 1 << 32
INDEX_MASK = GENERATION - 1

SCALAR_PAGES = 8
"""Up to so many pages are sorted into slabs one by one: a call of NumPy costs as much as five of them."""

Pages = NDArray[np.int64]
Places = NDArray[np.int32]

NO_PAGES: Pages = np.zeros(0, np.int64)
NO_PAGES.flags.writeable = False
_ONE: Pages = np.zeros(1, np.int64)  # to copy an array is the cheapest way to make one


class SlabStock:
    """The slabs that no pool owns, and who owns the others."""

    __slots__ = ("free", "owner", "slabs")

    def __init__(self, slabs: int) -> None:
        self.slabs = slabs
        self.free = list(range(slabs - 1, -1, -1))
        """A stack: the last one is taken next."""
        self.owner = [NO_POOL] * slabs
        """By slab: the number of the pool."""

    def take(self, count: int, pool: int) -> list[int]:
        """Give `count` free slabs to `pool`."""
        assert count <= len(self.free), f"pool {pool} takes {count} slabs, {len(self.free)} are free"
        taken = self.free[-count:][::-1]
        del self.free[-count:]
        for slab in taken:
            self.owner[slab] = pool
        return taken

    def take_one(self, pool: int) -> int:
        """Give one free slab to `pool`."""
        slab = self.free.pop()
        self.owner[slab] = pool
        return slab

    def give_back(self, slabs: list[int]) -> None:
        """Take `slabs`, which hold no live page, from their pool."""
        for slab in slabs:
            self.owner[slab] = NO_POOL
        self.free.extend(slabs)


class Pool:
    """Pages of one pool. `per_slab` pages lie in a slab; arrays are over pages or over indices, as each says."""

    __slots__ = (
        "_columns", "_handle_cells", "_index_cells", "_live_cells", "_owner_cells", "_place_cells", "_shelves",
        "_state_cells", "claims", "handle_of", "index_at", "live", "live_pages", "number", "owner", "per_slab",
        "pinned_in_slab", "pins", "place", "queue", "scratch", "slabs", "state", "stock", "stride_bytes",
    )  # fmt: skip

    def __init__(self, number: int, layout: PoolLayout, stock: SlabStock) -> None:
        self.number = number
        self.per_slab = layout.pages_per_slab
        self.stride_bytes = layout.stride_bytes
        self.stock = stock
        pages = stock.slabs * self.per_slab
        assert pages < INDEX_MASK, f"{pages} pages in pool {layout.name}; page numbers are 32-bit"
        self._live_cells = bytearray(pages)
        self.live = np.frombuffer(self._live_cells, np.uint8)
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
        self._shelves = Shelves(stock.slabs, self.per_slab)
        self._columns = np.arange(self.per_slab)
        self.slabs = 0
        """Slabs that the pool owns."""
        self.live_pages = 0
        self._open_cells()

    def _open_cells(self) -> None:
        # The same arrays for whoever touches a single page: a number out of or into a memoryview takes half the time.
        self._index_cells, self._place_cells = self.index_at.data, self.place.data
        self._handle_cells, self._state_cells = self.handle_of.data, self.state.data
        self._owner_cells = self.owner.data

    def __getstate__(self) -> dict[str, Any]:  # type: ignore[explicit-override] # of Python 3.12
        return {name: getattr(self, name) for name in self.__slots__ if not name.endswith("_cells")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._live_cells = bytearray(self.live)
        self.live = np.frombuffer(self._live_cells, np.uint8)
        self._open_cells()

    @property
    def fill(self) -> list[int]:
        """By slab: live pages of this pool."""
        return self._shelves.fill

    def live_in(self, slab: int) -> int:
        """Return the live pages of `slab`."""
        return self._shelves.count[slab]

    def fill_of(self, slabs: Pages) -> Pages:
        """Return the live pages of each of `slabs`."""
        return self._shelves.fill_of(slabs)

    @property
    def holes(self) -> int:
        """Free pages in slabs that the pool owns."""
        return self.slabs * self.per_slab - self.live_pages

    def slabs_short(self, count: int) -> int:
        """Return the free slabs that `count` new pages take once the holes are full."""
        beyond = count - self.slabs * self.per_slab + self.live_pages
        return ceil_div(beyond, self.per_slab) if beyond > 0 else 0

    def deal(self, count: int, grant_id: int) -> Pages:
        """Take the places of `count` free pages, one or more, for a grant; return their handles."""
        if count == 1:  # in scalars: an array costs more to make than all the rest
            at = self._index_cells[self.take_one()]
            self._state_cells[at] = HELD
            self._owner_cells[at] = grant_id
            handle: Pages = _ONE.copy()
            handle[0] = self._handle_cells[at]
            return handle
        index = self.index_at[self.take(count)]
        self.state[index] = HELD
        self.owner[index] = grant_id
        return self.handle_of[index]

    def take(self, count: int) -> Pages:
        """Make `count` free pages live: holes of the fullest slabs first, then free slabs."""
        if count == 1:
            return np.array((self.take_one(),), np.int64)
        slabs, free = self._shelves.pull_fullest(count)
        if free < count:
            opened = self._open(ceil_div(count - free, self.per_slab))
            free += len(opened) * self.per_slab
            slabs += opened
        chosen = np.fromiter(slabs, np.int64, len(slabs))  # half the time of np.array
        places = self.pages_of(chosen)
        pages: Pages = places[self.live[places] == 0][:count]
        self.live[pages] = 1
        self.live_pages += count
        self._shelves.fill_up(chosen[:-1])
        self._shelves.put(slabs[-1], self.per_slab - (free - count))
        return pages

    def take_one(self) -> int:
        """Make one free page live and return it: the same as `take`, in scalars."""
        slab = self._shelves.fill_one()
        if slab is None:
            slab = self.stock.take_one(self.number)
            self.slabs += 1
            self._shelves.put(slab, 1)
        first = slab * self.per_slab
        page = self._live_cells.index(0, first, first + self.per_slab)
        self._live_cells[page] = 1
        self.live_pages += 1
        return page

    def occupy(self, pages: Pages) -> None:
        """Make distinct free `pages`, all of them holes, live."""
        self.live_pages += len(pages)
        self.live[pages] = 1
        slabs, counts = np.unique(pages // self.per_slab, return_counts=True)
        for slab, count in zip(slabs.tolist(), counts.tolist(), strict=True):
            assert self._shelves.count[slab], f"slab {slab} is not one of pool {self.number}"
            self._shelves.pull(slab)
            self._shelves.put(slab, self._shelves.count[slab] + count)

    def drop(self, pages: Pages | Places) -> None:
        """Make distinct live `pages` free; a slab without live pages leaves the pool."""
        self.live_pages -= len(pages)
        if len(pages) > SCALAR_PAGES:
            self.live[pages.astype(np.int64, copy=False)] = 0  # to index with 32 bits takes longer than to widen them
            slabs = pages // self.per_slab
            slabs.sort()
            last = (slabs[1:] != slabs[:-1]).nonzero()[0]  # of each slab's pages but those of the last slab
            ends = np.empty(len(last) + 2, np.int64)
            ends[0], ends[1:-1], ends[-1] = -1, last, len(pages) - 1
            emptied = self._shelves.lower(slabs[ends[1:]], ends[1:] - ends[:-1])
        else:
            self.live[pages] = 0
            emptied = [slab for slab in (pages // self.per_slab).tolist() if self._shelves.lower_one(slab)]
        if emptied:
            self._close(emptied)

    def swap(self, sources: Pages, targets: Pages) -> None:
        """Move what is at `sources` to free pages `targets`: the handles go along. `live` is the caller's business."""
        moved, free = self.index_at[sources], self.index_at[targets]
        self.place[moved], self.place[free] = targets, sources
        self.index_at[targets], self.index_at[sources] = moved, free

    def is_held(self, handle: int, grant_id: int) -> bool:
        """Whether `handle` is valid and means a page that the grant with that id holds."""
        at = handle & INDEX_MASK
        if at >= len(self._handle_cells) or self._handle_cells[at] != handle:
            return False
        return self._owner_cells[at] == grant_id and self._state_cells[at] == HELD

    def retire_one(self, index: int) -> None:
        """Free the page of `index`."""
        page = self._place_cells[index]
        self._state_cells[index] = FREE
        self._handle_cells[index] += GENERATION
        self.live_pages -= 1
        self._live_cells[page] = 0
        slab = page // self.per_slab
        if self._shelves.lower_one(slab):
            self._close([slab])

    def expire(self, index: Pages) -> None:
        """Make the handles of distinct `index` stale; their places stay live for the caller to give up."""
        self.state[index] = FREE
        self.handle_of[index] += GENERATION

    def retire(self, index: Pages) -> None:
        """Free the pages of distinct `index`: their handles become stale."""
        self.expire(index)
        self.drop(self.place[index])

    def owned_slabs(self) -> list[int]:
        """Return the pool's slabs, emptiest first."""
        return list(self._shelves.emptiest())

    def shelves(self) -> list[list[int]]:
        """Return the slabs with 0, 1, 2 ... live pages, as the books have it; none of those with 0."""
        return self._shelves.by_level()

    def stocked_shelves(self) -> list[int]:
        """Return the shelves of slabs with holes that may have some, as the books have it."""
        return self._shelves.stocked()

    def emptiest(self, kept: Iterable[int]) -> Iterable[int]:
        """Yield the pool's slabs from the emptiest on, leaving out pinned ones and `kept`."""
        leave = set(kept)
        return (s for s in self._shelves.emptiest() if s not in self.pinned_in_slab and s not in leave)

    def hide(self, slabs: list[int]) -> None:
        """Take `slabs` off the shelves, so that `take` does not fill them; `abandon` must follow."""
        for slab in slabs:
            self._shelves.pull(slab)

    def abandon(self, slabs: list[int]) -> None:
        """Give up hidden `slabs`, whose live pages have all been moved."""
        for slab in slabs:
            first = slab * self.per_slab
            self.live[first : first + self.per_slab] = 0
            self.live_pages -= self._shelves.count[slab]
            self._shelves.put(slab, 0)
        self._close(slabs)

    def pages_of(self, slabs: list[int] | Pages) -> Pages:
        """Return all pages of `slabs`, live or not, in the order given."""
        return (np.asarray(slabs, np.int64)[:, None] * self.per_slab + self._columns).ravel()

    def _open(self, count: int) -> list[int]:
        opened = self.stock.take(count, self.number)
        self.slabs += count
        return opened

    def _close(self, slabs: list[int]) -> None:
        self.slabs -= len(slabs)
        self.stock.give_back(slabs)

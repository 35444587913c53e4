"""Which cached pages go when a commit finds too few places: judged in page counts, over all pools at once.

With moves only counts matter: a pool of x pages can always be packed into max(pinned, ceil(x / k)) slabs. So the
question is what to give up until all pools together fit the arena, each within its cap.

Giving up pages frees nothing until a whole slab is won. The next slab of a pool that holds x pages costs
x - (ceil(x / k) - 1) * k pages: at first the odd ones, then k each time. Loose pages are worth nothing and go first;
then units go in the order of their worth, each with all that hangs on it. What is cheapest is compared by what is lost
(worth per byte times bytes), and where that is equal by bytes.

    R1 complete   every pool is asked until its last cached page; a Refusal says that all of them are not enough
    R2 minimal    what turned out to be spare is put back, the dearest first: a unit bought for its pages of one pool
                  may have brought those that cheaper ones were bought for
    R3 cheapest   among single pages in order of worth, costs of next slabs never fall after the odd pages, so buying
                  the cheapest next slab over all pools is exact
    R4 cascades   a unit costs what hangs on it, too; the plan is at most the optimum plus the dearest unit of each
                  pool touched
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import add

from halocline.memory.demand import Demand, zero
from halocline.memory.evictable import Unit
from halocline.memory.grant import Refusal
from halocline.units import ceil_div, ceil_to


def no_units(pool: int) -> Iterable[Unit]:
    """Return the units of `pool` where nothing but loose pages is cached: none."""
    del pool
    return ()


@dataclass(frozen=True, slots=True)
class Pressure:
    """What stands against what, per pool, in the order of `ArenaLayout.pools`."""

    slabs: int
    pages_per_slab: tuple[int, ...]
    page_bytes: tuple[int, ...]
    caps: tuple[int, ...]
    """Most slabs of each pool."""
    pinned_slabs: tuple[int, ...]
    fixed: tuple[int, ...]
    """Pages that cannot go: held ones and those about to be committed."""
    cached: tuple[int, ...]
    """Pages that can, those of units included."""
    ranked: tuple[int, ...] = ()
    """How many of `cached` belong to units; none if left out."""
    units: Callable[[int], Iterable[Unit]] = no_units
    """The units with pages in a pool, in the order in which they go."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to evict."""

    evict: Demand
    """Loose pages of each pool, the first in its queue."""
    units: tuple[tuple[Unit, int], ...] = ()
    """Units, with the number of pages of those that go bundle by bundle; the others go whole."""


def reclaim_plan(pressure: Pressure) -> Plan | Refusal:
    """Return the least loss that makes all pools fit, or a Refusal if evicting everything would not help."""
    bargain = Bargain(pressure)
    over = [pool for pool in bargain.pools if not bargain.fit_cap(pool)]
    missing = bargain.slabs_missing
    book = [bargain.offer(pool) for pool in bargain.pools] if missing > 0 and not over else []
    while missing > 0 and not over:
        offers = sorted((offer for offer in book if offer is not None), key=_price)
        if not offers:
            break
        best = offers[0]
        before = bargain.left.copy()
        bargain.take(best)
        missing = bargain.slabs_missing
        if missing > 1:
            rival = _price(offers[1])[:2] if len(offers) > 1 else (float("inf"), 0)
            bargain.take_more(best, missing, rival)
            missing = bargain.slabs_missing
        if missing > 0:
            for pool, offer in enumerate(book):
                if bargain.left[pool] != before[pool] or (offer is not None and offer.shares(best)):
                    book[pool] = bargain.offer(pool)
    if missing > 0 or over:
        return _refusal(pressure, bargain.slabs_missing, over)
    bargain.spare()
    return Plan(Demand(bargain.loose), tuple((bargain.units[i], count) for i, count in bargain.taken.items()))


class Offer:
    """What a pool's next slab costs."""

    __slots__ = ("bytes", "loose", "loss", "pool", "units")

    def __init__(self, pool: int) -> None:
        self.pool = pool
        self.loose = 0
        self.units: dict[int, tuple[Unit, int]] = {}
        """By id: the unit, and how many more of its pages go (of a whole one: all)."""
        self.loss = 0.0
        self.bytes = 0

    def shares(self, other: Offer) -> bool:
        """Whether a unit stands in both: one that hangs on a unit stands wherever that unit stands."""
        return not self.units.keys().isdisjoint(other.units.keys())


class Bargain:
    """The state of one plan in the making: what is given up so far."""

    def __init__(self, pressure: Pressure) -> None:
        self._pressure = pressure
        self.pools = range(len(pressure.fixed))
        ranked = pressure.ranked or (0,) * len(pressure.fixed)
        self._loose_left = [cached - inside for cached, inside in zip(pressure.cached, ranked, strict=True)]
        self.left = [fixed + cached for fixed, cached in zip(pressure.fixed, pressure.cached, strict=True)]
        """Per pool: pages that stay, as things stand."""
        self.loose = [0 for _ in self.pools]
        self.taken: dict[int, int] = {}
        """By unit id, in the order in which they were bought: pages given up."""
        self.units: dict[int, Unit] = {}

    @property
    def slabs_missing(self) -> int:
        """Slabs by which all pools together exceed the arena."""
        return sum(map(self._slabs, self.pools, self.left)) - self._pressure.slabs

    def fit_cap(self, pool: int) -> bool:
        """Give up what `pool` holds beyond its cap: it can only make itself pay. False if it cannot pay enough."""
        cap = self._pressure.caps[pool]
        over = self.left[pool] - cap * self._pressure.pages_per_slab[pool]
        if over > 0:
            offer = self._buy(pool, over)
            if offer is None:
                return False
            self.take(offer)
        return self._pressure.pinned_slabs[pool] <= cap

    def offer(self, pool: int) -> Offer | None:
        """Return what one slab less of `pool` costs; None when pins or fixed pages keep it."""
        per_slab = self._pressure.pages_per_slab[pool]
        slabs = ceil_div(self.left[pool], per_slab)
        if slabs <= self._pressure.pinned_slabs[pool]:
            return None
        return self._buy(pool, self.left[pool] - (slabs - 1) * per_slab)

    def take(self, offer: Offer) -> None:
        """Give up what `offer` names."""
        self.loose[offer.pool] += offer.loose
        self._loose_left[offer.pool] -= offer.loose
        self.left[offer.pool] -= offer.loose
        for unit, count in offer.units.values():
            self.units[unit.id] = unit
            self.taken[unit.id] = self.taken.get(unit.id, 0) + count
            for pool, pages in enumerate(_pages(unit, count)):
                self.left[pool] -= pages

    def take_more(self, bought: Offer, slabs: int, rival: tuple[float, int]) -> None:
        """Buy up to `slabs` more like `bought` at once, where a whole slab of it still costs no more than `rival`."""
        pool, source = bought.pool, None
        per_slab = self._pressure.pages_per_slab[pool]
        left, bundle, worth = self._loose_left[pool], 1, 0.0
        if bought.units:
            source = next(reversed(bought.units.values()))[0]
            bundle, worth = source.bundle, source.worth
            left = 0 if source.hung or not bundle else source.left[pool] - self.taken[source.id]
        dearest = ceil_to(per_slab, bundle) * self._pressure.page_bytes[pool] if bundle else 0
        standing = ceil_div(self.left[pool], per_slab)
        count = min(slabs, left // per_slab, standing - self._pressure.pinned_slabs[pool])
        if count <= 0 or (worth * dearest, dearest) > rival:
            return
        pages = min(left, ceil_to(self.left[pool] - (standing - count) * per_slab, bundle))
        more = Offer(pool)
        if source is None:
            more.loose = pages
        else:
            more.units[source.id] = (source, pages)
        self.take(more)

    def spare(self) -> None:
        """Put back what is not needed, the dearest first; nothing before what it hangs on is back."""
        for unit in sorted((self.units[i] for i in self.taken), key=lambda unit: unit.order, reverse=True):
            if unit.over is not None and unit.over.id in self.taken:
                continue
            taken, bundle = self.taken[unit.id], unit.bundle
            if unit.hung or not bundle:
                bundle = taken
            bundles = self._most(ceil_div(taken, bundle), partial(_bundles, unit, bundle, taken))
            if bundles:
                self._put_back(unit, min(taken, bundles * bundle))
        for pool in self.pools:
            if self.loose[pool]:
                kept = self._most_loose(pool)
                self.loose[pool] -= kept
                self.left[pool] += kept

    def _buy(self, pool: int, pages: int) -> Offer | None:
        offer = Offer(pool)
        offer.loose = min(pages, self._loose_left[pool])
        offer.bytes = offer.loose * self._pressure.page_bytes[pool]
        gained = offer.loose
        if gained < pages:
            for unit in self._pressure.units(pool):
                left = unit.left[pool] - self.taken.get(unit.id, 0)
                if left > 0 and unit.id not in offer.units:
                    gained += self._add(offer, unit, pages - gained)
                    if gained >= pages:
                        break
        return offer if gained >= pages else None

    def _add(self, offer: Offer, unit: Unit, wanted: int) -> int:
        # Adds `unit` and all that hangs on it to `offer`; returns the pages of the offer's pool that this brings.
        # What hangs on a unit that was bought before is bought, too: units hang on each other thousands deep.
        gained = 0
        for hanging in unit.hung.values() if unit.id not in self.taken else ():
            if hanging.id not in offer.units:
                gained += self._add(offer, hanging, _EVERYTHING)
        left = max(unit.left) - self.taken.get(unit.id, 0) if unit.bundle else max(unit.left)
        if left <= 0 or (unit.id in self.taken and not unit.bundle):
            return gained
        count = left
        if unit.bundle and wanted < left:
            gone = len(unit.index[offer.pool]) - unit.left[offer.pool] if unit.left[offer.pool] else 0
            odd = (gone + self.taken.get(unit.id, 0)) % unit.bundle
            count = min(left, ceil_div(max(1, wanted - gained) + odd, unit.bundle) * unit.bundle - odd)
        offer.units[unit.id] = (unit, count)
        pages = _pages(unit, count)
        size = sum(map(int.__mul__, pages, self._pressure.page_bytes))
        offer.bytes += size
        offer.loss += unit.worth * size
        return gained + pages[offer.pool]

    def _most_loose(self, pool: int) -> int:
        # How many loose pages of `pool` may stay: as many as find room in the slabs that are left to it.
        slabs = self._slabs(pool, self.left[pool]) - self.slabs_missing
        beyond = min(slabs, self._pressure.caps[pool]) * self._pressure.pages_per_slab[pool] - self.left[pool]
        return max(0, min(self.loose[pool], beyond))

    def _most(self, limit: int, pages: Callable[[int], list[int]]) -> int:
        # The largest count up to `limit` whose pages may stay: more is never easier to keep.
        low, high = 0, limit + 1
        while high - low > 1:
            middle = limit if high > limit else (low + high) // 2
            low, high = (middle, high) if self._can_keep(pages(middle)) else (low, middle)
        return low

    def _put_back(self, unit: Unit, count: int) -> None:
        for pool, pages in enumerate(_pages(unit, count)):
            self.left[pool] += pages
        self.taken[unit.id] -= count
        if self.taken[unit.id] == 0:
            del self.taken[unit.id]

    def _can_keep(self, pages: list[int]) -> bool:
        needs = list(map(self._slabs, self.pools, map(add, self.left, pages)))
        return sum(needs) <= self._pressure.slabs and all(map(int.__le__, needs, self._pressure.caps))

    def _slabs(self, pool: int, pages: int) -> int:
        need, pinned = ceil_div(pages, self._pressure.pages_per_slab[pool]), self._pressure.pinned_slabs[pool]
        return need if need > pinned else pinned  # noqa: FURB136


_EVERYTHING = 1 << 62


def _pages(unit: Unit, count: int) -> list[int]:
    # The pages per pool that `count` of a unit's are: a unit that goes bundle by bundle is of one pool.
    return [count if left else 0 for left in unit.left] if unit.bundle else unit.left


def _bundles(unit: Unit, bundle: int, most: int, count: int) -> list[int]:
    return _pages(unit, min(most, count * bundle))


def _price(offer: Offer) -> tuple[float, int, int]:
    # What is lost counts first, then the bytes.
    return offer.loss, offer.bytes, offer.pool


def _refusal(pressure: Pressure, missing: int, over: list[int]) -> Refusal:
    pools = len(pressure.fixed)
    if over:
        pool = over[0]
        needed = max(pressure.pinned_slabs[pool], ceil_div(pressure.fixed[pool], pressure.pages_per_slab[pool]))
        excess = needed - pressure.caps[pool]
        message = (
            f"pool {pool} needs {excess} slabs more than its cap of {pressure.caps[pool]}, with nothing cached left"
        )
        return Refusal("cap", zero(pools), excess, message)
    message = f"{missing} of {pressure.slabs} slabs are missing after everything unlocked is evicted"
    return Refusal("memory", zero(pools), missing, message)

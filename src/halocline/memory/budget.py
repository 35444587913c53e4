"""The one capacity test: counts of pages per pool against slabs, nothing physical.

    slabs_needed(x) = sum over pools of max(pinned_slabs[p], ceil(x[p] / pages_per_slab[p]))
    fits(extra)     = slabs_needed(held + promised + extra) <= slabs, and each pool within its cap

Worked example: 4 slabs, pages_per_slab (5, 1), held (6, 1), promised (4, 0). Pool 0 needs ceil(10 / 5) = 2 slabs, pool
1 needs 1, so 3 of 4. One more page of pool 0 takes the fourth slab; then no page of pool 1 fits, but four more of pool
0 do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add, le

from halocline.memory.demand import Demand
from halocline.memory.grant import Refusal
from halocline.memory.layout import ArenaLayout
from halocline.units import ceil_div


class Budget:
    """Counters of pages per pool, and the three questions. Asking never changes anything."""

    __slots__ = (
        "cached", "caps", "held", "locked", "names", "pages_per_slab", "pinned_slabs", "promised", "slabs", "transfer",
    )  # fmt: skip

    def __init__(self, layout: ArenaLayout, caps: Sequence[int | None] | None = None) -> None:
        pools = len(layout.pools)
        given = (None,) * pools if caps is None else tuple(caps)
        assert len(given) == pools, f"{len(given)} caps for {pools} pools"
        self.slabs = layout.slabs
        self.names = [pool.name for pool in layout.pools]
        self.pages_per_slab = [pool.pages_per_slab for pool in layout.pools]
        self.caps = [layout.slabs if cap is None else min(cap, layout.slabs) for cap in given]
        self.held = [0] * pools
        """Pages of requests, locked pages and pages in transfer."""
        self.locked = [0] * pools
        """Part of `held`: locked pages of the cache."""
        self.transfer = [0] * pools
        """Part of `held`: pages that only pins keep."""
        self.promised = [0] * pools
        """Pages granted and not yet committed."""
        self.cached = [0] * pools
        """Unlocked pages of the cache: evictable, so they never count against a demand."""
        self.pinned_slabs = [0] * pools
        """Slabs that hold a pinned page."""

    def count(self, pool: int, *, held: int = 0, locked: int = 0, transfer: int = 0) -> None:
        """Change the counts of `pool` by so many pages."""
        self.held[pool] += held
        self.locked[pool] += locked
        self.transfer[pool] += transfer

    def slabs_by_pool(self, pages: Iterable[int]) -> list[int]:
        """Return the fewest slabs per pool that hold `pages`, given the slabs that pins keep."""
        needs = list(map(ceil_div, pages, self.pages_per_slab))
        return list(map(max, needs, self.pinned_slabs)) if any(self.pinned_slabs) else needs

    def slabs_needed(self, pages: Iterable[int]) -> int:
        """Return the fewest slabs that hold `pages[p]` pages of each pool p."""
        return sum(self.slabs_by_pool(pages))

    def fits(self, extra: Demand) -> bool:
        """Whether `extra` fits beside what is held and promised, by moves and evictions if need be. Equality fits."""
        # What `shortfall` says with words, in one pass over the pools: nothing else is asked as often. By index and
        # without max(): a strict zip of six lists alone takes as long as all this.
        held, promised, sizes, pinned, caps = (
            self.held, self.promised, self.pages_per_slab, self.pinned_slabs, self.caps,
        )  # fmt: skip
        assert len(extra) == len(held), f"{extra} pages are asked for of {len(held)} pools"
        needed = 0
        for pool, more in enumerate(extra):
            need = -(-(held[pool] + promised[pool] + more) // sizes[pool])
            if need < pinned[pool]:  # noqa: PLR1730
                need = pinned[pool]
            if need > caps[pool]:
                return False
            needed += need
        return needed <= self.slabs

    def fits_untouched(self, extra: Demand) -> bool:
        """Whether `extra` fits with nothing evicted: a hint, never a reason to refuse."""
        return self._allows(self.slabs_by_pool(map(add, self._with(extra), self.cached)))

    def fits_empty(self, demand: Demand) -> bool:
        """Whether `demand` fits an empty arena; no is for ever."""
        return self._allows(list(map(ceil_div, demand, self.pages_per_slab)))

    def shortfall(self, extra: Demand) -> Refusal | None:
        """Return why `extra` does not fit, with the arithmetic; None when it fits."""
        needs = self.slabs_by_pool(self._with(extra))
        for pool, (need, cap) in enumerate(zip(needs, self.caps, strict=True)):
            if need > cap and cap < self.slabs:
                message = f"{self._terms(pool, extra, need)}, but its share is {cap} slabs, {need - cap} too many"
                return Refusal("cap", extra, need - cap, message)
        missing = sum(needs) - self.slabs
        if missing <= 0:
            return None
        terms = "; ".join(self._terms(pool, extra, need) for pool, need in enumerate(needs))
        message = f"{terms}; together {sum(needs)} of {self.slabs} slabs, {missing} too many"
        return Refusal("memory", extra, missing, message)

    def most(self, pool: int, extra: Demand) -> int:
        """Return the most pages of `pool` that fit beside held, promised and `extra` pages; 0 when `extra` does not."""
        pages = self._with(extra)
        needs = self.slabs_by_pool(pages)
        if not self._allows(needs):
            return 0
        slabs = min(self.caps[pool], self.slabs - sum(needs) + needs[pool])
        return slabs * self.pages_per_slab[pool] - pages[pool]

    def display_pages(self, pool: int) -> int:
        """Return the pages that `pool` could hold with all other pools as they are. For display only: never summed.

        Each pool's figure supposes that it alone grows; two such figures together are more than the arena.
        """
        live = self.held[pool] + self.cached[pool]
        needs = self.slabs_by_pool(map(add, map(add, self.held, self.promised), self.cached))
        slabs = min(self.caps[pool], self.slabs - sum(needs) + needs[pool])
        return max(live, slabs * self.pages_per_slab[pool])

    def _with(self, extra: Demand) -> list[int]:
        assert len(extra) == len(self.held), f"{extra} pages are asked for of {len(self.held)} pools"
        return list(map(add, map(add, self.held, self.promised), extra))

    def _allows(self, needs: list[int]) -> bool:
        return sum(needs) <= self.slabs and all(map(le, needs, self.caps))

    def _terms(self, pool: int, extra: Demand, need: int) -> str:
        return (
            f"{self.names[pool]}: {self.held[pool]} held + {self.promised[pool]} promised + {extra[pool]} asked = "
            f"{self.held[pool] + self.promised[pool] + extra[pool]} pages, {self.pages_per_slab[pool]} per slab "
            f"({self.pinned_slabs[pool]} slabs pinned): {need} slabs"
        )

"""Pins: pages that a reader outside the stream reads, so that they must not move, die or be freed.

A pin of a held page is never refused. It is *in force* at once where the slabs it newly pins do not raise the pool's
need beyond what its held and promised pages need anyway. Otherwise it is *deferred*: the next commit first gathers the
pool's held pages into max(pinned_slabs, ceil(held / k)) slabs, and the pin comes into force with that commit's moves.
Until then its pages may still be moved, so a deferred pin costs the budget nothing; but they are already safe from
being freed and evicted.
"""

from __future__ import annotations

from halocline.memory.budget import Budget
from halocline.memory.grant import Pin
from halocline.memory.pool import INDEX_MASK, Pages, Pool
from halocline.units import ceil_div


class PinBoard:
    """All open pins of an arena."""

    __slots__ = ("deferred", "open")

    def __init__(self, pools: int) -> None:
        self.open: list[Pin] = []
        self.deferred: list[list[Pin]] = [[] for _ in range(pools)]
        """Per pool: pins that wait for the next commit's moves."""

    @property
    def waits(self) -> bool:
        """Whether some pin waits for a commit."""
        return any(self.deferred)

    def waits_in(self, pool: int) -> bool:
        """Whether some pin waits for a gathering of `pool`."""
        return bool(self.deferred[pool])

    def add(self, pin: Pin, pools: list[Pool], budget: Budget) -> None:
        """Open `pin`, whose handles are all of held pages."""
        self.open.append(pin)
        for pool, handles in zip(pools, pin.handles, strict=True):
            if len(handles):
                pool.claims[handles & INDEX_MASK] += 1
                if not _try_enforce(pool, budget, handles & INDEX_MASK):
                    self.deferred[pool.number].append(pin)
                    pin.deferred += (pool.number,)

    def remove(self, pin: Pin, pools: list[Pool], budget: Budget) -> list[Pages]:
        """Close `pin`; return per pool the indices that no pin claims any more."""
        self.open.remove(pin)
        loose: list[Pages] = []
        for pool, handles in zip(pools, pin.handles, strict=True):
            index = handles & INDEX_MASK
            pool.claims[index] -= 1
            if pool.number in pin.deferred:
                self.deferred[pool.number].remove(pin)
            else:
                _lift(pool, budget, index)
            loose.append(index[pool.claims[index] == 0])
        pin.deferred = ()
        pin.is_open = False
        return loose

    def enforce_fitting(self, pools: list[Pool], budget: Budget) -> None:
        """Bring those deferred pins into force that need no gathering any more."""
        for pool in pools:
            for pin in list(self.deferred[pool.number]):
                if _try_enforce(pool, budget, pin.handles[pool.number] & INDEX_MASK):
                    self._settle(pin, pool.number)

    def enforce_all(self, pool: Pool, budget: Budget) -> None:
        """Bring every deferred pin of a gathered `pool` into force."""
        for pin in list(self.deferred[pool.number]):
            done = _try_enforce(pool, budget, pin.handles[pool.number] & INDEX_MASK)
            assert done, f"pool {pool.number} is gathered, but the pin of {pin.owner!r} still raises its need"
            self._settle(pin, pool.number)

    def _settle(self, pin: Pin, pool: int) -> None:
        self.deferred[pool].remove(pin)
        pin.deferred = tuple(waiting for waiting in pin.deferred if waiting != pool)


def _try_enforce(pool: Pool, budget: Budget, index: Pages) -> bool:
    # Pins `index` unless that would raise the pool's need; says whether it did.
    fresh = index[pool.pins[index] == 0]
    slabs = (pool.place[fresh] // pool.per_slab).tolist()
    pages = budget.held[pool.number] + budget.promised[pool.number]
    bound = max(len(pool.pinned_in_slab), ceil_div(pages, pool.per_slab))
    if len(pool.pinned_in_slab.keys() | set(slabs)) > bound:
        return False
    pool.pins[index] += 1
    for slab in slabs:
        pool.pinned_in_slab[slab] = pool.pinned_in_slab.get(slab, 0) + 1
    budget.pinned_slabs[pool.number] = len(pool.pinned_in_slab)
    return True


def _lift(pool: Pool, budget: Budget, index: Pages) -> None:
    pool.pins[index] -= 1
    for slab in (pool.place[index[pool.pins[index] == 0]] // pool.per_slab).tolist():
        pool.pinned_in_slab[slab] -= 1
        if pool.pinned_in_slab[slab] == 0:
            del pool.pinned_in_slab[slab]
    budget.pinned_slabs[pool.number] = len(pool.pinned_in_slab)

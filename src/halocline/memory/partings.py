"""How pages leave their holders: a grant that frees, caches or ends, and a pin that ends.

    held by a grant --no pin-----> free, or cached
                    '--pinned----> in transfer --last pin ends--> free, or cached

The promise grows back by what was freed, but not by what a transfer keeps: those bytes are still in use.
"""

from __future__ import annotations

from halocline.errors import InvariantError
from halocline.memory.cached import CachedPages
from halocline.memory.grant import Grant, Handles, Pin
from halocline.memory.pins import PinBoard
from halocline.memory.pool import CACHED, FREE, INDEX_MASK, TRANSFER, TRANSFER_CACHED, Pages, Pool


class Partings:
    """The one way out of every grant and every pin of an arena."""

    __slots__ = ("_cached", "budget", "owners", "pins", "pools")

    def __init__(self, pools: list[Pool], pins: PinBoard, cached: CachedPages) -> None:
        self.pools = pools
        self.pins = pins
        self.budget = cached.budget
        self.owners = cached.owners
        self._cached = cached

    def free(self, grant: Grant, pool: int, handles: Handles) -> None:
        """Free pages of `grant`."""
        if len(handles) != 1 or not self._free_one(grant, self.pools[pool], handles.item(0)):
            self._part(grant, pool, handles, FREE)

    def cache(self, grant: Grant, pool: int, handles: Handles) -> None:
        """Give pages of `grant` to the cache."""
        self._part(grant, pool, handles, CACHED)

    def release(self, grant: Grant) -> None:
        """End `grant` and all that it holds."""
        grant.check_open()
        if any(grant.lent):
            raise InvariantError([f"{grant.describe()} is released while {tuple(grant.lent)} of its pages are lent"])
        for pool in self.pools:
            if grant.pages(pool.number):
                self._let_go(grant, pool, self.owners.all_of(grant, pool), FREE)
            self.budget.promised[pool.number] -= grant.room[pool.number]
        self.owners.close(grant)

    def unpin(self, pin: Pin) -> None:
        """End `pin`."""
        if not pin.is_open:
            raise InvariantError([f"the pin of {pin.owner!r} is ended twice"])
        for pool, loose in zip(self.pools, self.pins.remove(pin, self.pools, self.budget), strict=True):
            free = loose[pool.state[loose] == TRANSFER]
            if len(free):
                pool.retire(free)
                self.budget.count(pool.number, held=-len(free), transfer=-len(free))
            cached = loose[pool.state[loose] == TRANSFER_CACHED]
            self.budget.count(pool.number, transfer=-len(cached))
            self._cached.take_in(pool, cached)

    def _free_one(self, grant: Grant, pool: Pool, handle: int) -> bool:
        # What a decode gives up when its window slides, many times in every step: the same as `_part`, in scalars.
        # False, with nothing changed, where anything is unusual: the long way then does it or says what is wrong.
        if not grant.is_open or self.pins.open or not pool.is_held(handle, grant.id):
            return False
        grant.pay(pool.number, 1)
        self.budget.promised[pool.number] += 1
        self.budget.held[pool.number] -= 1
        pool.retire_one(handle & INDEX_MASK)
        self.owners.trim(grant)
        return True

    def _part(self, grant: Grant, pool: int, handles: Handles, state: int) -> None:
        of_pool = self.pools[pool]
        self._let_go(grant, of_pool, self.owners.own(grant, of_pool, handles, "lets go of"), state)
        self.owners.trim(grant)

    def _let_go(self, grant: Grant, pool: Pool, index: Pages, state: int) -> None:
        # The one way in which pages leave a grant: freed or cached, claimed ones to their transfer.
        number = pool.number
        if self.pins.open:
            claimed = pool.claims[index] > 0
            kept, index = index[claimed], index[~claimed]
            if len(kept):
                pool.state[kept] = TRANSFER_CACHED if state == CACHED else TRANSFER
                grant.hand_over(number, len(kept))
                self.budget.transfer[number] += len(kept)
        if len(index) == 0:
            return
        grant.pay(number, len(index))
        self.budget.promised[number] += len(index)
        if state == CACHED:
            self._cached.take_in(pool, index)
            return
        self.budget.held[number] -= len(index)
        if len(index) == 1:
            pool.retire_one(int(index[0]))
        else:
            pool.retire(index)

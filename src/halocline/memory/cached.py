"""The pages of the cache: locked ones, which are held, and evictable ones with the order in which they go.

    held by a grant --adopt--> locked --unlock--> evictable --evict, or a commit that needs room--> gone
       |       ^----entrust----|   ^-----lock-----|   ^
       '-------------------- take_in -----------------'

Told by whoever owns the cached pages, who is never asked back: which pages are one choice, and what each is worth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halocline.errors import InvariantError
from halocline.memory.demand import Demand
from halocline.memory.evictable import NO_UNIT, Place, Ranking, Unit
from halocline.memory.grant import Grant, Handles, Refusal
from halocline.memory.ledger import Ledger
from halocline.memory.moves import withdraw
from halocline.memory.pool import CACHED, INDEX_MASK, LOCKED, TRANSFER, TRANSFER_CACHED, Pages, Pool


class CachedPages:
    """What is cached in the pools of one arena. Its calls are those of `Arena`, which says what they mean."""

    __slots__ = ("budget", "ledger", "owners", "pools", "ranking")

    def __init__(self, pools: list[Pool], ledger: Ledger, ranking: Ranking) -> None:
        self.pools = pools
        self.ledger = ledger
        self.budget = ledger.budget
        self.owners = ledger.owners
        self.ranking = ranking

    def lock(self, owner: str | Grant, handles: Sequence[Handles], demand: Demand) -> Grant | Refusal:
        """Lock cached pages, per pool, and reserve `demand`, anew or by extending a grant to it; both or neither.

        Locked pages are held: never evicted, and they count. A page that only a transfer keeps for the cache may be
        locked too; it counts already. Locking a locked page is a defect: who counts lockers tells only of the first.
        """
        index = self.owners.checked(handles, (CACHED, TRANSFER_CACHED), "lock")
        fresh = [i[pool.state[i] == CACHED] for pool, i in zip(self.pools, index, strict=True)]
        extra = self.ledger.extra(owner, demand) if isinstance(owner, Grant) else self.ledger.asked(owner, demand)
        with_locked = extra.plus(Demand(map(len, fresh)))
        if not self.budget.fits(with_locked):
            return self.ledger.refusal(with_locked)
        for pool, locked, new in zip(self.pools, index, fresh, strict=True):
            if len(locked) == 0:
                continue
            withdraw(pool, self.ranking, new)
            self.budget.cached[pool.number] -= len(new)
            pool.state[locked] = LOCKED
            self.budget.count(pool.number, held=len(new), locked=len(locked), transfer=len(new) - len(locked))
        return self.ledger.raise_by(owner, extra) if isinstance(owner, Grant) else self.ledger.open(owner, demand)

    def adopt(self, grant: Grant, handles: Sequence[Handles]) -> None:
        """Turn held pages (per pool) of `grant` into locked pages of the cache; its demand falls by as many.

        Nothing else changes: what is held stays held, what is promised stays promised. So this can always be done.
        """
        grant.check_open()
        index = [
            self.owners.own(grant, pool, given, "gives the tree") if len(given) else given
            for pool, given in zip(self.pools, handles, strict=True)
        ]
        if any(len(given) > asked for given, asked in zip(index, grant.asked, strict=True)):
            raise InvariantError(
                [f"{grant.describe()} gives {tuple(map(len, index))} pages away, some of them borrowed"]
            )
        for pool, given in zip(self.pools, index, strict=True):
            if len(given):
                pool.state[given] = LOCKED
                grant.give_away(pool.number, len(given))
                self.budget.locked[pool.number] += len(given)
                self.owners.trim(grant)

    def entrust(self, grant: Grant, handles: Sequence[Handles]) -> None:
        """Turn locked pages (per pool) of the cache into held pages of `grant`, whose demand rises by as many.

        The way back from `adopt`: what is held and promised stays the same. Whoever counts lockers counts them out.
        Raises InvariantError for a pinned page, because its new owner may write it while somebody reads it.
        """
        grant.check_open()
        index = self.owners.checked(handles, (LOCKED,), "hand over")
        for pool, taken in zip(self.pools, index, strict=True):
            if (pool.claims[taken] > 0).any():
                at = int(taken[int(np.argmax(pool.claims[taken] > 0))])
                raise InvariantError([f"{grant.owner!r} takes over {self.owners.describe(pool, at)}: it is pinned"])
        for pool, taken in zip(self.pools, index, strict=True):
            if len(taken):
                self.owners.enter(grant, pool, taken)
                grant.take_in(pool.number, len(taken))
                self.budget.locked[pool.number] -= len(taken)

    def unlock(self, handles: Sequence[Handles], heir: Grant | None = None) -> None:
        """Make locked pages (per pool) evictable again, last in order; the room that comes free goes to `heir`, if any.

        A pinned page stays with its transfer until the pin ends.
        """
        index = self.owners.checked(handles, (LOCKED,), "unlock")
        if heir is not None:
            heir.check_open()
        for pool, unlocked in zip(self.pools, index, strict=True):
            if len(unlocked) == 0:
                continue
            self.budget.locked[pool.number] -= len(unlocked)
            claimed = pool.claims[unlocked] > 0
            loose = unlocked
            if np.count_nonzero(claimed):
                kept, loose = unlocked[claimed], unlocked[~claimed]
                pool.state[kept] = TRANSFER_CACHED
                self.budget.transfer[pool.number] += len(kept)
            self.take_in(pool, loose)
            if heir is not None and len(loose):
                heir.raise_demand(pool.number, len(loose))
                self.budget.promised[pool.number] += len(loose)

    def take_in(self, pool: Pool, index: Pages) -> None:
        """Make held pages of `index`, which nobody claims, evictable, last in order."""
        pool.state[index] = CACHED
        pool.queue.push(index)
        self.budget.held[pool.number] -= len(index)
        self.budget.cached[pool.number] += len(index)

    def take_loose_as_alike(self) -> None:
        """Be told that the order in which pages were cached means nothing: what matters is told by units."""
        for pool in self.pools:
            pool.queue.is_ordered = False

    def requeue(self, pool: int, handles: Handles) -> None:
        """Put cached pages last in the order of eviction."""
        index = self.owners.valid(self.pools[pool], handles)
        self.owners.check(self.pools[pool], index, (CACHED,), "requeue")
        ranked = self.ranking.member[pool][index] != NO_UNIT
        self.ranking.take_out(pool, index[ranked])
        self.pools[pool].queue.push(index)

    def rank(self, handles: Sequence[Handles], worth: float, place: Place) -> Unit:
        """Make a unit of cached pages (per pool, first to go first): see `halocline.memory.evictable`.

        Raises InvariantError if one of them is not cached or belongs to another unit.
        """
        index = self.owners.checked(handles, (CACHED,), "rank")
        for pool, of_pool in zip(self.pools, index, strict=True):
            self._check_loose(pool, of_pool, "rank")
        for pool, of_pool in zip(self.pools, index, strict=True):
            pool.queue.remove(of_pool)
        unit = Unit(tuple(index), worth, place.depth, place.bundle)
        self.ranking.add(unit, place.over)
        return unit

    def rerank(self, unit: Unit, handles: Sequence[Handles], worth: float, place: Place) -> Unit:
        """Let `unit` end and make one of `handles`: `unrank` and `rank` in one, and cheap where the pages are its."""
        index = [of_pool & INDEX_MASK for of_pool in handles]
        if not self.ranking.is_of(unit, index):
            self.unrank(unit)
            return self.rank(handles, worth, place)
        self.ranking.renew(unit, index, worth, place)
        return unit

    def join(self, pool: int, joining: Sequence[tuple[Unit, Handles]]) -> None:
        """Let cached pages of `pool`, so far loose, belong to units that go as a whole.

        Raises InvariantError if one of them is not cached or belongs to a unit, or if a unit goes otherwise or is gone.
        """
        of_pool = self.pools[pool]
        index = self.owners.valid(of_pool, np.concatenate([handles for _, handles in joining]))
        self.owners.check(of_pool, index, (CACHED,), "join")
        self._check_loose(of_pool, index, "join")
        for unit, _ in joining:
            if unit.bundle or unit.id not in self.ranking.units:
                why = f"goes {unit.bundle} pages at a time" if unit.bundle else "has ended"
                raise InvariantError([f"pages of pool {pool} cannot join unit {unit.id}: it {why}"])
        of_pool.queue.remove(index)
        at = 0
        for unit, handles in joining:
            self.ranking.join(unit, pool, index[at : at + len(handles)])
            at += len(handles)

    def _check_loose(self, pool: Pool, index: Pages, verb: str) -> None:
        ranked = self.ranking.member[pool.number][index] != NO_UNIT
        if ranked.any():
            at = int(index[int(np.argmax(ranked))])
            unit = self.ranking.member[pool.number].item(at)
            raise InvariantError([f"cannot {verb} {self.owners.describe(pool, at)}: it belongs to unit {unit}"])

    def value(self, unit: Unit, worth: float) -> None:
        """Change what a byte of `unit` is worth."""
        self.ranking.value(unit, worth)

    def unrank(self, unit: Unit) -> None:
        """Make the pages of `unit` loose, last in their queues."""
        for pool, index in zip(self.pools, self.ranking.dissolve(unit), strict=True):
            pool.queue.push(index)

    def evict(self, pool: int, handles: Handles) -> None:
        """Let cached pages die now; those that a transfer keeps are free when its pin ends, no longer cached."""
        index = self.owners.valid(self.pools[pool], handles)
        self.owners.check(self.pools[pool], index, (CACHED, TRANSFER_CACHED), "evict")
        kept = self.pools[pool].state[index] == TRANSFER_CACHED
        self.pools[pool].state[index[kept]] = TRANSFER
        index = index[~kept]
        withdraw(self.pools[pool], self.ranking, index)
        self.pools[pool].retire(index)
        self.budget.cached[pool] -= len(index)

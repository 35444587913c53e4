"""One arena of bytes and everything that may be done with it: the facade of memory/.

    reserve ----> Grant ----> commit ----> handles ----> physical    page numbers for the kernels
       |                        |                          free, cache, release
       `-> Refusal              `-> moves, evictions

`reserve` (with `extend` and `lock`, which ask the same question) is the only no. Everything else either works or shows
a defect of the caller, which is raised as InvariantError before anything has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from halocline.errors import InvariantError
from halocline.memory.audit import Books, Violation, audit
from halocline.memory.budget import Budget
from halocline.memory.demand import Demand
from halocline.memory.evictable import NO_UNIT, Place, Ranking, Unit
from halocline.memory.figures import ArenaFigures, figures
from halocline.memory.grant import NO_HANDLES, Commit, Grant, Handles, Move, Order, Pin, Refusal
from halocline.memory.layout import ArenaLayout
from halocline.memory.moves import make_room, reclaim_for, withdraw
from halocline.memory.orders import charge, hand_out, places_at_hand, undo
from halocline.memory.owners import Owners
from halocline.memory.pins import PinBoard
from halocline.memory.pool import (
    CACHED,
    FREE,
    HELD,
    INDEX_MASK,
    LOCKED,
    TRANSFER,
    TRANSFER_CACHED,
    Pages,
    Pool,
    SlabStock,
)


class Arena:
    """Slabs, pools, budget and grants of one arena. Pools are numbered as in `layout.pools`."""

    def __init__(self, layout: ArenaLayout, caps: tuple[int | None, ...] | None = None) -> None:
        self.layout = layout
        self.budget = Budget(layout, caps)
        self.stock = SlabStock(layout.slabs)
        self.pools = [Pool(number, pool, self.stock) for number, pool in enumerate(layout.pools)]
        self.owners = Owners(self.pools, [pool.name for pool in layout.pools])
        self.pins = PinBoard(len(self.pools))
        self.moves_planned = 0
        """Moves ever planned: whoever remembers page numbers looks them up again when this has grown."""
        self.ranking = Ranking([len(pool.state) for pool in self.pools])

    # ---- questions: they never act

    def fits(self, extra: Demand) -> bool:
        """Whether `extra` pages fit beside all that is held and promised, by moves and evictions if need be."""
        return self.budget.fits(extra)

    def fits_untouched(self, extra: Demand) -> bool:
        """Whether `extra` pages fit with nothing evicted: a hint only."""
        return self.budget.fits_untouched(extra)

    def fits_empty(self, demand: Demand) -> bool:
        """Whether `demand` fits this arena with nothing in it; the caller adds the floor."""
        return self.budget.fits_empty(demand)

    def shortfall(self, extra: Demand) -> Refusal | None:
        """Return why `extra` does not fit, with the arithmetic; None when it fits."""
        return self.budget.shortfall(extra)

    def most(self, pool: int, extra: Demand) -> int:
        """Return the most additional pages of `pool` that fit beside `extra`; 0 when `extra` itself does not fit."""
        return self.budget.most(pool, extra)

    def physical(self, pool: int, handles: Handles) -> NDArray[np.int32]:
        """Return the present page numbers of `handles`, in their order. They hold until the next commit.

        Raises InvariantError, naming the owner, if a handle is stale.
        """
        return self.pools[pool].place[self.owners.valid(self.pools[pool], handles)]

    def figures(self) -> ArenaFigures:
        """Return where every byte of the arena is (L13)."""
        return figures(self.layout, self.budget, self.pools, len(self.stock.free))

    def audit(self) -> list[Violation]:
        """Recount everything from scratch; an empty list means that all laws hold."""
        return audit(Books(self.layout, self.budget, self.stock, self.pools, self.owners, self.pins, self.ranking))

    @property
    def awaits_commit(self) -> bool:
        """Whether a deferred pin waits for a commit; an idle scheduler must commit, if only an empty list of orders."""
        return self.pins.waits

    # ---- grants

    def reserve(self, owner: str, demand: Demand) -> Grant | Refusal:
        """Promise `demand` to `owner`, all or nothing."""
        if min(demand, default=0) < 0:
            raise InvariantError([f"{owner!r} reserves {demand}: pages are counted from 0"])
        return self._grant(owner, demand) if self.budget.fits(demand) else self._refusal(demand)

    def extend(self, grant: Grant, demand: Demand) -> Grant | Refusal:
        """Raise the demand of `grant` to `demand`, which is at least as much in every pool; all or nothing.

        Pages that the grant has borrowed become its own first.
        """
        extra = self._extra(grant, demand)
        return self._raise(grant, extra) if self.budget.fits(extra) else self._refusal(extra)

    def shrink(self, grant: Grant, demand: Demand) -> None:
        """Lower the demand of `grant` to `demand`; never below what it holds on its own account."""
        self._check_open(grant)
        less = grant.demand.minus(demand)
        if min(less, default=0) < 0 or any(map(int.__gt__, less, grant.room)):
            raise InvariantError([f"{grant.describe()} cannot shrink to {demand}: its room is {tuple(grant.room)}"])
        for pool, count in enumerate(less):
            grant.asked[pool] -= count
            grant.room[pool] -= count
            self.budget.promised[pool] -= count

    def release(self, grant: Grant) -> None:
        """End `grant`: free what it holds (pinned pages go to their transfer) and give up the rest of its promise.

        Raises InvariantError while others still hold pages that it lent.
        """
        self._check_open(grant)
        if any(grant.lent):
            raise InvariantError([f"{grant.describe()} is released while {tuple(grant.lent)} of its pages are lent"])
        for pool in self.pools:
            if grant.pages(pool.number):
                self._let_go(grant, pool, self.owners.all_of(grant, pool), FREE)
            self.budget.promised[pool.number] -= grant.room[pool.number]
            grant.room[pool.number] = 0
        self.owners.close(grant)

    # ---- pages

    def commit(self, orders: Sequence[Order]) -> Commit:
        """Turn promised pages into handles, for all orders of a step at once. Cannot fail.

        Raises OverdrawnError, with nothing changed, if an order exceeds what its grant and its lender have left.
        """
        pages = charge(orders, self.budget.names)
        totals = list(map(sum, pages))
        moves: tuple[Move, ...] = ()
        evicted: tuple[Handles, ...] = (NO_HANDLES,) * len(self.pools)
        if self.pins.waits or not places_at_hand(self.pools, self.budget, totals):
            moves, evicted = self._make_room(orders, totals)
        for pool, total in enumerate(totals):
            self.budget.held[pool] += total
            self.budget.promised[pool] -= total
        return Commit(hand_out(orders, self.pools, pages), moves, evicted)

    def free(self, grant: Grant, pool: int, handles: Handles) -> None:
        """Free pages of `grant`. Borrowed ones are paid back first; then its promise grows back: its demand stays.

        A pinned page goes to its transfer instead, and the demand falls by one: its bytes are still in use.
        """
        if len(handles) == 1 and self._free_one(grant, self.pools[pool], handles.item(0)):
            return
        self._part(grant, pool, handles, FREE)

    def cache(self, grant: Grant, pool: int, handles: Handles) -> None:
        """Give pages of `grant` to the cache, evictable, last in the order of eviction. Books as for `free`."""
        self._part(grant, pool, handles, CACHED)

    # ---- the cache's pages

    def lock(self, owner: str | Grant, handles: Sequence[Handles], demand: Demand) -> Grant | Refusal:
        """Lock cached pages, per pool, and reserve `demand`, anew or by extending a grant to it; both or neither.

        Locked pages are held: never evicted, and they count. A page that only a transfer keeps for the cache may be
        locked too; it counts already. Locking a locked page is a defect: who counts lockers tells only of the first.
        """
        index = self._checked(handles, (CACHED, TRANSFER_CACHED), "lock")
        fresh = [i[pool.state[i] == CACHED] for pool, i in zip(self.pools, index, strict=True)]
        extra = self._extra(owner, demand) if isinstance(owner, Grant) else demand
        with_locked = extra.plus(Demand(map(len, fresh)))
        if not self.budget.fits(with_locked):
            return self._refusal(with_locked)
        for pool, locked, new in zip(self.pools, index, fresh, strict=True):
            withdraw(pool, self.ranking, new)
            self.budget.cached[pool.number] -= len(new)
            pool.state[locked] = LOCKED
            self._count(pool, held=len(new), locked=len(locked), transfer=len(new) - len(locked))
        return self._raise(owner, extra) if isinstance(owner, Grant) else self._grant(owner, demand)

    def adopt(self, grant: Grant, handles: Sequence[Handles]) -> None:
        """Turn held pages (per pool) of `grant` into locked pages of the cache; its demand falls by as many.

        Nothing else changes: what is held stays held, what is promised stays promised. So this can always be done.
        """
        index = [
            self._own(grant, pool, of_pool, "gives the tree") for pool, of_pool in zip(self.pools, handles, strict=True)
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
        self._check_open(grant)
        index = self._checked(handles, (LOCKED,), "hand over")
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
        index = self._checked(handles, (LOCKED,), "unlock")
        if heir is not None:
            self._check_open(heir)
        for pool, unlocked in zip(self.pools, index, strict=True):
            claimed = pool.claims[unlocked] > 0
            kept, loose = unlocked[claimed], unlocked[~claimed]
            pool.state[kept] = TRANSFER_CACHED
            self._count(pool, locked=-len(unlocked), transfer=len(kept))
            self._to_cache(pool, loose)
            if heir is not None and len(loose):
                heir.raise_demand(pool.number, len(loose))
                self.budget.promised[pool.number] += len(loose)

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
        index = self._checked(handles, (CACHED,), "rank")
        for pool, of_pool in zip(self.pools, index, strict=True):
            pool.queue.remove(of_pool)
        unit = Unit(tuple(index), worth, place.depth, place.bundle)
        self.ranking.add(unit, place.over)
        return unit

    def value(self, unit: Unit, worth: float) -> None:
        """Change what a byte of `unit` is worth."""
        self.ranking.value(unit, worth)

    def unrank(self, unit: Unit) -> None:
        """Make the pages of `unit` loose, last in their queues."""
        for pool, index in zip(self.pools, self.ranking.dissolve(unit), strict=True):
            pool.queue.push(index)

    def evict(self, pool: int, handles: Handles) -> None:
        """Let cached pages die now."""
        index = self.owners.valid(self.pools[pool], handles)
        self.owners.check(self.pools[pool], index, (CACHED,), "evict")
        withdraw(self.pools[pool], self.ranking, index)
        self.pools[pool].retire(index)
        self.budget.cached[pool] -= len(index)

    # ---- pins

    def pin(self, owner: str, handles: Sequence[Handles]) -> Pin:
        """Pin held pages (per pool) for a reader outside the stream. Never refused, perhaps deferred to a commit."""
        self._checked(handles, (HELD, LOCKED, TRANSFER, TRANSFER_CACHED), "pin")
        pin = Pin(owner, tuple(of_pool.copy() for of_pool in handles))
        self.pins.add(pin, self.pools, self.budget)
        return pin

    def unpin(self, pin: Pin) -> None:
        """End `pin`: pages that nobody else holds are freed, or return to the cache."""
        if not pin.is_open:
            raise InvariantError([f"the pin of {pin.owner!r} is ended twice"])
        for pool, loose in zip(self.pools, self.pins.remove(pin, self.pools, self.budget), strict=True):
            free = loose[pool.state[loose] == TRANSFER]
            if len(free):
                pool.retire(free)
                self._count(pool, held=-len(free), transfer=-len(free))
            cached = loose[pool.state[loose] == TRANSFER_CACHED]
            self._count(pool, transfer=-len(cached))
            self._to_cache(pool, cached)

    # ---- how room is made

    def _make_room(self, orders: Sequence[Order], totals: list[int]) -> tuple[tuple[Move, ...], tuple[Handles, ...]]:
        self.pins.enforce_fitting(self.pools, self.budget)
        plan = reclaim_for(self.pools, self.budget, self.ranking, totals)
        if isinstance(plan, Refusal):
            undo(orders)
            raise InvariantError([f"L3: granted pages {tuple(totals)} cannot be committed: {plan.message}"])
        room = make_room(self.pools, self.budget, self.ranking, self.pins, totals, plan)
        self.moves_planned += len(room.moves)
        return tuple(room.moves), tuple(np.concatenate(died) if died else NO_HANDLES for died in room.evicted)

    # ---- how pages leave

    def _free_one(self, grant: Grant, pool: Pool, handle: int) -> bool:
        # What a decode gives up when its window slides, many times in every step: the same as `_part`, in scalars.
        # False, with nothing changed, where anything is unusual: the long way then does it or says what is wrong.
        at = handle & INDEX_MASK
        ordinary = grant.is_open and not self.pins.open and at < len(pool.place) and pool.handle_of.item(at) == handle
        if not ordinary or pool.owner.item(at) != grant.id or pool.state.item(at) != HELD:
            return False
        grant.pay(pool.number, 1)
        self.budget.promised[pool.number] += 1
        self.budget.held[pool.number] -= 1
        pool.retire_one(at)
        self.owners.trim(grant)
        return True

    def _part(self, grant: Grant, pool: int, handles: Handles, state: int) -> None:
        of_pool = self.pools[pool]
        self._let_go(grant, of_pool, self._own(grant, of_pool, handles, "lets go of"), state)
        self.owners.trim(grant)

    def _own(self, grant: Grant, pool: Pool, handles: Handles, verb: str) -> Pages:
        self._check_open(grant)
        index = self.owners.valid(pool, handles)
        self.owners.check_distinct(pool, index, "part with")
        mine = (pool.owner[index] == grant.id) & (pool.state[index] == HELD)
        if not mine.all():
            at = int(index[int(np.argmin(mine))])
            raise InvariantError([f"{grant.owner!r} {verb} {self.owners.describe(pool, at)}"])
        return index

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
            self._to_cache(pool, index)
            return
        self.budget.held[number] -= len(index)
        if len(index) == 1:
            pool.retire_one(int(index[0]))
        else:
            pool.retire(index)

    def _to_cache(self, pool: Pool, index: Pages) -> None:
        pool.state[index] = CACHED
        pool.queue.push(index)
        self.budget.held[pool.number] -= len(index)
        self.budget.cached[pool.number] += len(index)

    # ---- small things

    def _checked(self, handles: Sequence[Handles], states: tuple[int, ...], verb: str) -> list[Pages]:
        index = [self.owners.valid(pool, of_pool) for pool, of_pool in zip(self.pools, handles, strict=True)]
        for pool, of_pool in zip(self.pools, index, strict=True):
            self.owners.check(pool, of_pool, states, verb)
        return index

    def _count(self, pool: Pool, *, held: int = 0, locked: int = 0, transfer: int = 0) -> None:
        self.budget.held[pool.number] += held
        self.budget.locked[pool.number] += locked
        self.budget.transfer[pool.number] += transfer

    def _grant(self, owner: str, demand: Demand) -> Grant:
        for pool, count in enumerate(demand):
            self.budget.promised[pool] += count
        return self.owners.open(owner, demand)

    def _raise(self, grant: Grant, extra: Demand) -> Grant:
        for pool, count in enumerate(extra):
            if count:
                self.budget.promised[pool] += count
                grant.raise_demand(pool, count)
        return grant

    def _refusal(self, extra: Demand) -> Refusal:
        refusal = self.budget.shortfall(extra)
        assert refusal is not None, f"{extra} does not fit, and yet nothing is short"
        return refusal

    def _extra(self, grant: Grant, demand: Demand) -> Demand:
        self._check_open(grant)
        extra = demand.minus(grant.demand)
        if min(extra, default=0) < 0:
            raise InvariantError([f"{grant.owner!r} extends its demand {grant.demand} to less: {demand}"])
        return extra

    def _check_open(self, grant: Grant) -> None:
        if not grant.is_open:
            raise InvariantError([f"{grant.describe()} was released before"])

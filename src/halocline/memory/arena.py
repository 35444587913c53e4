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
from halocline.memory.cached import CachedPages
from halocline.memory.demand import Demand
from halocline.memory.evictable import Place, Ranking, Unit
from halocline.memory.figures import ArenaFigures, figures
from halocline.memory.grant import NO_HANDLES, Commit, Grant, Handles, Move, Order, Pin, Refusal
from halocline.memory.layout import ArenaLayout
from halocline.memory.ledger import Ledger
from halocline.memory.moves import make_room, reclaim_for
from halocline.memory.orders import charge, columns, hand_out, hand_out_one, places_at_hand, undo
from halocline.memory.owners import Owners
from halocline.memory.partings import Partings
from halocline.memory.pins import PinBoard
from halocline.memory.pool import HELD, INDEX_MASK, LOCKED, TRANSFER, TRANSFER_CACHED, Pool, SlabStock


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
        self._ledger = Ledger(self.budget, self.owners)
        self._cached = CachedPages(self.pools, self._ledger, self.ranking)
        self._partings = Partings(self.pools, self.pins, self._cached)
        self._none_evicted: tuple[Handles, ...] = (NO_HANDLES,) * len(self.pools)

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
        return self._ledger.reserve(owner, demand)

    def extend(self, grant: Grant, demand: Demand) -> Grant | Refusal:
        """Raise the demand of `grant` to `demand`, which is at least as much in every pool; all or nothing.

        Pages that the grant has borrowed become its own first.
        """
        return self._ledger.extend(grant, demand)

    def extend_all(self, extras: Sequence[tuple[Grant, Sequence[int]]]) -> Sequence[Grant] | Refusal:
        """Raise the demand of each grant by so many pages per pool; all or nothing: one question for all of them."""
        return self._ledger.extend_all(extras)

    def shrink(self, grant: Grant, demand: Demand) -> None:
        """Lower the demand of `grant` to `demand`; never below what it holds on its own account."""
        self._ledger.shrink(grant, demand)

    def release(self, grant: Grant) -> None:
        """End `grant`: free what it holds (pinned pages go to their transfer) and give up the rest of its promise.

        Raises InvariantError while others still hold pages that it lent.
        """
        self._partings.release(grant)

    # ---- pages

    def commit(self, orders: Sequence[Order]) -> Commit:
        """Turn promised pages into handles, for all orders of a step at once. Cannot fail.

        Raises OverdrawnError, with nothing changed, if an order exceeds what its grant and its lender have left.
        """
        budget = self.budget
        charge(orders, budget.names)
        alone = orders[0] if len(orders) == 1 else None
        pages = [] if alone else columns(orders, len(self.pools))
        totals: Sequence[int] = alone.pages if alone else list(map(sum, pages))
        moves: tuple[Move, ...] = ()
        evicted = self._none_evicted
        if (self.pins.open and self.pins.waits) or not places_at_hand(self.pools, budget, totals):
            moves, evicted = self._make_room(orders, list(totals))
        held, promised = budget.held, budget.promised
        for pool, total in enumerate(totals):
            held[pool] += total
            promised[pool] -= total
        handles = hand_out_one(alone, self.pools) if alone else hand_out(orders, self.pools, pages)
        return Commit(handles, moves, evicted)

    def free(self, grant: Grant, pool: int, handles: Handles) -> None:
        """Free pages of `grant`. Borrowed ones are paid back first; then its promise grows back: its demand stays.

        A pinned page goes to its transfer instead, and the demand falls by one: its bytes are still in use.
        """
        self._partings.free(grant, pool, handles)

    def cache(self, grant: Grant, pool: int, handles: Handles) -> None:
        """Give pages of `grant` to the cache, evictable, last in the order of eviction. Books as for `free`."""
        self._partings.cache(grant, pool, handles)

    # ---- the cache's pages

    def lock(self, owner: str | Grant, handles: Sequence[Handles], demand: Demand) -> Grant | Refusal:
        """Lock cached pages, per pool, and reserve `demand`, anew or by extending a grant to it; both or neither.

        Locked pages are held: never evicted, and they count. A page that only a transfer keeps for the cache may be
        locked too; it counts already. Locking a locked page is a defect: who counts lockers tells only of the first.
        """
        return self._cached.lock(owner, handles, demand)

    def adopt(self, grant: Grant, handles: Sequence[Handles]) -> None:
        """Turn held pages (per pool) of `grant` into locked pages of the cache; its demand falls by as many.

        Nothing else changes: what is held stays held, what is promised stays promised. So this can always be done.
        """
        self._cached.adopt(grant, handles)

    def entrust(self, grant: Grant, handles: Sequence[Handles]) -> None:
        """Turn locked pages (per pool) of the cache into held pages of `grant`, whose demand rises by as many.

        The way back from `adopt`: what is held and promised stays the same. Whoever counts lockers counts them out.
        Raises InvariantError for a pinned page, because its new owner may write it while somebody reads it.
        """
        self._cached.entrust(grant, handles)

    def unlock(self, handles: Sequence[Handles], heir: Grant | None = None) -> None:
        """Make locked pages (per pool) evictable again, last in order; the room that comes free goes to `heir`, if any.

        A pinned page stays with its transfer until the pin ends.
        """
        self._cached.unlock(handles, heir)

    def take_loose_as_alike(self) -> None:
        """Be told that the order in which pages were cached means nothing: what matters is told by units."""
        self._cached.take_loose_as_alike()

    def requeue(self, pool: int, handles: Handles) -> None:
        """Put cached pages last in the order of eviction."""
        self._cached.requeue(pool, handles)

    def rank(self, handles: Sequence[Handles], worth: float, place: Place) -> Unit:
        """Make a unit of cached pages (per pool, first to go first): see `halocline.memory.evictable`.

        Raises InvariantError if one of them is not cached or belongs to another unit.
        """
        return self._cached.rank(handles, worth, place)

    def rerank(self, unit: Unit, handles: Sequence[Handles], worth: float, place: Place) -> Unit:
        """Let `unit` end and make one of `handles`: `unrank` and `rank` in one, and cheap where the pages are its."""
        return self._cached.rerank(unit, handles, worth, place)

    def join(self, pool: int, joining: Sequence[tuple[Unit, Handles]]) -> None:
        """Let cached pages of `pool`, so far loose, belong to units that go as a whole: `rank` for what comes later."""
        self._cached.join(pool, joining)

    def value(self, unit: Unit, worth: float) -> None:
        """Change what a byte of `unit` is worth."""
        self._cached.value(unit, worth)

    def unrank(self, unit: Unit) -> None:
        """Make the pages of `unit` loose, last in their queues."""
        self._cached.unrank(unit)

    def evict(self, pool: int, handles: Handles) -> None:
        """Let cached pages die now."""
        self._cached.evict(pool, handles)

    # ---- pins

    def pin(self, owner: str, handles: Sequence[Handles]) -> Pin:
        """Pin held pages (per pool) for a reader outside the stream. Never refused, perhaps deferred to a commit."""
        self.owners.checked(handles, (HELD, LOCKED, TRANSFER, TRANSFER_CACHED), "pin")
        pin = Pin(owner, tuple(of_pool.copy() for of_pool in handles))
        self.pins.add(pin, self.pools, self.budget)
        return pin

    def unpin(self, pin: Pin) -> None:
        """End `pin`: pages that nobody else holds are freed, or return to the cache."""
        self._partings.unpin(pin)

    def count_pinned(self, pool: int, handles: Handles) -> int:
        """Return how many of `handles` some pin keeps: whoever gives them up does not free them."""
        if not self.pins.open or not len(handles):
            return 0
        return int(np.count_nonzero(self.pools[pool].claims[handles & INDEX_MASK]))

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

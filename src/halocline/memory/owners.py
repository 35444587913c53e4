"""Who holds what: the open grants, the names behind stale handles, and the checks on handles that come from outside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from halocline.errors import InvariantError
from halocline.memory.demand import Demand
from halocline.memory.grant import Dealt, Grant, Handles
from halocline.memory.pool import CACHED, FREE, GENERATION, HELD, INDEX_MASK, LOCKED, NO_PAGES, Pages, Pool

SPARE_RECEIPTS = 64
SPARE_NAMES = 1024


def are_all(good: NDArray[np.bool_]) -> bool:
    """Whether all of `good` hold: what `good.all()` says, in a tenth of the time where they are few."""
    return 0 not in good.tobytes()


class Owners:
    """The registry of grants. The name of an ended grant is kept while a page remembers it as its last holder."""

    __slots__ = ("_next_id", "_none", "_pool_names", "_prune_at", "grants", "names", "pools")

    def __init__(self, pools: list[Pool], names: list[str]) -> None:
        self.pools = pools
        self._pool_names = names
        self._next_id = 1
        self._none = (0,) * len(pools)
        self._prune_at = SPARE_NAMES
        self.grants: dict[int, Grant] = {}
        self.names: dict[int, str] = {}
        """Of ended grants; that of an open one stands in the grant."""

    def open(self, owner: str, demand: Demand) -> Grant:
        """Register a new grant."""
        grant_id, none = self._next_id, self._none
        grant = Grant(grant_id, owner, [*demand], [*demand], [*none], [*none], [], [])
        self._next_id = grant_id + 1
        self.grants[grant_id] = grant
        return grant

    def close(self, grant: Grant) -> None:
        """Forget a grant that holds nothing any more; its name stays for messages."""
        del self.grants[grant.id]
        self.names[grant.id] = grant.owner
        grant.is_open = False
        grant.receipts.clear()
        if len(self.names) > self._prune_at:
            self._prune()

    def indices_of(self, grant: Grant, pool: Pool) -> Pages:
        """Return the indices of the pages of `pool` that `grant` holds, found by looking at each of its receipts."""
        handles = self._received(grant, pool)
        index = handles & INDEX_MASK
        alive = (pool.handle_of[index] == handles) & (pool.owner[index] == grant.id) & (pool.state[index] == HELD)
        return index if are_all(alive) else index[alive]

    def all_of(self, grant: Grant, pool: Pool) -> Pages:
        """Return the same for a grant that ends: if it holds as many as it ever received, it holds just these."""
        handles = self._received(grant, pool)
        return handles & INDEX_MASK if len(handles) == grant.pages(pool.number) else self.indices_of(grant, pool)

    def enter(self, grant: Grant, pool: Pool, index: Pages) -> None:
        """Note that `grant` holds `index`, which nobody held; older records of the same pages are dropped."""
        held = self._held(grant)
        held[pool.number] = np.concatenate((held[pool.number], pool.handle_of[index]))
        pool.state[index] = HELD
        pool.owner[index] = grant.id
        grant.receipts = [((tuple(held),), 0)]

    def trim(self, grant: Grant) -> None:
        """Drop stale receipts of `grant` once they outnumber what it holds, so that a long life costs no memory."""
        received = len(grant.receipts)
        if received > SPARE_RECEIPTS and received > 2 * max(grant.held) + SPARE_RECEIPTS:
            grant.receipts = [((tuple(self._held(grant)),), 0)]

    def _received(self, grant: Grant, pool: Pool) -> Handles:
        number = pool.number
        received = [
            dealt.part(at, number) if isinstance(dealt, Dealt) else dealt[at][number] for dealt, at in grant.receipts
        ]
        return received[0] if len(received) == 1 else np.concatenate([NO_PAGES, *received])

    def _held(self, grant: Grant) -> list[Handles]:
        # Per pool.
        return [pool.handle_of[self.indices_of(grant, pool)] for pool in self.pools]

    def valid(self, pool: Pool, handles: Handles) -> Pages:
        """Return the indices of `handles`; raises InvariantError, naming the page's owner, if one is stale."""
        if len(handles) == 0:
            return NO_PAGES
        index = handles & INDEX_MASK
        try:
            now = pool.handle_of[index]
        except IndexError:
            bad = int(index.max())
            name = self._pool_names[pool.number]
            raise InvariantError([f"{name} has no handle {bad}: it ends at {len(pool.place) - 1}"]) from None
        if now.tobytes() != handles.tobytes():
            at = int(np.argmin(now == handles))
            raise InvariantError([self._stale(pool, int(handles[at]), int(index[at]))])
        return index

    def check(self, pool: Pool, index: Pages, states: tuple[int, ...], verb: str) -> None:
        """Raise InvariantError unless all `index` are distinct and in one of `states`."""
        self.check_distinct(pool, index, verb)
        found = pool.state[index].tobytes()
        wrong = found.translate(None, bytes(states))  # what is left without the states that may be
        if wrong:
            raise InvariantError([f"cannot {verb} {self.describe(pool, int(index[found.index(wrong[0])]))}"])

    def check_distinct(self, pool: Pool, index: Pages, verb: str) -> None:
        """Raise InvariantError if an index is named twice in one call."""
        if len(index) < 2:
            return
        order = np.arange(len(index), dtype=np.int32)
        pool.scratch[index] = order
        once = pool.scratch[index]
        if once.tobytes() != order.tobytes():
            at = int(index[int(np.argmin(once == order))])
            raise InvariantError([f"cannot {verb} twice in one call: {self.describe(pool, at)}"])

    def own(self, grant: Grant, pool: Pool, handles: Handles, verb: str) -> Pages:
        """Return the indices of `handles`; raises InvariantError unless they are distinct pages that `grant` holds."""
        grant.check_open()
        index = self.valid(pool, handles)
        self.check_distinct(pool, index, "part with")
        mine = (pool.owner[index] == grant.id) & (pool.state[index] == HELD)
        if not are_all(mine):
            at = int(index[int(np.argmin(mine))])
            raise InvariantError([f"{grant.owner!r} {verb} {self.describe(pool, at)}"])
        return index

    def checked(self, handles: Sequence[Handles], states: tuple[int, ...], verb: str) -> list[Pages]:
        """Return the indices of `handles`, per pool; raises InvariantError unless they are distinct, in `states`."""
        index = [self.valid(pool, of_pool) for pool, of_pool in zip(self.pools, handles, strict=True)]
        for pool, of_pool in zip(self.pools, index, strict=True):
            if len(of_pool):
                self.check(pool, of_pool, states, verb)
        return index

    def describe(self, pool: Pool, index: int) -> str:
        """Say in words what page of which owner stands behind `index`."""
        name = self._pool_names[pool.number]
        page = f"page {pool.place[index]} (handle {index}, generation {pool.handle_of[index] // GENERATION}) of {name}"
        last = self.name(int(pool.owner[index]))
        state = int(pool.state[index])
        if state == FREE:
            return f"{page}, which is free and was last held by {last!r}"
        if state == HELD:
            return f"{page}, which is held by {last!r}"
        keeper = "cached by the tree" if state == CACHED else "locked in the tree" if state == LOCKED else "in transfer"
        return f"{page}, which is {keeper} and came from {last!r}"

    def name(self, grant_id: int) -> str:
        """Return the owner of a grant, open or ended."""
        grant = self.grants.get(grant_id)
        return self.names.get(grant_id, "nobody") if grant is None else grant.owner

    def _stale(self, pool: Pool, handle: int, index: int) -> str:
        return f"stale handle {index} of generation {handle // GENERATION}: it means {self.describe(pool, index)}"

    def _prune(self) -> None:
        # By the low bits of the ids: to look a million pages' owners up among the names stops the server for 90 ms, and
        # a table by whole ids grows with every grant ever made. Who shares his bits with one that is remembered stays.
        slots = 1 << (4 * len(self.names)).bit_length()
        remembered = np.zeros(slots, np.bool_)
        for pool in self.pools:
            remembered[pool.owner & (slots - 1)] = True
        kept = remembered[np.fromiter(self.names, np.int64, len(self.names)) & (slots - 1)].tolist()
        self.names = {
            i: name for (i, name), is_remembered in zip(self.names.items(), kept, strict=True) if is_remembered
        }
        self._prune_at = 2 * len(self.names) + SPARE_NAMES

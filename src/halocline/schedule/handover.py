"""What a request hands over to the prefix cache as it goes on, and what its page table is afterwards.

    before    |the tree's ......|own .............................|own, in no whole granule yet|
                  ^ window begins here now                        ^ end
    after         |the tree's ....................................|own ........................|

A chunk hands over all its whole granules. A decode does so when the first of its own pages leaves a window, all whole
granules at once: that is once per window length and not once per granule, and what leaves in between is the tree's
already. Own pages that leave a window before their granule is whole are freed: nobody could resume on them. So are
those of a request that was received in smaller pages, until its windows have passed the page that came in part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halocline.cache.insert import Advance, Own
from halocline.cache.keys import Key, token_key
from halocline.cache.lock import Lock
from halocline.cache.tree import Tree
from halocline.memory.arena import Arena
from halocline.memory.grant import NO_HANDLES
from halocline.memory.retention import Full, State
from halocline.schedule.holding import Holding, Keeper
from halocline.schedule.request import Request
from halocline.units import floor_to

NOTHING = Own(0, NO_HANDLES)


class Handover:
    """Takes requests forward in the tree. The one writer of tables that begin with the tree's pages."""

    def __init__(self, arena: Arena, keeper: Keeper, tree: Tree) -> None:
        self._arena = arena
        self._keeper = keeper
        self._tree = tree
        self._granule_tokens = arena.layout.granule_tokens
        pools = list(enumerate(arena.layout.pools))
        self._full = [(number, pool.page_tokens) for number, pool in pools if isinstance(pool.retention, Full)]
        self._windows = [
            (number, pool.page_tokens, pool.retention)
            for number, pool in pools
            if not isinstance(pool.retention, Full | State)
        ]
        self._states = [number for number, pool in pools if isinstance(pool.retention, State)]
        self._no_own = (NOTHING,) * len(pools)

    def advance(self, moved: Sequence[Request], holdings: Sequence[Holding]) -> bool:
        """Take requests of an applied step forward; return whether the tree may have got anything.

        The end of a prompt is a boundary to come back to.
        """
        begins = [self._windows_begin(request.computed) for request in moved]
        steps = [self._step_of(*each) for each in zip(moved, holdings, begins, strict=True)]
        for begin, holding, inserted in zip(begins, holdings, self._tree.advance(steps), strict=True):
            self._take_over(holding, begin, inserted.swapped)
        return any(step.own is not self._no_own for step in steps)

    def finish(self, request: Request, holding: Holding) -> None:
        """Hand over all whole granules of a request that leaves now, without what an outstanding step computes."""
        lock, begins = lock_of(holding), self._windows_begin(request.computed)
        if holding.is_torn:
            return  # what it would leave is no boundary to come back to
        end = max(lock.inserted_tokens, floor_to(request.computed, self._granule_tokens))
        self._free_passed(holding, begins, end)
        own = self._own(holding, lock)
        self._tree.advance([Advance(lock, key_of(request), end, request.computed, own, protect=True)])

    def undo(self, request: Request, holding: Holding) -> None:
        """Give a checkpoint back that was handed to a request which could not be admitted after all."""
        lock, own = lock_of(holding), list(self._no_own)
        if any(map(len, lock.handed)):
            for pool in self._states:
                own[pool] = Own(0, lock.handed[pool])
            self._tree.advance([Advance(lock, key_of(request), lock.inserted_tokens, lock.inserted_tokens, own)])

    def _windows_begin(self, computed: int) -> list[int]:
        # The first page, per window pool, that positions from `computed` on read.
        return [retention.first_needed(computed) // size for _, size, retention in self._windows]

    def _step_of(self, request: Request, holding: Holding, begins: list[int]) -> Advance:
        lock, computed = lock_of(holding), request.computed
        inserted, protect = lock.inserted_tokens, computed == request.prompt_tokens
        if holding.is_torn:  # nothing is handed over before its windows have passed the torn pages
            self._free_passed(holding, begins, inserted)
            return Advance(lock, key_of(request), inserted, computed, self._no_own)
        if computed > request.resumed_at and not self._own_page_leaves(holding, begins, inserted):
            key = request.prefix  # not read: nothing is inserted
            return Advance(lock, key if key is not None else key_of(request), inserted, computed, self._no_own, protect)
        end = max(inserted, floor_to(computed, self._granule_tokens))
        self._free_passed(holding, begins, end)
        own = self._own(holding, lock)
        for pool in self._states:
            own[pool] = Own(0, holding.saved[pool])
            holding.saved[pool] = NO_HANDLES
        return Advance(lock, key_of(request), end, computed, own, protect)

    def _own_page_leaves(self, holding: Holding, begins: list[int], inserted: int) -> bool:
        for (pool, size, _), begin in zip(self._windows, begins, strict=True):
            if begin > inserted // size and begin > holding.first_page[pool]:
                return True
        return False

    def _free_passed(self, holding: Holding, begins: list[int], end: int) -> None:
        # Own pages from `end` on, in no whole granule, that the windows have passed.
        for (pool, size, _), begin in zip(self._windows, begins, strict=True):
            table = holding.first_page[pool]
            low = max(0, end // size - table)
            high = min(begin - table, len(holding.handles[pool]))
            if high > low:
                self._arena.free(holding.grant, pool, holding.handles[pool][low:high])

    def _own(self, holding: Holding, lock: Lock) -> list[Own]:
        own = list(self._no_own)
        for pool, size in self._full:
            first = lock.full_tokens // size
            own[pool] = Own(first, holding.handles[pool][first:])
        for pool, size, _ in self._windows:
            first = max(holding.first_page[pool], lock.inserted_tokens // size)
            own[pool] = Own(first, holding.handles[pool][first - holding.first_page[pool] :])
        return own

    def _take_over(self, holding: Holding, begins: list[int], swapped: Sequence[Own]) -> None:
        # Cuts the table where windows begin, and enters the tree's pages where they stand for own ones.
        for (pool, _, _), begin in zip(self._windows, begins, strict=True):
            gone = begin - holding.first_page[pool]
            if gone > 0:
                gone = min(gone, len(holding.handles[pool]))
                holding.handles[pool] = holding.handles[pool][gone:]
                holding.places[pool] = holding.places[pool][gone:]
                holding.first_page[pool] += gone
        for pool, taken in enumerate(swapped):
            if len(taken.handles):
                self._enter(holding, pool, taken)
        self._keeper.passed(holding)  # its end has not moved

    def _enter(self, holding: Holding, pool: int, taken: Own) -> None:
        low = taken.first_page - holding.first_page[pool]
        high = low + len(taken.handles)
        if not np.array_equal(holding.handles[pool][low:high], taken.handles):
            self._keeper.replace(holding, pool, low, taken.handles)


def lock_of(holding: Holding) -> Lock:
    """Return the lock of a request that runs beside the prefix cache."""
    assert holding.lock is not None, f"{holding.grant.owner} runs beside the prefix cache without a lock"
    return holding.lock


def key_of(request: Request) -> Key:
    """Return the whole history as the tree reads it: packed when it came, lengthened by what was generated since."""
    known, history = request.prefix, request.history
    assert known is not None, f"{request.id} runs beside the prefix cache and was never opened there"
    if known.tokens < len(history):
        fresh = token_key(history[known.tokens :])
        known = Key(known.data + fresh.data, len(history), request.namespace)
    request.prefix = known
    return known

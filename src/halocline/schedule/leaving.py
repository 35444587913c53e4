"""What comes free when requests leave that share pages: the question of whoever looks for victims.

A window page counts with the request that it is charged to: either nobody else locks it, or its next payer's promise
falls by one. A full page counts when everyone whose path leads over it leaves. No page counts that a pin keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub

import numpy as np

from halocline.cache.tree import Tree
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, zero
from halocline.memory.grant import NO_HANDLES, Handles
from halocline.memory.pool import INDEX_MASK
from halocline.memory.retention import Full, State
from halocline.schedule.handover import lock_of
from halocline.schedule.request import Request
from halocline.schedule.sharing import granted, holding_of


class Leaving:
    """Counts what leaves with requests that run beside the prefix cache. Changes nothing."""

    def __init__(self, arena: Arena, tree: Tree) -> None:
        self._arena = arena
        self._tree = tree
        self._nothing = zero(len(arena.layout.pools))
        pools = list(enumerate(arena.layout.pools))
        self._full = {number: pool.page_tokens for number, pool in pools if isinstance(pool.retention, Full)}
        self._windows = [number for number, pool in pools if not isinstance(pool.retention, Full | State)]
        self._states = [number for number, pool in pools if isinstance(pool.retention, State)]

    def given_back(self, requests: Sequence[Request]) -> Demand:
        """Return what can be granted anew when all of `requests` leave: grants, and pages that only they lock."""
        pages = list(granted(self._nothing, requests))
        if self._arena.pins.open:
            pages = list(map(sub, pages, self._pinned(requests)))
        lockers: dict[int, int] = {}
        nodes = {}
        checkpoints: list[Handles] = []
        for request in requests:
            lock = lock_of(holding_of(request))
            for pool in self._windows:
                pages[pool] += lock.charged[pool]
            for node in lock.node.path():
                nodes[node.id] = node
                lockers[node.id] = lockers.get(node.id, 0) + 1
            for pool in self._states:
                alone = self._only_locked_by(pool, lock.pages[pool], checkpoints)
                pages[pool] += alone and alone - self._arena.count_pinned(pool, lock.pages[pool])
        for node_id, count in lockers.items():
            for pool in self._full:
                handles = nodes[node_id].pages[pool]
                if len(handles) and self._tree.forest.books[pool].lockers[handles[0] & INDEX_MASK] == count:
                    pages[pool] += len(handles) - self._arena.count_pinned(pool, handles)
        return Demand(pages)

    def _pinned(self, requests: Sequence[Request]) -> list[int]:
        # Per pool: what of grants and charges of these requests pins keep when all of them leave. A window page that
        # somebody else locks on is not kept by its pin: that one pays for it from then on.
        pages = [0] * len(self._nothing)
        holdings = list(map(holding_of, requests))
        for pool in range(len(pages)):
            size, leaving, charged = self._full.get(pool), NO_HANDLES, NO_HANDLES
            for holding in holdings:
                lock, handles = lock_of(holding), holding.handles[pool]
                shared = lock.full_tokens // size if size is not None else len(lock.pages[pool])
                own = handles if pool in self._states else handles[shared:]
                pages[pool] += self._arena.count_pinned(pool, own)
                if pool in self._windows:
                    charge = self._tree.forest.books[pool].charge[lock.pages[pool] & INDEX_MASK]
                    leaving = np.concatenate((leaving, lock.pages[pool]))
                    charged = np.concatenate((charged, lock.pages[pool][charge == lock.id]))
            if len(charged):
                lockers = self._tree.forest.books[pool].lockers[charged & INDEX_MASK]
                going = (leaving[:, None] == charged[None, :]).sum(axis=0)
                pages[pool] += self._arena.count_pinned(pool, charged[lockers == going])
        return pages

    def _only_locked_by(self, pool: int, handles: Handles, seen: list[Handles]) -> int:
        # A checkpoint counts when the last of its lockers is met.
        if len(handles) == 0:
            return 0
        seen.append(handles)
        times = sum(int(other[0] == handles[0]) for other in seen if len(other))
        return int(self._tree.forest.books[pool].lockers[handles[0] & INDEX_MASK] == times)

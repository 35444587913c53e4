"""How a request's pages become the tree's: merged with what the tree has already, page by page.

    in the tree   the page is there                         a tombstone, or nothing yet
    request's     out of its window: freed                  out of its window: cached in that place
    own page      else freed, and the tree's is locked      else adopted: the tree's, and locked by the request

A page that no boundary reads (`Resume.ever_read`: W < G and the like) has left the window when its granule is whole. It
is freed then, as it is where a request gives it up before: cached it would never be hit, only evicted.

The first insertion wins: what the tree has is never replaced, so nobody's page numbers change under him, and the later
request swaps to the tree's handles. Both computed the same from the same tokens. As tombstones are filled from the same
insertion, the tree is whole in every pool over the window when the request has swapped.

Where full pages are locked further than the request has come (H8), only its window pages go into the tree, each into
the tombstone of its place; the full pages there are the tree's, and no own one is taken or expected.

Nearly always the tree has nothing of the range, and nobody else of the step has come that way (`Insertion.is_new`):
then what is out of the window is cached and the rest adopted as it is, with nothing looked for and nothing merged.

All of it is neutral for held + promised: freed pages give their room back before the tree's are locked in their place,
adopted ones take their demand along. Pages out of the window go first, because they may be borrowed from a step grant.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from halocline.cache.forest import Forest
from halocline.cache.keys import Key
from halocline.cache.locks import Lock, LockBook
from halocline.cache.match import Resume
from halocline.cache.merge import Insertion, Merge
from halocline.cache.node import TOMBSTONE, Node, gather, tombstones
from halocline.errors import InvariantError
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.grant import NO_HANDLES, Handles, Refusal
from halocline.memory.pool import INDEX_MASK


class Own(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Pages of one pool that a request holds itself, in a row."""

    first_page: int
    """Page number of the first one, from position 0 of the request."""
    handles: Handles


class Advance(msgspec.Struct, frozen=True, eq=False, gc=False):  # in no cycle, and a step makes many
    """How far a request has come: what it has computed, and which of its own pages the tree gets."""

    lock: Lock
    key: Key
    end_tokens: int
    """Up to here whole granules are inserted; `Lock.inserted_tokens` when nothing is."""
    computed_tokens: int
    """The next position to compute: windows have passed what it does not read."""
    own: Sequence[Own]
    """Per pool: all own pages of the range that a position from `computed_tokens` on reads, and earlier ones that are
    still held; of a full pool those from `Lock.full_tokens` on; of a state pool the checkpoint at `end_tokens`, or
    nothing. They are the tree's afterwards, or gone."""
    protect: bool = False
    """Whether `end_tokens` is the last boundary of a prompt or of an output: somebody may come back to it."""


class Inserted(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What came of an advance, for whoever keeps the request's page table."""

    swapped: tuple[Own, ...]
    """Per pool: the tree's pages that stand in place of the request's own ones now, all locked by it."""
    branch: Node | None
    """The node at whose end the request left what was in the tree before, if it did."""


class Inserter:
    """Insertion into one forest."""

    def __init__(self, arena: Arena, forest: Forest, locks: LockBook, resume: Resume) -> None:
        self._arena = arena
        self._forest = forest
        self._locks = locks
        self._resume = resume
        self._nothing = Inserted((Own(0, NO_HANDLES),) * forest.shape.pools, None)

    def advance(self, step: Sequence[Advance]) -> list[Inserted]:
        """Take all requests of a step forward: their whole granules into the tree, their window locks up to date."""
        plans = [self._plan(each) for each in step]
        for each, plan in zip(step, plans, strict=True):
            if plan is not None:
                for merge in plan.merges:
                    self._settle_gone(each.lock, plan, merge)
        self._locks.pass_windows([(each.lock, each.computed_tokens) for each in step])
        hands_states = bool(self._forest.shape.states)
        return [
            self._settle(each, plan) if plan is not None or hands_states else self._nothing
            for each, plan in zip(step, plans, strict=True)
        ]

    def _plan(self, each: Advance) -> Insertion | None:
        # None for who inserts no granule: most of those who decode, whose windows only pass pages.
        shape, lock = self._forest.shape, each.lock
        start, end = lock.inserted, each.end_tokens // shape.granule_tokens
        if each.end_tokens % shape.granule_tokens or not start <= end or each.end_tokens > each.computed_tokens:
            why = f"inserts from {start * shape.granule_tokens} to {each.end_tokens} of {each.computed_tokens} computed"
            raise InvariantError([f"{lock.grant.owner!r} {why}"])
        if start == end:
            return None
        # Full pages up to the locked path's end are the tree's already, and never the request's own.
        lacking, branch, agreed = max(start, lock.node.end), None, end
        if lacking < end:
            node, branch, agreed = self._grow(lock, each.key, end)
            self._locks.lead_to(lock, node)  # at once, so that nobody else of this step lengthens that node
        lock.inserted = end
        merges = [self._merge(pool, (start, end), each) for pool in self._locks.windows]
        if lacking < end:
            merges += [self._merge(pool, (lacking, end), each) for pool in self._locks.full]
        return Insertion(lock.node, start, branch, agreed == start, merges)

    def _settle(self, each: Advance, plan: Insertion | None) -> Inserted:
        if plan is None:
            self._insert_states(each.lock, each.own)
            return self._nothing
        if plan.is_new:
            self._adopt(each.lock, plan)
            self._insert_states(each.lock, each.own)
            return Inserted(self._nothing.swapped, plan.branch)
        swapped = [Own(0, NO_HANDLES)] * self._forest.shape.pools
        for merge in plan.merges:
            self._settle_kept(each.lock, plan.path(), merge)
            swapped[merge.pool] = self._record(each.lock, plan.path(), merge)
        self._insert_states(each.lock, each.own)
        return Inserted(tuple(swapped), plan.branch)

    def _grow(self, lock: Lock, key: Key, end: int) -> tuple[Node, Node | None, int]:
        # The node that ends after `end` granules, made if it is missing; where the request left the tree, if it was
        # another one's; and the granules that the tree had.
        forest, unit = self._forest, self._forest.shape.granule_bytes
        walk = forest.walk(key, end, lock.node)
        parent = forest.split_at(walk) or lock.node
        if walk.granules == end:
            return parent, None, end
        branch = parent if parent.children and not parent.is_root else None
        data, pages = key.data[walk.granules * unit : end * unit], tombstones(forest.shape, end - walk.granules)
        if parent is lock.node and self._is_open_ended(parent):
            forest.extend(parent, data, pages)
            return parent, None, walk.granules
        return forest.grow(parent, data, pages), branch, walk.granules

    def _is_open_ended(self, node: Node) -> bool:
        # Whether only the one request that is growing `node` knows its end: it may then just become longer.
        has_state = any(node.pages[pool][0] != TOMBSTONE for pool in self._forest.shape.states if not node.is_root)
        return not (node.is_root or node.children or node.locks > 1 or node.mark or has_state)

    def _merge(self, pool: int, run: tuple[int, int], each: Advance) -> Merge:
        per_granule, own = self._forest.shape.pages_per_granule[pool], each.own[pool]
        first, last = run[0] * per_granule, run[1] * per_granule
        kept_from = min(last, max(first, self._resume.first_page(pool, each.computed_tokens)))
        low, high = max(first, own.first_page), min(last, own.first_page + len(own.handles))
        if first == low and high == last:
            mine = own.handles[low - own.first_page : high - own.first_page].copy()
            return Merge(pool, first, kept_from, mine, is_whole=True)
        mine = np.full(last - first, TOMBSTONE, np.int64)
        if low < high:
            mine[low - first : high - first] = own.handles[low - own.first_page : high - own.first_page]
        if (mine[kept_from - first :] == TOMBSTONE).any():
            who = each.lock.grant.owner
            raise InvariantError([f"{who!r} inserts pages {kept_from} to {last} of pool {pool} without holding them"])
        return Merge(pool, first, kept_from, mine, is_whole=False)

    def _settle_gone(self, lock: Lock, plan: Insertion, merge: Merge) -> None:
        # Pages that the window has passed: duplicates and what nobody can read are freed, the others cached.
        passed = merge.kept_from - merge.first_page
        if passed == 0:
            return
        if plan.is_new and merge.is_whole and self._resume.reads_all(merge.pool):
            self._arena.cache(lock.grant, merge.pool, merge.mine[:passed])
            self._forest.fill(plan.node, merge.pool, merge.first_page, merge.mine[:passed])
            return
        path = plan.path()
        theirs, mine = merge.look(path, self._forest.shape)[:passed], merge.mine[:passed]
        there = mine != TOMBSTONE
        new = there & (theirs == TOMBSTONE)
        if new.any() and merge.pool in self._locks.windows:
            new &= self._resume.ever_read(merge.pool, merge.first_page, merge.kept_from)
        useless = there & ~new
        if useless.any():
            self._arena.free(lock.grant, merge.pool, mine[useless])
            mine[useless] = TOMBSTONE
        if new.any():
            self._arena.cache(lock.grant, merge.pool, mine[new])
            self._write(path, merge.pool, merge.first_page, mine, theirs)

    def _adopt(self, lock: Lock, plan: Insertion) -> None:
        # What `_settle_kept` and `_record` do where the tree has nothing: all of it is the tree's, and locked.
        kept: list[Handles] = [NO_HANDLES] * self._forest.shape.pools
        for merge in plan.merges:
            kept[merge.pool] = merge.mine[merge.kept_from - merge.first_page :]
        self._arena.adopt(lock.grant, kept)
        for merge in plan.merges:
            pool, handles = merge.pool, kept[merge.pool]
            if len(handles):
                self._locks.count_first(lock, pool, handles & INDEX_MASK)
                self._forest.fill(plan.node, pool, merge.kept_from, handles)
            if pool in self._locks.windows:
                self._locks.lengthen(lock, pool, merge.kept_from, handles)

    def _settle_kept(self, lock: Lock, path: list[Node], merge: Merge) -> None:
        # Pages that the request still reads: duplicates are swapped for the tree's, the others adopted.
        pool, passed = merge.pool, merge.kept_from - merge.first_page
        theirs, mine = merge.look(path, self._forest.shape)[passed:], merge.mine[passed:]
        there = theirs != TOMBSTONE
        if np.count_nonzero(there) == 0:  # as nearly always
            double, taken, new = NO_HANDLES, NO_HANDLES, mine
        else:
            double, taken, new = mine[there], theirs[there], mine[~there]
        if len(new):
            self._arena.adopt(lock.grant, self._only(pool, new))
            self._locks.count_in(lock, pool, new & INDEX_MASK)
        if len(double):
            self._arena.free(lock.grant, pool, double)
            lockers = self._forest.books[pool].lockers[taken & INDEX_MASK]
            fresh = taken[lockers == 0]
            covered = len(taken) if pool in self._locks.full else len(fresh)
            less = [covered if number == pool else 0 for number in range(len(self._arena.pools))]
            self._arena.shrink(lock.grant, lock.grant.demand.minus(Demand(less)))
            answer = self._arena.lock(lock.grant, self._only(pool, fresh), lock.grant.demand)
            assert not isinstance(answer, Refusal), f"the room of freed duplicates is gone: {answer}"
            self._locks.count_in(lock, pool, taken & INDEX_MASK)
        if len(new):
            self._write(path, pool, merge.kept_from, mine, theirs)

    def _write(self, path: list[Node], pool: int, first: int, mine: Handles, theirs: Handles) -> None:
        # Puts what the tree got into the nodes' places.
        self._forest.put(path, pool, first, np.where(theirs == TOMBSTONE, mine, theirs))

    def _record(self, lock: Lock, path: list[Node], merge: Merge) -> Own:
        last = merge.first_page + len(merge.mine)
        handles = gather(path, self._forest.shape, merge.pool, merge.kept_from, last).copy()
        if merge.pool in self._locks.windows:
            self._locks.lengthen(lock, merge.pool, merge.kept_from, handles)
        return Own(merge.kept_from, handles)

    def _insert_states(self, lock: Lock, own: Sequence[Own]) -> None:
        # A checkpoint is a copy of its own, of which the request has no further use: cached, or freed as a duplicate.
        for pool in self._forest.shape.states:
            handles = own[pool].handles
            if len(handles) == 0:
                continue
            node = self._forest.end_at(lock.node, lock.inserted)
            if node.is_root or node.pages[pool][0] != TOMBSTONE:
                self._arena.free(lock.grant, pool, handles)
                continue
            self._arena.cache(lock.grant, pool, handles)
            node.pages[pool][0] = handles[0]
            self._forest.own(node, pool, 0, handles)

    def _only(self, pool: int, handles: Handles) -> list[Handles]:
        return [handles if number == pool else NO_HANDLES for number in range(len(self._arena.pools))]

"""Who locks which cached pages, and whose demand each of them reduces: the books of the prefix cache.

A request locks a path, not pages: `Lock` ends at a node. Per page the books count lockers. The first locker locks the
page in the arena (it becomes held: it counts, and it cannot be evicted), the last one unlocks it.

    full pool     Every locker's demand is less by the page, for the rest of its life: it never needs that page again.
    window pool   A locked page is only borrowed, until the window has passed it; then the locker needs the room for a
                  page of its own. So each page is *charged* to exactly one of its lockers, and only that one's demand
                  is less by it. When the charged locker's window passes the page:
                      nobody else locks it   it is evictable again, and the room goes to the locker's grant
                      another locks it       the charge goes to that one, whose promise shrinks by one, and the first
                                             one's grows by one
                  When one passes that is not charged, nothing moves. Window locks end page by page.
    state         A locked checkpoint stands beside the working state: nobody's demand is less by it. Where that is
                  one state too many, a checkpoint that nobody else locks is handed over instead of copied: it leaves
                  the tree and *is* the working state.

Why nothing of this can be refused: held + promised is the same before and after every line above. And why the promise
of the next one can shrink: its demand covers every page of its window, and this one it does not hold itself.

Worked example: a sliding pool, P = 16, W = 48, resident price 4 pages, a cached prefix of 96 tokens. At b = 96 the
window needs pages 3, 4, 5.

    A locks        held 3 (charged to A)                       A's grant 4 - 3 = 1             held + promised = 4
    B locks        held 3                                      B's grant 4 - 0 = 4                               8
    A decodes 112  page 3 passed by A: charged to B            A's grant 2, B's 3                                8
                   its page 6 is full and the tree's: held 4   A's grant 1                                       8
    B decodes 112  page 3 passed by its last locker: cached    held 3, B's grant 4                               8
                   another page 6 is the tree's: held 4        B's grant 3                                       8
    A leaves       pages 4, 5 charged to B, A's 6 cached       held 3, B's grant 1; A's grant of 1 ends          4

Restoring windows (H8): P = G = 16, W = 40, a prompt of 97 tokens whose six full pages are cached, and of its sliding
pages only 0, 1, 2. It resumes at 48, with demand (7, 4) from there on:

    full       6 locked: the path to 96        grant 7 - 6 = 1                 [48, 96) is read, never written
    sliding    3 locked: pages 0, 1, 2         grant 4 - 3 = 1, and more from the step as its chunk asks for it
    at 96      own pages 3, 4, 5 fill the tombstones; the path is what it was, and no full page was taken

`lock` is refused as a whole or done as a whole, and it is the only thing here that can be refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halocline.cache.charges import Charges, Pages
from halocline.cache.forest import NO_LOCK, Forest
from halocline.cache.lock import Lock, Parting
from halocline.cache.match import Resume, Walk
from halocline.cache.node import TOMBSTONE, Node, gather
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.grant import NO_HANDLES, Grant, Handles, Refusal
from halocline.memory.pool import INDEX_MASK
from halocline.memory.retention import Full

__all__ = ["Lock", "LockBook"]


class LockBook:
    """All open locks. Acts on the arena in the same call."""

    def __init__(self, arena: Arena, forest: Forest, resume: Resume) -> None:
        self._arena = arena
        self._forest = forest
        self._resume = resume
        self._next_id = NO_LOCK + 1
        self.open: dict[int, Lock] = {}
        pools = list(enumerate(arena.layout.pools))
        self.full = [number for number, pool in pools if isinstance(pool.retention, Full)]
        self.windows = [number for number, pool in pools if number not in self.full and pool.is_positional]
        self._charges = Charges(arena, forest, self.windows, self.open)

    @property
    def waiting(self) -> list[dict[int, list[Lock]]]:
        """Per window pool, by page index: lockers that are not charged."""
        return self._charges.waiting

    # ---- taking

    def lock(self, owner: str, walk: Walk, granules: int, root: Node, demand: Demand) -> Lock | Refusal:
        """Lock the full pages of `walk` and what resuming after `granules` reads; reserve what `demand` asks beyond.

        Everything can resume after `granules`; `walk` may lead on, over full pages whose windows or states are gone.
        """
        refusal = self._refusal(walk, granules, demand)
        if refusal is not None:
            return refusal
        wanted = self.wanted(walk, granules)
        fresh = self._charges.fresh(wanted)
        grant = self._arena.lock(owner, fresh, self.reduced(demand, wanted, fresh))
        if isinstance(grant, Refusal):
            return grant
        lock = self._open(grant, self._forest.split_at(walk) or root, granules)
        for pool in (*self.windows, *self._forest.shape.states):
            lock.pages[pool] = wanted[pool].copy()
        for pool in self.windows:
            lock.first_page[pool] = self._resume.first_page(pool, granules * self._forest.shape.granule_tokens)
        for pool, handles in enumerate(wanted):
            self.count_in(lock, pool, handles & INDEX_MASK)
        return lock

    def _refusal(self, walk: Walk, granules: int, demand: Demand) -> Refusal | None:
        # The arena's own no, said before a page of the path is looked at: somebody at the head of a line asks often.
        less = self.locked_of(walk, granules)
        return None if less is None else self._arena.shortfall(demand.minus(less))

    def locked_of(self, walk: Walk, granules: int) -> Demand | None:
        """Return how much less `lock` asks for than it is told, because others lock a part; None where pins count.

        What is fresh is asked for as much as it lowers the demand, so full pages that others lock make it less, and a
        checkpoint that nobody locks makes it more. A path's nodes are locked from the first one on, each wholly.
        """
        if any(self._arena.budget.transfer):  # of cached pages that only a pin keeps, which count already
            return None
        less = [0] * self._forest.shape.pools
        for pool in self.full:
            for node in walk.path:
                if not self._is_locked(node, pool):
                    break
                less[pool] = min(node.end, walk.granules) * self._forest.shape.pages_per_granule[pool]
        for pool in self._forest.shape.states if granules else ():
            less[pool] = -any(node.end == granules and not self._is_locked(node, pool) for node in walk.path)
        return Demand(less)

    def _is_locked(self, node: Node, pool: int) -> bool:
        return self._forest.books[pool].lockers.item(node.pages[pool].item(0) & INDEX_MASK) > 0

    def wanted(self, walk: Walk, granules: int) -> list[Handles]:
        """Return the handles per pool that a request locks which resumes after `granules` of `walk`."""
        shape = self._forest.shape
        wanted: list[Handles] = [NO_HANDLES] * shape.pools
        for pool in self.full:
            wanted[pool] = gather(walk.path, shape, pool, 0, walk.granules * shape.pages_per_granule[pool])
        for pool in self.windows:
            first = self._resume.first_page(pool, granules * shape.granule_tokens)
            wanted[pool] = gather(walk.path, shape, pool, first, granules * shape.pages_per_granule[pool])
        for pool in shape.states:
            if granules:
                wanted[pool] = next(node.pages[pool] for node in walk.path if node.end == granules)
        return wanted

    def reduced(self, demand: Demand, wanted: Sequence[Handles], fresh: Sequence[Handles]) -> Demand:
        """Return `demand` less what locked pages cover: all full ones, those window pages that nobody else locks."""
        less = [0] * len(demand)
        for pool in self.full:
            less[pool] = len(wanted[pool])
        for pool in self.windows:
            less[pool] = len(fresh[pool])
        left = demand.minus(Demand(less))
        assert min(left) >= 0, f"a demand of {demand} does not cover the {tuple(less)} pages that it locks"
        return left

    def is_sole(self, walk: Walk, granules: int) -> bool:
        """Whether nobody locks or reads the checkpoint after `granules` of `walk`, so that it may be handed over."""
        states, wanted = self._forest.shape.states, self.wanted(walk, granules)
        free = self._charges.fresh(wanted)
        return bool(granules and states) and all(
            len(free[pool]) == len(wanted[pool]) and not self._arena.pools[pool].claims[free[pool] & INDEX_MASK].any()
            for pool in states
        )

    def take_states(self, lock: Lock) -> None:
        """Hand the checkpoint that only `lock` locks over to its request: the tree has a tombstone there."""
        node = self._forest.end_at(lock.node, lock.resumed)
        states = self._forest.shape.states
        lock.handed = [pages if pool in states else NO_HANDLES for pool, pages in enumerate(lock.pages)]
        self._arena.entrust(lock.grant, lock.handed)
        for pool in states:
            index = lock.handed[pool] & INDEX_MASK
            assert (self._forest.books[pool].lockers[index] == 1).all(), "a checkpoint that others lock is handed over"
            self._forest.books[pool].lockers[index] = 0
            self._forest.disown(pool, index)
            node.pages[pool][:] = TOMBSTONE
            lock.pages[pool] = NO_HANDLES

    def count_in(self, lock: Lock, pool: int, index: Pages) -> None:
        """Count `lock` as a locker of `index`, which are locked in the arena."""
        self._charges.count_in(lock, pool, index)

    def count_first(self, lock: Lock, pool: int, index: Pages) -> None:
        """Count `lock` as the first locker of `index`, which have just become the tree's."""
        self._charges.count_first(lock, pool, index)

    def lengthen(self, lock: Lock, pool: int, first_page: int, handles: Handles) -> None:
        """Note that the locked pages of a window `pool` go on with `handles`, which begin at `first_page`."""
        if len(lock.pages[pool]) == 0:
            lock.first_page[pool] = first_page
        lock.pages[pool] = np.concatenate((lock.pages[pool], handles))

    # ---- giving up

    def pass_windows(self, moved: Sequence[tuple[Lock, int]]) -> None:
        """End the window locks of pages that each lock's request has passed: it computes position `int` next.

        For all requests of a step at once, after they have let go of their own pages beyond the windows: a charge that
        goes from one to another finds its room there only then.
        """
        parts = []
        for lock, computed_tokens in moved:
            for pool in self.windows:
                first = self._resume.first_page(pool, computed_tokens)
                count = min(len(lock.pages[pool]), first - lock.first_page[pool])
                if count > 0:
                    parts.append(Parting(lock, pool, lock.pages[pool][:count]))
                    lock.pages[pool] = lock.pages[pool][count:]
                    lock.first_page[pool] += count
        if parts:
            self._charges.part(parts)

    def drop_states(self, lock: Lock) -> None:
        """End the lock of the checkpoint: it has been copied into the working state."""
        parts = [Parting(lock, pool, lock.pages[pool]) for pool in self._forest.shape.states if len(lock.pages[pool])]
        for part in parts:
            lock.pages[part.pool] = NO_HANDLES
        if parts:
            self._charges.part(parts)

    def close(self, lock: Lock) -> None:
        """End `lock`: the request leaves. Its grant is released by whoever opened it, afterwards."""
        assert lock.is_open, f"the lock of {lock.grant.owner!r} is ended twice"
        path = lock.node.path()
        parts = [Parting(lock, pool, handles) for pool, handles in enumerate(lock.pages) if len(handles)]
        for pool in self.full:
            parts += [Parting(lock, pool, node.pages[pool]) for node in reversed(path)]
        lock.node.locks -= 1
        lock.pages = [NO_HANDLES] * len(lock.pages)
        lock.is_open = False
        del self.open[lock.id]
        if parts:
            self._charges.part(parts)

    def pay(self, lock: Lock) -> None:
        """Let `lock` pay the charges that it owes, as far as its grant has room by now."""
        self._charges.pay(lock)

    def unlocked(self) -> list[Handles]:
        """Return the pages, per pool, that were unlocked since the last call and are loose in the arena."""
        return self._charges.unlocked()

    def lead_to(self, lock: Lock, node: Node) -> None:
        """Let the locked path of `lock` end at `node`, whose pages it locks already."""
        lock.node.locks -= 1
        lock.node = node
        node.locks += 1

    def _open(self, grant: Grant, node: Node, granules: int) -> Lock:
        lock = Lock(self._next_id, grant, node, self._forest.shape, granules)
        self._next_id += 1
        self.open[lock.id] = lock
        node.locks += 1
        return lock

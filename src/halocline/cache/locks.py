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
    state         A locked checkpoint stands beside the working state: nobody's demand is less by it.

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

`lock` is refused as a whole or done as a whole, and it is the only thing here that can be refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halocline.cache.forest import NO_LOCK, Forest
from halocline.cache.keys import EVERYBODY
from halocline.cache.match import Resume, Walk
from halocline.cache.node import Node, Shape, gather
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.grant import NO_HANDLES, Grant, Handles, Refusal
from halocline.memory.pool import INDEX_MASK
from halocline.memory.retention import Full

Pages = NDArray[np.int64]


class Lock:
    """What one running request has locked in the tree. Everybody may read it; only `LockBook` writes it."""

    __slots__ = (
        "_granule_tokens",
        "first_page",
        "grant",
        "id",
        "is_open",
        "namespace",
        "node",
        "owed",
        "pages",
        "resumed",
        "revealed_tokens",
    )

    def __init__(self, lock_id: int, grant: Grant, node: Node, shape: Shape) -> None:
        pools = shape.pools
        self._granule_tokens = shape.granule_tokens
        self.id = lock_id
        self.grant = grant
        self.namespace = EVERYBODY
        self.node = node
        """Where the locked path ends."""
        self.first_page = [0] * pools
        """Per window pool: the page number (from position 0 of the request) of the first locked page."""
        self.pages: list[Handles] = [NO_HANDLES] * pools
        """Locked pages: of a window pool in a row from `first_page` on, of a state pool the checkpoint. Those of a full
        pool are the path's."""
        self.owed = [0] * pools
        """Charges taken over without room to pay with: the demand falls by them as soon as there is room."""
        self.resumed = 0
        """Granules that the request did not have to compute."""
        self.revealed_tokens = 0
        """How far the prompt agreed with the tree when it came: perhaps a branch. Where states are kept, a chunk should
        end here and leave a checkpoint."""
        self.is_open = True

    @property
    def full_tokens(self) -> int:
        """How far the pages of the full pools are the tree's: no own full page begins before."""
        return self.node.end * self._granule_tokens


@dataclass(frozen=True, slots=True)
class Parting:
    """Pages of one pool that a lock lets go."""

    lock: Lock
    pool: int
    handles: Handles


def unique(parts: Sequence[Handles]) -> Handles:
    """Return all handles of `parts`, each once, in the order of their first appearance."""
    handles = np.concatenate(parts)
    _, first = np.unique(handles, return_index=True)
    return handles[np.sort(first)]


class LockBook:
    """All open locks, and the books of lockers and charges. Acts on the arena in the same call."""

    def __init__(self, arena: Arena, forest: Forest, resume: Resume) -> None:
        self._arena = arena
        self._forest = forest
        self._resume = resume
        self._next_id = NO_LOCK + 1
        self.open: dict[int, Lock] = {}
        pools = list(enumerate(arena.layout.pools))
        self.full = [number for number, pool in pools if isinstance(pool.retention, Full)]
        self.windows = [number for number, pool in pools if number not in self.full and pool.is_positional]
        self._unlocked: list[list[Handles]] = [[] for _ in pools]
        self.waiting: list[dict[int, list[Lock]]] = [{} for _ in pools]
        """Per window pool, by page index: lockers that are not charged, first come first charged."""

    # ---- taking

    def lock(self, owner: str, walk: Walk, root: Node, demand: Demand) -> Lock | Refusal:
        """Lock `walk`, at whose end everything can resume, and reserve `demand` less what the locked pages cover."""
        wanted = self.wanted(walk)
        fresh = self._fresh(wanted)
        grant = self._arena.lock(owner, fresh, self.reduced(demand, wanted, fresh))
        if isinstance(grant, Refusal):
            return grant
        node = self._forest.split_at(walk) or root
        lock = self._open(grant, node)
        for pool in (*self.windows, *self._forest.shape.states):
            lock.pages[pool] = wanted[pool].copy()
        for pool in self.windows:
            lock.first_page[pool] = self._resume.first_page(pool, node.end * self._forest.shape.granule_tokens)
        for pool, handles in enumerate(wanted):
            self.count_in(lock, pool, handles & INDEX_MASK)
        return lock

    def wanted(self, walk: Walk) -> list[Handles]:
        """Return the handles per pool that a request which resumes at the end of `walk` locks."""
        shape = self._forest.shape
        wanted: list[Handles] = [NO_HANDLES] * shape.pools
        for pool in (*self.full, *self.windows):
            first = self._resume.first_page(pool, walk.granules * shape.granule_tokens)
            wanted[pool] = gather(walk.path, shape, pool, first, walk.granules * shape.pages_per_granule[pool])
        for pool in shape.states:
            if walk.granules:
                wanted[pool] = walk.path[-1].pages[pool]
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

    def count_in(self, lock: Lock, pool: int, index: Pages) -> None:
        """Count `lock` as a locker of `index`, which are locked in the arena; window pages charge the first one."""
        books = self._forest.books[pool]
        if pool in self.windows:
            first = books.lockers[index] == 0
            books.charge[index[first]] = lock.id
            for page in index[~first].tolist():
                self.waiting[pool].setdefault(page, []).append(lock)
        books.lockers[index] += 1

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
            self._part(parts)

    def drop_states(self, lock: Lock) -> None:
        """End the lock of the checkpoint: it has been copied into the working state."""
        parts = [Parting(lock, pool, lock.pages[pool]) for pool in self._forest.shape.states if len(lock.pages[pool])]
        for part in parts:
            lock.pages[part.pool] = NO_HANDLES
        if parts:
            self._part(parts)

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
            self._part(parts)

    def unlocked(self) -> list[Handles]:
        """Return the pages, per pool, that were unlocked since the last call and are loose in the arena."""
        pages = [np.concatenate(parts) if parts else NO_HANDLES for parts in self._unlocked]
        self._unlocked = [[] for _ in self._unlocked]
        return pages

    def lead_to(self, lock: Lock, node: Node) -> None:
        """Let the locked path of `lock` end at `node`, whose pages it locks already."""
        lock.node.locks -= 1
        lock.node = node
        node.locks += 1

    # ---- workings

    def _open(self, grant: Grant, node: Node) -> Lock:
        lock = Lock(self._next_id, grant, node, self._forest.shape)
        self._next_id += 1
        self.open[lock.id] = lock
        node.locks += 1
        return lock

    def _part(self, parts: Sequence[Parting]) -> None:
        # The one way in which locks end. All lockers that part are counted out before any charge finds its heir.
        loose: list[list[Handles]] = [[NO_HANDLES] for _ in self._arena.pools]
        rooms: dict[int, list[int]] = {}
        for part in parts:
            self._forest.books[part.pool].lockers[part.handles & INDEX_MASK] -= 1
        for part in parts:
            index = part.handles & INDEX_MASK
            if part.pool in self.windows:
                self._pass_charges(part, index, rooms)
            loose[part.pool].append(part.handles[self._forest.books[part.pool].lockers[index] == 0])
        unlocked = [unique(of_pool) for of_pool in loose]
        self._arena.unlock(unlocked)
        for pool, handles in enumerate(unlocked):
            if len(handles):
                self._unlocked[pool].append(handles)
        self._change_rooms({self.open[lock_id]: change for lock_id, change in rooms.items() if lock_id in self.open})

    def _pass_charges(self, part: Parting, index: Pages, rooms: dict[int, list[int]]) -> None:
        # What was charged to the parting lock becomes its room; where others lock on, the next one pays with his.
        books, waiting = self._forest.books[part.pool], self.waiting[part.pool]
        pools = range(len(self._arena.pools))
        mine = books.charge[index] == part.lock.id
        received = int(np.count_nonzero(mine))
        if received:
            rooms.setdefault(part.lock.id, [0 for _ in pools])[part.pool] += received
            books.charge[index[mine]] = NO_LOCK
        if not waiting:
            return
        for page, charged in zip(index.tolist(), mine.tolist(), strict=True):
            queue = waiting.get(page)
            if queue is None:
                continue
            if charged:
                heir = queue.pop(0)
                books.charge[page] = heir.id
                rooms.setdefault(heir.id, [0 for _ in pools])[part.pool] -= 1
            else:
                queue.remove(part.lock)
            if not queue:
                del waiting[page]

    def _change_rooms(self, changes: dict[Lock, list[int]]) -> None:
        # Those who pay first, so that what others come into is there. A request that leaves in the middle of a step may
        # charge one that has no room just then: that one owes it.
        for lock, change in changes.items():
            net = [more - owed for more, owed in zip(change, lock.owed, strict=True)]
            less = [min(max(0, -count), room) for count, room in zip(net, lock.grant.room, strict=True)]
            lock.owed = [max(0, -count) - paid for count, paid in zip(net, less, strict=True)]
            change[:] = [max(0, count) for count in net]
            if any(less):
                self._arena.shrink(lock.grant, lock.grant.demand.minus(Demand(less)))
        for lock, more in changes.items():
            if any(more):
                answer = self._arena.extend(lock.grant, lock.grant.demand.plus(Demand(more)))
                assert not isinstance(answer, Refusal), f"the room that {lock.grant.describe()} comes into is gone"

    def _fresh(self, wanted: Sequence[Handles]) -> list[Handles]:
        fresh: list[Handles] = []
        for books, handles in zip(self._forest.books, wanted, strict=True):
            index = handles & INDEX_MASK
            fresh.append(handles[books.lockers[index] == 0])
        return fresh

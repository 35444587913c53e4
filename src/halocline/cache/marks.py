"""Which boundaries are worth keeping, and in which order they go.

A **mark** is a boundary that somebody may come back to: the end of a prompt, the end of an output, a branch that a
second request revealed, a point where one has resumed. It protects its *tail*: in every window pool the pages of the
last W - 1 positions before it and of a branch slack, counted from where the prompt or output ended, and the state at
it; and window pages before those that lie in the slab in which the tail begins, so that the slab empties when it dies.
The tail is one unit: it lives and dies as a whole, and where nothing hangs on the node its full pages are in that unit,
too. Else they are a unit of their own that goes from its end, and what hangs on them (the tail at the node's end, the
nodes below) goes first. Everything else is loose and goes before any unit.

What a mark is worth per byte: the tokens that it saves beyond the mark before it on the path, over the bytes that are
kept for it alone. The order is kept without ever re-sorting: worth = clock + tokens / bytes, set when the mark is made
or used; the clock rises to the worth of what was evicted last, so what is not used sinks against it.

Two ranks make it scan-resistant. A mark that was used (or continues a path that was) is *proven* and goes after all
that are not, so one pass over many new sessions drives out new sessions only. At most half of the arena is proven:
beyond that the least worthy becomes unproven again. And a mark that returns after it was evicted is worth nothing until
it is used: of sessions that come in turn and do not all fit, those that are here stay, the others pass through (D1).

Worked example (Gemma 3 27B, 16-token pages, 512-token granules, W = 1,024): a new prompt of 24 granules keeps 24 * 40
MiB of full pages and a tail of 3 * 208 MiB, 1,584 MiB for 12,288 tokens: 7.76 tokens per MiB. One of 4 granules: 2,048
tokens in 784 MiB, 2.6. The second goes first if both came together.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from halocline.cache.forest import Forest
from halocline.cache.ghosts import Digests, Ghosts
from halocline.cache.locks import LockBook
from halocline.cache.match import Resume
from halocline.cache.node import PROVEN, TOMBSTONE, Mark, Node
from halocline.cache.reach import Reach, kept_for_others, reach_of
from halocline.memory.arena import Arena
from halocline.memory.evictable import NO_UNIT, Place, Unit
from halocline.memory.grant import NO_HANDLES, Handles
from halocline.memory.pool import CACHED, INDEX_MASK, LOCKED
from halocline.units import MIB

NO_MARK = 0
PROVEN_SHARE = 0.5
BRANCH_SLACK_TOKENS = 512


class Marks:
    """All marks of a forest, and the units that the arena is told."""

    def __init__(self, arena: Arena, forest: Forest, locks: LockBook, resume: Resume, slack_tokens: int) -> None:
        self._arena = arena
        self._forest = forest
        self._locks = locks
        self._resume = resume
        self._reach = Reach(arena, forest, locks, resume)
        self._slack_tokens = slack_tokens
        self._reach_tokens = slack_tokens + max(
            reach_of(pool.retention) + pool.pages_per_slab * pool.page_tokens for pool in arena.layout.pools
        )
        self._strides = [pool.stride_bytes for pool in arena.layout.pools]
        self._proven_limit = PROVEN_SHARE * arena.layout.arena_bytes
        self._clock = [0.0, 0.0]
        self._proven: list[tuple[float, int]] = []
        """A heap of (worth, mark id); entries are stale where the mark's worth is another by now."""
        self.proven_bytes = 0
        """What proven marks keep for themselves."""
        self._next_id = NO_MARK + 1
        self.ghosts = Ghosts()
        self.marks: dict[int, Mark] = {}

    # ---- marks come, are used, and go

    def mark(self, node: Node, prefix: Digests, *, proven: bool, resumed: int, end_tokens: int | None = None) -> None:
        """Protect the boundary at `node`'s end, reached by a request that resumed after `resumed` granules.

        `end_tokens`: where a prompt or an output ended, there or within a granule beyond. The branch slack is
        counted from there: boundaries down to so many tokens before it can be resumed at, too.
        """
        boundary = node.end * self._forest.shape.granule_tokens
        serves = boundary if end_tokens is None else min(boundary, end_tokens - self._slack_tokens)
        self.keep(node, prefix, proven=proven, resumed=resumed, serves_tokens=serves)

    def keep(self, node: Node, prefix: Digests, *, proven: bool, resumed: int, serves_tokens: int) -> None:
        """Do as `mark` does, with the first boundary named that the tail serves."""
        if node.is_root or (node.mark is None and not self.is_whole(node)):
            return
        if node.mark is None:
            node.mark = Mark(self._next_id, node, prefix)
            self._next_id += 1
            self.marks[node.mark.id] = node.mark
            node.mark.returned = not proven and self.ghosts.knows(prefix, resumed)
        self._reach.extend(node.mark, max(0, serves_tokens))
        self._value(node.mark, proven=proven or node.mark.proven)

    def use(self, node: Node, prefix: Digests) -> None:
        """Note that a request resumes at `node`'s end: the boundary is proven."""
        self.mark(node, prefix, proven=True, resumed=node.end)

    def lift(self, node: Node) -> None:
        """End the mark at `node`'s end, if there is one, though nothing of it was evicted: it is no ghost."""
        if node.mark is not None:
            self._end(node.mark, evicted=False)

    def unlocked(self, loose: Sequence[Handles]) -> None:
        """Put pages that the last locker has left in their units again."""
        nodes: dict[int, Node] = {}
        for pool in self._locks.full:
            if len(loose[pool]):
                nodes |= {node.id: node for node in self._forest.owners(pool, loose[pool] & INDEX_MASK)}
        for node in sorted(nodes.values(), key=lambda node: node.start):
            self._rank(node)
        for pool in self.tail_pools:
            if len(loose[pool]):
                self._unlocked_of_tails(pool, loose[pool])

    def _unlocked_of_tails(self, pool: int, loose: Handles) -> None:
        # What windows pass of a tail page by page joins its unit: to make that anew would take ten times as long.
        index = loose & INDEX_MASK
        marks = self._forest.books[pool].mark[index]
        if not marks.any():
            return
        alone = (self._arena.ranking.member[pool][index] == NO_UNIT) & (self._arena.pools[pool].state[index] == CACHED)
        joining: dict[int, list[int]] = {}
        for handle, mark_id in zip(loose[alone].tolist(), marks[alone].tolist(), strict=True):
            if mark_id != NO_MARK:
                joining.setdefault(mark_id, []).append(handle)
        parts, others = [], []
        for mark_id, handles in joining.items():
            mark = self.marks[mark_id]
            if mark.tail is not None and mark.tail.left[pool]:
                parts.append((mark.tail, np.array(handles, np.int64)))
            else:
                others.append(mark.node)
        if parts:
            self._arena.join(pool, parts)
        for node in others:
            self._rank(node)

    def died(self, marks: Iterable[Mark]) -> None:
        """Look at marks that lost pages: those whose boundary is void end, and the clock rises to their worth."""
        for mark in marks:
            if mark.id not in self.marks:
                continue
            node = mark.node
            if node.id not in self._forest.nodes or not self.is_whole(node):
                self._clock[mark.proven] = max(self._clock[mark.proven], mark.key)
                self._end(mark)
            else:
                self._reach.extend(mark, node.end * self._forest.shape.granule_tokens)  # perhaps it was cut
                self._rank(node)

    def childless(self, node: Node) -> None:
        """Be told that what hung below `node` is gone: its pages and its tail are one choice from now on."""
        if node.mark is not None and node.body is not node.mark.tail:
            self._rank(node)

    def is_whole(self, node: Node) -> bool:
        """Whether a request could resume at `node`'s end (L7)."""
        return self._reach.is_whole(node)

    def tail(self, mark: Mark, pool: int) -> Handles:
        """Return the pages of `mark`'s tail, the branch slack included, that are there."""
        tail = self._reach.pages(mark.node, pool, mark.first_page[pool])
        there = tail != TOMBSTONE
        return tail if np.count_nonzero(there) == len(tail) else tail[there]

    def near(self, node: Node, pool: int, last_page: int) -> Iterator[Mark]:
        """Yield the marks to which page `last_page` of `pool` in `node`, or one before it there, may matter.

        They stand at its end and below, as far as windows reach. In a window pool, their tails begin no later.
        """
        is_window = pool in self._locks.windows
        stack = [node]
        while stack:
            below = stack.pop()
            if below.mark is not None and (not is_window or below.mark.first_page[pool] <= last_page):
                yield below.mark
            if (below.end - node.end) * self._forest.shape.granule_tokens < self._reach_tokens:
                stack.extend(below.children.values())

    # ---- worth

    def worth_at(self, node: Node, *, proven: bool) -> float:
        """Return what a byte of a mark at `node`'s end would be worth if it were set now; 0 for a root."""
        shape, layout = self._forest.shape, self._arena.layout
        saved = node.end - self._before(node)
        size = sum(saved * shape.pages_per_granule[pool] * self._strides[pool] for pool in self._locks.full)
        for pool in self._locks.windows:
            end = node.end * shape.granule_tokens
            size += (end // layout.pools[pool].page_tokens - self._resume.first_page(pool, end)) * self._strides[pool]
        return self._clock[proven] + saved * shape.granule_tokens * MIB / max(1, size) + (PROVEN if proven else 0.0)

    @property
    def tail_pools(self) -> tuple[int, ...]:
        """The pools of which a mark keeps pages: all but full ones."""
        return (*self._locks.windows, *self._forest.shape.states)

    def _value(self, mark: Mark, *, proven: bool) -> None:
        mark.returned = mark.returned and not proven
        self._set_proven(mark, proven=proven)
        size = self._own_bytes(mark)
        if mark.proven:
            self.proven_bytes += size - mark.bytes
        mark.bytes = size
        self._set_key(mark)
        self._limit_proven()

    def _offer(self, mark: Mark) -> None:
        # Lets the mark above and those below that are worth more by now have what `mark`, whose worth sank, keeps.
        above = mark.node.parent
        while above is not None and not above.is_root:
            if above.mark is not None and above.mark.worth > mark.worth:
                self._rank(above)
                break
            above = above.parent
        for pool in self._locks.windows:
            last = mark.node.end * self._forest.shape.pages_per_granule[pool] - 1
            for below in list(self.near(mark.node, pool, last)):
                if below.worth > mark.worth:
                    self._rank(below.node)

    def _set_key(self, mark: Mark) -> None:
        saved = (mark.node.end - self._before(mark.node)) * self._forest.shape.granule_tokens
        key = 0.0 if mark.returned else self._clock[mark.proven] + saved * MIB / max(1, mark.bytes)
        before, mark.key = mark.key, key
        if mark.proven:
            heapq.heappush(self._proven, (key, mark.id))
        self._rank(mark.node)
        if key < before:
            self._offer(mark)
        self._refresh_worth(mark.node)

    def _set_proven(self, mark: Mark, *, proven: bool) -> None:
        if proven != mark.proven:
            mark.proven = proven
            self.proven_bytes += mark.bytes if proven else -mark.bytes

    def _limit_proven(self) -> None:
        while self.proven_bytes > self._proven_limit and self._proven:
            key, mark_id = heapq.heappop(self._proven)
            mark = self.marks.get(mark_id)
            if mark is not None and mark.proven and mark.key == key:
                self._clock[True] = max(self._clock[True], key)
                self._set_proven(mark, proven=False)
                self._set_key(mark)

    def _before(self, node: Node) -> int:
        # The granules up to the mark before `node`'s on its path.
        above = node.parent
        while above is not None and above.mark is None:
            above = above.parent
        return above.end if above is not None else 0

    def _own_bytes(self, mark: Mark) -> int:
        shape = self._forest.shape
        size = 0
        for pool in self._locks.full:
            size += (mark.node.end - self._before(mark.node)) * shape.pages_per_granule[pool] * self._strides[pool]
        for pool in self.tail_pools:
            size += len(self._keep(mark, pool)) * self._strides[pool]
        return size

    def _refresh_worth(self, node: Node | None) -> None:
        # A node is worth as much as the best mark at its end or below.
        while node is not None and not node.is_root:
            worths = [child.worth for child in node.children.values()]
            worth = max([node.mark.worth if node.mark is not None else 0.0, *worths])
            if worth == node.worth:
                return
            node.worth = worth
            if node.body is not None and any(node.body.left):
                self._arena.value(node.body, worth)
            node = node.parent

    # ---- units

    def _rank(self, node: Node) -> None:
        # Tells the arena of the full pages and of the tail at the end, as far as nobody locks them. Where nothing
        # hangs below both are one unit: full pages whose boundary is void would be kept for nothing, as a tail's rest.
        mark, body = node.mark, self._free_body(node)
        tail = self._free_tail(mark) if mark is not None else self._nothing()
        above = node.parent.body if node.parent is not None else None
        above = above if above is not None and any(above.left) else None
        is_one = mark is not None and not node.children and any(map(len, tail)) and any(map(len, body))
        if is_one != (mark is not None and node.body is mark.tail):
            self._unrank(node)
        if mark is not None and is_one:
            pages = [of_body if len(of_body) else of_tail for of_body, of_tail in zip(body, tail, strict=True)]
            node.body = mark.tail = self._tell(node.body, pages, mark.worth, Place(2 * node.end + 1, 0, above))
            return
        bundle = self._forest.shape.pages_per_granule[self._locks.full[0]] if self._locks.full else 0
        if node.body is not None or any(map(len, body)):
            node.body = self._tell(node.body, body, node.worth, Place(2 * node.end, bundle, above))
        for child in node.children.values() if node.body is not None else ():
            if child.body is not None and any(child.body.left):
                self._arena.ranking.hang(child.body, node.body)
        if mark is not None and (mark.tail is not None or any(map(len, tail))):
            mark.tail = self._tell(mark.tail, tail, mark.worth, Place(2 * node.end + 1, 0, node.body))

    def _tell(self, unit: Unit | None, pages: list[Handles], worth: float, place: Place) -> Unit | None:
        # Lets `pages` be a unit, which `unit` was so far; None where there are none.
        if unit is not None and any(unit.left):
            if any(map(len, pages)):
                return self._arena.rerank(unit, pages, worth, place)
            self._arena.unrank(unit)
        return self._arena.rank(pages, worth, place) if any(map(len, pages)) else None

    def _unrank(self, node: Node) -> None:
        units = {unit.id: unit for unit in (node.body, node.mark.tail if node.mark is not None else None) if unit}
        for unit in units.values():
            if any(unit.left):
                self._arena.unrank(unit)
        node.body = None
        if node.mark is not None:
            node.mark.tail = None

    def _free_body(self, node: Node) -> list[Handles]:
        # The node's full pages, deepest first, but those that a pin keeps; none if somebody locks one of them.
        pages = self._nothing()
        for pool in self._locks.full:
            handles = node.pages[pool][::-1]
            if self._arena.pools[pool].state.item(handles.item(-1) & INDEX_MASK) == LOCKED:
                continue  # whoever locks a node's first page locks all of them
            state = self._arena.pools[pool].state[handles & INDEX_MASK]
            free = state == CACHED
            if np.count_nonzero(free) == len(handles):
                pages[pool] = handles
            elif not (state == LOCKED).any():  # who sent them has gone, and some were not taken yet
                pages[pool] = handles[free]
        return pages

    def _free_tail(self, mark: Mark) -> list[Handles]:
        # The pages that the mark keeps and nobody locks.
        mine = mark.tail.id if mark.tail is not None else NO_UNIT
        pages = self._nothing()
        for pool in self.tail_pools:
            kept = self._keep(mark, pool)
            free = self._arena.pools[pool].state[kept & INDEX_MASK] == CACHED
            if not np.count_nonzero(free):
                continue  # the one who set the mark reads all of them
            pages[pool] = kept = kept[free]
            member = self._arena.ranking.member[pool][kept & INDEX_MASK]
            if np.count_nonzero((member != NO_UNIT) & (member != mine)):
                self._arena.requeue(pool, kept)
        return pages

    def _nothing(self) -> list[Handles]:
        return [NO_HANDLES for _ in self._arena.pools]

    def _keep(self, mark: Mark, pool: int) -> Handles:
        # Takes over the pages of its tail that no worthier mark keeps; returns all that it keeps.
        tail, keepers = self.tail(mark, pool), self._forest.books[pool].mark
        index = tail & INDEX_MASK
        before = keepers[index]
        foreign = before != mark.id
        if not np.count_nonzero(foreign):
            return tail
        for other in set(before[foreign].tolist()):
            if other == NO_MARK or self.marks[other].worth <= mark.worth:
                keepers[index[before == other]] = mark.id
        kept: Handles = tail[keepers[index] == mark.id]
        return kept

    def _kept(self, mark: Mark, pool: int) -> Handles:
        return self._of(mark, pool, self.tail(mark, pool))

    def _of(self, mark: Mark, pool: int, tail: Handles) -> Handles:
        kept: Handles = tail[self._forest.books[pool].mark[tail & INDEX_MASK] == mark.id]
        return kept

    def _end(self, mark: Mark, *, evicted: bool = True) -> None:
        node = mark.node
        self._unrank(node)
        for pool in self.tail_pools:
            self._forest.books[pool].mark[self._kept(mark, pool) & INDEX_MASK] = NO_MARK
        self._set_proven(mark, proven=False)
        if evicted:
            self.ghosts.remember(mark.prefix, kept_for_others(node))
        del self.marks[mark.id]
        node.mark = None
        if node.id in self._forest.nodes:
            self._rank(node)
        living: Node | None = node
        while living is not None and living.id not in self._forest.nodes:
            living = living.parent
        self._refresh_worth(living)
        above = node.parent
        while above is not None and not above.is_root:
            if above.mark is not None and above.id in self._forest.nodes:  # what the ended one kept may be in its tail
                self._rank(above)
                break
            above = above.parent

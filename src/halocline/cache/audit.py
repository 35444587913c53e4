"""The tree's laws, recounted from scratch beside the arena's: nothing here trusts an array that it checks.

L1  every cached or locked page is in exactly one node, and the arena knows it as the tree's
L5  what a request locks is locked in the arena, and the lockers per page are those that can be counted from the locks
L6  locked or pinned + evictable = all that the nodes own, per pool
L7  the window before the end of every locked path is locked as far as the request has not passed it
L8  a tombstone owns no page: no page's mapping leads to a node that does not have it
L3  every window page is charged to one of its lockers, and whoever waits for a charge locks the page
and nothing stays that can never be matched: every granule has its full pages, every leaf owns something
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from halocline.cache.forest import NO_LOCK, Forest
from halocline.cache.locks import LockBook
from halocline.cache.node import TOMBSTONE, Node, gather
from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.memory.pool import CACHED, INDEX_MASK, LOCKED, TRANSFER_CACHED, Pool


def audit(arena: Arena, forest: Forest, locks: LockBook) -> list[Violation]:
    """Return every broken law of the tree. The arena's own audit is the arena's."""
    found = list(_structure(forest, locks))
    for pool in arena.pools:
        name = arena.layout.pools[pool.number].name
        found += [*_owners(forest, pool, name), *_lockers(forest, locks, pool, name)]
        if pool.number in locks.windows:
            found += [*_windows(forest, locks, pool.number, name), *_charges(forest, locks, pool, name)]
    return found


def _structure(forest: Forest, locks: LockBook) -> Iterator[Violation]:
    seen: dict[int, Node] = {}
    stack = list(forest.roots.values())
    for space, root in forest.roots.items():
        if not root.children and not root.locks:
            yield Violation("L1", f"nothing is kept under {space}, and yet it has a root: salts would pile up")
    while stack:
        node = stack.pop()
        for first, child in node.children.items():
            seen[child.id] = child
            stack.append(child)
            if child.parent is not node or child.start != node.end or not child.key.startswith(first):
                yield Violation("L1", f"node {child.id} does not stand where its parent {node.id} says")
    if seen != forest.nodes:
        yield Violation("L1", f"{len(seen)} nodes can be reached, {len(forest.nodes)} are in the books")
    ends = Counter(lock.node.id for lock in locks.open.values())
    for node in seen.values():
        yield from _node(forest, locks, node, ends[node.id])


def _node(forest: Forest, locks: LockBook, node: Node, ends: int) -> Iterator[Violation]:
    if len(node.key) != node.granules * forest.shape.granule_bytes or node.granules == 0:
        yield Violation("L1", f"node {node.id} of {node.granules} granules has a key of {len(node.key)} bytes")
    for pool, pages in enumerate(node.pages):
        if len(pages) != forest.shape.slots(pool, node.granules):
            yield Violation("L1", f"node {node.id} has {len(pages)} pages of pool {pool}")
        if pool in locks.full and (pages == TOMBSTONE).any():
            yield Violation("L8", f"node {node.id} lacks full pages: it can never be matched")
    if node.is_bare and not node.children and not node.locks:
        yield Violation("L8", f"node {node.id} owns nothing and leads to nothing")
    if ends != node.locks:
        yield Violation("L5", f"{ends} locked paths end at node {node.id}, the books say {node.locks}")


def _owners(forest: Forest, pool: Pool, name: str) -> Iterator[Violation]:
    number = pool.number
    owned = [node.pages[number][node.holds(number)] for node in forest.nodes.values()]
    handles = np.concatenate([np.zeros(0, np.int64), *owned])
    index = handles & INDEX_MASK
    if not np.array_equal(pool.handle_of[index], handles):
        yield Violation("L8", f"{name}: nodes have handles of pages that were freed")
    if len(np.unique(index)) != len(index):
        yield Violation("L1", f"{name}: {len(index) - len(np.unique(index))} pages counted twice in the tree")
    mine = np.flatnonzero(np.isin(pool.state, (CACHED, LOCKED, TRANSFER_CACHED)))
    if not np.array_equal(np.sort(index), mine):
        sign = "missing in the nodes" if len(mine) > len(index) else "in nodes but not cached"
        yield Violation("L6", f"{name}: the arena has {len(mine)} pages of the tree, the nodes {len(index)}: {sign}")
    says = np.zeros(len(pool.state), np.int64)
    for node in forest.nodes.values():
        says[node.pages[number][node.holds(number)] & INDEX_MASK] = node.id
    wrong = np.flatnonzero(says != forest.books[number].node)
    if len(wrong):
        yield Violation("L8", f"{name}: the mapping of {len(wrong)} pages leads to nodes that do not own them")
    astray = sum(_astray(forest, node, number) for node in forest.nodes.values())
    if astray:
        yield Violation("L8", f"{name}: {astray} pages stand elsewhere in their nodes than the books say")


def _astray(forest: Forest, node: Node, number: int) -> int:
    (at,) = node.holds(number).nonzero()
    pages = forest.books[number].page[node.pages[number][at] & INDEX_MASK]
    return int(np.count_nonzero(pages != at + node.start * forest.shape.pages_per_granule[number]))


def _lockers(forest: Forest, locks: LockBook, pool: Pool, name: str) -> Iterator[Violation]:
    number, count = pool.number, np.zeros(len(pool.state), np.int64)
    for lock in locks.open.values():
        mine = [lock.pages[number]]
        if number in locks.full:
            mine = [node.pages[number] for node in lock.node.path()]
        for handles in mine:
            np.add.at(count, handles & INDEX_MASK, 1)
            if (pool.handle_of[handles & INDEX_MASK] != handles).any():
                yield Violation("L5", f"{name}: {lock.grant.owner!r} locks a page that was freed")
    wrong = np.flatnonzero(count != forest.books[number].lockers)
    if len(wrong):
        yield Violation("L5", f"{name}: the lockers of {len(wrong)} pages differ from the locks that there are")
    if not np.array_equal(np.flatnonzero(count), np.flatnonzero(pool.state == LOCKED)):
        yield Violation("L5", f"{name}: pages with lockers and pages locked in the arena are not the same")


def _windows(forest: Forest, locks: LockBook, number: int, name: str) -> Iterator[Violation]:
    # What a request locks of its window are the path's pages in a row, up to where it has inserted.
    per_granule = forest.shape.pages_per_granule[number]
    for lock in locks.open.values():
        who, first, count = lock.grant.owner, lock.first_page[number], len(lock.pages[number])
        if not lock.resumed <= lock.inserted <= lock.node.end:
            yield Violation("L7", f"{who!r} resumed after {lock.resumed}, has inserted {lock.inserted} granules")
        if count and first + count != lock.inserted * per_granule:
            yield Violation("L7", f"{name}: {who!r} locks pages {first} to {first + count}, not up to what it inserted")
        there = gather(lock.node.path(), forest.shape, number, first, first + count)
        if not np.array_equal(there, lock.pages[number]):
            yield Violation("L7", f"{name}: {who!r} locks other pages than those of its path")


def _charges(forest: Forest, locks: LockBook, pool: Pool, name: str) -> Iterator[Violation]:
    number, books = pool.number, forest.books[pool.number]
    lockers: dict[int, list[int]] = {}
    for lock in locks.open.values():
        for page in (lock.pages[number] & INDEX_MASK).tolist():
            lockers.setdefault(page, []).append(lock.id)
    for page, ids in lockers.items():
        waiting = [lock.id for lock in locks.waiting[number].get(page, [])]
        if sorted([int(books.charge[page]), *waiting]) != sorted(ids):
            yield Violation(
                "L3", f"{name}: page {page} is locked by {ids}, charged to {books.charge[page]}, {waiting} wait"
            )
    for lock in locks.open.values():
        charged = int(np.count_nonzero(books.charge[lock.pages[number] & INDEX_MASK] == lock.id))
        if charged != lock.charged[number]:
            who = lock.grant.owner
            yield Violation(
                "L3", f"{name}: {charged} pages are charged to {who!r}, which counts {lock.charged[number]}"
            )
    stray = int(np.count_nonzero(books.charge != NO_LOCK)) - len(lockers)
    if stray or locks.waiting[number].keys() - lockers.keys():
        yield Violation("L3", f"{name}: {stray} pages are charged to somebody without being locked")

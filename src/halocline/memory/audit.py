"""The laws, recounted from scratch: nothing here trusts a counter that it checks.

A message names the sign. "3 missing": the books know of more than there are. "3 counted twice": there are more than the
books know of. The two are different bugs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from halocline.memory.budget import Budget
from halocline.memory.evictable import Ranking, Unit
from halocline.memory.layout import ArenaLayout
from halocline.memory.owners import Owners
from halocline.memory.pins import PinBoard
from halocline.memory.pool import (
    CACHED,
    FREE,
    HELD,
    INDEX_MASK,
    LOCKED,
    NO_POOL,
    TRANSFER,
    TRANSFER_CACHED,
    Pool,
    SlabStock,
)
from halocline.units import ceil_div


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken law."""

    law: str
    """As design and docs number them: "L1" to "L13"."""
    message: str


@dataclass(frozen=True, slots=True)
class Books:
    """Everything that an arena consists of."""

    layout: ArenaLayout
    budget: Budget
    stock: SlabStock
    pools: list[Pool]
    owners: Owners
    pins: PinBoard
    ranking: Ranking


def audit(books: Books) -> list[Violation]:
    """Return every broken law of an arena."""
    found = [*_slabs(books), *_budget(books), *_loans(books)]
    for pool, shape in zip(books.pools, books.layout.pools, strict=True):
        found += [*_places(shape.name, pool), *_counters(books, shape.name, pool), *_grants(books, shape.name, pool)]
        found += [*_pins(books, shape.name, pool), *_queue(books, shape.name, pool)]
    return found


def differ(law: str, what: str, books: int, counted: int) -> Iterator[Violation]:
    """Yield a violation if the books and the recount differ, saying in which direction."""
    if books > counted:
        yield Violation(law, f"{what}: {books - counted} missing (books {books}, counted {counted})")
    elif counted > books:
        yield Violation(law, f"{what}: {counted - books} counted twice (books {books}, counted {counted})")


def _slabs(books: Books) -> Iterator[Violation]:
    # L2: a slab belongs to at most one pool. L13: bytes are conserved.
    users: Counter[int] = Counter()
    owner = np.array(books.stock.owner)
    for pool in books.pools:
        live = np.unique(np.flatnonzero(pool.live) // pool.per_slab)
        users.update(live.tolist())
        for slab in live[owner[live] != pool.number].tolist():
            yield Violation("L2", f"slab {slab} holds pages of pool {pool.number} but is owned by {owner[slab]}")
        yield from differ("L2", f"slabs of pool {pool.number}", pool.slabs, len(live))
        yield from differ("L2", f"slabs marked as pool {pool.number}", int((owner == pool.number).sum()), len(live))
    for slab, pools in users.items():
        if pools > 1:
            yield Violation("L2", f"slab {slab} is counted twice: it holds live pages of {pools} pools")
    free = books.stock.free
    yield from differ("L2", "free slabs", len(free), books.stock.slabs - len(users))
    if len(set(free)) != len(free) or any(owner[slab] != NO_POOL for slab in free):
        yield Violation("L2", "a free slab is listed twice or has an owner")
    size = books.layout.slab_bytes
    used = sum(int(np.count_nonzero(pool.live)) * pool.stride_bytes for pool in books.pools)
    holes = sum(pool.holes * pool.stride_bytes for pool in books.pools)
    yield from differ("L13", "bytes", books.layout.arena_bytes, used + holes + len(free) * size)


def _budget(books: Books) -> Iterator[Violation]:
    # L3: all that is promised can be committed at once.
    budget = books.budget
    needs = []
    for pool, shape in enumerate(books.layout.pools):
        pages = budget.held[pool] + budget.promised[pool]
        needs.append(max(len(books.pools[pool].pinned_in_slab), ceil_div(pages, shape.pages_per_slab)))
        if needs[pool] > budget.caps[pool]:
            yield Violation("L3", f"{shape.name} needs {needs[pool]} slabs, its cap is {budget.caps[pool]}")
        if books.pools[pool].slabs > budget.caps[pool]:
            yield Violation("L3", f"{shape.name} owns {books.pools[pool].slabs} slabs, its cap is {budget.caps[pool]}")
        promised = sum(grant.room[pool] for grant in books.owners.grants.values())
        yield from differ("L3", f"{shape.name}: promised pages", budget.promised[pool], promised)
    if sum(needs) > budget.slabs:
        yield Violation("L3", f"held and promised pages need {needs} slabs, {sum(needs)} of {budget.slabs}")


def _places(name: str, pool: Pool) -> Iterator[Violation]:
    # L1, L2: indices and places are one-to-one, and a page is live exactly when its state is not FREE.
    pages = np.arange(len(pool.place))
    if not np.array_equal(np.sort(pool.place), pages) or not np.array_equal(pool.index_at[pool.place], pages):
        yield Violation("L2", f"{name}: handles and places are not one-to-one")
    wrong = np.flatnonzero((pool.state[pool.index_at] != FREE) != (pool.live != 0))
    if len(wrong):
        yield Violation(
            "L1", f"{name}: pages {wrong[:8].tolist()} are live without an owner or owned without being live"
        )
    fill = np.bincount(np.flatnonzero(pool.live) // pool.per_slab, minlength=pool.stock.slabs).tolist()
    if fill != pool.fill:
        yield Violation("L1", f"{name}: pages per slab are {fill}, the books say {pool.fill}")
    if not np.array_equal(pool.handle_of & INDEX_MASK, pages):
        yield Violation("L2", f"{name}: handles do not name their own place in the tables")
    yield from _shelves(name, pool, fill)


def _shelves(name: str, pool: Pool, fill: list[int]) -> Iterator[Violation]:
    # Where new pages go is read off the shelves, so each slab must stand on that of its live pages.
    if sorted(pool.owned_slabs()) != [slab for slab, count in enumerate(fill) if count]:
        yield Violation("L1", f"{name}: the shelves hold slabs {sorted(pool.owned_slabs())}, live pages are elsewhere")
    for level, slabs in enumerate(pool.shelves()):
        wrong = [slab for slab in slabs if fill[slab] != level]
        if wrong:
            yield Violation("L1", f"{name}: slabs {wrong} stand on the shelf of {level} live pages and have others")
    stocked = [level for level, slabs in enumerate(pool.shelves()[:-1]) if slabs]
    if not set(stocked) <= set(pool.stocked_shelves()):
        yield Violation("L1", f"{name}: shelves that are not empty: {stocked}, the books say {pool.stocked_shelves()}")


def _counters(books: Books, name: str, pool: Pool) -> Iterator[Violation]:
    budget, number = books.budget, pool.number
    count = np.bincount(pool.state, minlength=6).tolist()
    transfer = count[TRANSFER] + count[TRANSFER_CACHED]
    yield from differ("L1", f"{name}: held pages", budget.held[number], count[HELD] + count[LOCKED] + transfer)
    yield from differ("L1", f"{name}: cached pages", budget.cached[number], count[CACHED])
    yield from differ("L6", f"{name}: locked pages", budget.locked[number], count[LOCKED])
    yield from differ("L1", f"{name}: pages in transfer", budget.transfer[number], transfer)
    yield from differ("L1", f"{name}: live pages", pool.live_pages, len(pool.state) - count[FREE])


def _grants(books: Books, name: str, pool: Pool) -> Iterator[Violation]:
    # L1: every held page has one owner, who knows of it.
    number = pool.number
    ids, counts = np.unique(pool.owner[pool.state == HELD], return_counts=True)
    holds = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    for grant in books.owners.grants.values():
        yield from differ("L1", f"{name}: pages of {grant.owner!r}", grant.pages(number), holds.pop(grant.id, 0))
        if not grant.is_open:
            yield Violation("L1", f"{name}: the grant of {grant.owner!r} is closed and still counts")
        if grant.pages(number) and len(books.owners.indices_of(grant, pool)) != grant.pages(number):
            yield Violation(
                "L1", f"{name}: the receipts of {grant.owner!r} do not show the {grant.pages(number)} pages it holds"
            )
    for owner, pages in holds.items():
        yield Violation(
            "L1", f"{name}: {pages} pages belong to {books.owners.names.get(owner)!r}, whose grant has ended"
        )


def _loans(books: Books) -> Iterator[Violation]:
    for number, shape in enumerate(books.layout.pools):
        lent: Counter[int] = Counter()
        for grant in books.owners.grants.values():
            who = f"{shape.name}: {grant.owner!r}"
            loans = [loan for loan in grant.loans if loan.pool == number]
            lent.update({loan.lender.id: 0 for loan in loans})
            for loan in loans:
                lent[loan.lender.id] += loan.count
            yield from differ("L3", f"{who} borrowed pages", grant.borrowed[number], sum(loan.count for loan in loans))
            if grant.room[number] < 0 or (grant.borrowed[number] and grant.room[number]):
                yield Violation(
                    "L3", f"{who} has room {grant.room[number]} and borrowed {grant.borrowed[number]} pages"
                )
        for grant in books.owners.grants.values():
            yield from differ("L3", f"{shape.name}: pages lent by {grant.owner!r}", grant.lent[number], lent[grant.id])


def _pins(books: Books, name: str, pool: Pool) -> Iterator[Violation]:
    # L5: what is pinned is held, and in force where the books say.
    claims, pins = np.zeros_like(pool.claims), np.zeros_like(pool.pins)
    for pin in books.pins.open:
        index = pin.handles[pool.number] & INDEX_MASK
        if not np.array_equal(pool.handle_of[index], pin.handles[pool.number]):
            yield Violation("L5", f"{name}: a page pinned by {pin.owner!r} was freed")
        claims[index] += 1
        pins[index] += pool.number not in pin.deferred
    if (claims != pool.claims).any() or (pins != pool.pins).any():
        yield Violation("L5", f"{name}: pins per page are {int(pins.sum())}, the books say {int(pool.pins.sum())}")
    if ((claims > 0) & (pool.state < HELD)).any():
        yield Violation("L5", f"{name}: a pinned page is free or evictable")
    orphans = int(np.count_nonzero((pool.state >= TRANSFER) & (claims == 0)))
    if orphans:
        yield Violation("L1", f"{name}: {orphans} pages are in transfer without a pin: they will never be freed")
    waiting = sum(pool.number in pin.deferred for pin in books.pins.open)
    yield from differ("L5", f"{name}: pins wait for a commit", len(books.pins.deferred[pool.number]), waiting)
    slabs = Counter((pool.place[np.flatnonzero(pins)] // pool.per_slab).tolist())
    if slabs != pool.pinned_in_slab:
        yield Violation("L5", f"{name}: pinned slabs are {dict(slabs)}, the books say {pool.pinned_in_slab}")
    yield from differ("L5", f"{name}: pinned slabs", books.budget.pinned_slabs[pool.number], len(slabs))


def _queue(books: Books, name: str, pool: Pool) -> Iterator[Violation]:
    # L6: evictable and cached are the same pages.
    waiting, cached = pool.queue.waiting(), np.flatnonzero(pool.state == CACHED)
    yield from differ("L6", f"{name}: evictable pages", pool.queue.length, len(waiting))
    member = books.ranking.member[pool.number]
    ranked = np.flatnonzero(member)
    if not np.array_equal(np.sort(np.concatenate((waiting, ranked))), cached):
        wait = len(waiting) + len(ranked)
        yield Violation("L6", f"{name}: {wait} pages wait for eviction, {len(cached)} are cached")
    ids, counts = np.unique(member[ranked], return_counts=True)
    there = {unit.id: unit.left[pool.number] for unit in books.ranking.units.values() if unit.left[pool.number]}
    if there != dict(zip(ids.tolist(), counts.tolist(), strict=True)):
        yield Violation("L6", f"{name}: the units' pages are not those that say so")
    for unit in books.ranking.units.values():
        named = np.unique(unit.index[pool.number])
        yield from _unit(name, unit, pool.number, int(np.count_nonzero(member[named] == unit.id)))
    order = sorted(books.ranking.units[unit_id].order for unit_id in there)
    if order != books.ranking.by_pool[pool.number]:
        yield Violation("L6", f"{name}: the order of units is not the order of their worth")


def _unit(name: str, unit: Unit, pool: int, named: int) -> Iterator[Violation]:
    # L6: what goes with a unit is what it names, and what hangs on it.
    if named != unit.left[pool]:
        yield Violation("L6", f"{name}: unit {unit.id} names {named} of its {unit.left[pool]} pages")
    if unit.over is not None and unit.over.hung.get(unit.id) is not unit:
        yield Violation("L6", f"{name}: unit {unit.id} hangs on unit {unit.over.id}, which does not know of it")

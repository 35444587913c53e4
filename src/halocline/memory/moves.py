"""How a commit that lacks places gets them: evict what counts demand, gather what pins demand, vacate slabs.

All of it is one parallel pass, because within a step every place has one part only:

    sources   pages that move; their places stay closed to other moves until the pass is planned
    targets   holes of the same pool, or places of pages evicted in this step
    new       places given out afterwards: holes, free slabs, and places that were sources, because the moves read
              before the forward writes

Why it always works: after eviction every pool fits into max(pinned, ceil(pages / k)) slabs, new pages included, and
these sum to the slabs of the arena or less. A pool above its number has holes enough to empty its emptiest unpinned
slab into the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from halocline.memory.budget import Budget
from halocline.memory.evictable import NO_UNIT, Ranking
from halocline.memory.grant import Move, Refusal
from halocline.memory.pins import PinBoard
from halocline.memory.pool import CACHED, FREE, HELD, Pages, Pool
from halocline.memory.reclaim import Plan, Pressure, reclaim_plan
from halocline.units import ceil_div

LOOKED_AT = 4096
"""How many loose pages are looked at beyond those that must go, to find slabs that empty."""
MOST_VACATED = 4
"""How many slabs one commit empties by moves while cached pages could go instead: see ADR 11 for the measurement."""
SORTED_WHOLE = 256
"""Up to so many slabs are sorted wholly: to divide them first takes longer."""
NO_PAGES: Pages = np.zeros(0, np.int64)


@dataclass(slots=True)
class Room:
    """What was done to make room."""

    moves: list[Move] = field(default_factory=list)
    evicted: list[list[Pages]] = field(default_factory=list)
    """Handles per pool."""


@dataclass(slots=True)
class _Shift:
    """One pool's part in the pass."""

    keepers: list[int] = field(default_factory=list)
    """Slabs that pages are gathered into: not to be vacated."""
    sources: Pages = field(default_factory=lambda: NO_PAGES)
    """Places left behind in slabs that stay; still marked live so that no other move goes there."""


def reclaim_for(
    pools: list[Pool], budget: Budget, ranking: Ranking, extra: list[int], spare_slabs: int = 0
) -> Plan | Refusal:
    """Ask `reclaim_plan` what must go so that `extra` new pages per pool find places and `spare_slabs` are left."""
    pressure = Pressure(
        slabs=budget.slabs - spare_slabs,
        pages_per_slab=tuple(budget.pages_per_slab),
        page_bytes=tuple(pool.stride_bytes for pool in pools),
        caps=tuple(budget.caps),
        pinned_slabs=tuple(budget.pinned_slabs),
        fixed=tuple(map(int.__add__, budget.held, extra)),
        cached=tuple(budget.cached),
        ranked=tuple(cached - pool.queue.length for cached, pool in zip(budget.cached, pools, strict=True)),
        units=ranking.in_order,
    )
    return reclaim_plan(pressure)


def make_room(
    pools: list[Pool], budget: Budget, ranking: Ranking, pins: PinBoard, extra: list[int], plan: Plan
) -> Room:
    """Carry out `plan`, gather for deferred pins, and vacate slabs until `extra` pages per pool find free places."""
    room = Room(evicted=[[] for _ in pools])
    _evict_planned(pools, budget, ranking, extra, plan, room)
    if not pins.waits:
        _evict_rather_than_move(pools, budget, ranking, extra, room)
    shifts = [
        _gather(pool, budget, ranking, pins, room) if pins.waits and pins.waits_in(pool.number) else _Shift()
        for pool in pools
    ]
    for pool, slabs in zip(pools, _slabs_to_vacate(pools, shifts, extra), strict=True):
        if slabs:
            _vacate(pool, budget, ranking, slabs, shifts[pool.number], room)
    for pool, shift in zip(pools, shifts, strict=True):
        if len(shift.sources):
            pool.drop(shift.sources)
    return room


def _evict_planned(
    pools: list[Pool], budget: Budget, ranking: Ranking, extra: list[int], plan: Plan, room: Room
) -> None:
    for unit, count in plan.units:
        for pool, index in zip(pools, ranking.pop(unit, count), strict=True):
            if len(index):
                evict(pool, budget, index, room)
    for pool, count in zip(pools, plan.evict, strict=True):
        if count:
            loose = _loose(pool, count, extra[pool.number])
            pool.queue.remove(loose)
            evict(pool, budget, loose, room)


def _evict_rather_than_move(pools: list[Pool], budget: Budget, ranking: Ranking, extra: list[int], room: Room) -> None:
    # Bounds how much one step moves before its forward: what is next in the order of eviction goes a little earlier,
    # until no more than MOST_VACATED slabs have to be emptied, or evicting empties none: held pages are in them.
    spare, missing = 0, _missing_slabs(pools, [pool.holes for pool in pools], extra)
    while missing > MOST_VACATED:
        spare += missing - MOST_VACATED
        plan = reclaim_for(pools, budget, ranking, extra, spare)
        if isinstance(plan, Refusal):
            return
        _evict_planned(pools, budget, ranking, extra, plan, room)
        before, missing = missing, _missing_slabs(pools, [pool.holes for pool in pools], extra)
        if missing == before and (plan.units or not plan.evict.is_zero):
            return


def _missing_slabs(pools: list[Pool], holes: list[int], extra: list[int]) -> int:
    # Slabs that the new pages lack beside the pools' holes and the free slabs.
    lacking = sum(ceil_div(max(0, extra[p] - holes[p]), pool.per_slab) for p, pool in enumerate(pools))
    return lacking - len(pools[0].stock.free)


def _loose(pool: Pool, count: int, extra: int) -> Pages:
    # The loose pages to evict. Where they are alike, slabs of nothing but loose pages go as far as the pool gives slabs
    # away; the rest comes from the slabs with the fewest, whose holes the new pages fill, so that whole ones are left.
    loose = pool.queue.first(count if pool.queue.is_ordered else count + LOOKED_AT)
    if len(loose) <= count or pool.per_slab == 1:
        return loose[:count]
    slabs, which, there = _by_slab(pool, loose)
    given = max(0, pool.slabs - ceil_div(pool.live_pages - count + extra, pool.per_slab))
    order = _first_slabs((pool.fill_of(slabs) - there) * len(pool.live) + slabs, there, count, given)
    rank = np.empty(len(slabs), np.int64)
    rank.fill(len(order))
    rank[order] = np.arange(len(order))
    rank = rank[which]
    needed = (rank < len(order)).nonzero()[0]
    chosen: Pages = loose[needed[rank[needed].argsort(kind="stable")]][:count]
    return chosen


def _first_slabs(key: Pages, there: Pages, count: int, given: int) -> Pages:
    # The slabs from which `count` loose pages come: `given` of those with the least keys, then those with the greatest.
    given = min(given, len(key))
    least = _least(key, given)
    lacking = count - int(there[least].sum())
    most = min(lacking, len(key) - given)  # each of them has at least one
    if most > 0:
        least = np.concatenate((least, _least(-key, most)))
    enough = int(there[least].cumsum().searchsorted(count)) + 1
    return least[:enough]


def _least(key: Pages, count: int) -> Pages:
    # Where the `count` least of distinct `key` stand, in order. Of a thousand a few are needed: others are not sorted.
    if len(key) <= SORTED_WHOLE:
        least: Pages = key.argsort()[:count]
        return least
    least = key.argpartition(count - 1)[:count] if count else NO_PAGES
    return least[key[least].argsort()]


def _by_slab(pool: Pool, index: Pages) -> tuple[Pages, Pages, Pages]:
    # The slabs in which the pages of `index` lie, which of them each one's is, and how many lie in each. By writing the
    # number of each page over its slab: to sort thousands of them takes five times as long.
    slab, order = (pool.place[index] // pool.per_slab).astype(np.int64), np.arange(len(index), dtype=np.int32)
    pool.scratch[slab] = order
    slabs = slab[(pool.scratch[slab] == order).nonzero()[0]]  # where the last page of each stands
    pool.scratch[slabs] = order[: len(slabs)]
    which = pool.scratch[slab].astype(np.int64)
    return slabs, which, np.bincount(which)


def withdraw(pool: Pool, ranking: Ranking, index: Pages) -> None:
    """Take cached pages out of the order of eviction, loose ones and those of units."""
    ranked = ranking.member[pool.number][index] != NO_UNIT
    if ranked.any():
        ranking.take_out(pool.number, index[ranked])
        index = index[~ranked]
    pool.queue.remove(index)


def in_order(pool: Pool, ranking: Ranking, index: Pages) -> Pages:
    """Return cached pages in the order in which they would go one by one: loose ones first."""
    ids = ranking.member[pool.number][index]
    loose, ranked = index[ids == NO_UNIT], index[ids != NO_UNIT].tolist()
    ranked.sort(key=lambda at: ranking.units[int(ranking.member[pool.number][at])].order)
    return np.concatenate((pool.queue.in_order(loose), np.asarray(ranked, np.int64)))


def evict(pool: Pool, budget: Budget, index: Pages, room: Room) -> None:
    """Let the cached pages of `index`, already out of the queue, die."""
    room.evicted[pool.number].append(pool.handle_of[index])
    pool.retire(index)
    budget.cached[pool.number] -= len(index)


def _gather(pool: Pool, budget: Budget, ranking: Ranking, pins: PinBoard, room: Room) -> _Shift:
    # Packs the held pages into max(pinned, ceil(held / k)) slabs; then every deferred pin of the pool comes into force.
    keepers, held_elsewhere = _keepers(pool, budget)
    places = pool.pages_of(keepers)
    missing = len(held_elsewhere) - int(np.count_nonzero(pool.live[places] == 0))
    if missing > 0:
        cached = pool.index_at[places]
        cached = in_order(pool, ranking, cached[pool.state[cached] == CACHED])[:missing]
        withdraw(pool, ranking, cached)
        evict(pool, budget, cached, room)
    targets = places[pool.live[places] == 0][: len(held_elsewhere)]
    pool.occupy(targets)
    _shift(pool, held_elsewhere, targets, room)
    pins.enforce_all(pool, budget)
    return _Shift(keepers, _close_left(pool, held_elsewhere))


def _close_left(pool: Pool, sources: Pages) -> Pages:
    # Gives up the slabs in which nothing is left but `sources`; returns the sources in other slabs.
    slabs, counts = np.unique(sources // pool.per_slab, return_counts=True)
    left = [slab for slab, count in zip(slabs.tolist(), counts.tolist(), strict=True) if pool.live_in(slab) == count]
    gone = np.isin(sources // pool.per_slab, left)
    pool.drop(sources[gone])
    return sources[~gone]


def _keepers(pool: Pool, budget: Budget) -> tuple[list[int], Pages]:
    # The slabs to gather into: pinned ones, then those with the most held pages; and the held pages outside them.
    slabs = pool.owned_slabs()
    pages = pool.pages_of(slabs)
    state = pool.state[pool.index_at[pages]].reshape(-1, pool.per_slab)
    held = (state >= HELD).sum(axis=1).tolist()
    wanted = max(len(pool.pinned_in_slab), ceil_div(budget.held[pool.number], pool.per_slab))
    order = sorted(range(len(slabs)), key=lambda at: (slabs[at] not in pool.pinned_in_slab, -held[at], slabs[at]))
    others = pool.pages_of([slabs[at] for at in order[wanted:]])
    return [slabs[at] for at in order[:wanted]], others[pool.state[pool.index_at[others]] >= HELD]


def _slabs_to_vacate(pools: list[Pool], shifts: list[_Shift], extra: list[int]) -> list[list[int]]:
    # The cheapest unpinned slabs over all pools, as many as the new pages lack.
    chosen: list[list[int]] = [[] for _ in pools]
    holes = [pool.holes + len(shift.sources) for pool, shift in zip(pools, shifts, strict=True)]
    missing = _missing_slabs(pools, holes, extra)
    if missing <= 0:
        return chosen
    offers = {pool.number: iter(pool.emptiest(shifts[pool.number].keepers)) for pool in pools}
    heads = {p: next(offer, None) for p, offer in offers.items()}
    for _ in range(missing):
        costs = [
            (pools[p].live_in(slab) * pools[p].stride_bytes, p, slab)
            for p, slab in heads.items()
            if slab is not None and (len(chosen[p]) + 1) * pools[p].per_slab <= holes[p] - extra[p]
        ]
        assert costs, (
            f"{missing} slabs to vacate, found {chosen}; pinned {[len(pool.pinned_in_slab) for pool in pools]}"
        )
        _, p, slab = min(costs)
        chosen[p].append(slab)
        heads[p] = next(offers[p], None)
    return chosen


def _vacate(pool: Pool, budget: Budget, ranking: Ranking, slabs: list[int], shift: _Shift, room: Room) -> None:
    # Moves all pages of `slabs` into the holes of the pool's other slabs, and gives the slabs back.
    pool.hide(slabs)
    places = pool.pages_of(slabs)
    index = pool.index_at[places]
    moving = index[pool.state[index] != FREE]
    hidden = sum(pool.per_slab - pool.live_in(slab) for slab in slabs)
    excess = len(moving) - (pool.holes - hidden)
    if excess > 0:  # only beside a gather, whose sources are holes that no other move may fill
        cached = in_order(pool, ranking, moving[pool.state[moving] == CACHED])[:excess]
        moving = np.setdiff1d(moving, cached)
        withdraw(pool, ranking, cached)
        _evict_hidden(pool, budget, cached, room)
    if len(moving):
        _shift(pool, pool.place[moving].astype(np.int64), pool.take(len(moving)), room)
    shift.sources = shift.sources[~np.isin(shift.sources // pool.per_slab, slabs)]
    pool.abandon(slabs)


def _evict_hidden(pool: Pool, budget: Budget, index: Pages, room: Room) -> None:
    # Like `evict`, for pages in hidden slabs: `abandon` frees their places.
    room.evicted[pool.number].append(pool.handle_of[index])
    pool.expire(index)
    budget.cached[pool.number] -= len(index)


def _shift(pool: Pool, sources: Pages, targets: Pages, room: Room) -> None:
    pool.swap(sources, targets)
    room.moves.extend(map(Move, [pool.number] * len(sources), sources.tolist(), targets.tolist()))

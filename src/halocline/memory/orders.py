"""The parts of a commit: charge every order, see whether places are at hand, deal the new pages out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat

import numpy as np

from halocline.errors import OverdrawnError
from halocline.memory.budget import Budget
from halocline.memory.demand import Demand
from halocline.memory.grant import NO_HANDLES, Handles, Order
from halocline.memory.pool import HELD, Pool


def charge(orders: Sequence[Order], names: Sequence[str]) -> list[int]:
    """Charge every order to its grant and lender; return the new pages per pool.

    Raises OverdrawnError, with every charge undone, if one exceeds what its grant and its lender have left.
    """
    pools = range(len(names))
    totals = [0] * len(names)
    for at, order in enumerate(orders):
        grant, pages = order.grant, order.pages
        if len(pages) != len(names) or not grant.is_open:
            undo(orders[:at])
            raise OverdrawnError(
                [f"{grant.describe()} cannot commit {pages}: it is closed or not of {len(names)} pools"], at
            )
        room, taken = grant.room, grant.taken
        for pool in pools:
            count = pages[pool]
            if 0 < count <= room[pool]:  # Grant.charge without a lender, in place: a step has hundreds of these
                room[pool] -= count
                taken[pool] += count
                totals[pool] += count
            elif count:
                if count < 0 or not grant.charge(pool, count, order.step):
                    raise _overdrawn(orders, at, pool, names[pool])
                totals[pool] += count
    return totals


def _overdrawn(orders: Sequence[Order], at: int, pool: int, name: str) -> OverdrawnError:
    # Undoes the charges before pool `pool` of order `at`; returns what to raise.
    order = orders[at]
    part = Demand(count if p < pool else 0 for p, count in enumerate(order.pages))
    undo([*orders[:at], Order(order.grant, part)])
    lender = "" if order.step is None else f" and borrow from {order.step.describe()}"
    return OverdrawnError([f"{order.grant.describe()} cannot commit {order.pages[pool]} pages of {name}{lender}"], at)


def undo(charged: Sequence[Order]) -> None:
    """Take charges back, last one first: what `charge` did to the ledgers, in reverse."""
    for order in reversed(charged):
        for pool, count in enumerate(order.pages):
            if count:
                order.grant.pay(pool, count)


def places_at_hand(pools: Sequence[Pool], budget: Budget, totals: Sequence[int]) -> bool:
    """Whether holes and free slabs take the new pages as things stand, each pool within its cap."""
    opened = 0
    for pool, total in zip(pools, totals, strict=True):
        if total:
            short = pool.slabs_short(total)
            if short and pool.slabs + short > budget.caps[pool.number]:
                return False
            opened += short
    return opened <= len(pools[0].stock.free)


def hand_out(orders: Sequence[Order], pool: Pool, total: int) -> Sequence[Handles]:
    """Take `total` places of `pool`, all of them at hand, and deal their handles out in the order of the orders."""
    number = pool.number
    if total == 1:
        return _hand_out_one(orders, pool)
    index = pool.index_at[pool.take(total)]
    handles = pool.handle_of[index]
    pool.state[index] = HELD
    if len(orders) == 1:
        grant = orders[0].grant
        pool.owner[index] = grant.id
        grant.record(number, handles)
        return (handles,)
    counts = [order.pages[number] for order in orders]
    ids = [order.grant.id for order in orders]
    pool.owner[index] = ids if max(counts) == 1 == min(counts) else np.repeat(ids, counts)
    ends = list(accumulate(counts))
    dealt = [handles[end - count : end] if count else NO_HANDLES for count, end in zip(counts, ends, strict=True)]
    for order, count, part in zip(orders, counts, dealt, strict=True):
        if count:  # Grant.record, in place: a step has hundreds of these
            grant = order.grant
            grant.chunks[number].append(part)
            grant.recorded[number] += count
    return dealt


def _hand_out_one(orders: Sequence[Order], pool: Pool) -> Sequence[Handles]:
    # The same in scalars: an array costs more to make than all the rest.
    number = pool.number
    index = pool.index_at.item(pool.take_one())
    handles = pool.handle_of[index : index + 1].copy()
    pool.state[index] = HELD
    taker = next(at for at, order in enumerate(orders) if order.pages[number])
    grant = orders[taker].grant
    pool.owner[index] = grant.id
    grant.record(number, handles)
    return (*repeat(NO_HANDLES, taker), handles, *repeat(NO_HANDLES, len(orders) - taker - 1))

"""The parts of a commit: charge every order, see whether places are at hand, deal the new pages out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from halocline.errors import OverdrawnError
from halocline.memory.budget import Budget
from halocline.memory.demand import Demand
from halocline.memory.grant import NO_HANDLES, Handles, Order
from halocline.memory.pool import HELD, Pool


def charge(orders: Sequence[Order], names: Sequence[str]) -> list[tuple[int, ...]]:
    """Charge every order to its grant and lender; return the new pages per pool and order.

    Raises OverdrawnError, with every charge undone, if one exceeds what its grant and its lender have left.
    """
    pools = len(names)
    for at, order in enumerate(orders):
        grant, pages = order.grant, order.pages
        if len(pages) != pools or not grant.is_open:
            undo(orders[:at])
            raise OverdrawnError([f"{grant.describe()} cannot commit {pages}: it is closed or not of {pools} pools"], at)
        room, taken = grant.room, grant.taken
        for pool, count in enumerate(pages):
            if 0 < count <= room[pool]:  # Grant.charge without a lender, in place: a step has hundreds of these
                room[pool] -= count
                taken[pool] += count
            elif count and (count < 0 or not grant.charge(pool, count, order.step)):
                raise _overdrawn(orders, at, pool, names[pool])
    return list(zip(*[order.pages for order in orders], strict=True)) or [()] * pools


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


def hand_out(
    orders: Sequence[Order], pools: Sequence[Pool], pages: Sequence[tuple[int, ...]]
) -> tuple[tuple[Handles, ...], ...]:
    """Take the places of all `pages` (per pool and order), which are at hand; return the handles per order and pool."""
    deal = _deal_to_one if len(orders) == 1 else _deal
    columns = [deal(orders, pool, counts) for pool, counts in zip(pools, pages, strict=True)]
    handles = tuple(zip(*columns, strict=True))
    for order, receipt in zip(orders, handles, strict=True):
        order.grant.receipts.append(receipt)
    return handles


def _deal_to_one(orders: Sequence[Order], pool: Pool, counts: tuple[int, ...]) -> tuple[Handles, ...]:
    count, owner = counts[0], orders[0].grant.id
    if count == 0:
        return (NO_HANDLES,)
    if count > 1:
        index = pool.index_at[pool.take(count)]
        pool.state[index] = HELD
        pool.owner[index] = owner
        return (pool.handle_of[index],)
    at = pool.index_at.item(pool.take_one())  # in scalars: an array costs more to make than all the rest
    pool.state[at] = HELD
    pool.owner[at] = owner
    return (pool.handle_of[at : at + 1].copy(),)


def _deal(orders: Sequence[Order], pool: Pool, counts: tuple[int, ...]) -> Sequence[Handles]:
    total = sum(counts)
    if total == 0:
        return (NO_HANDLES,) * len(orders)
    index = pool.index_at[pool.take(total)]
    handles = pool.handle_of[index]
    owners = [order.grant.id for order in orders]
    pool.state[index] = HELD
    if min(counts) == max(counts) == 1:
        pool.owner[index] = owners
        return list(handles.reshape(-1, 1))
    pool.owner[index] = np.repeat(owners, counts)
    ends = accumulate(counts)
    return [handles[end - count : end] if count else NO_HANDLES for end, count in zip(ends, counts, strict=True)]

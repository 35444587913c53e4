"""The parts of a commit: charge every order, see whether places are at hand, deal the new pages out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat

import numpy as np
from numpy.typing import NDArray

from halocline.errors import OverdrawnError
from halocline.memory.budget import Budget
from halocline.memory.demand import Demand
from halocline.memory.grant import NO_HANDLES, Dealt, Handles, Order
from halocline.memory.pool import HELD, Pool


def charge(orders: Sequence[Order], names: Sequence[str]) -> None:
    """Charge every order to its grant and lender.

    Raises OverdrawnError, with every charge undone, if one exceeds what its grant and its lender have left.
    """
    pools = len(names)
    for at, order in enumerate(orders):
        grant, pages = order.grant, order.pages
        if len(pages) != pools or not grant.is_open:
            undo(orders[:at])
            why = f"it is closed or not of {pools} pools"
            raise OverdrawnError([f"{grant.describe()} cannot commit {pages}: {why}"], at)
        room, pool = grant.room, 0
        for count in pages:  # Grant.charge without a lender, in place: a step has hundreds
            if count:
                left = room[pool] - count
                if left >= 0 and count > 0:
                    room[pool] = left
                elif count < 0 or not grant.charge(pool, count, order.step):
                    raise _overdrawn(orders, at, pool, names[pool])
            pool += 1  # noqa: SIM113 - with enumerate() all this takes a third longer


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
    for number, total in enumerate(totals):
        if total == 0:
            continue
        pool = pools[number]
        if total > pool.slabs * pool.per_slab - pool.live_pages:  # more than its holes
            short = pool.slabs_short(total)
            if pool.slabs + short > budget.caps[number]:
                return False
            opened += short
    return opened == 0 or opened <= len(pools[0].stock.free)


def columns(orders: Sequence[Order], pools: int) -> list[tuple[int, ...]]:
    """Return the pages of `orders` by pool."""
    return list(zip(*[order.pages for order in orders], strict=True)) or [()] * pools


def hand_out_one(order: Order, pools: Sequence[Pool]) -> tuple[tuple[Handles, ...], ...]:
    """Take the places of all pages of a lone order, which are at hand; return the handles per order and pool."""
    grant, handles = order.grant, []
    for pool, count in enumerate(order.pages):
        handles.append(pools[pool].deal(count, grant.id) if count else NO_HANDLES)
    dealt = (tuple(handles),)
    grant.receipts.append((dealt, 0))
    return dealt


def hand_out(
    orders: Sequence[Order], pools: Sequence[Pool], pages: Sequence[tuple[int, ...]]
) -> tuple[tuple[Handles, ...], ...] | Dealt:
    """Take the places of all `pages` (per pool and order), which are at hand; return the handles per order and pool."""
    if not orders:
        return ()
    owners = np.array([order.grant.id for order in orders], np.int64)
    handles, ends = zip(*map(_deal, repeat(owners), pools, pages), strict=True)
    dealt = Dealt(handles, ends)
    for at, order in enumerate(orders):
        order.grant.receipts.append((dealt, at))
    return dealt


def _deal(owners: NDArray[np.int64], pool: Pool, counts: tuple[int, ...]) -> tuple[Handles, Sequence[int]]:
    # `counts` pages to each of `owners`, ids of grants: all handles, and where those of each owner end.
    total = sum(counts)
    if total == 0:
        return NO_HANDLES, (0,) * len(counts)
    index = pool.index_at[pool.take(total)]
    pool.state[index] = HELD
    if total == len(counts) and all(counts):  # one page each, as in decode
        pool.owner[index] = owners
        return pool.handle_of[index], range(1, total + 1)
    pool.owner[index] = np.repeat(owners, counts)
    return pool.handle_of[index], tuple(accumulate(counts))

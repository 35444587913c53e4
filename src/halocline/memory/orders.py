"""The parts of a commit: charge every order, see whether places are at hand, deal the new pages out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halocline.errors import InvariantError
from halocline.memory.budget import Budget
from halocline.memory.demand import Demand
from halocline.memory.grant import NO_HANDLES, Handles, Order
from halocline.memory.owners import Owners
from halocline.memory.pool import HELD, Pool


def charge(orders: Sequence[Order], names: Sequence[str]) -> list[int]:
    """Charge every order to its grant and lender; return the new pages per pool.

    Raises InvariantError, with every charge undone, if one exceeds what its grant and its lender have left.
    """
    totals = [0] * len(names)
    for at, order in enumerate(orders):
        grant, pages, step = order.grant, order.pages, order.step
        if len(pages) != len(names) or not grant.is_open:
            undo(orders[:at])
            raise InvariantError(
                [f"{grant.describe()} cannot commit {pages}: it is closed or not of {len(names)} pools"]
            )
        for pool, count in enumerate(pages):
            if count == 0:
                continue
            if count < 0 or not grant.charge(pool, count, step):
                part = Demand(n if p < pool else 0 for p, n in enumerate(pages))
                undo([*orders[:at], Order(grant, part)])
                lender = "" if step is None else f" and borrow from {step.describe()}"
                raise InvariantError([f"{grant.describe()} cannot commit {count} pages of {names[pool]}{lender}"])
            totals[pool] += count
    return totals


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


def hand_out(orders: Sequence[Order], pool: Pool, total: int, owners: Owners) -> list[Handles]:
    """Take `total` places of `pool`, all of them at hand, and deal their handles out in the order of the orders."""
    number = pool.number
    index = pool.index_at[pool.take(total)]
    handles = pool.handle_of[index]
    pool.state[index] = HELD
    if len(orders) == 1:
        pool.owner[index] = orders[0].grant.id
        owners.record(orders[0].grant, number, handles)
        return [handles]
    pool.owner[index] = np.repeat([order.grant.id for order in orders], [order.pages[number] for order in orders])
    dealt: list[Handles] = []
    at = 0
    for order in orders:
        count = order.pages[number]
        part = handles[at : at + count] if count else NO_HANDLES
        if count:
            owners.record(order.grant, number, part)
        dealt.append(part)
        at += count
    return dealt

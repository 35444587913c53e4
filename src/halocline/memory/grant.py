"""The words in which the budget is spoken: grants and their ledger, refusals, orders, commits and pins.

A grant is a promise of pages that cannot fail. Its ledger, per pool:

    demand      pages it may hold on its own account
    room        what is promised and not yet taken, never negative
    borrowed    pages it holds that a lender (a step grant, the floor) pays for
    held        demand - room + borrowed: pages it holds now, and those that it lent
    lent        part of `held` that borrowers hold

`held` is not written down: a page that is handed out changes one number. Whoever borrows has no room of its own:
`borrowed == max(0, held - demand)` at all times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from halocline.errors import InvariantError
from halocline.memory.demand import Demand

Handles = NDArray[np.int64]
NO_HANDLES: Handles = np.zeros(0, np.int64)
NO_HANDLES.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the budget says no, with the numbers: never an exception, because the caller goes on with other work."""

    reason: Literal["memory", "cap"]
    """`cap`: a pool would exceed its cap (static split); `memory`: all pools together exceed the arena."""
    extra: Demand
    """The pages asked for beyond what is held and promised."""
    slabs_missing: int
    """Slabs that the pool (`cap`) or the arena (`memory`) is short of."""
    message: str


class Dealt:
    """What one commit handed out to several orders: for each of them a tuple of its handles, one array per pool.

    The arrays are cut out of those of all orders only when somebody looks: in a decode of hundreds each takes a page,
    and to make an object of each page costs as much as all the rest of the commit.
    """

    __slots__ = ("_by_pool", "_ends")

    def __init__(self, by_pool: tuple[Handles, ...], ends: tuple[Sequence[int], ...]) -> None:
        self._by_pool = by_pool  # the handles of all orders, one order after another
        self._ends = ends  # per pool and order

    def part(self, order: int, pool: int) -> Handles:
        """Return the handles of `pool` for the order with that number, counted from 0."""
        ends = self._ends[pool]
        return self._by_pool[pool][ends[order - 1] if order else 0 : ends[order]]

    def __len__(self) -> int:
        return len(self._ends[0])

    def __getitem__(self, order: int) -> tuple[Handles, ...]:
        number = range(len(self))[order]
        return tuple([self.part(number, pool) for pool in range(len(self._ends))])

    def __iter__(self) -> Iterator[tuple[Handles, ...]]:
        cut = []
        for handles, ends in zip(self._by_pool, self._ends, strict=True):
            parts, start = [], 0
            for end in ends:  # `part`, in place
                parts.append(handles[start:end])
                start = end
            cut.append(parts)
        return zip(*cut, strict=True)


Receipt = tuple[tuple[tuple[Handles, ...], ...] | Dealt, int]
"""What a commit handed out, and which of its orders is meant."""


class Loan:
    """Pages of one pool that a borrower holds on a lender's account."""

    __slots__ = ("count", "lender", "pool")

    def __init__(self, lender: Grant, pool: int, count: int) -> None:
        self.lender = lender
        self.pool = pool
        self.count = count


class Grant(msgspec.Struct, eq=False):
    """A promise of pages to one owner. Everybody may read it; only the arena writes it."""

    id: int
    owner: str
    asked: list[int]
    """Pages per pool that it may hold on its own account: its demand."""
    room: list[int]
    borrowed: list[int]
    lent: list[int]
    loans: list[Loan]
    receipts: list[Receipt]
    """What each commit handed out, some of it stale: how `release` finds what is still held."""
    is_open: bool = True

    @property
    def demand(self) -> Demand:
        """Pages per pool that the grant may hold on its own account."""
        return Demand(self.asked)

    @property
    def held(self) -> Demand:
        """Pages per pool that the grant holds now, borrowed ones and those it lent included."""
        return Demand(map(add, map(sub, self.asked, self.room), self.borrowed))

    def pages(self, pool: int) -> int:
        """Return how many pages of `pool` carry this grant's name."""
        return self.asked[pool] - self.room[pool] + self.borrowed[pool] - self.lent[pool]

    def charge(self, pool: int, count: int, lender: Grant | None) -> bool:
        """Charge `count` new pages, what exceeds the room to `lender`; False if both are short: nothing changed."""
        borrow = count - self.room[pool]
        if borrow <= 0:
            self.room[pool] -= count
            return True
        if lender is None or lender is self or lender.loans or lender.room[pool] < borrow or not lender.is_open:
            return False
        lender.room[pool] -= borrow
        lender.lent[pool] += borrow
        self.loans.append(Loan(lender, pool, borrow))
        self.borrowed[pool] += borrow
        self.room[pool] = 0
        return True

    def pay(self, pool: int, count: int) -> None:
        """Take `count` pages off the books: borrowed ones are paid back first, then the promise grows back."""
        repaid = min(count, self.borrowed[pool])
        if repaid:
            self.repay(pool, repaid)
        self.room[pool] += count - repaid

    def repay(self, pool: int, count: int) -> None:
        """Give `count` borrowed pages of room back, to the most recent lender first."""
        for lender, pages in self._settle(pool, count):
            lender.room[pool] += pages

    def hand_over(self, pool: int, count: int) -> None:
        """Take `count` pages off the books whose bytes a transfer keeps: the demand falls, so no promise grows.

        Where all that is left is borrowed, the lender's demand falls instead: the bytes are gone either way.
        """
        own = min(count, self.asked[pool])
        self.asked[pool] -= own
        for lender, pages in self._settle(pool, count - own):
            lender.asked[pool] -= pages

    def give_away(self, pool: int, count: int) -> None:
        """Take `count` own pages off the books with the demand that covered them: the room stays as it is."""
        self.asked[pool] -= count

    def take_in(self, pool: int, count: int) -> None:
        """Put `count` pages on the books with the demand that covers them: the room stays as it is."""
        self.asked[pool] += count

    def raise_demand(self, pool: int, count: int) -> None:
        """Raise the demand by `count` pages; borrowed pages become the grant's own first."""
        self.asked[pool] += count
        repaid = min(count, self.borrowed[pool])
        if repaid:
            self.repay(pool, repaid)
        self.room[pool] += count - repaid

    def _settle(self, pool: int, count: int) -> list[tuple[Grant, int]]:
        # Ends loans of `count` pages, most recent first; the lender's side of the book is the caller's.
        settled: list[tuple[Grant, int]] = []
        for at in range(len(self.loans) - 1, -1, -1):
            if count == 0:
                break
            loan = self.loans[at]
            if loan.pool != pool:
                continue
            pages = min(count, loan.count)
            loan.count -= pages
            count -= pages
            self.borrowed[pool] -= pages
            loan.lender.lent[pool] -= pages
            settled.append((loan.lender, pages))
            if loan.count == 0:
                del self.loans[at]
        assert count == 0, f"{self.owner!r} has {count} more borrowed pages of pool {pool} than loans"
        return settled

    def check_open(self) -> None:
        """Raise InvariantError if the grant has ended."""
        if not self.is_open:
            raise InvariantError([f"{self.describe()} was released before"])

    def describe(self) -> str:
        """Say in words whose grant this is and how much of it is used."""
        return f"grant of {self.owner!r} (demand {tuple(self.asked)}, held {tuple(self.held)})"


class Order(msgspec.Struct, frozen=True, eq=False, gc=False):  # in no cycle, and a step makes hundreds
    """Commit `pages` new pages to `grant`; what exceeds its room is borrowed from `step`: a step grant or the floor."""

    grant: Grant
    pages: Demand
    step: Grant | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """Copy page `source` of pool `pool` onto page `target`; both are page numbers (physical places), not handles.

    In one step sources and targets are disjoint, so the moves may be done in parallel and in any order.
    """

    pool: int
    source: int
    target: int


class Commit(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What came of a step's orders."""

    handles: tuple[tuple[Handles, ...], ...] | Dealt
    """New handles, per order and per pool."""
    moves: tuple[Move, ...]
    """All moves of the step: one parallel pass before anything else is written."""
    evicted: tuple[Handles, ...]
    """Handles of cached pages that died, per pool: whoever cached them must forget them."""


@dataclass(slots=True, eq=False)
class Pin:
    """Pages that must stay where they are, for a reader outside the stream. Written by the arena only."""

    owner: str
    handles: tuple[Handles, ...]
    """Per pool."""
    deferred: tuple[int, ...] = ()
    """Pools whose pages must be gathered first: the next commit does so, and its moves come before the readers."""
    is_open: bool = True

    @property
    def is_in_force(self) -> bool:
        """Whether the pages stand where they will stay, so that their places may be told to a reader."""
        return self.is_open and not self.deferred

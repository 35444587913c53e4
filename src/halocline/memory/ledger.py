"""Promises to owners: grants are opened, raised and lowered here, and this is where the no is said.

    reserve   a new grant           extend   a higher demand           shrink   a lower one, never below what is held

Both answers that may be no come from one predicate, `Budget.fits`; a Refusal carries its arithmetic. `CachedPages.lock`
asks the same question for pages and demand together, and then opens or raises the grant here.
"""

from __future__ import annotations

from collections.abc import Sequence

from halocline.errors import InvariantError
from halocline.memory.budget import Budget
from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Refusal
from halocline.memory.owners import Owners


class Ledger:
    """The open grants of an arena against its budget."""

    __slots__ = ("budget", "owners")

    def __init__(self, budget: Budget, owners: Owners) -> None:
        self.budget = budget
        self.owners = owners

    def reserve(self, owner: str, demand: Demand) -> Grant | Refusal:
        """Promise `demand` to `owner`, all or nothing."""
        self.asked(owner, demand)
        return self.open(owner, demand) if self.budget.fits(demand) else self.refusal(demand)

    def extend(self, grant: Grant, demand: Demand) -> Grant | Refusal:
        """Raise the demand of `grant` to `demand`, which is at least as much in every pool; all or nothing.

        Pages that the grant has borrowed become its own first.
        """
        extra = self.extra(grant, demand)
        return self.raise_by(grant, extra) if self.budget.fits(extra) else self.refusal(extra)

    def extend_all(self, extras: Sequence[tuple[Grant, Sequence[int]]]) -> Sequence[Grant] | Refusal:
        """Raise the demand of each grant by so many pages per pool, all or nothing: one question for all of them."""
        for grant, extra in extras:
            grant.check_open()
            if min(extra, default=0) < 0:
                raise InvariantError([f"{grant.owner!r} extends its demand {grant.demand} by {tuple(extra)}"])
        total = Demand(map(sum, zip(*[extra for _, extra in extras], strict=True)))
        if extras and not self.budget.fits(total):
            return self.refusal(total)
        return [self.raise_by(grant, extra) for grant, extra in extras]

    def shrink(self, grant: Grant, demand: Demand) -> None:
        """Lower the demand of `grant` to `demand`; never below what it holds on its own account."""
        grant.check_open()
        less = grant.demand.minus(demand)
        if min(less, default=0) < 0 or any(map(int.__gt__, less, grant.room)):
            raise InvariantError([f"{grant.describe()} cannot shrink to {demand}: its room is {tuple(grant.room)}"])
        for pool, count in enumerate(less):
            grant.asked[pool] -= count
            grant.room[pool] -= count
            self.budget.promised[pool] -= count

    def open(self, owner: str, demand: Demand) -> Grant:
        """Promise `demand`, which fits, to `owner`."""
        promised = self.budget.promised
        for pool, count in enumerate(demand):
            promised[pool] += count
        return self.owners.open(owner, demand)

    def raise_by(self, grant: Grant, extra: Sequence[int]) -> Grant:
        """Raise the demand of `grant` by `extra`, which fits."""
        for pool, count in enumerate(extra):
            if count:
                self.budget.promised[pool] += count
                grant.raise_demand(pool, count)
        return grant

    def refusal(self, extra: Demand) -> Refusal:
        """Return why `extra`, which does not fit, does not."""
        refusal = self.budget.shortfall(extra)
        assert refusal is not None, f"{extra} does not fit, and yet nothing is short"
        return refusal

    def extra(self, grant: Grant, demand: Demand) -> Demand:
        """Return by how much `demand` is more than that of `grant`. Raises InvariantError if it is less anywhere."""
        grant.check_open()
        extra = demand.minus(grant.demand)
        if min(extra, default=0) < 0:
            raise InvariantError([f"{grant.owner!r} extends its demand {grant.demand} to less: {demand}"])
        return extra

    def asked(self, owner: str, demand: Demand) -> Demand:
        """Return `demand`, which `owner` asks for anew. Raises InvariantError if it is less than nothing anywhere."""
        for pages in demand:  # not min(), which takes as long as all of the budget's question
            if pages < 0:
                raise InvariantError([f"{owner!r} reserves {demand}: pages are counted from 0"])
        return demand

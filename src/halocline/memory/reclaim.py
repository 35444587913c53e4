"""Which cached pages go when a commit finds too few places: judged in page counts, over all pools at once.

With moves only counts matter: a pool of x pages can always be packed into max(pinned, ceil(x / k)) slabs. So the
question is how many cached pages of each pool to give up until all pools together fit the arena, each within its cap.

Giving up pages frees nothing until a whole slab is won. The next slab of a pool that holds x pages costs
x - (ceil(x / k) - 1) * k pages: at first the odd ones, then k each time. Costs never fall, so buying the cheapest
next slab over all pools until the arena fits is complete (R1), minimal (R2) and, for single pages, cheapest (R3).
"""

from __future__ import annotations

from dataclasses import dataclass

from halocline.memory.demand import Demand, zero
from halocline.memory.grant import Refusal
from halocline.units import ceil_div


@dataclass(frozen=True, slots=True)
class Pressure:
    """What stands against what, per pool, in the order of `ArenaLayout.pools`."""

    slabs: int
    pages_per_slab: tuple[int, ...]
    page_bytes: tuple[int, ...]
    caps: tuple[int, ...]
    """Most slabs of each pool."""
    pinned_slabs: tuple[int, ...]
    fixed: tuple[int, ...]
    """Pages that cannot go: held ones and those about to be committed."""
    cached: tuple[int, ...]
    """Pages that can."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many cached pages of each pool to evict."""

    evict: Demand


def reclaim_plan(pressure: Pressure) -> Plan | Refusal:
    """Return the fewest bytes to evict so that all pools fit, or a Refusal if evicting everything would not help."""
    evict = [_to_fit_cap(pressure, pool) for pool in range(len(pressure.fixed))]
    missing = sum(_slabs(pressure, pool, evict[pool]) for pool in range(len(evict))) - pressure.slabs
    while missing > 0:
        offers = [
            (cost * pressure.page_bytes[pool], pool, cost)
            for pool, gone in enumerate(evict)
            if (cost := _next_slab(pressure, pool, gone)) is not None
        ]
        if not offers:
            break
        _, pool, cost = min(offers)
        evict[pool] += cost
        missing -= 1
    over = [p for p, gone in enumerate(evict) if _slabs(pressure, p, gone) > pressure.caps[p]]
    return _refusal(pressure, missing, over) if missing > 0 or over else Plan(Demand(evict))


def _slabs(pressure: Pressure, pool: int, gone: int) -> int:
    left = pressure.fixed[pool] + pressure.cached[pool] - gone
    return max(pressure.pinned_slabs[pool], ceil_div(left, pressure.pages_per_slab[pool]))


def _to_fit_cap(pressure: Pressure, pool: int) -> int:
    # A pool at its cap can only make itself pay.
    over = pressure.fixed[pool] + pressure.cached[pool] - pressure.caps[pool] * pressure.pages_per_slab[pool]
    return min(max(0, over), pressure.cached[pool])


def _next_slab(pressure: Pressure, pool: int, gone: int) -> int | None:
    # Cached pages that must go for one slab less; None when pins or fixed pages keep the slab.
    per_slab = pressure.pages_per_slab[pool]
    left = pressure.fixed[pool] + pressure.cached[pool] - gone
    slabs = ceil_div(left, per_slab)
    cost = left - (slabs - 1) * per_slab
    if slabs <= pressure.pinned_slabs[pool] or cost > pressure.cached[pool] - gone:
        return None
    return cost


def _refusal(pressure: Pressure, missing: int, over: list[int]) -> Refusal:
    pools = len(pressure.fixed)
    if over:
        pool = over[0]
        excess = _slabs(pressure, pool, pressure.cached[pool]) - pressure.caps[pool]
        message = (
            f"pool {pool} needs {excess} slabs more than its cap of {pressure.caps[pool]}, with nothing cached left"
        )
        return Refusal("cap", zero(pools), excess, message)
    message = f"{missing} of {pressure.slabs} slabs are missing after everything unlocked is evicted"
    return Refusal("memory", zero(pools), missing, message)

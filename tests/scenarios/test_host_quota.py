"""I1: the byte quota of the host arena is never exceeded, whatever the mix of kinds (151 % were seen).

Requests of 20 full pages, 3 pages of a window and a state are copied to the host until it says no. Per 100 bytes of
full pages they bring 36 of the window and 15 of the state: who counts full pages only takes 151 % of the quota.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Refusal
from halocline.memory.host import HostArena
from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Full, Sliding, State
from halocline.units import ceil_div
from testing.schedule import PoolSpec, tiny_layout

POOLS: tuple[PoolSpec, ...] = ((Full(), 4, 12), (Sliding(9), 4, 5), (State(), 1, 4))
"""A slab is 12 full pages, 5 pages of the window or 4 states."""
COPY = Demand((20, 3, 1))
LAYOUT = tiny_layout(POOLS, 8)
STRIDES = [pool.stride_bytes for pool in LAYOUT.pools]
FULL_BYTES = COPY[0] * STRIDES[0]
QUOTA_BYTES = 40 * FULL_BYTES
"""The full pages of 40 copies: 66 whole slabs and two thirds of one."""
MakeHost = Callable[[], HostArena]


def shipped() -> HostArena:
    return HostArena(LAYOUT, QUOTA_BYTES)


class CountsFullPages(HostArena):
    """The wrong policy: what is not a full page is small, and not counted."""

    def __init__(self, layout: ArenaLayout, quota_bytes: int) -> None:
        super().__init__(layout, 2 * quota_bytes)
        self.quota_bytes = quota_bytes
        self.counted_bytes = 0

    def reserve(self, owner: str, demand: Demand) -> Grant | Refusal:
        more = demand[0] * STRIDES[0]
        if self.counted_bytes + more > self.quota_bytes:
            return Refusal("memory", demand, 1, "the quota is full")
        self.counted_bytes += more
        return super().reserve(owner, demand)


class QuotaPerKind(HostArena):
    """The wrong policy: every kind may fill the quota by itself."""

    def __init__(self, layout: ArenaLayout, quota_bytes: int) -> None:
        super().__init__(layout, 3 * quota_bytes)
        self.quota_bytes = quota_bytes

    def reserve(self, owner: str, demand: Demand) -> Grant | Refusal:
        held = self.arena.budget.held
        after = [(held[pool] + demand[pool]) * stride for pool, stride in enumerate(STRIDES)]
        if max(after) > self.quota_bytes:
            return Refusal("memory", demand, 1, "the quota of a kind is full")
        return super().reserve(owner, demand)


def fill(host: HostArena, mix: list[Demand]) -> int:
    """Copy requests to the host in turn until one is refused; return how many there were."""
    for count in range(1000):
        demand = mix[count % len(mix)]
        grant = host.reserve(f"copy {count}", demand)
        if isinstance(grant, Refusal):
            return count
        host.store(grant, [np.zeros(pages, np.int32) for pages in demand])
    raise AssertionError("the quota was never full")


def slabs(copies: int) -> int:
    return sum(ceil_div(copies * pages, pool.pages_per_slab) for pages, pool in zip(COPY, LAYOUT.pools, strict=True))


def test_i1_25_copies_fit_the_quota_and_the_26th_is_refused() -> None:
    host = shipped()
    assert (slabs(25), slabs(26), QUOTA_BYTES // LAYOUT.slab_bytes) == (64, 67, 66)
    assert fill(host, [COPY]) == 25
    assert host.figures().used_bytes == 25 * sum(pages * stride for pages, stride in zip(COPY, STRIDES, strict=True))
    assert host.figures().total_bytes <= QUOTA_BYTES
    assert host.arena.audit() == []


@pytest.mark.parametrize(
    "mix",
    [
        [Demand((20, 0, 0))],
        [Demand((0, 3, 0))],
        [Demand((0, 0, 1))],
        [Demand((20, 0, 0)), Demand((0, 3, 0)), Demand((0, 0, 1))],
        [Demand((1, 5, 2)), Demand((7, 1, 0))],
    ],
    ids=["full", "window", "state", "in turn", "mixed"],
)
def test_i1_no_mix_of_kinds_exceeds_the_quota_and_none_stops_a_slab_below_it(mix: list[Demand]) -> None:
    host = shipped()
    assert fill(host, mix) > 0
    figures = host.figures()
    assert figures.used_bytes <= figures.total_bytes <= QUOTA_BYTES
    assert figures.free_bytes < 3 * LAYOUT.slab_bytes, "it was refused while a slab was left for each kind"


def test_i1_bites_a_quota_that_counts_full_pages_only() -> None:
    host = CountsFullPages(LAYOUT, QUOTA_BYTES)
    assert fill(host, [COPY]) == 40
    assert host.figures().used_bytes == QUOTA_BYTES * 151 // 100


def test_i1_bites_a_quota_for_each_kind() -> None:
    host = QuotaPerKind(LAYOUT, QUOTA_BYTES)
    fill(host, [Demand((20, 0, 0)), Demand((0, 8, 0)), Demand((0, 0, 6))])
    assert host.figures().used_bytes > 2 * QUOTA_BYTES

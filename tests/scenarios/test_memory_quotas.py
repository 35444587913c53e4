"""B8, C2 and C3 of the scenarios: every store has a quota of its own, and usage is bytes over total bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.figures import ArenaFigures
from halocline.memory.grant import Grant, Order, Pin
from halocline.memory.retention import Full, Sliding, State
from testing.memory import as_handles, layout
from testing.schedule import GUARANTEED, World, rules, tiny_layout

# ---- B8: arena, staging run, host arena


class Stores:
    """Three stores of the same pools, and a fake owner that takes a request's pages from one to the next.

    device   4 slabs    the request computes here; a pin keeps what is read while it travels
    staging  2 slabs    where a link writes
    host     3 slabs    where a retracted request's pages stay
    """

    def __init__(self) -> None:
        self.device = self._store(4)
        self.staging = self._store(2)
        self.host = self._store(3)

    @staticmethod
    def _store(slabs: int) -> Arena:
        return Arena(layout(full=4, sliding=2, slabs=slabs))

    @property
    def all(self) -> tuple[Arena, ...]:
        return self.device, self.staging, self.host

    def take(self, store: Arena, owner: str, demand: Demand) -> Grant:
        """Fill pages of a store; the caller knows that they fit."""
        grant = store.reserve(owner, demand)
        assert isinstance(grant, Grant), f"{owner!r} is refused {demand}: {grant.message}"
        done = store.commit([Order(grant, demand)])
        self.handles = done.handles[0]
        return grant

    def leave(self, grant: Grant) -> Pin:
        """Begin to read the pages last taken from the device; the request itself goes."""
        pin = self.device.pin("offload", [as_handles(of_pool) for of_pool in self.handles])
        self.device.release(grant)
        return pin


class OneQuota(Stores):
    """The wrong policy: all three are charged to the device's arena."""

    def __init__(self) -> None:
        super().__init__()
        self.staging = self.host = self.device


def check_b8(make: type[Stores]) -> None:
    stores, pages = make(), Demand((8, 2))
    stores.take(stores.staging, "another", Demand((0, 2)))
    request = stores.take(stores.device, "request-7", Demand((8, 4)))
    assert stores.device.figures().used_bytes == 4 * stores.device.layout.slab_bytes, "the device is full to the byte"
    on_device = stores.handles
    on_staging = stores.take(stores.staging, "link", Demand((4, 0)))
    on_host = stores.take(stores.host, "request-7", pages)
    used = [store.figures().used_bytes for store in stores.all]
    slab = stores.device.layout.slab_bytes
    assert used == [4 * slab, 2 * slab, 3 * slab], "each page is counted where it is, and nowhere else"
    stores.handles = on_device
    pin = stores.leave(request)
    assert stores.device.figures().transfer_bytes == 4 * slab, "what travels is the device's until the pin ends"
    stores.device.unpin(pin)
    stores.staging.release(on_staging)
    assert [store.figures().used_bytes for store in stores.all] == [0, slab, 3 * slab]
    assert not isinstance(stores.host.reserve("more", Demand((1, 0))), Grant), "the host's quota is full"
    assert isinstance(stores.device.reserve("request-8", Demand((8, 4))), Grant), "the device's is not"
    stores.host.release(on_host)
    for store in stores.all:
        figures = store.figures()
        assert figures.used_bytes + figures.hole_bytes + figures.free_bytes == store.layout.arena_bytes
        assert store.audit() == []


def test_b8_device_staging_and_host_have_each_their_own_quota() -> None:
    check_b8(Stores)


def test_b8_bites_one_quota_for_all_three() -> None:
    with pytest.raises(AssertionError, match="is refused"):
        check_b8(OneQuota)


# ---- C2: usage in bytes

Usage = Callable[[ArenaFigures], float]


def bytes_over_total(figures: ArenaFigures) -> float:
    return figures.used_bytes / figures.total_bytes


def fullest_pool(figures: ArenaFigures) -> float:
    """The wrong policy: the largest share of any pool in what that pool could hold now."""
    return max(pool.live_tokens / pool.capacity_tokens for pool in figures.pools if pool.capacity_tokens)


def fullest_pool_of_fixed_size(figures: ArenaFigures) -> float:
    """The wrong policy before that: the largest share of any pool in the whole arena's bytes."""
    return max(pool.used_bytes for pool in figures.pools) / figures.total_bytes


def loaded(*demands: Demand) -> ArenaFigures:
    """Return the figures of an arena of 12 slabs under these loads."""
    some = Arena(layout(full=4, sliding=2, state=1, slabs=12))
    for number, demand in enumerate(demands):
        grant = some.reserve(f"request-{number}", demand)
        assert isinstance(grant, Grant)
        some.commit([Order(grant, demand)])
    return some.figures()


LOADS = [Demand((12, 0, 0)), Demand((0, 6, 0)), Demand((0, 0, 3)), Demand((4, 2, 1)), Demand((8, 0, 1))]
"""Three slabs each."""


def check_c2(usage: Usage) -> None:
    for load in LOADS:
        assert usage(loaded(load)) == pytest.approx(3 / 12), f"{load} is a quarter of the bytes"
        for other in LOADS:
            together = usage(loaded(load, other))
            assert together == pytest.approx(6 / 12), f"{load} beside {other}: the mix shifts the figure to {together}"


def test_c2_usage_is_bytes_over_total_bytes_whatever_the_mix() -> None:
    check_c2(bytes_over_total)


@pytest.mark.parametrize("usage", [fullest_pool, fullest_pool_of_fixed_size], ids=lambda usage: usage.__name__)
def test_c2_bites_the_fullest_pool_shown_as_usage(usage: Usage) -> None:
    with pytest.raises(AssertionError):
        check_c2(usage)


def test_c2_a_threshold_in_bytes_is_crossed_by_bytes_alone() -> None:
    """The same watermark, every mix: below it with two slabs, not below it with three."""
    low_bytes = loaded().total_bytes // 4
    fewer = [Demand((8, 0, 0)), Demand((0, 4, 0)), Demand((0, 0, 2)), Demand((4, 2, 0)), Demand((0, 2, 1))]
    assert all(loaded(load).running_bytes >= low_bytes for load in LOADS)
    assert all(loaded(load).running_bytes < low_bytes for load in fewer)


# ---- C3: every pool has about a third of an arena in which not even a state is left


def check_c3(usage: Usage) -> None:
    """Six of eight requests run. The seventh lacks a state, which is larger than all that is left together."""
    pools = ((Full(), 16, 10), (Sliding(44), 16, 5), (State(), 1, 1))
    made = World(tiny_layout(pools, 18), rules(max_running_requests=16, step_tokens=256, admission=GUARANTEED))
    for number in range(8):
        made.arrive(f"r{number}", 161, 16)
    made.run_until(lambda: made.scheduler.figures().decoding == 6)
    made.plan_and_apply()
    figures, state_bytes = made.arena.figures(), made.layout.pools[2].stride_bytes
    assert figures.free_bytes == 0, "every slab is allocated"
    assert figures.hole_bytes == figures.total_bytes - figures.used_bytes < state_bytes
    assert [round(pool.used_bytes / figures.total_bytes, 2) for pool in figures.pools] == [0.37, 0.27, 0.33]
    assert usage(figures) > 0.96, f"the arena is full, and {usage(figures):.2f} is shown"
    reason = made.scheduler.reasons()["r6"]
    assert reason.code == "memory"
    assert "state: 6 held + 0 promised + 1 asked = 7 pages" in reason.detail
    assert "together 21 of 18 slabs, 3 too many" in reason.detail
    made.run().assert_all_finished()


def test_c3_a_full_arena_is_shown_as_full_and_who_waits_knows_why() -> None:
    check_c3(bytes_over_total)


def test_c3_bites_the_fullest_pool_shown_as_usage() -> None:
    with pytest.raises(AssertionError, match=r"0\.37 is shown"):
        check_c3(fullest_pool_of_fixed_size)

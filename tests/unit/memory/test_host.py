"""The host arena: its quota, the order of its work, and what decides between copying and computing."""

from __future__ import annotations

import numpy as np
import pytest

from halocline.errors import ConfigError
from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Refusal
from halocline.memory.host import HostArena, HostCopies, HostCosts, HostMoves, host_layout
from halocline.memory.retention import Full, Sliding
from testing.schedule import tiny_layout

POOLS = ((Full(), 4, 3), (Sliding(6), 4, 1))
LAYOUT = tiny_layout(POOLS, 10)


def host(slabs: int = 3) -> HostArena:
    """Return a host arena of so many slabs and a few bytes."""
    return HostArena(LAYOUT, slabs * LAYOUT.slab_bytes + 7)


def numbers(*pages: int) -> np.ndarray:
    """Return page numbers."""
    return np.array(pages, np.int32)


def granted(arena: HostArena, *pages: int) -> Grant:
    """Reserve pages per pool; they must fit."""
    answer = arena.reserve("copy", Demand(pages))
    assert isinstance(answer, Grant)
    return answer


def test_the_host_has_the_same_pages_and_as_many_slabs_as_fit_its_quota() -> None:
    laid = host_layout(LAYOUT, 3 * LAYOUT.slab_bytes + 7)
    assert (laid.pools, laid.slab_bytes, laid.slabs) == (LAYOUT.pools, LAYOUT.slab_bytes, 3)
    assert (laid.arena_bytes, laid.remainder_bytes) == (3 * LAYOUT.slab_bytes, 7)


def test_less_than_a_slab_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=f"{LAYOUT.slab_bytes - 1} bytes.* less than one slab of {LAYOUT.slab_bytes}"):
        HostArena(LAYOUT, LAYOUT.slab_bytes - 1)


def test_what_does_not_fit_the_quota_is_refused_and_equality_fits() -> None:
    arena = host()
    granted(arena, 3, 2)
    assert isinstance(arena.reserve("one more", Demand((1, 0))), Refusal)


def test_a_store_notes_one_copy_per_pool_in_the_order_of_the_pages() -> None:
    arena = host()
    commit = arena.store(granted(arena, 2, 1), [numbers(7, 5), numbers(4)])
    first, second = arena.take_work()
    assert isinstance(first, HostCopies)
    assert isinstance(second, HostCopies)
    assert (first.pool, first.device_pages.tolist()) == (0, [7, 5])
    assert first.host_pages.tolist() == arena.arena.physical(0, commit.handles[0][0]).tolist()
    assert (second.pool, second.device_pages.tolist()) == (1, [4])
    assert arena.take_work() == (), "work is given once"
    assert arena.stored_pages == [2, 1]


def test_moves_stand_before_the_copy_that_needs_their_room() -> None:
    """Two slabs of three full pages, one page left in each: a sliding page needs a slab, so one page moves."""
    arena = host(2)
    grant = granted(arena, 6, 0)
    handles = arena.store(grant, [numbers(*range(6)), numbers()]).handles[0][0]
    for keep in (0, 3):
        arena.arena.free(grant, 0, handles[keep + 1 : keep + 3])
    arena.arena.shrink(grant, Demand((2, 0)))
    arena.take_work()
    arena.store(granted(arena, 0, 1), [numbers(), numbers(9)])
    moves, copy = arena.take_work()
    assert isinstance(moves, HostMoves)
    assert isinstance(copy, HostCopies)
    assert [(move.pool, move.source // 3, move.target // 3) for move in moves.moves] in ([(0, 1, 0)], [(0, 0, 1)])
    assert copy.host_pages.tolist() == [moves.moves[0].source // 3]


def test_loads_name_the_places_after_all_work() -> None:
    arena = host(2)
    grant = granted(arena, 2, 0)
    handles = arena.store(grant, [numbers(8, 3), numbers()]).handles[0]
    (load,) = arena.loads(handles, [numbers(1, 2), numbers()])
    assert (load.pool, load.device_pages.tolist()) == (0, [1, 2])
    assert load.host_pages.tolist() == arena.arena.physical(0, handles[0]).tolist()


def test_work_that_is_dropped_is_not_given_to_a_later_step() -> None:
    arena = host()
    arena.store(granted(arena, 1, 0), [numbers(1), numbers()])
    assert arena.has_work
    arena.drop_work()
    assert not arena.has_work
    assert arena.take_work() == ()


def test_bytes_are_whole_strides() -> None:
    full, window = (pool.stride_bytes for pool in LAYOUT.pools)
    assert host().bytes_of((2, 3)) == 2 * full + 3 * window


@pytest.mark.parametrize(("copied", "tokens", "worth"), [(999, 10, True), (1000, 10, False), (1001, 10, False)])
def test_copying_is_chosen_when_it_takes_less_time_than_computing(copied: int, tokens: int, worth: bool) -> None:
    """1,000 bytes at 100 bytes a second take as long as 10 tokens at one a second."""
    assert HostCosts(100.0, 1.0).is_worth(copied, tokens) is worth


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_rates_are_above_zero(rates: tuple[float, float]) -> None:
    with pytest.raises(ConfigError):
        HostCosts(*rates)

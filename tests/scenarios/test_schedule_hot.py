"""A2, A14 and D7 through the real scheduler with the prefix cache on; the token oracle reads every page."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halocline.memory.arena import Arena
from halocline.memory.retention import Full, Sliding
from testing import wrong
from testing.schedule import GUARANTEED, PoolSpec, World, fewest_slabs, greedy, prompt, rules, takes, tiny_layout

SPLIT_OR_SHARED = pytest.mark.parametrize("split", [True, False], ids=["split", "shared"])
POOLS: tuple[PoolSpec, ...] = ((Full(), 4, 1), (Sliding(8), 4, 1))
HOT = {"prefix_cache": True}
Spoil = Callable[[World], None]


def right(made: World) -> None:
    """Spoil nothing."""


# --- A2: two windows' room, a cached prefix of two windows, five tokens left


def run_a2(split: bool, spoil: Spoil = right) -> None:
    """S = 16 tokens = 2 W, of which the floor has a page; shared: the fewest slabs that take the request alone."""
    slabs = 12 if split else fewest_slabs(POOLS, 21, 2, **HOT)
    made = World(tiny_layout(POOLS, slabs), rules(**HOT), (8, 4) if split else None)
    spoil(made)
    made.arrive("before", 17, 1)
    made.run()
    made.arrive("hot", (*prompt(16, 0), 90, 91, 92, 93, 94), 2)
    segments = {segment.request_id: segment for segment in made.plan_and_apply().segments}
    assert segments["hot"].start == 16, f"it computes from {segments['hot'].start} on and not from its cached prefix"
    made.run().assert_all_finished()
    assert made.steps <= 17 + 4


@SPLIT_OR_SHARED
def test_a2_who_resumes_on_a_cached_window_starts_at_once(split: bool) -> None:
    run_a2(split)
    if not split:
        assert not takes(POOLS, fewest_slabs(POOLS, 21, 2, **HOT) - 1, 21, 2, **HOT)


@SPLIT_OR_SHARED
def test_a2_bites_when_the_scheduler_charges_a_second_window(split: bool) -> None:
    with pytest.raises(AssertionError, match=r"nothing to compute|it computes from 0 on"):
        run_a2(split, wrong.charges_a_second_window)


# --- A14: what the candidate would resume on is what reclaim would evict


def run_a14(split: bool, kind: type[Arena] = Arena) -> None:
    """The candidate needs 7 + 3 pages, 5 + 2 of which are cached: without them it would fit beside who runs."""
    caps = (13, 10) if split else None
    made = World(tiny_layout(POOLS, 23 if split else 20), rules(admission=GUARANTEED, **HOT), caps, make_arena=kind)
    made.arrive("before", 21, 1)
    made.run()
    made.arrive("running", prompt(9, 5), greedy(24, ignore_eos=True))  # 8 + 3 pages of 32 positions, the floor has 1
    made.step()
    made.arrive("candidate", (*prompt(20, 0), 90, 91, 92, 93, 94), greedy(3, ignore_eos=True))
    before = [grant.owner for grant in made.arena.owners.grants.values()]
    held, cached = list(made.arena.budget.locked), list(made.arena.budget.cached)
    assert cached == [5, 5], "the candidate's prefix was meant to be cached"
    made.step()
    assert made.scheduler.reasons()["candidate"].code == "memory"
    assert [grant.owner for grant in made.arena.owners.grants.values()] == before, "it has taken something"
    assert (list(made.arena.budget.locked), list(made.arena.budget.cached)) == (held, cached), "it has locked something"
    made.run().assert_all_finished()


@SPLIT_OR_SHARED
def test_a14_the_candidates_own_prefix_counts_before_anything_is_taken(split: bool) -> None:
    run_a14(split)


@SPLIT_OR_SHARED
def test_a14_bites_when_the_scheduler_prices_and_then_locks(split: bool) -> None:
    with pytest.raises(AssertionError):
        run_a14(split, wrong.PricesThenLocks)


# --- D7: retracted, and back by a hit


@pytest.mark.parametrize("length", [255, 256, 257])
def test_d7_a_retracted_request_comes_back_by_a_hit_and_reads_the_right_pages(length: int) -> None:
    pools: tuple[PoolSpec, ...] = ((Full(), 256, 1), (Sliding(100), 256, 1))
    made = World(tiny_layout(pools, 12), rules(max_model_len=600, step_tokens=512, **HOT))
    made.arrive("a", length, greedy(6, ignore_eos=True))
    for _ in range(3):
        made.step()
    request = made.scheduler._roster.live["a"]
    made.scheduler._roster.retract(request)
    plan = made.plan_and_apply()
    assert plan.segments[0].start == (len(request.history) - 2) // 256 * 256
    made.run().assert_all_finished()

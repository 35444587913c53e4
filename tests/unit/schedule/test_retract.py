"""Victims: fewest bytes that suffice, then least work lost, and never one more than needed."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from halocline.memory.demand import Demand
from halocline.memory.retention import Full
from halocline.schedule.request import Request
from halocline.schedule.retract import MOST_TRIES, Victims
from testing.schedule import MIXED, World, greedy, rules, tiny_layout


def crowd(seed: int, slabs: int, most: int) -> tuple[World, list[Request]]:
    """Return a world in which requests of many sizes run, and the running ones by seniority."""
    draw = random.Random(seed)
    world = World(tiny_layout(MIXED, slabs), rules(max_running_requests=most, step_tokens=256))
    for index in range(most):
        world.arrive(f"r{index}", draw.randint(1, 25), greedy(draw.choice((5, 9, 30))))
    for _ in range(3):
        world.step()
    roster = world.scheduler._roster
    running = sorted((*roster.prefilling, *roster.decoding), key=lambda request: request.key)
    return world, running


def room_of(requests: tuple[Request, ...] | list[Request], pools: int) -> Demand:
    total = [0] * pools
    for request in requests:
        assert request.holding is not None
        total = [a + b for a, b in zip(total, request.holding.grant.demand, strict=True)]
    return Demand(total)


def victims(world: World, extra: Demand, juniors: list[Request]) -> tuple[Request, ...] | None:
    return Victims(world.arena, extra, juniors, world.scheduler._sharing.given_back).choose()


def cost(world: World, requests: tuple[Request, ...]) -> tuple[int, int]:
    pages = room_of(requests, len(world.layout.pools))
    strides = [pool.stride_bytes for pool in world.layout.pools]
    given = sum(count * stride for count, stride in zip(pages, strides, strict=True))
    return given, sum(request.computed for request in requests)


def suffices(world: World, extra: Demand, requests: tuple[Request, ...]) -> bool:
    return world.arena.fits(extra.minus(room_of(requests, len(extra))))


@pytest.mark.parametrize("most", [6, 12])
@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_cheapest_of_all(seed: int, most: int) -> None:
    """Every subset is tried here: up to 2,047 of them."""
    world, running = crowd(seed, 45 * most // 6, most)
    juniors = running[1:]
    assert len(juniors) >= most // 3
    for extra in (Demand((1, 0, 0)), Demand((0, 1, 0)), Demand((9, 2, 1)), Demand((30, 9, 3))):
        chosen = victims(world, extra, juniors)
        subsets = [s for n in range(len(juniors) + 1) for s in combinations(juniors, n) if suffices(world, extra, s)]
        if chosen is None:
            assert subsets == []
        else:
            assert suffices(world, extra, chosen)
            assert cost(world, chosen) == min(cost(world, subset) for subset in subsets)


def test_two_small_juniors_go_before_a_large_one_however_many_there_are() -> None:
    """Eight pages are missing: two of nine small juniors have twelve, the large one has 107."""
    world = World(tiny_layout(((Full(), 1, 1),), 200), rules(max_running_requests=20, step_tokens=256))
    world.arrive("senior", 4, greedy(4, ignore_eos=True))
    for index in range(9):
        world.arrive(f"small{index}", 3, greedy(4, ignore_eos=True))
    world.arrive("large", 100, greedy(8, ignore_eos=True))
    world.step()
    live = world.scheduler._roster.live
    extra = Demand((world.arena.most(0, Demand((0,))) + 8,))
    chosen = victims(world, extra, list(live.values())[1:])
    assert chosen is not None
    assert room_of(chosen, 1) == (12,), f"{[request.id for request in chosen]} gave way"


@pytest.mark.parametrize("tries", [0, MOST_TRIES])
@pytest.mark.parametrize("seed", range(6))
def test_among_many_juniors_no_victim_can_be_spared(seed: int, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are too many subsets to try (here: none is), and a good choice must do."""
    monkeypatch.setattr("halocline.schedule.retract.MOST_TRIES", tries)
    world, running = crowd(seed, 90, 20)
    juniors = running[1:]
    asked = 0
    for extra in (Demand((2, 1, 0)), Demand((40, 5, 2)), Demand((100, 20, 4)), Demand((10**4, 0, 0))):
        chosen = victims(world, extra, juniors)
        if chosen is None:
            assert not suffices(world, extra, tuple(juniors))
            continue
        assert suffices(world, extra, chosen)
        asked += len(chosen)
        for spared in chosen:
            rest = tuple(request for request in chosen if request is not spared)
            assert not suffices(world, extra, rest), f"{spared.id} was retracted for nothing"
    assert asked > 0, "nobody had to give way, so nothing was tested"


def test_nobody_gives_way_when_it_fits_anyway() -> None:
    world, running = crowd(1, 200, 6)
    assert victims(world, Demand((1, 1, 1)), running[1:]) == ()


def test_the_deficit_decides_and_not_the_length() -> None:
    """F4: a short junior that suffices goes; the long one, whose retraction would give back far more, stays."""
    world = World(tiny_layout(MIXED, 17), rules())
    for name, length in (("senior", 4), ("long", 40), ("short", 4)):
        world.arrive(name, length, greedy(4))
    world.step()
    world.step()
    live = world.scheduler._roster.live
    assert all(live[name].is_running for name in ("senior", "long", "short")), world.scheduler.reasons()
    spare = world.arena.most(0, Demand((0, 0, 0)))
    chosen = victims(world, Demand((spare + 1, 0, 0)), [live["long"], live["short"]])
    assert chosen == (live["short"],)


def test_among_equal_bytes_the_least_work_is_lost() -> None:
    world = World(tiny_layout(MIXED, 30), rules())
    for name in ("senior", "early", "late"):
        world.arrive(name, 8, greedy(20))
        world.step()
    live = world.scheduler._roster.live
    early, late = live["early"], live["late"]
    assert early.computed > late.computed
    spare = world.arena.most(0, Demand((0, 0, 0)))
    assert victims(world, Demand((spare + 1, 0, 0)), [early, late]) == (late,)

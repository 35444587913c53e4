"""The laws of the arena as properties of any history: L1 to L5 and L13."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.memory.demand import Demand
from halocline.memory.grant import Grant
from testing.memory import FREEING_ACTS, World, act, can_place, crowded, profile

RANDOMS = st.randoms(use_true_random=False)
CAPS = st.none() | st.tuples(*[st.none() | st.integers(1, 3)] * 3)
LENGTHS = st.integers(0, 12)
NOTHING = Demand((0, 0, 0))
GRID = [Demand((a, b, c)) for a in range(4) for b in range(4) for c in range(3)]


def reached(random: Random, caps, length: int) -> World:
    world = crowded(random, caps)
    for _ in range(length):
        act(world, random)
    return world


@profile(examples=120)
@given(RANDOMS, CAPS, LENGTHS)
def test_l1_l2_every_page_has_one_owner_and_keeps_its_content(random, caps, length):
    world = crowded(random, caps)
    for _ in range(length):
        act(world, random)
        world.check()


@profile(examples=120)
@given(RANDOMS, CAPS, LENGTHS, st.sampled_from(GRID))
def test_l3_reserve_says_yes_exactly_when_the_pages_can_be_placed(random, caps, length, demand):
    world = reached(random, caps, length)
    assert isinstance(world.arena.reserve("asker", demand), Grant) == can_place(world, demand)


@profile(examples=120)
@given(RANDOMS, CAPS, LENGTHS)
def test_l3_every_outstanding_grant_can_be_committed_at_once(random, caps, length):
    world = reached(random, caps, length)
    for pool in random.sample(range(3), 3):
        most = world.arena.most(pool, NOTHING)
        assert world.reserve(Demand(most if p == pool else 0 for p in range(3))) is not None
    world.check_every_grant_commits()


@profile(examples=120)
@given(RANDOMS, CAPS, LENGTHS)
def test_l3_every_outstanding_grant_can_be_committed_page_by_page(random, caps, length):
    world = reached(random, caps, length)
    pages = [
        (holding, pool) for holding in world.holdings for pool in range(3) for _ in range(holding.grant.room[pool])
    ]
    for holding, pool in random.sample(pages, len(pages)):
        world.commit([(holding, Demand(int(p == pool) for p in range(3)), None)])
    world.check()


@profile(examples=120)
@given(RANDOMS, CAPS, LENGTHS)
def test_l4_freeing_never_turns_a_yes_into_a_no(random, caps, length):
    world = crowded(random, caps)
    for _ in range(length):
        fitted = [demand for demand in GRID if world.arena.fits(demand)]
        name = act(world, random)
        if name in FREEING_ACTS:
            lost = [demand for demand in fitted if not world.arena.fits(demand)]
            assert not lost, f"after {name} {lost} no longer fit"


@profile(examples=120)
@given(RANDOMS, CAPS, LENGTHS)
def test_l5_the_greatest_pressure_leaves_locked_and_pinned_pages_alone(random, caps, length):
    world = reached(random, caps, length)
    locked = world.locked_copy()
    world.commit([])  # deferred pins come into force
    places = world.pinned_places()
    for pool in random.sample(range(3), 3):
        most = world.arena.most(pool, NOTHING)
        world.reserve(Demand(most if p == pool else 0 for p in range(3)))
        world.commit_all()
    assert world.locked == locked
    assert [len(world.places(pool, locked[pool])) for pool in range(3)] == list(map(len, locked))
    assert world.pinned_places() == places
    world.check()


@profile(examples=120)
@given(RANDOMS, CAPS, LENGTHS)
def test_l13_bytes_are_conserved_and_split_by_owner(random, caps, length):
    world = crowded(random, caps)
    for _ in range(length):
        act(world, random)
        figures = world.arena.figures()
        assert figures.used_bytes + figures.hole_bytes + figures.free_bytes == world.arena.layout.arena_bytes
        for pool, shape in enumerate(world.arena.layout.pools):
            mine, stride = figures.pools[pool], shape.stride_bytes
            assert mine.cached_bytes == len(world.cached[pool]) * stride
            assert mine.locked_bytes == len(world.locked[pool]) * stride
            assert mine.transfer_bytes == len(world.transfer[pool]) * stride
            assert mine.used_bytes == len(world.live(pool)) * stride
            assert mine.promised_bytes == world.promised()[pool] * stride
            assert mine.capacity_tokens >= mine.live_tokens


@pytest.mark.laws
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("hundred", range(14))
def test_long_histories_from_plain_seeds_hold_every_law(hundred):
    """Volume without shrinking: 100 worlds a time, 60 acts each. A failure names its seed."""
    for seed in range(100 * hundred, 100 * hundred + 100):
        random = Random(seed)
        world = crowded(random, random.choice([None, (2, 2, 1), (None, 1, None)]))
        for step in range(60):
            name = act(world, random)
            try:
                world.check()
                if step % 6 == 0:
                    world.check_every_grant_commits()
            except Exception as error:
                raise AssertionError(f"seed {seed}, act {step} ({name}): {error}") from error

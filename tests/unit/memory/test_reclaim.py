"""reclaim_plan against an exhaustive search over all numbers of pages to evict."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from halocline.memory.demand import Demand
from halocline.memory.reclaim import Plan, Pressure, Refusal, reclaim_plan
from testing.memory import profile

PAGES = st.integers(0, 5)


@st.composite
def pressures(draw) -> Pressure:
    slabs = draw(st.integers(1, 5))
    per_slab = draw(st.tuples(*[st.integers(1, 4)] * 3))
    return Pressure(
        slabs=slabs,
        pages_per_slab=per_slab,
        page_bytes=tuple(120 // count for count in per_slab),
        caps=draw(st.tuples(*[st.integers(1, slabs)] * 3)),
        pinned_slabs=draw(st.tuples(*[st.integers(0, 1)] * 3)),
        fixed=draw(st.tuples(PAGES, PAGES, PAGES)),
        cached=draw(st.tuples(PAGES, PAGES, PAGES)),
    )


def enough(pressure: Pressure, evict: tuple[int, ...]) -> bool:
    """Whether the rest fits: filled into slabs page by page."""
    total = 0
    for pool in range(3):
        room, slabs = 0, 0
        for _ in range(pressure.fixed[pool] + pressure.cached[pool] - evict[pool]):
            if room == 0:
                room, slabs = pressure.pages_per_slab[pool], slabs + 1
            room -= 1
        slabs = max(slabs, pressure.pinned_slabs[pool])
        if slabs > pressure.caps[pool]:
            return False
        total += slabs
    return total <= pressure.slabs


def every_way(pressure: Pressure) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(count + 1) for count in pressure.cached)))


def cost(pressure: Pressure, evict: tuple[int, ...]) -> int:
    return sum(count * size for count, size in zip(evict, pressure.page_bytes, strict=True))


@profile(examples=400)
@given(pressures())
def test_r1_a_refusal_comes_only_where_evicting_everything_would_not_help(pressure):
    plan = reclaim_plan(pressure)
    assert isinstance(plan, Plan) == enough(pressure, pressure.cached)
    assert isinstance(plan, Refusal) or enough(pressure, plan.evict)


@profile(examples=400)
@given(pressures())
def test_r2_no_page_of_a_plan_can_be_spared(pressure):
    plan = reclaim_plan(pressure)
    for pool in range(3) if isinstance(plan, Plan) else ():
        if plan.evict[pool]:
            spared = [count - (p == pool) for p, count in enumerate(plan.evict)]
            assert not enough(pressure, tuple(spared)), f"{plan.evict} spares a page of pool {pool}"


@profile(examples=400)
@given(pressures())
def test_r3_no_other_choice_of_pages_is_cheaper(pressure):
    plan = reclaim_plan(pressure)
    if isinstance(plan, Plan):
        cheapest = min(cost(pressure, evict) for evict in every_way(pressure) if enough(pressure, evict))
        assert cost(pressure, plan.evict) == cheapest


def test_a_pool_makes_its_peer_pay():
    """H1: all slabs are cached pages of one pool; the other one gets what it needs, and no more is evicted."""
    pressure = Pressure(4, (5, 1), (1, 5), (4, 4), (0, 0), fixed=(0, 1), cached=(20, 0))
    assert reclaim_plan(pressure) == Plan(Demand((5, 0)))


def test_only_the_shortfall_is_evicted():
    """G2: 445 cached pages, one page short."""
    pressure = Pressure(500, (1, 1), (1, 1), (500, 500), (0, 0), fixed=(56, 0), cached=(0, 445))
    assert reclaim_plan(pressure) == Plan(Demand((0, 1)))


def test_a_pool_at_its_cap_pays_for_itself():
    pressure = Pressure(4, (2, 2), (1, 1), (2, 2), (0, 0), fixed=(3, 0), cached=(2, 3))
    assert reclaim_plan(pressure) == Plan(Demand((1, 0)))


def test_a_refusal_for_memory_counts_the_missing_slabs():
    refusal = reclaim_plan(Pressure(2, (1, 1), (1, 1), (2, 2), (0, 0), fixed=(2, 2), cached=(1, 0)))
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.slabs_missing) == ("memory", 2)


def test_a_refusal_for_a_cap_names_the_pool():
    refusal = reclaim_plan(Pressure(4, (1, 1), (1, 1), (4, 1), (0, 0), fixed=(0, 3), cached=(0, 1)))
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.slabs_missing) == ("cap", 2)
    assert "pool 1" in refusal.message

"""The one capacity test, in numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.memory.budget import Budget
from halocline.memory.demand import Demand
from testing.memory import layout


def budget(*, slabs: int = 4, held=(0, 0), promised=(0, 0), cached=(0, 0), pinned=(0, 0), caps=None) -> Budget:
    """Five pages of the full pool in a slab, one of the sliding pool."""
    made = Budget(layout(full=5, sliding=1, slabs=slabs), caps)
    made.held[:] = held
    made.promised[:] = promised
    made.cached[:] = cached
    made.pinned_slabs[:] = pinned
    return made


def test_the_worked_example_of_the_module_holds():
    example = budget(held=(6, 1), promised=(4, 0))
    assert example.slabs_needed((10, 1)) == 3
    assert example.fits(Demand((1, 0)))
    example.promised[0] += 1
    assert not example.fits(Demand((0, 1)))
    assert example.fits(Demand((4, 0)))


@pytest.mark.parametrize(
    ("extra", "fits"),
    [((20, 0), True), ((21, 0), False), ((15, 1), True), ((16, 1), False), ((0, 4), True), ((0, 5), False)],
)
def test_equality_fits_and_one_page_more_does_not(extra, fits):
    assert budget().fits(Demand(extra)) == fits


def test_pages_are_rounded_to_slabs_once_after_they_are_added():
    assert budget(slabs=2, held=(6, 0)).fits(Demand((4, 0)))


def test_a_pinned_slab_is_needed_however_few_pages_it_holds():
    spread = budget(held=(2, 0), pinned=(2, 0))
    assert spread.slabs_needed((2, 0)) == 2
    assert spread.fits(Demand((8, 2)))
    assert not spread.fits(Demand((0, 3)))


def test_cached_pages_never_count_against_a_demand_but_are_seen_by_the_hint():
    full_of_cache = budget(cached=(20, 0))
    assert full_of_cache.fits(Demand((20, 0)))
    assert not full_of_cache.fits_untouched(Demand((1, 0)))


def test_an_empty_arena_knows_nothing_of_what_is_held():
    busy = budget(held=(20, 0), pinned=(4, 0))
    assert busy.fits_empty(Demand((20, 0)))
    assert not busy.fits_empty(Demand((21, 0)))


def test_a_cap_refuses_although_other_slabs_are_free():
    refusal = budget(caps=(1, None)).shortfall(Demand((6, 0)))
    assert refusal is not None
    assert (refusal.reason, refusal.slabs_missing) == ("cap", 1)


def test_a_pool_without_a_cap_is_refused_for_memory():
    refusal = budget().shortfall(Demand((30, 0)))
    assert refusal is not None
    assert (refusal.reason, refusal.slabs_missing) == ("memory", 2)


def test_a_refusal_shows_its_arithmetic():
    refusal = budget(held=(6, 1), promised=(4, 0)).shortfall(Demand((11, 0)))
    assert refusal is not None
    assert "full: 6 held + 4 promised + 11 asked = 21 pages, 5 per slab (0 slabs pinned): 5 slabs" in refusal.message
    assert "together 6 of 4 slabs, 2 too many" in refusal.message


FEW = st.tuples(st.integers(0, 12), st.integers(0, 4))
CAPS = st.tuples(*[st.none() | st.integers(1, 4)] * 2)


@given(FEW, FEW, FEW, st.tuples(st.integers(0, 2), st.integers(0, 2)), CAPS, FEW)
def test_the_question_the_refusal_and_the_count_of_slabs_agree(held, promised, cached, pinned, caps, extra):
    some = budget(held=held, promised=promised, cached=cached, pinned=pinned, caps=caps)
    needs = some.slabs_by_pool(map(sum, zip(held, promised, extra, strict=True)))
    within = sum(needs) <= 4 and all(cap is None or need <= cap for need, cap in zip(needs, caps, strict=True))
    assert some.fits(Demand(extra)) == within
    assert (some.shortfall(Demand(extra)) is None) == within


def test_what_fits_has_no_shortfall():
    assert budget().shortfall(Demand((20, 0))) is None


@pytest.mark.parametrize("extra", [(0, 0), (3, 1), (0, 2), (9, 2)])
@pytest.mark.parametrize("pool", [0, 1])
@pytest.mark.parametrize("caps", [None, (2, None), (None, 1)])
def test_most_is_the_border_of_fits(extra, pool, caps):
    some = budget(held=(3, 0), promised=(1, 1), pinned=(1, 0), caps=caps)
    most = some.most(pool, Demand(extra))
    with_most = list(extra)
    with_most[pool] += most
    with_more = list(extra)
    with_more[pool] += most + 1
    assert not some.fits(Demand(with_more))
    assert some.fits(Demand(with_most)) or most == 0


def test_most_is_zero_where_even_the_rest_does_not_fit():
    assert budget().most(0, Demand((0, 5))) == 0


def test_displayed_pages_suppose_that_only_one_pool_grows():
    some = budget(held=(6, 1), promised=(0, 1), cached=(2, 0))
    assert some.display_pages(0) == 10
    assert some.display_pages(1) == 2


def test_displayed_pages_are_never_fewer_than_the_live_ones():
    assert budget(slabs=2, held=(0, 1), promised=(0, 1), cached=(5, 0)).display_pages(0) == 5

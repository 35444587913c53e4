"""One order is handed out in scalars, several at once in arrays: both must leave the same books."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.grant import Commit, Dealt, Grant, Order
from testing.memory import arena, as_handles, profile

PAGES = st.tuples(st.integers(0, 4), st.integers(0, 3))
DEMANDS = st.lists(PAGES, min_size=2, max_size=5)


def granted(some: Arena, demands: list[tuple[int, int]]) -> list[Grant]:
    answers = [some.reserve(f"request-{i}", Demand(demand)) for i, demand in enumerate(demands)]
    assert all(isinstance(answer, Grant) for answer in answers)
    return [answer for answer in answers if isinstance(answer, Grant)]


def numbers(some: Arena, grants: list[Grant]) -> list[object]:
    budget = some.budget
    return [budget.held[:], budget.promised[:], *[(g.demand, g.held, g.room) for g in grants]]


@given(DEMANDS, st.data())
@profile(60)
def test_orders_of_one_commit_and_commits_of_one_order_leave_the_same_books(demands, data):
    together, apart = arena(full=3, sliding=2, slabs=24), arena(full=3, sliding=2, slabs=24)
    of_together, of_apart = granted(together, demands), granted(apart, demands)
    pages = [Demand(data.draw(st.integers(0, most)) for most in demand) for demand in demands]
    fresh = [*together.commit([Order(g, p) for g, p in zip(of_together, pages, strict=True)]).handles]
    alone = [apart.commit([Order(g, p)]).handles[0] for g, p in zip(of_apart, pages, strict=True)]
    assert [tuple(map(len, order)) for order in fresh] == [tuple(map(len, order)) for order in alone] == pages
    assert numbers(together, of_together) == numbers(apart, of_apart)
    for some, grants, handed in ((together, of_together, fresh), (apart, of_apart, alone)):
        assert some.audit() == []
        for grant, order in zip(grants, handed, strict=True):
            for pool, handles in enumerate(order):
                some.free(grant, pool, handles[:1])
            some.release(grant)
        assert some.audit() == []
        assert (some.budget.held, some.budget.promised, len(some.stock.free)) == ([0, 0], [0, 0], 24)


def commit_of_three() -> Commit:
    some = arena(full=4, sliding=4, slabs=8)
    grants = granted(some, [(2, 1), (0, 1), (1, 1)])
    return some.commit([Order(grant, grant.demand) for grant in grants])


def test_what_is_dealt_to_several_is_cut_the_same_whichever_way_one_looks():
    dealt = commit_of_three().handles
    assert isinstance(dealt, Dealt)
    whole = [[handles.tolist() for handles in order] for order in dealt]
    assert [list(map(len, order)) for order in whole] == [[2, 1], [0, 1], [1, 1]]
    assert [[handles.tolist() for handles in dealt[at]] for at in (0, 1, -1)] == whole
    assert dealt.part(2, 0).tolist() == whole[2][0]
    assert len({handle for order in whole for handle in order[0]}) == 3


def test_an_order_that_was_not_given_has_no_handles():
    dealt = commit_of_three().handles
    with pytest.raises(IndexError):
        dealt[3]


def test_no_orders_are_dealt_nothing():
    assert len(arena(full=4, slabs=8).commit([]).handles) == 0


def test_a_page_of_a_great_commit_is_found_when_its_grant_ends():
    some = arena(full=4, sliding=4, slabs=8)
    grants = granted(some, [(2, 1), (2, 1)])
    for _ in range(2):
        some.commit([Order(grant, Demand((1, 0))) for grant in grants])
    some.free(grants[0], 0, as_handles([]))
    some.release(grants[0])
    assert (some.budget.held, some.audit()) == ([2, 0], [])

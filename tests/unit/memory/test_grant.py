"""The ledger of a grant: what it owns, what it borrows, and in which order it pays back."""

from __future__ import annotations

from testing.memory import Grant


def grant(owner: str, *pages: int) -> Grant:
    return Grant(1, owner, [*pages], [*pages], [0] * len(pages), [0] * len(pages), [], [])


def test_pages_within_the_demand_are_charged_to_the_grant_itself():
    request, step = grant("a", 4), grant("step", 3)
    assert request.charge(0, 4, step)
    assert (request.room, request.borrowed, step.held) == ([0], [0], (0,))


def test_what_exceeds_the_demand_is_borrowed_and_charged_to_the_lender():
    request, step = grant("a", 4), grant("step", 3)
    assert request.charge(0, 6, step)
    assert (request.held, request.borrowed, step.held, step.room) == ((6,), [2], (2,), [1])


def test_without_a_lender_nothing_exceeds_the_demand():
    request = grant("a", 4)
    assert not request.charge(0, 5, None)
    assert (request.held, request.room) == ((0,), [4])


def test_a_lender_lends_no_more_than_its_own_room():
    request, step = grant("a", 4), grant("step", 1)
    assert not request.charge(0, 6, step)
    assert (request.held, request.room, step.room, request.loans) == ((0,), [4], [1], [])


def test_a_borrower_does_not_lend():
    request, step, floor = grant("a", 1), grant("step", 1), grant("floor", 5)
    assert step.charge(0, 2, floor)
    assert not request.charge(0, 2, step)


def test_a_grant_does_not_lend_to_itself():
    request = grant("a", 4)
    assert not request.charge(0, 5, request)


def test_borrowed_pages_are_paid_back_first_to_the_most_recent_lender():
    request, step, floor = grant("a", 1), grant("step", 2), grant("floor", 2)
    request.charge(0, 3, step)
    request.charge(0, 2, floor)
    request.pay(0, 3)
    assert (floor.held, step.held, request.borrowed, request.room) == ((0,), (1,), [1], [0])


def test_the_promise_grows_back_once_nothing_is_borrowed():
    request, step = grant("a", 4), grant("step", 2)
    request.charge(0, 6, step)
    request.pay(0, 5)
    assert (request.held, request.room, request.demand, step.room) == ((1,), [3], (4,), [2])


def test_loans_of_other_pools_are_left_alone():
    request, step = grant("a", 0, 0), grant("step", 2, 2)
    request.charge(0, 1, step)
    request.charge(1, 2, step)
    request.pay(0, 1)
    assert (step.held, request.borrowed) == ((0, 2), [0, 2])


def test_a_raised_demand_takes_over_borrowed_pages_first():
    request, step = grant("a", 4), grant("step", 2)
    request.charge(0, 6, step)
    request.raise_demand(0, 3)
    assert (request.demand, request.borrowed, request.room, step.room) == ((7,), [0], [1], [2])


def test_pages_handed_to_a_transfer_lower_the_demand():
    request = grant("a", 4)
    request.charge(0, 3, None)
    request.hand_over(0, 2)
    assert (request.demand, request.held, request.room) == ((2,), (1,), [1])


def test_borrowed_pages_handed_to_a_transfer_lower_the_lenders_demand():
    request, step = grant("a", 1), grant("step", 3)
    request.charge(0, 3, step)
    request.hand_over(0, 2)
    assert (request.demand, request.held, request.borrowed) == ((0,), (1,), [1])
    assert (step.demand, step.held, step.room) == ((2,), (1,), [1])

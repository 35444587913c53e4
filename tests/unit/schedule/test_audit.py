"""The audit finds what it is there for: each test breaks one thing on purpose in a healthy world."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halocline.memory.demand import Demand
from halocline.schedule.holding import Holding
from halocline.schedule.request import Request, State
from testing.schedule import FULL_AND_WINDOW, World, greedy, rules, tiny_layout


def healthy() -> World:
    """Return a world with two decoding requests, one prefilling and one waiting, between steps."""
    made = World(tiny_layout(FULL_AND_WINDOW, 60), rules(step_tokens=16, max_running_requests=3))
    made.arrive("a", 5, greedy(40))
    made.arrive("b", 5, greedy(40))
    for _ in range(9):
        made.step()
    made.arrive("c", 40, greedy(4))
    made.arrive("d", 4, greedy(4))
    made.step()
    assert made.scheduler.audit() == []
    return made


def parts(made: World, name: str) -> tuple[Request, Holding]:
    request = made.scheduler._roster.live[name]
    assert request.holding is not None
    return request, request.holding


def loses_a_page(made: World) -> None:
    _, holding = parts(made, "a")
    holding.handles[0] = holding.handles[0][:-1]


def counts_a_page_twice(made: World) -> None:
    _, holding = parts(made, "a")
    holding.handles[0] = holding.handles[0].repeat(2)
    holding.places[0] = holding.places[0].repeat(2)


def shares_pages(made: World) -> None:
    (_, first), (_, second) = parts(made, "a"), parts(made, "b")
    first.handles[0] = second.handles[0].copy()


def keeps_a_window_too_long(made: World) -> None:
    made.check = False
    sharing = made.scheduler._sharing
    settle = sharing.settle
    sharing.settle = lambda moved: settle([request for request in moved if request.id != "a"])  # type: ignore[method-assign]
    request, holding = parts(made, "a")
    while request.computed < holding.slide_at:
        made.step()


def loses_its_window(made: World) -> None:
    _, holding = parts(made, "a")
    holding.first_page[1] += 1


def holds_more_than_granted(made: World) -> None:
    _, holding = parts(made, "a")
    made.arena.extend(holding.grant, Demand((holding.grant.demand[0], holding.grant.demand[1])))
    less = holding.grant.room[0] + 1  # what is held is the difference of the two
    holding.grant.asked[0] -= less
    holding.grant.room[0] -= less


def stands_in_two_lines(made: World) -> None:
    request, _ = parts(made, "a")
    made.scheduler._roster.waiting.add(request)


def stands_in_no_line(made: World) -> None:
    request, _ = parts(made, "a")
    made.scheduler._roster.decoding.remove(request)


def stands_in_the_wrong_line(made: World) -> None:
    request, _ = parts(made, "a")
    request.state = State.PREFILLING


def stands_out_of_order(made: World) -> None:
    made.scheduler._roster.decoding._requests.reverse()


def ended_and_still_stands(made: World) -> None:
    del made.scheduler._roster.live["a"]


def has_no_grant(made: World) -> None:
    request, _ = parts(made, "a")
    request.holding = None


def waits_with_a_grant(made: World) -> None:
    _, holding = parts(made, "a")
    made.scheduler._roster.live["d"].holding = holding


def grant_is_closed(made: World) -> None:
    _, holding = parts(made, "a")
    made.arena.release(holding.grant)


def holds_a_stale_handle(made: World) -> None:
    _, holding = parts(made, "a")
    made.arena.free(holding.grant, 1, holding.handles[1][:1])


def missed_a_move(made: World) -> None:
    _, holding = parts(made, "a")
    holding.places[0] = holding.places[0][::-1].copy()


def counts_more_than_computed(made: World) -> None:
    request, _ = parts(made, "c")
    request.computed = 40


def has_not_ended(made: World) -> None:
    request, _ = parts(made, "a")
    request.end = len(request.history)


def has_too_few_slots(made: World) -> None:
    made.scheduler._rules = rules(max_running_requests=2)


def floor_is_given_up(made: World) -> None:
    made.arena.release(made.scheduler._floor)


def floor_is_shrunk(made: World) -> None:
    made.arena.shrink(made.scheduler._floor, Demand((0, 0)))


def step_grant_is_left_behind(made: World) -> None:
    made.arena.reserve("step", Demand((0, 3)))


def reserves_twice(made: World) -> None:
    made.arena.reserve("a", Demand((1, 0)))


def counts_an_end_too_many(made: World) -> None:
    made.scheduler._roster.totals.finished += 1


def asks_for_its_next_page_too_late(made: World) -> None:
    _, holding = parts(made, "a")
    holding.page_until += 4


def slides_too_late(made: World) -> None:
    _, holding = parts(made, "a")
    holding.slide_at += 1


FAULTS: dict[Callable[[World], None], tuple[str, str]] = {
    loses_a_page: ("L1", "1 pages missing"),
    counts_a_page_twice: ("L1", "pages counted twice"),
    shares_pages: ("L1", "is held by a and by b"),
    keeps_a_window_too_long: ("L9", "between steps, its windows are"),
    loses_its_window: ("L7", "lacks pages"),
    holds_more_than_granted: ("L9", "between steps, granted"),
    stands_in_two_lines: ("L10", "stands in another line"),
    stands_in_no_line: ("L10", "3 requests stand in lines, 4 are live"),
    stands_in_the_wrong_line: ("L10", "is prefilling and stands in another line"),
    stands_out_of_order: ("L10", "out of order"),
    ended_and_still_stands: ("L10", "stands in a line and is not live"),
    has_no_grant: ("L1", "lacks a grant"),
    waits_with_a_grant: ("L1", "(waiting) holds a grant"),
    grant_is_closed: ("L1", "holds the grant of a (open: False)"),
    missed_a_move: ("L1", "request a in full: its pages moved to"),
    holds_a_stale_handle: ("L1", "request a in sliding-6: stale handle"),
    counts_more_than_computed: ("L9", "has computed 40 of 40 tokens"),
    has_not_ended: ("L10", "has all its"),
    has_too_few_slots: ("L3", "3 requests run, 2 may"),
    floor_is_given_up: ("L3", "the floor is (0, 1) pages, open: False"),
    floor_is_shrunk: ("L3", "the floor is (0, 0) pages, open: True; it should be (0, 1)"),
    step_grant_is_left_behind: ("L3", "a step grant of (0, 3) pages is open between steps"),
    reserves_twice: ("L1", "a second grant of (1, 0) pages is open in the name of request a"),
    counts_an_end_too_many: ("L10", "requests taken: 1 missing (books 5, counted 4)"),
    asks_for_its_next_page_too_late: ("L7", "asks for its next page at"),
    slides_too_late: ("L9", "lets go of its next page at"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_audit_names_law_and_numbers_of(fault: Callable[[World], None]) -> None:
    made = healthy()
    fault(made)
    law, words = FAULTS[fault]
    found = made.scheduler.audit()
    assert any(violation.law == law and words in violation.message for violation in found), found


def test_a_healthy_world_has_no_violation_in_the_middle_of_a_step() -> None:
    made = healthy()
    made.plan()
    assert made.scheduler.audit() == []


def test_places_are_looked_up_again_when_pages_moved_for_another_owner() -> None:
    """A foreign commit (a cache, a transfer) may move pages between steps; its moves are in no plan of ours."""
    made = healthy()
    _, holding = parts(made, "a")
    truth = holding.places[0].tolist()
    holding.places[0] = holding.places[0] + 1
    made.arena.moves_planned += 1
    assert made.scheduler.audit() == [], "what will be looked up again is not remembered wrongly"
    made.plan()
    assert holding.places[0].tolist()[: len(truth)] == truth
    assert made.scheduler.audit() == []

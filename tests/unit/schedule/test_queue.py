"""The line of waiting requests: seniority, kept through leaving and returning."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.schedule.events import Arrive
from halocline.schedule.queue import Line
from halocline.schedule.request import Request
from testing.schedule import greedy


def request(arrival: int, priority: int = 0) -> Request:
    return Request(Arrive(f"r{arrival}", (1,), greedy(4), 0, priority), arrival, 4, frozenset())


@given(st.lists(st.integers(-2, 2), max_size=20), st.randoms())
def test_the_most_senior_comes_first_whatever_the_order_of_adding(priorities: list[int], order: object) -> None:
    requests = [request(arrival, priority) for arrival, priority in enumerate(priorities)]
    line = Line()
    shuffled = requests.copy()
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    for each in shuffled:
        line.add(each)
    assert [each.key for each in line] == sorted(each.key for each in requests)
    for place, each in enumerate(line.snapshot()):
        assert line.place(each) == place
        assert line.juniors(each) == line.snapshot()[place + 1 :]


def test_juniors_of_a_stranger_are_those_after_its_place() -> None:
    line = Line()
    for arrival in (1, 3, 5):
        line.add(request(arrival))
    assert [each.arrival for each in line.juniors(request(3, priority=0))] == [5]
    assert [each.arrival for each in line.juniors(request(2))] == [3, 5]


def test_removing_who_is_not_there_is_a_defect() -> None:
    line = Line()
    line.add(request(1))
    with pytest.raises(AssertionError, match="r2 is not in this line of 1"):
        line.remove(request(2))


def test_an_empty_line_has_no_first() -> None:
    assert Line().first() is None

"""What another worker is told of how long it has to wait: a number that falls, and does not rise when others come."""

from __future__ import annotations

from typing import Any

from halocline.params import SamplingParams
from halocline.schedule.backlog import work_before
from halocline.schedule.events import Arrive, Route
from halocline.schedule.request import Request, State


def request(name: str, arrival: int, prompt_tokens: int, route: Route = "here", **known: Any) -> Request:
    """A request of at most 5 output tokens; one for another worker has 1."""
    event = Arrive(name, tuple(range(prompt_tokens)), SamplingParams(), 0, route=route)
    made = Request(event, arrival, 1 if route == "send" else 5, frozenset())
    for field, value in known.items():
        setattr(made, field, value)
    return made


def work(name: str, *requests: Request) -> int:
    return work_before({each.id: each for each in requests}, name)


RUNNING = {"holding": object()}


def test_it_counts_the_prompt_and_all_seniors_to_their_ends() -> None:
    own = request("own", 1, 10, "send", is_called=True)
    senior, junior = request("senior", 0, 20), request("junior", 2, 40)
    assert work("own", own) == 10
    assert work("own", senior, own, junior) == 10 + 24
    senior.computed = 22
    assert work("own", senior, own, junior) == 10 + 2
    assert work("nobody", own) == 0


def test_a_senior_counts_before_another_workers_word_so_that_nothing_rises_when_it_comes() -> None:
    own, senior = request("own", 1, 10, "send", is_called=True), request("senior", 0, 20, "receive")
    before = work("own", senior, own)
    senior.is_called = True
    assert before == work("own", senior, own) == 10 + 24


def test_juniors_that_run_count_while_it_waits_for_what_they_hold() -> None:
    own, junior = request("own", 1, 10, "send", is_called=True), request("junior", 2, 40, computed=41, **RUNNING)
    assert work("own", own, junior) == 10 + 3
    own.holding = object()  # type: ignore[assignment]
    assert work("own", own, junior) == 10


def test_who_only_waits_to_be_taken_has_nothing_to_compute() -> None:
    own = request("own", 1, 10, "send", is_called=True)
    assert work("own", request("sent", 0, 20, "send", state=State.SENDING, **RUNNING), own) == 10

"""Request states: the one table, and the story that an illegal transition tells."""

from __future__ import annotations

import pytest

from halocline.errors import InvariantError
from halocline.schedule.events import Arrive
from halocline.schedule.request import ENDS, STORY_LINES, TRANSITIONS, Request, State
from testing.schedule import greedy

EOS = frozenset({1})
ALLOWED = {
    ("waiting", "prefilling"),
    ("waiting", "finished"),
    ("waiting", "failed"),
    ("prefilling", "decoding"),
    ("prefilling", "retracted"),
    ("prefilling", "finished"),
    ("prefilling", "failed"),
    ("decoding", "retracted"),
    ("decoding", "finished"),
    ("decoding", "failed"),
    ("prefilling", "waiting"),
    ("prefilling", "sending"),
    ("waiting", "receiving"),
    ("retracted", "receiving"),
    ("receiving", "decoding"),
    ("receiving", "waiting"),
    ("receiving", "retracted"),
    ("receiving", "finished"),
    ("receiving", "failed"),
    ("sending", "waiting"),
    ("sending", "retracted"),
    ("sending", "finished"),
    ("sending", "failed"),
    ("retracted", "prefilling"),
    ("retracted", "finished"),
    ("retracted", "failed"),
}


def request(**fields: object) -> Request:
    return Request(Arrive("a", (5, 6, 7), greedy(10, **fields), 0), 4, 10, EOS)


@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("after", State)
def test_every_transition_is_in_the_table_or_raises(before: State, after: State) -> None:
    made = request()
    made.state = before
    if (before.value, after.value) in ALLOWED:
        made.move(after, 3)
        assert made.state is after
    else:
        with pytest.raises(InvariantError, match=f"cannot go from {before.value} to {after.value}"):
            made.move(after, 3)
        assert made.state is before


def test_an_ended_request_goes_nowhere() -> None:
    assert all(TRANSITIONS[end] == frozenset() for end in ENDS)


def test_an_illegal_transition_tells_the_story() -> None:
    made = request()
    made.move(State.PREFILLING, 1)
    made.move(State.RETRACTED, 2)
    with pytest.raises(InvariantError, match=r"arrived with 3 prompt tokens, step 1: prefilling .* step 2: retracted"):
        made.move(State.DECODING, 3)


def test_the_story_stays_short_however_often_a_request_is_retracted() -> None:
    made = request()
    for step in range(1000):
        made.move(State.PREFILLING, step)
        made.move(State.RETRACTED, step)
    assert len(made.story) == STORY_LINES


def test_seniority_is_priority_then_arrival() -> None:
    assert request().key == (0, 4)


def test_ignoring_eos_keeps_the_clients_own_stop_tokens() -> None:
    assert request(ignore_eos=True, stop_token_ids=(9,)).stops == {9}
    assert request(stop_token_ids=(9,)).stops == {1, 9}

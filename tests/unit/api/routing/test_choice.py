"""Who gets a request: properties of both choices, and the numbers at which they change their mind."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from halocline.api.routing.choice import DecodeCandidate, PrefillCandidate, choose_decode, choose_prefill

PROMPT = 1000
DECODE = st.builds(
    DecodeCandidate,
    name=st.just(""),
    free_bytes=st.integers(-100, 400),
    need_bytes=st.integers(0, 100),
    waiting=st.integers(0, 5),
    recent=st.integers(0, 5),
    in_flight=st.integers(0, 5),
    matched_bytes=st.integers(0, PROMPT),
)
PREFILL = st.builds(
    PrefillCandidate,
    name=st.just(""),
    outstanding_bytes=st.integers(0, 3000),
    in_flight=st.integers(0, 5),
    matched_bytes=st.integers(0, PROMPT),
)


@given(st.lists(DECODE, max_size=6))
def test_a_decode_worker_is_chosen_by_room_then_load_then_the_beginning(drawn: list[DecodeCandidate]) -> None:
    candidates = [replace(each, name=f"{i}") for i, each in enumerate(drawn)]
    chosen = choose_decode(candidates)
    if chosen is None:
        assert not candidates
        return
    assert chosen in candidates
    roomy = [each for each in candidates if each.has_room]
    if roomy:
        assert chosen.has_room
        most = max(each.free_bytes for each in roomy)
        assert 2 * chosen.free_bytes >= most
        rivals = [each for each in roomy if 2 * each.free_bytes >= most]
        assert chosen.matched_bytes == max(each.matched_bytes for each in rivals)
        if not any(each.matched_bytes for each in rivals):
            assert chosen.free_bytes == most
    else:
        shortest = min(each.queue for each in candidates)
        assert chosen.queue <= 2 * shortest + 2
        rivals = [each for each in candidates if each.queue <= 2 * shortest + 2]
        assert chosen.matched_bytes == max(each.matched_bytes for each in rivals)
    assert choose_decode(candidates[::-1]) == chosen, "the order of the list decides nothing"


@given(st.lists(PREFILL, max_size=6))
def test_a_prefill_worker_is_chosen_where_the_prompt_is_computed_soonest(drawn: list[PrefillCandidate]) -> None:
    candidates = [replace(each, name=f"{i}") for i, each in enumerate(drawn)]
    chosen = choose_prefill(candidates, PROMPT)
    if chosen is None:
        assert not candidates
        return
    costs = {each.name: each.outstanding_bytes + PROMPT - each.matched_bytes for each in candidates}
    assert costs[chosen.name] == min(costs.values())
    assert choose_prefill(candidates[::-1], PROMPT) == chosen


def decode(
    name: str, free: int, matched: int = 0, *, need: int = 10, waiting: int = 0, recent: int = 0
) -> DecodeCandidate:
    return DecodeCandidate(name, free, need, waiting, recent, 0, matched)


def test_the_beginning_counts_down_to_half_of_the_free_bytes() -> None:
    assert choose_decode([decode("freest", 100), decode("knows", 50, 256)]) == decode("knows", 50, 256)
    assert choose_decode([decode("freest", 101), decode("knows", 50, 256)]) == decode("freest", 101)


def test_equality_has_room_and_who_waits_has_none() -> None:
    assert choose_decode([decode("a", 10), decode("b", 9)]) == decode("a", 10)
    assert decode("a", 10).has_room
    assert not decode("a", 9).has_room
    assert not decode("a", 10, waiting=1).has_room
    assert decode("a", 10, recent=1).has_room


def test_among_full_workers_the_beginning_counts_up_to_twice_the_queue_and_two() -> None:
    shortest, knows = decode("shortest", 0, waiting=1), decode("knows", 0, 256, waiting=4)
    assert choose_decode([shortest, knows]) == knows
    assert choose_decode([shortest, replace(knows, recent=1)]) == shortest


def test_waiting_for_a_beginning_may_cost_as_much_as_computing_it_and_no_more() -> None:
    idle, knows = PrefillCandidate("b-idle", 0, 0, 0), PrefillCandidate("a-knows", 300, 0, 300)
    assert choose_prefill([idle, knows], PROMPT) == knows
    assert choose_prefill([idle, replace(knows, outstanding_bytes=301)], PROMPT) == idle

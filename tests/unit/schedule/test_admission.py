"""The gate: what is refused at the door, on which terms the rest comes in, and how outputs are estimated."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.memory.demand import resident
from halocline.params import SamplingParams
from halocline.schedule.admission import OBSERVED_REQUESTS, OutputLengths
from halocline.schedule.events import Accepted, Arrive, Rejected
from testing.schedule import FULL_AND_WINDOW, GUARANTEED, THREE_POOLS, World, greedy, prompt, world

# --- estimates


@given(st.lists(st.integers(1, 64), min_size=32, max_size=80), st.floats(0.01, 1.0))
def test_the_estimate_is_the_smallest_length_that_the_quantile_does_not_exceed(lengths: list[int], q: float) -> None:
    estimates, covered = OutputLengths(q), Fraction(str(q)) * len(lengths)
    for tokens in lengths:
        estimates.record(64, tokens)
    estimate = estimates.estimate(64)
    assert sum(tokens <= estimate for tokens in lengths) >= covered
    assert estimate in lengths
    assert all(sum(t <= smaller for t in lengths) < covered for smaller in set(lengths) if smaller < estimate)


def test_a_quantile_is_taken_as_written_not_as_its_binary_neighbour() -> None:
    estimates = OutputLengths(0.07)
    for tokens in range(1, 101):
        estimates.record(128, tokens)
    assert estimates.estimate(128) == 7


def test_until_32_have_finished_the_limit_itself_is_granted_up_to_1024() -> None:
    estimates = OutputLengths(0.9)
    for _ in range(31):
        estimates.record(4000, 5)
    assert estimates.estimate(4000) == 1024
    assert estimates.estimate(700) == 700
    estimates.record(4000, 5)
    assert estimates.estimate(4000) == 5


def test_a_class_is_max_tokens_rounded_up_to_a_power_of_four() -> None:
    classes = [OutputLengths.class_of(tokens) for tokens in (1, 2, 3, 4, 5, 16, 17, 1024, 1025, 4097)]
    assert classes == [1, 4, 4, 4, 16, 16, 64, 1024, 4096, 16384]


def test_classes_do_not_mix() -> None:
    estimates = OutputLengths(0.9)
    for _ in range(40):
        estimates.record(64, 3)
    assert estimates.estimate(65) == 65
    assert estimates.estimate(17) == 3


def test_only_the_last_1024_of_a_class_count_and_are_kept() -> None:
    estimates = OutputLengths(0.5)
    for _ in range(OBSERVED_REQUESTS):
        estimates.record(64, 60)
    for _ in range(OBSERVED_REQUESTS):
        estimates.record(64, 2)
    assert estimates.estimate(64) == 2
    assert len(estimates._recent[64]) == len(estimates._sorted[64]) == OBSERVED_REQUESTS


def test_estimates_follow_observed_lengths_and_nothing_else() -> None:
    """F2: no timer. Steps may pass as they like; only finished requests change what is granted."""
    made = world(slabs=40)
    made.expect_outputs(64, 5)
    made.arrive("long", 4, greedy(64, ignore_eos=True))
    for _ in range(40):
        made.step()
        assert made.scheduler._gate.lengths.estimate(64) == 5
    made.run()
    assert made.scheduler._gate.lengths._sorted[64] == [5] * 32 + [64]


# --- the door

FAULTS = {
    "empty": ((), "prompt", "the prompt is empty"),
    "too high": ((1, 97), "prompt", "token id 97; the model's are 0 to 96"),
    "negative": ((-1, 4), "prompt", "token id -1"),
    "text": ((1, "2"), "prompt", "whole numbers"),
    "float": ((1, 2.0), "prompt", "whole numbers"),
    "bool": ((1, True), "prompt", "whole numbers"),
    "none": ((None,), "prompt", "whole numbers"),
    "flag that is 0": ((5, False, 7), "prompt", "whole numbers"),
    "number of another kind": ((5, np.int64(4), 7), "prompt", "whole numbers"),
    "of more than 32 bits": ((5, 1 << 40), "prompt", f"token id {1 << 40}; the model's are 0 to 96"),
    "negative and a flag": ((-1, True), "prompt", "whole numbers"),
    "negative and a float": ((-1, 2.5), "prompt", "whole numbers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_prompt_that_is_no_list_of_tokens_is_refused(fault: str) -> None:
    tokens, param, words = FAULTS[fault]
    made = world()
    answer = made.tell(Arrive("a", tokens, greedy(3), 0))[0]  # type: ignore[arg-type]
    assert isinstance(answer, Rejected)
    assert (answer.param, answer.code) == (param, "invalid_request")
    assert words in answer.message
    assert not made.scheduler.has_work


def test_zeros_and_ones_are_tokens() -> None:
    made = world()
    assert isinstance(made.tell(Arrive("a", (0, 1, 1, 0), greedy(3), 0))[0], Accepted)


def test_a_stop_token_that_the_model_does_not_have_is_refused() -> None:
    made = world()
    answer = made.tell(Arrive("a", (1,), greedy(3, stop_token_ids=(96, 97, 5)), 0))[0]
    assert isinstance(answer, Rejected)
    assert (answer.param, answer.message) == (
        "stop_token_ids",
        "stop_token_ids holds token id 97; the model's are 0 to 96",
    )
    assert isinstance(made.tell(Arrive("a", (1,), greedy(3, stop_token_ids=(96,)), 0))[0], Accepted)


def test_a_priority_that_is_no_number_is_refused() -> None:
    answer = world().tell(Arrive("a", (1,), greedy(3), 0, "high"))[0]  # type: ignore[arg-type]
    assert isinstance(answer, Rejected)
    assert answer.param == "priority"


@pytest.mark.parametrize("pools", [FULL_AND_WINDOW, THREE_POOLS], ids=["two-pools", "three-pools"])
@pytest.mark.parametrize("slabs", [6, 9])
def test_the_largest_output_is_exact(pools: tuple, slabs: int) -> None:
    """Halving finds what trying every length finds."""
    made = world(pools, slabs, max_model_len=90)
    for length in range(1, 91):
        fitting = [
            new
            for new in range(1, 90 - length + 1)
            if made.arena.fits_empty(resident(made.layout, length, new).plus(made.floor))
        ]
        assert max(0, made.scheduler._gate.largest_output(length)) == max(fitting, default=0)


def largest(made: World, length: int) -> int:
    return made.scheduler._gate.largest_output(length)


def test_without_max_tokens_the_largest_that_fits_applies() -> None:
    made = world(slabs=8)
    answer = made.arrive("a", 10, greedy())
    assert answer == Accepted("a", largest(made, 10))
    made.run().assert_all_finished()
    assert made.ends["a"] == "length"


def test_without_max_tokens_the_models_length_limits() -> None:
    assert world(slabs=200, max_model_len=40).arrive("a", 10, greedy()) == Accepted("a", 30)


def test_guaranteed_without_max_tokens_takes_the_default_at_most() -> None:
    made = world(slabs=200, admission=GUARANTEED, default_max_tokens=7)
    assert made.arrive("a", 10, greedy()) == Accepted("a", 7)
    assert made.arrive("b", 10, greedy(min_tokens=9)) == Accepted("b", 9)
    assert made.arrive("c", 10, greedy(50)) == Accepted("c", 50)


def test_too_many_tokens_are_refused_with_the_arithmetic_and_the_largest_that_would_do() -> None:
    made = world(slabs=8)
    most = largest(made, 10)
    answer = made.arrive("a", 10, most + 1)
    assert isinstance(answer, Rejected)
    assert (answer.param, answer.code) == ("max_tokens", "context_length_exceeded")
    pages = resident(made.layout, 10, most + 1)
    assert f"{pages[0]} + 0 pages of full, {pages[1]} + 1 pages of sliding-6" in answer.message
    assert "9 slabs where the arena has 8" in answer.message
    assert f"at most {most} would do" in answer.message
    assert isinstance(made.arrive("b", 10, most), Accepted)


def test_too_many_tokens_are_clipped_where_the_operator_says_so() -> None:
    made = world(slabs=8, clip_max_tokens=True)
    most = largest(made, 10)
    assert made.arrive("a", 10, most + 1) == Accepted("a", most, clipped=True)
    assert made.arrive("b", 10, most) == Accepted("b", most)


def test_beyond_the_models_length_the_message_names_it() -> None:
    answer = world(slabs=200, max_model_len=40).arrive("a", 30, 11)
    assert isinstance(answer, Rejected)
    assert "that is 41 tokens, and max_model_len is 40; at most 10 would do" in answer.message


@pytest.mark.parametrize("clip", [False, True])
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_even_with_clipping(clip: bool) -> None:
    answer = world(slabs=200, max_model_len=40, clip_max_tokens=clip).arrive("a", 40, greedy())
    assert isinstance(answer, Rejected)
    assert (answer.param, answer.code) == ("prompt", "context_length_exceeded")
    assert "shorten the prompt" in answer.message


def test_the_static_share_is_named_when_it_is_what_is_too_small() -> None:
    answer = world(slabs=40, caps=(2, 38)).arrive("a", 30, 30)
    assert isinstance(answer, Rejected)
    assert "the static share of full is 6 pages" in answer.message


def test_min_tokens_beyond_what_fits_is_refused() -> None:
    made = world(slabs=8)
    answer = made.arrive("a", 10, greedy(min_tokens=largest(made, 10) + 1))
    assert isinstance(answer, Rejected)
    assert answer.param == "min_tokens"


def test_more_waiting_requests_than_allowed_are_refused_as_overload() -> None:
    made = world(max_waiting_requests=2)
    for name in "ab":
        assert isinstance(made.arrive(name, 4, 4), Accepted)
    answer = made.arrive("c", 4, 4)
    assert isinstance(answer, Rejected)
    assert answer.code == "overloaded"
    made.step()
    assert isinstance(made.arrive("d", 4, 4), Accepted)


def test_an_id_in_use_is_refused_and_the_first_request_goes_on() -> None:
    made = world()
    made.arrive("a", 4, 4)
    answer = made.tell(Arrive("a", prompt(3), greedy(9), 0))[0]
    assert isinstance(answer, Rejected)
    made.run().assert_all_finished()
    assert len(made.outputs["a"]) == 4


# --- the grant


def granted(made: World, name: str) -> tuple[int, ...]:
    holding = made.scheduler._roster.live[name].holding
    assert holding is not None
    return tuple(holding.grant.demand)


def admitted(params: SamplingParams, **changes: object) -> tuple[int, ...]:
    made = world(slabs=60, **changes)
    made.expect_outputs(64, 4)
    made.arrive("a", 9, params)
    made.plan()
    return granted(made, "a")


def test_expected_admission_grants_the_prompt_and_the_estimate() -> None:
    assert admitted(greedy(64)) == (ceil((9 + 4 - 1) / 4), 3)


def test_guaranteed_admission_grants_the_whole() -> None:
    assert admitted(greedy(64), admission=GUARANTEED) == (ceil((9 + 64 - 1) / 4), 3)


def test_who_ignores_the_end_of_sequence_gets_the_whole() -> None:
    assert admitted(greedy(64, ignore_eos=True)) == (ceil((9 + 64 - 1) / 4), 3)


def test_who_was_retracted_comes_back_only_with_the_whole() -> None:
    made = world(slabs=60).expect_outputs(64, 4)
    made.arrive("a", 9, 64)
    made.step()
    made.scheduler._roster.retract(made.scheduler._roster.live["a"])
    made.plan()
    assert granted(made, "a") == (ceil((9 + 64 - 1) / 4), 3)


def test_who_named_no_limit_comes_back_with_as_much_as_was_ever_seen() -> None:
    """All it may generate would be the whole arena: it would come back only when everybody else has left."""
    made = world(slabs=60)
    limit = made.scheduler._gate.largest_output(9)
    made.expect_outputs(limit, 4)
    made.scheduler._gate.lengths.record(limit, 40)
    made.arrive("a", 9, greedy(None))
    made.step()
    request = made.scheduler._roster.live["a"]
    assert request.max_tokens == limit > 100
    made.scheduler._roster.retract(request)
    made.plan()
    history = len(request.history)
    assert granted(made, "a")[0] == ceil((history + 40 - request.output_tokens - 1) / 4)


def test_who_was_retracted_without_a_limit_may_always_grow_to_twice_what_it_has() -> None:
    estimates = OutputLengths(0.9)
    assert estimates.estimate_further(4096, 0) == 1
    assert estimates.estimate_further(4096, 300) == 300
    estimates.record(4096, 500)
    assert [estimates.estimate_further(4096, tokens) for tokens in (0, 300, 499, 500)] == [500, 300, 499, 500]

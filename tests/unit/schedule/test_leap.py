"""Leaps: several tokens of every decode in one step, and when a step computes one token all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halocline.errors import ConfigError, InvariantError
from halocline.memory.retention import Sliding
from halocline.schedule.events import NewToken
from halocline.step import Sampled, Segment, StepPlan
from testing.schedule import FULL_AND_WINDOW, GUARANTEED, THREE_POOLS, World, fewest_slabs, greedy, rules, tiny_layout

LOOKAHEAD = 7


def leaping(slabs: int = 60, decode_tokens: int = 1 + LOOKAHEAD, **changes: object) -> World:
    """Return a world that leaps as soon as nobody prefills."""
    settled = rules(**({"lookahead_tokens": LOOKAHEAD} | changes))
    return World(tiny_layout(FULL_AND_WINDOW, slabs), settled, decode_tokens=decode_tokens)


def decoding(made: World, *names: str, max_tokens: int = 40, **fields: object) -> World:
    """Let requests of five tokens begin to decode."""
    for name in names:
        made.arrive(name, 5, greedy(max_tokens, **fields))
    return made.run_until(lambda: all(made.outputs[name] for name in names))


def spans(plan: StepPlan | None) -> dict[str, tuple[int, int]]:
    """Return where each segment begins and how many tokens it has."""
    assert plan is not None
    return {segment.request_id: (segment.start, segment.tokens) for segment in plan.segments}


def test_a_leap_knows_the_first_token_of_each_decode_and_no_other() -> None:
    made = decoding(leaping(), "a", "b")
    plan = made.plan()
    assert plan is not None
    assert spans(plan) == {"a": (5, 8), "b": (5, 8)}
    assert all(segment.is_leap for segment in plan.segments)
    assert plan.query_starts.tolist() == [0, 8, 16]
    assert plan.positions.tolist() == [*range(5, 13)] * 2
    assert plan.token_ids.tolist() == [made.outputs["a"][0], *[-1] * 7, made.outputs["b"][0], *[-1] * 7]
    made.apply(made.backend.run(plan))
    assert [len(made.outputs[name]) for name in "ab"] == [9, 9]
    made.run().assert_all_finished()


def test_a_chunk_and_a_decode_of_one_token_are_no_leaps() -> None:
    made = decoding(leaping(decode_tokens=1), "a")
    made.arrive("b", 9, 3)
    assert [segment.is_leap for segment in made.plan_and_apply().segments] == [False, False]


def test_without_being_asked_nobody_leaps_and_more_than_prices_count_is_refused() -> None:
    made = decoding(leaping(decode_tokens=1), "a")
    assert spans(made.plan_and_apply()) == {"a": (5, 1)}
    for tokens in (-1, 2 + LOOKAHEAD):
        with pytest.raises(InvariantError, match=f"{tokens} tokens per decode are asked for"):
            made.scheduler.plan(0.0, tokens)
    with pytest.raises(InvariantError, match="with lookahead_tokens 0"):
        World(tiny_layout(FULL_AND_WINDOW, 60)).scheduler.plan(0.0, 2)


def test_a_negative_lookahead_is_refused() -> None:
    with pytest.raises(ConfigError, match="lookahead_tokens is -1"):
        rules(lookahead_tokens=-1)


def test_a_leap_ends_where_the_first_request_ends() -> None:
    made = leaping()
    made.arrive("short", 5, 4)
    decoding(made, "long")
    assert spans(made.plan_and_apply()) == {"short": (5, 3), "long": (5, 3)}
    assert made.ends == {"short": "length"}
    assert spans(made.plan_and_apply()) == {"long": (8, 8)}


def test_all_leaps_together_stay_within_the_steps_tokens() -> None:
    made = decoding(leaping(step_tokens=12, max_running_requests=4), "a", "b", "c", "d")
    assert {tokens for _, tokens in spans(made.plan_and_apply()).values()} == {3}


def test_a_leap_ends_where_stop_tokens_become_allowed() -> None:
    """So that a segment can say once for all its tokens whether they may be sampled."""
    made = decoding(leaping(eos_token_ids=(3, 5, 7)), "a", min_tokens=6)
    plan = made.plan_and_apply()
    assert spans(plan) == {"a": (5, 5)}
    assert plan.segments[0].forbids_stop
    plan = made.plan_and_apply()
    assert spans(plan) == {"a": (10, 8)}
    assert not plan.segments[0].forbids_stop


def test_who_wants_log_probabilities_gets_one_token_a_step() -> None:
    made = decoding(leaping(), "a", "b", logprobs=0)
    assert spans(made.plan_and_apply()) == {"a": (5, 1), "b": (5, 1)}


def test_nobody_leaps_while_somebody_prefills_or_has_just_arrived() -> None:
    made = decoding(leaping(step_tokens=16), "a")
    made.arrive("b", 40, 9)
    for _ in range(3):  # 15 tokens beside the decode, whole granules
        assert spans(made.plan_and_apply())["a"][1] == 1
    made.run_until(lambda: bool(made.outputs["b"]))
    assert {tokens for _, tokens in spans(made.plan_and_apply()).values()} == {8}


def waiting_for(code: str) -> World:
    """Return a world in which "b" waits, for that reason, while "a" decodes."""
    slots = 1 if code == "slots" else 8
    slabs = fewest_slabs(FULL_AND_WINDOW, 5, 40, admission=GUARANTEED, lookahead_tokens=LOOKAHEAD)
    made = leaping(slabs, admission=GUARANTEED, max_running_requests=slots)
    decoding(made, "a")
    made.arrive("b", 5, 40)
    assert spans(made.plan_and_apply())["a"][1] == (8 if code == "slots" else 1), "memory has to be asked once"
    assert made.scheduler.reasons()["b"].code == code
    return made


@pytest.mark.parametrize("code", ["slots", "memory"])
def test_who_waits_and_was_refused_does_not_keep_others_from_leaping(code: str) -> None:
    made = waiting_for(code)
    assert spans(made.plan_and_apply())["a"][1] == 8
    assert made.scheduler.reasons()["b"].code == code
    made.run().assert_all_finished()


def test_an_arrival_before_whom_was_refused_is_asked_first() -> None:
    made = waiting_for("memory")
    made.arrive("c", 5, 3, priority=-1)
    assert spans(made.plan_and_apply())["a"][1] == 1


def test_who_was_refused_is_asked_again_when_it_fits() -> None:
    made = waiting_for("memory")
    made.abort("a")
    assert spans(made.plan_and_apply()) == {"b": (0, 5)}


def test_a_leap_takes_nothing_from_anybody_a_single_token_does() -> None:
    """Where the pages of a leap are not to be had, decodes go on token by token until somebody must give way."""
    slabs = fewest_slabs(FULL_AND_WINDOW, 30, 40, lookahead_tokens=LOOKAHEAD)
    made = leaping(slabs).expect_outputs(40, 2)
    for name in "abc":
        made.arrive(name, 9, 40)
    steps: list[tuple[int, int]] = []
    while made.scheduler.has_work:
        before = made.retractions, made.leaps
        made.step()
        steps.append((made.retractions - before[0], made.leaps - before[1]))
    assert any(retracted for retracted, _ in steps), "somebody had to give way"
    assert any(leapt for _, leapt in steps)
    assert not any(leapt for retracted, leapt in steps if retracted), steps
    made.assert_all_finished()


def test_what_stands_after_a_stop_token_is_dropped() -> None:
    made = decoding(leaping(), "a", "b", stop_token_ids=(96,))
    plan = made.plan()
    assert plan is not None
    updates = made.scheduler.apply(
        replace(
            made.backend.run(plan),
            sampled=(Sampled("a", 1, None, (2, 96, 4, 5, 6, 7, 8)), Sampled("b", 96)),
        )
    )
    assert updates == (
        NewToken("a", 1),
        NewToken("a", 2),
        NewToken("a", 96, None, "stop"),
        NewToken("b", 96, None, "stop"),
    )
    assert made.scheduler.audit() == []
    assert made.scheduler.totals.output_tokens == 2 + 4, "the first tokens of both, and those of the leap"
    assert made.is_empty


@pytest.mark.parametrize("count", [3, 9])
def test_a_leap_that_comes_back_with_another_number_of_tokens_fails_its_request(count: int) -> None:
    made = decoding(leaping(), "a", "b")
    plan = made.plan()
    assert plan is not None
    result = made.backend.run(plan)
    made.apply(replace(result, sampled=(Sampled("a", 1, None, (2,) * (count - 1)), result.sampled[1])))
    assert made.failed == {"a": f"the backend returned {count} tokens of a leap of 8"}
    made.run()
    assert made.outputs["b"] == made.expected("b")


def test_an_aborted_request_leaves_a_leap_and_what_it_had_stays_true() -> None:
    made = decoding(leaping(prefix_cache=True), "a", "b")
    plan = made.plan()
    assert plan is not None
    result = made.backend.run(plan)
    made.abort("a")
    made.apply(result)
    made.run().assert_true_tokens()
    assert (made.ends["a"], len(made.outputs["a"])) == ("abort", 1)


def test_windows_that_a_leap_passes_as_a_whole_are_given_up() -> None:
    made = World(tiny_layout(((Sliding(2), 2, 3),), 20), rules(lookahead_tokens=15), decode_tokens=16)
    decoding(made, "a")
    made.plan_and_apply()
    request = made.scheduler._roster.live["a"]
    assert request.holding is not None
    assert (request.computed, request.holding.first_page, request.holding.pages) == (21, [10], (1,))


def test_every_granule_that_a_leap_crosses_is_kept_for_others() -> None:
    made = World(tiny_layout(THREE_POOLS[:2], 60), rules(lookahead_tokens=15, prefix_cache=True), decode_tokens=16)
    decoding(made, "a")
    made.plan_and_apply()
    made.abort("a")
    text = (*made.arrivals["a"].prompt, *made.outputs["a"])
    made.arrive("b", (*text, 1), 2)
    made.run().assert_true_tokens()
    assert made.cached_tokens["b"] == 20, "five granules of four tokens: 21 positions were computed"


def test_a_segment_tells_a_leap_by_what_is_known() -> None:
    segment = Segment("a", 4, 3, True, greedy(9), 0, [1] * 5, 5, False)
    assert segment.is_leap
    assert not Segment("a", 4, 1, True, greedy(9), 0, [1] * 5, 5, False).is_leap

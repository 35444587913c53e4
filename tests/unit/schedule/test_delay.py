"""The prefill delay is a bound on each request: once let go, nobody is held back again, whatever keeps him out then."""

from __future__ import annotations

from testing.schedule import FULL_AND_WINDOW, World, stem, world


def decoding_world(slabs: int = 80, **changes: object) -> World:
    """Return a world in which `a` decodes; its clock counts steps, and the delay is three of them."""
    made = world(FULL_AND_WINDOW, slabs, prefill_delay_seconds=3.0, prefill_delay_tokens=60, **changes)
    made.arrive("a", stem(8), 40)
    made.plan_and_apply()
    return made


def steps_until_admitted(made: World, name: str) -> list[str]:
    """Return the reason of each step in which `name` was not admitted."""
    told = []
    while name not in made.cached_tokens:
        made.plan_and_apply()
        if name not in made.cached_tokens:
            told.append(made.scheduler.reasons()[name].code)
    return told


def test_whoever_waited_for_a_slot_as_long_as_the_delay_comes_in_when_one_is_free() -> None:
    made = decoding_world(max_running_requests=2)
    made.arrive("b", stem(8), 14)
    steps_until_admitted(made, "b")
    made.arrive("c", stem(8), 4)
    told = steps_until_admitted(made, "c")
    assert told == ["delay"] * 3 + ["slots"] * (len(told) - 3)
    assert len(told) > 8


def test_whoever_waits_for_memory_is_tried_in_every_step_once_the_delay_is_over() -> None:
    made = decoding_world(slabs=18)
    made.arrive("b", stem(8), 14)
    steps_until_admitted(made, "b")
    made.arrive("c", stem(40), 1)
    told = steps_until_admitted(made, "c")
    assert told == ["delay"] * 3 + ["memory"] * (len(told) - 3)
    assert len(told) > 5


def test_what_a_batch_leaves_over_is_not_held_back_anew() -> None:
    made = decoding_world(step_tokens=21)
    for name in ("b", "c"):
        made.arrive(name, stem(20), 4)
    assert steps_until_admitted(made, "b") == ["delay"] * 3
    assert steps_until_admitted(made, "c") == []  # its reason in the step before was the room of that step


def test_a_new_arrival_waits_its_own_delay_after_others_were_let_go() -> None:
    made = decoding_world()
    made.arrive("b", stem(8), 30)
    assert steps_until_admitted(made, "b") == ["delay"] * 3
    made.plan_and_apply()
    made.arrive("c", stem(8), 4)
    assert steps_until_admitted(made, "c") == ["delay"] * 3


def test_seniors_who_keep_coming_do_not_prolong_the_delay_of_those_who_wait() -> None:
    made = decoding_world(max_running_requests=8)
    made.arrive("b", stem(8), 4)
    for step in range(3):
        made.arrive(f"senior{step}", stem(8), 4, priority=-1)
        made.plan_and_apply()
    made.plan_and_apply()
    assert {"b", "senior0", "senior1", "senior2"} <= set(made.cached_tokens)


def test_the_delay_begins_with_the_first_who_is_held_back_and_not_before() -> None:
    made = decoding_world()
    for _ in range(8):
        made.plan_and_apply()
    made.arrive("b", stem(8), 4)
    assert steps_until_admitted(made, "b") == ["delay"] * 3
    made.run().assert_all_finished()

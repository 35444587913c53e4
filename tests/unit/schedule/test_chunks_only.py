"""Steps in which decodes stand still: what a replay asks for when prompts are to take no time."""

from __future__ import annotations

from testing.schedule import FULL_AND_WINDOW, World, greedy, rules, tiny_layout


def world(slabs: int = 60, **changes: object) -> World:
    return World(tiny_layout(FULL_AND_WINDOW, slabs), rules(**changes))


def test_decodes_stand_still_while_chunks_are_computed() -> None:
    made = world(step_tokens=8)
    made.arrive("a", 5, greedy(12))
    made.run_until(lambda: bool(made.outputs["a"]))
    made.arrive("b", 20, greedy(3))
    made.decode_tokens, before = 0, list(made.outputs["a"])
    chunks = [[(s.request_id, s.tokens) for s in made.plan_and_apply().segments] for _ in range(3)]
    assert chunks == [[("b", 8)], [("b", 8)], [("b", 4)]]
    assert made.plan() is None
    assert made.outputs["a"] == before
    assert len(made.outputs["b"]) == 1
    made.decode_tokens = 1
    made.run().assert_all_finished()


def test_with_nothing_but_decodes_there_is_nothing_to_plan() -> None:
    made = world()
    made.arrive("a", 5, greedy(4))
    made.run_until(lambda: bool(made.outputs["a"]))
    assert made.scheduler.plan(0.0, 0) is None
    assert made.scheduler.has_work
    made.run().assert_all_finished()


def test_who_outgrows_its_grant_goes_on_between_steps_of_chunks_alone() -> None:
    made = world(slabs=40, admission=("expected", 0.8), step_tokens=64).expect_outputs(30, 2)
    for name in "abcdef":
        made.arrive(name, 12, greedy(30))
    for _ in range(200):
        made.decode_tokens = 0
        while made.step():
            pass
        made.decode_tokens = 1
        if not made.step():
            break
    made.assert_all_finished()
    assert made.scheduler.totals.extensions > 0
    assert made.scheduler.totals.retractions > 0

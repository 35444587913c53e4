"""Who was refused memory is looked up, priced and locked again only when the answer may be another one."""

from __future__ import annotations

import pytest

from halocline.schedule.events import Reason
from testing.schedule import FULL_AND_WINDOW, GUARANTEED, World, fewest_slabs, greedy, prompt, rules, tiny_layout


def full_world(spare_slabs: int = 0, text: tuple[int, ...] | None = None, **changes: object) -> World:
    """Return a world in which "a" decodes and "b" was refused memory; both begin alike."""
    changes = {"admission": GUARANTEED, "prefix_cache": True} | changes
    slabs = fewest_slabs(FULL_AND_WINDOW, 9, 40, **changes) + spare_slabs
    made = World(tiny_layout(FULL_AND_WINDOW, slabs), rules(**changes))
    made.arrive("a", prompt(9, 1), 40)
    made.run_until(lambda: bool(made.outputs["a"]))
    text = (*prompt(8, 1), 5, 6) if text is None else text
    made.arrive("b", text, 49 - len(text))
    made.step()
    assert made.scheduler.reasons()["b"].code == "memory"
    return made


class Asked:
    """Counts how often the gate prices a candidate."""

    def __init__(self, made: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        gate = made.scheduler._gate
        priced = gate.candidate

        def candidate(request: object) -> object:
            self.times += 1
            return priced(request)  # type: ignore[arg-type]

        monkeypatch.setattr(gate, "candidate", candidate)


def detail(reason: Reason) -> str:
    assert reason.code == "memory"
    return reason.detail


def test_while_others_decode_it_is_not_asked_again_and_its_reason_stays_true(monkeypatch: pytest.MonkeyPatch) -> None:
    made = full_world(prefix_cache=False)
    asked = Asked(made, monkeypatch)
    details = set()
    for _ in range(12):
        held, promised = made.arena.budget.held[0], made.arena.budget.promised[0]
        made.step()
        told = detail(made.scheduler.reasons()["b"])
        details.add(told)
        assert f"{held} held + {promised} promised" in told
    assert asked.times == 0
    assert len(details) > 1, "pages were taken meanwhile, and the numbers of the reason follow them"
    made.run().assert_all_finished()
    assert asked.times == 1, "it was asked when there was room"


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_when_room_comes_free_it_comes_in_at_once(prefix_cache: bool) -> None:
    made = full_world(prefix_cache=prefix_cache)
    made.step()
    made.abort("a")
    assert [segment.request_id for segment in made.plan_and_apply().segments] == ["b"]
    made.run().assert_true_tokens()


def test_when_more_of_it_is_cached_it_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who decodes gives the tree whole granules: of one that goes on as it does, more is shared then."""
    twin = full_world()
    for _ in range(20):
        twin.step()
    made = full_world(text=(*prompt(9, 1), *twin.outputs["a"][:12], 5, 6))
    asked = Asked(made, monkeypatch)
    sharing, request = made.scheduler._sharing, made.scheduler._roster.live["b"]
    before = sharing.standing(request)
    steps = 0
    while sharing.standing(request) == before:
        made.step()
        steps += 1
    assert asked.times == 0, f"asked within {steps} steps in which it stood as before"
    made.step()
    assert asked.times == 1


def test_what_others_bring_to_the_cache_makes_nobody_ask_again_whom_it_does_not_concern(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = full_world(text=prompt(10, 3))
    asked = Asked(made, monkeypatch)
    changes = made.scheduler._sharing.changes
    for _ in range(20):
        made.step()
    assert made.scheduler._sharing.changes > changes + 1
    assert asked.times == 0
    made.run().assert_all_finished()
    assert asked.times >= 1


def test_when_expectations_have_changed_it_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = full_world(prefix_cache=False, admission=("expected", 0.5))
    asked = Asked(made, monkeypatch)
    made.step()
    assert asked.times == 0
    made.expect_outputs(39, 1)
    made.step()
    assert asked.times == 1


def test_when_somebody_more_senior_arrives_the_answer_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    made = full_world(prefix_cache=False)
    asked = Asked(made, monkeypatch)
    made.arrive("c", 9, greedy(40), priority=-1)
    made.step()
    assert asked.times == 1
    assert made.scheduler.reasons()["c"].code == "memory"
    assert made.scheduler.reasons()["b"].code == "queue"

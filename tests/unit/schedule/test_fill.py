"""Who was refused memory is looked up, priced and locked again only when the answer may be another one."""

from __future__ import annotations

import pytest

from halocline.schedule.events import Reason
from testing.schedule import FULL_AND_WINDOW, GUARANTEED, World, fewest_slabs, greedy, prompt, rules, tiny_layout


def full_world(spare_slabs: int = 0, **changes: object) -> World:
    """Return a world in which "a" decodes and "b" was refused memory; both begin alike."""
    changes = {"admission": GUARANTEED, "prefix_cache": True} | changes
    slabs = fewest_slabs(FULL_AND_WINDOW, 9, 40, **changes) + spare_slabs
    made = World(tiny_layout(FULL_AND_WINDOW, slabs), rules(**changes))
    made.arrive("a", prompt(9, 1), 40)
    made.run_until(lambda: bool(made.outputs["a"]))
    made.arrive("b", (*prompt(8, 1), 5, 6), 39)
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


def test_when_what_is_cached_has_grown_it_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of the one who decodes lets go of pages, and the tree gets whole granules: more may be shared now."""
    made = full_world()
    asked = Asked(made, monkeypatch)
    before = made.scheduler._sharing.changes
    steps = 0
    while made.scheduler._sharing.changes == before:
        made.step()
        steps += 1
    assert asked.times == 0, f"asked within {steps} steps in which nothing changed"
    made.step()
    assert asked.times == 1


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

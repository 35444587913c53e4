"""Landings that give way to prompts which are computed here for others: for what, until when."""

from __future__ import annotations

from halocline.schedule.events import (
    Abort,
    Arrive,
    LandingReady,
    Lost,
    Offered,
    PeerAccepted,
    PeerRevoked,
    RevokeWanted,
)
from testing.schedule import FULL_AND_WINDOW, greedy, prompt, rules, tiny_layout
from testing.transfers import Side, state_of


def gave_way() -> Side:
    """Return a worker with one slot whose landing of `a` gave way to `@b`, which is computed for another worker."""
    made = Side(tiny_layout(FULL_AND_WINDOW, 40), rules(max_running_requests=1))
    made.tell(Arrive("a", prompt(9), greedy(5), 0, route="receive"))
    made.tell(Offered("a", 1, gives_way=True))
    made.run_until(lambda: any(isinstance(each, LandingReady) for each in made.said))
    made.tell(Arrive("@b", prompt(9, 3), greedy(1), 0, route="send"))
    made.tell(PeerAccepted("@b", 1, 0))
    assert made.plan() is None, "the only slot is the landing's"
    assert made.said[-1] == RevokeWanted("a", 1)
    made.tell(Lost("a", 1, "it gave way", is_final=False))
    return made


def remembered(made: Side) -> int:
    courtesy = made.scheduler._transfers._courtesy
    return len(courtesy._yielding) + len(courtesy._first) + len(courtesy._held)


def is_in_line(made: Side) -> bool:
    return made.scheduler._roster.live["a"].is_called


def test_who_gave_way_comes_in_after_the_prompt_for_which_it_did() -> None:
    made = gave_way()
    made.tell(Offered("a", 2, gives_way=True))
    assert not is_in_line(made)
    assert "@b, which is computed here for another worker, goes first" in made.scheduler.reasons()["a"].detail
    plan = made.scheduler.plan(0.0)
    assert plan is not None
    assert [segment.request_id for segment in plan.segments] == ["@b"]
    assert is_in_line(made), "it comes in with the next plan"
    made.apply(made.backend.run(plan))
    made.run_until(lambda: state_of(made, "@b") == "sending")


def test_who_gave_way_comes_in_when_that_prompt_is_accepted_anew() -> None:
    made = gave_way()
    made.tell(Offered("a", 2, gives_way=True))
    made.tell(PeerRevoked("@b", 1))
    assert is_in_line(made)
    made.tell(PeerAccepted("@b", 2, 0))
    assert is_in_line(made), "the later attempt has no more right"


def test_an_offer_that_stands_waits_for_nobody() -> None:
    """The worker that computes the prompt was started again, and comes before this one in the order now."""
    made = gave_way()
    made.tell(Offered("a", 2, gives_way=False))
    assert is_in_line(made)


def test_nothing_is_remembered_of_who_has_left() -> None:
    for gives_way in (True, False):
        made = gave_way()
        made.tell(Offered("a", 2, gives_way))
        assert remembered(made) == (3 if gives_way else 0)
        made.tell(Abort("a"))
        assert remembered(made) == 0
        assert state_of(made, "@b") == "waiting"

"""The verdict on an engine: progress, silence, death."""

from __future__ import annotations

from dataclasses import replace

from halocline.engine.health import ProgressWatch, Sight, judge
from halocline.engine.messages import Blocked, Snapshot

WELL = Sight(dead_reason=None, is_draining=False, waiting_sequences=3, silent_seconds=0.1, snapshot=Snapshot())
STUCK = Snapshot(has_work=True, stalled_seconds=31.0, blocked=Blocked("cmpl-7", "memory", "12 pages short in full"))


def test_an_engine_that_works_is_healthy() -> None:
    assert judge(WELL, 30.0).is_healthy


def test_a_stalled_engine_is_unhealthy_and_the_body_names_the_blocked_request_and_its_refusal() -> None:
    verdict = judge(replace(WELL, snapshot=STUCK), 30.0)
    assert not verdict.is_healthy
    assert verdict.body()["status"] == "stalled"
    assert verdict.body()["blocked"] == {"request": "cmpl-7", "reason": "memory", "detail": "12 pages short in full"}
    assert "31.0 s" in verdict.message
    assert judge(replace(WELL, snapshot=STUCK), 40.0).is_healthy


def test_an_engine_that_says_nothing_while_clients_wait_is_unhealthy() -> None:
    assert judge(replace(WELL, silent_seconds=30.0), 30.0).state == "silent"
    assert judge(replace(WELL, silent_seconds=1e6, waiting_sequences=0), 30.0).is_healthy, "idle is not silent"


def test_death_comes_before_everything_else() -> None:
    verdict = judge(replace(WELL, dead_reason="killed by SIGKILL", is_draining=True, snapshot=STUCK), 30.0)
    assert (verdict.state, verdict.message) == ("dead", "killed by SIGKILL")


def test_a_draining_server_is_not_to_be_sent_requests() -> None:
    assert judge(replace(WELL, is_draining=True), 30.0).state == "draining"


def test_the_watch_starts_when_work_arrives() -> None:
    watch = ProgressWatch(0.0)
    watch.note(50.0, progressed=False, has_work=True)
    assert watch.stalled_seconds(53.0) == 3.0
    watch.note(60.0, progressed=True, has_work=True)
    assert watch.stalled_seconds(61.0) == 1.0
    watch.note(70.0, progressed=False, has_work=False)
    assert watch.stalled_seconds(99.0) == 0.0

"""The cheap question why the head of the queue waits, against the answer for everybody."""

from __future__ import annotations

from halocline.params import SamplingParams
from halocline.schedule.events import Arrive
from halocline.sim.backend import ReplayBackend
from halocline.sim.setup import build
from testing.replays import small_setup


def test_the_reason_of_the_head_is_the_one_that_reasons_gives_it() -> None:
    seen = set()
    for changes in ({"pages": 9}, {"max_running_requests": 2}, {"pages": 24, "step_tokens": 16}):
        scheduler, backend = build(small_setup(**changes)).scheduler, ReplayBackend()  # type: ignore[arg-type]
        assert scheduler.head_reason() is None
        for name in "abcdef":
            backend.expect(name, 1)
            params = SamplingParams(temperature=0.0, max_tokens=4)
            scheduler.handle(Arrive(name, tuple(range(14)), params, 0))
        fresh = scheduler.head_reason()
        assert fresh is not None
        assert fresh.code == "queue"  # no step was planned since
        while (plan := scheduler.plan(0.0)) is not None:
            reasons = scheduler.reasons()
            waiting = [name for name in "abcdef" if name in reasons]
            head = scheduler.head_reason()
            assert (head is None) == (scheduler.waiting == 0) == (not waiting)
            assert scheduler.running + scheduler.waiting == len(scheduler._roster.live)
            if head is not None:
                assert reasons[waiting[0]] == head
                seen.add(head.code)
            scheduler.apply(backend.run(plan))
    assert {"memory", "slots", "step-room"} <= seen

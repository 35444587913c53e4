"""The step loop: what goes in comes out, and a defect fails the requests concerned and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from halocline.engine.core import PATIENCE_DEFECTS, AuditRule, EngineCore
from halocline.engine.figures import snapshot_of
from halocline.params import SamplingParams
from halocline.schedule.events import Abort, Accepted, Admitted, Arrive, Event, Failed, NewToken, Rejected, Update
from halocline.step import StepPlan, StepResult
from halocline.units import KIB
from testing.engine import EOS, FakeBackend, FakeScheduler, build_on_arena, ids_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def core(
    *, reply: str = "ab", audit: AuditRule = "idle", clock: Clock | None = None, **settings: int
) -> tuple[EngineCore, FakeScheduler, FakeBackend]:
    scheduler, backend = FakeScheduler(**settings), FakeBackend(reply)
    return EngineCore(scheduler, backend, audit=audit, clock=clock or Clock()), scheduler, backend


def arrive(name: str, prompt: str = "x", **params: object) -> Arrive:
    return Arrive(name, tuple(ids_of(prompt)), SamplingParams(**params), 0)  # type: ignore[arg-type]


def run(engine: EngineCore, *events: Event, turns: int = 20) -> list[Update]:
    updates = engine.turn(events)
    for _ in range(turns):
        updates += engine.turn()
    return updates


def tokens(updates: Sequence[Update], name: str) -> list[int | None]:
    return [each.token_id for each in updates if isinstance(each, NewToken) and each.request_id == name]


def failed(updates: Sequence[Update]) -> set[str]:
    return {each.request_id for each in updates if isinstance(each, Failed)}


def test_one_turn_takes_events_in_and_computes_one_step() -> None:
    engine, scheduler, _ = core()
    updates = engine.turn([arrive("a"), arrive("b")])
    assert [type(each) for each in updates] == [Accepted, Accepted, Admitted, Admitted, NewToken, NewToken]
    assert (engine.steps, scheduler.step) == (1, 1)


def test_requests_run_to_their_end() -> None:
    engine, _, _ = core()
    updates = run(engine, arrive("a"), arrive("b", max_tokens=1))
    assert tokens(updates, "a") == [*ids_of("ab"), EOS]
    assert tokens(updates, "b") == ids_of("a")
    assert not engine.has_work
    assert engine.live == ()


def test_an_abort_frees_within_the_turn() -> None:
    engine, scheduler, _ = core()
    engine.turn([arrive("a", ignore_eos=True, max_tokens=100)])
    assert scheduler.used_pages > 0
    updates = engine.turn([Abort("a")])
    assert updates == [NewToken("a", None, None, "abort")]
    assert scheduler.used_pages == 0


def test_a_failure_of_one_request_leaves_the_others_running() -> None:
    engine, _, _ = core()
    updates = run(engine, arrive("good"), arrive("bad", "please FAIL"))
    assert failed(updates) == {"bad"}
    assert tokens(updates, "good") == [*ids_of("ab"), EOS]
    assert engine.counters["defects"] == 0


def test_a_backend_that_raises_fails_the_requests_of_the_plan_and_serves_the_next() -> None:
    engine, _, backend = core()

    def explode(plan: StepPlan) -> None:
        raise RuntimeError("out of memory in step 1")

    backend.before_step = explode
    updates = engine.turn([arrive("a"), arrive("b")])
    assert [each for each in updates if isinstance(each, Failed)] == [
        Failed("a", "out of memory in step 1"),
        Failed("b", "out of memory in step 1"),
    ]
    backend.before_step = None
    assert tokens(run(engine, arrive("c")), "c") == [*ids_of("ab"), EOS]
    assert engine.counters["defects"] == 1


class Defective(FakeScheduler):
    """Raises where it is told to."""

    where = ""
    times = 1

    def _trip(self, where: str) -> None:
        if where == self.where and self.times > 0:
            self.times -= 1
            raise AssertionError(f"defect in {where}")

    def handle(self, event: Event) -> Sequence[Update]:
        self._trip("handle")
        return super().handle(event)

    def plan(self, now: float) -> StepPlan | None:
        self._trip("plan")
        return super().plan(now)

    def apply(self, result: StepResult) -> Sequence[Update]:
        self._trip("apply")
        return super().apply(result)


@pytest.mark.parametrize("where", ["handle", "plan", "apply"])
def test_a_scheduler_that_raises_once_serves_the_next_request(where: str) -> None:
    scheduler = Defective()
    engine = EngineCore(scheduler, FakeBackend("ab"), clock=Clock())
    scheduler.where = where
    run(engine, arrive("a"))
    assert tokens(run(engine, arrive("b")), "b") == [*ids_of("ab"), EOS]
    assert engine.counters["defects"] == 1
    assert not engine.has_work


@pytest.mark.parametrize("where", ["plan", "apply"])
def test_a_defect_that_repeats_fails_everything_instead_of_turning_for_ever(where: str) -> None:
    scheduler = Defective()
    engine = EngineCore(scheduler, FakeBackend("ab"), clock=Clock())
    scheduler.where, scheduler.times = where, PATIENCE_DEFECTS
    updates = run(engine, arrive("a"), arrive("b"), turns=PATIENCE_DEFECTS)
    assert failed(updates) == {"a", "b"}
    assert len([each for each in updates if isinstance(each, Failed)]) == 2, "each is told once"
    assert engine.live == ()
    assert not scheduler.has_work


def test_a_rejected_request_is_counted_by_its_code() -> None:
    engine, _, _ = core(model_len=8)
    updates = engine.turn([arrive("a", "123456789")])
    assert isinstance(updates[0], Rejected)
    assert snapshot_of(engine, 0.0).refusals == {"context_length_exceeded": 1}
    assert engine.live == ()


@pytest.mark.parametrize(("rule", "audits"), [("off", 0), ("idle", 1), ("every", 3)])
def test_memory_is_recounted_as_often_as_the_rule_says(rule: AuditRule, audits: int) -> None:
    engine, _, _ = core(audit=rule)
    run(engine, arrive("a"))
    # Three tokens are three steps; it becomes idle in the last of them.
    assert engine.counters["audits"] == audits


def test_a_broken_law_is_reported_and_stops_nothing() -> None:
    engine, scheduler, _ = core()
    scheduler.violations = ["pool full counts 3 pages twice"]
    assert tokens(run(engine, arrive("a")), "a") == [*ids_of("ab"), EOS]
    snapshot = snapshot_of(engine, 0.0)
    assert snapshot.violations == ("L1: pool full counts 3 pages twice",)
    assert snapshot.counters["violations"] == 1


def test_an_audit_that_raises_is_a_violation() -> None:
    engine, scheduler, _ = core()

    def broken() -> list[object]:
        raise KeyError("pool 3")

    scheduler.audit = broken  # type: ignore[assignment, method-assign]
    assert "the audit itself failed" in engine.audit()[0]


def test_work_without_progress_is_timed_and_the_blocked_request_named() -> None:
    clock = Clock()
    engine, scheduler, _ = core(clock=clock)
    scheduler.is_stuck = True
    clock.now = 100.0
    engine.turn([arrive("a")])
    clock.now = 107.0
    engine.turn([arrive("b")])
    snapshot = snapshot_of(engine, clock.now)
    assert snapshot.stalled_seconds == 7.0, "a new arrival is no progress"
    assert snapshot.blocked is not None
    assert (snapshot.blocked.request_id, snapshot.blocked.code) == ("a", "memory")
    assert snapshot.waiting == {"memory": 1, "queue": 1}
    scheduler.is_stuck = False
    engine.turn()
    assert snapshot_of(engine, clock.now).stalled_seconds == 0.0
    run(engine)
    clock.now = 1000.0
    assert snapshot_of(engine, clock.now).stalled_seconds == 0.0, "an idle engine is not stalled"


def test_closing_frees_the_backend() -> None:
    engine, _, backend = core()
    engine.close()
    assert backend.is_closed


def test_a_request_that_fails_while_the_next_step_is_planned_is_told() -> None:
    engine, scheduler, _ = core()
    scheduler.is_stuck = True
    engine.turn([arrive("a")])
    told = [(Failed("a", "it cannot go on alone"),)]
    scheduler.take_updates = lambda: told.pop() if told else ()  # type: ignore[method-assign]
    assert engine.turn() == [Failed("a", "it cannot go on alone")]
    assert engine.live == ()


class TestOnTheRealScheduler:
    """The same loop before the shipped scheduler and arena."""

    def parts(self) -> tuple[EngineCore, FakeBackend]:
        made = build_on_arena({"kv_bytes": 64 * KIB, "reply": "{prompt}"}, lambda text, fraction: None)
        assert isinstance(made.backend, FakeBackend)
        return EngineCore(made.scheduler, made.backend, audit="every", clock=Clock()), made.backend

    @pytest.mark.parametrize("step", range(1, 6))
    def test_a_backend_that_raises_in_any_step_leaves_the_arena_whole(self, step: int) -> None:
        engine, backend = self.parts()

        def explode(plan: StepPlan) -> None:
            if engine.steps == step:
                raise RuntimeError("the device is gone")

        backend.before_step = explode
        names = [f"r{i}" for i in range(30)]
        updates = run(engine, *(arrive(name, "x" * (i + 1), max_tokens=40) for i, name in enumerate(names)), turns=400)
        lost = failed(updates)
        assert lost
        for i, name in enumerate(names):
            if name not in lost:
                assert tokens(updates, name) == [*ids_of("x" * (i + 1)), EOS]
        snapshot = snapshot_of(engine, 0.0)
        assert snapshot.figures is not None
        assert snapshot.figures.arena.used_bytes == snapshot.figures.arena.cached_bytes
        assert snapshot.violations == ()
        assert engine.live == ()

    def test_aborts_at_any_moment_leave_the_arena_whole(self) -> None:
        engine, _ = self.parts()
        engine.turn([arrive(f"r{i}", "x" * 20, max_tokens=40) for i in range(30)])
        for i in range(30):
            engine.turn([Abort(f"r{i}", "stop" if i % 2 else "abort")])
        run(engine, turns=10)
        snapshot = snapshot_of(engine, 0.0)
        assert snapshot.figures is not None
        needed = snapshot.figures.arena.used_bytes - snapshot.figures.arena.cached_bytes
        assert (needed, snapshot.violations, engine.has_work) == (0, (), False)

    def test_the_snapshot_names_who_waits_and_why(self) -> None:
        engine, _ = self.parts()
        engine.turn([arrive(f"r{i}", "x" * 200, max_tokens=40) for i in range(30)])
        snapshot = snapshot_of(engine, 0.0)
        assert sum(snapshot.waiting.values()) > 0
        assert snapshot.blocked is not None
        assert snapshot.blocked.code != "queue"
        assert snapshot.blocked.detail

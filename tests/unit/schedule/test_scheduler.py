"""The scheduler as its callers see it: events at any moment, results, failures, ends, reasons, figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from halocline.errors import ConfigError, InvariantError
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.grant import Commit, Grant, Handles, Order, Refusal
from halocline.memory.retention import Chunked, Full, Sliding
from halocline.schedule.events import Abort, Failed, NewToken, Reason
from halocline.schedule.holding import Holding
from halocline.schedule.request import State
from halocline.schedule.scheduler import Rules, Scheduler
from halocline.step import Sampled, StepResult
from testing.schedule import FULL_AND_WINDOW, GUARANTEED, PoolSpec, World, greedy, rules, tiny_layout, world


def state_of(made: World, name: str) -> State:
    return made.scheduler._roster.live[name].state


# --- rules and construction


def test_rules_list_every_problem_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Rules(step_tokens=4, max_running_requests=8, max_model_len=1, vocab_size=0, admission=("expected", 1.5))
    assert len(caught.value.problems) == 4
    assert "step_tokens is 4 but 8 requests may decode in one step" in str(caught.value)


def test_a_step_shorter_than_a_granule_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="less than one granule of 4 tokens"):
        World(tiny_layout(FULL_AND_WINDOW, 9), rules(step_tokens=3, max_running_requests=2))


def test_an_arena_that_serves_nobody_is_refused_at_start_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"needs 1 \+ 0 pages of full, 1 \+ 1 pages of sliding-6 .* 3 slabs .* has 2"):
        world(slabs=2)
    world(slabs=3).arrive("a", 1, 1)


def test_an_arena_that_cannot_hold_the_floor_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="floor of one granule"):
        world(slabs=9, caps=(9, 0))


# --- ends of a request


def tokens_and_end(params: object, eos: tuple[int, ...] = (), length: int = 6) -> tuple[list[int], str, World]:
    made = world(slabs=60, eos_token_ids=eos, max_model_len=40)
    made.arrive("a", length, params)  # type: ignore[arg-type]
    made.run().assert_all_finished()
    return made.outputs["a"], made.ends["a"], made


def plain_output() -> list[int]:
    return tokens_and_end(greedy(30))[0]


def test_max_tokens_ends_with_length() -> None:
    tokens, end, _ = tokens_and_end(greedy(3))
    assert (len(tokens), end) == (3, "length")


def test_the_models_length_ends_with_length() -> None:
    tokens, end, _ = tokens_and_end(greedy())
    assert (len(tokens), end) == (34, "length")


def first_repeat_free(tokens: list[int], at: int) -> int:
    assert tokens[at] not in tokens[:at], "the oracle's output was meant not to repeat so early"
    return tokens[at]


def test_end_of_sequence_ends_with_stop_and_is_reported() -> None:
    plain = plain_output()
    eos = first_repeat_free(plain, 4)
    tokens, end, _ = tokens_and_end(greedy(30), eos=(eos,))
    assert (tokens, end) == (plain[:5], "stop")


def test_end_of_sequence_as_the_last_allowed_token_is_a_stop() -> None:
    plain = plain_output()
    _, end, _ = tokens_and_end(greedy(5), eos=(first_repeat_free(plain, 4),))
    assert end == "stop"


def test_end_of_sequence_is_ignored_on_request() -> None:
    plain = plain_output()
    tokens, end, _ = tokens_and_end(greedy(30, ignore_eos=True), eos=(first_repeat_free(plain, 4),))
    assert (tokens, end) == (plain, "length")


def test_a_stop_token_ends_even_when_end_of_sequence_is_ignored() -> None:
    plain = plain_output()
    stop = first_repeat_free(plain, 4)
    tokens, end, _ = tokens_and_end(greedy(30, ignore_eos=True, stop_token_ids=(stop,)))
    assert (tokens, end) == (plain[:5], "stop")


def test_no_stop_before_min_tokens_even_if_the_backend_samples_one() -> None:
    made = world(slabs=60, eos_token_ids=(1,))
    made.arrive("a", 6, greedy(30, min_tokens=3))
    ends = []
    for _ in range(4):
        plan = made.plan()
        assert plan is not None
        updates = made.scheduler.apply(StepResult(plan.step, (Sampled("a", 1),)))
        ends.append(updates[0].finish_reason)  # type: ignore[union-attr]
    assert ends == [None, None, None, "stop"]


def test_stop_strings_found_by_the_front_end_count_as_finished() -> None:
    made = world(slabs=60)
    made.arrive("a", 6, 60)
    for _ in range(5):
        made.step()
    assert made.tell(Abort("a", "stop")) == (NewToken("a", None, None, "stop"),)
    totals = made.scheduler.figures().totals
    assert (totals.finished, totals.aborted) == (1, 0)
    assert made.scheduler._gate.lengths._sorted[64] == [5]


# --- aborts at any moment


def world_in(state: State) -> World:
    """Return a world in which request `a` is in `state`, beside `b` that goes on."""
    made = world(slabs=60, step_tokens=8)
    made.arrive("b", 3, 30)
    made.step()
    made.arrive("a", 20, 20)
    if state is not State.WAITING:
        made.step()
    while state is State.DECODING and state_of(made, "a") is not State.DECODING:
        made.step()
    if state is State.RETRACTED:
        made.scheduler._roster.retract(made.scheduler._roster.live["a"])
    assert state_of(made, "a") is state
    return made


@pytest.mark.parametrize("state", [State.WAITING, State.PREFILLING, State.DECODING, State.RETRACTED])
def test_an_abort_frees_everything_in_any_state(state: State) -> None:
    made = world_in(state)
    before = len(made.outputs["a"])
    assert made.tell(Abort("a")) == (NewToken("a", None, None, "abort"),)
    assert "a" not in made.scheduler._roster.live
    assert [grant.owner for grant in made.arena.owners.grants.values()] == ["floor", "b"]
    made.run()
    assert len(made.outputs["a"]) == before
    made.assert_all_finished()


@pytest.mark.parametrize("state", [State.WAITING, State.PREFILLING, State.DECODING])
def test_an_abort_between_plan_and_result_frees_everything_and_hides_the_token(state: State) -> None:
    made = world_in(state)
    plan = made.plan()
    assert plan is not None
    assert "a" in [segment.request_id for segment in plan.segments]
    before = list(made.outputs["a"])
    made.abort("a")
    assert [grant.owner for grant in made.arena.owners.grants.values() if grant.owner == "a"] == []
    made.apply(made.backend.run(plan))
    assert made.outputs["a"] == before
    made.run().assert_all_finished()


def test_aborting_everyone_between_plan_and_result_leaves_nothing() -> None:
    made = world_in(State.PREFILLING)
    plan = made.plan()
    assert plan is not None
    made.abort("a")
    made.abort("b")
    made.apply(made.backend.run(plan))
    assert made.is_empty
    assert not made.scheduler.has_work


def test_aborting_a_stranger_says_nothing() -> None:
    made = world()
    made.arrive("a", 3, 1)
    made.run()
    assert made.tell(Abort("a")) == ()
    assert made.tell(Abort("nobody")) == ()


# --- failures


def test_a_failed_request_fails_alone() -> None:
    made = world_in(State.DECODING)
    made.backend.fails = {"a"}
    made.step()
    assert made.failed == {"a": "the fake backend was told to fail it"}
    made.run()
    assert made.ends["b"] == "length"
    assert made.is_empty


def test_a_chunk_that_fails_before_its_prompts_end_fails_its_request() -> None:
    made = world_in(State.PREFILLING)
    made.backend.fails = {"a"}
    made.step()
    assert "a" in made.failed
    made.run()
    assert made.is_empty


def test_a_missing_token_is_a_failure_of_its_request() -> None:
    made = world_in(State.DECODING)
    plan = made.plan()
    assert plan is not None
    result = made.backend.run(plan)
    made.apply(replace(result, sampled=tuple(got for got in result.sampled if got.request_id != "a")))
    assert made.failed == {"a": "the backend returned no token for this request"}
    made.run()
    assert made.is_empty


def test_a_failed_step_fails_its_requests_and_nobody_else() -> None:
    made = world(slabs=60, step_tokens=8, max_running_requests=8)
    made.arrive("a", 20, 20)
    made.step()
    made.arrive("late", 5, 5)
    plan = made.plan()
    assert plan is not None
    assert [segment.request_id for segment in plan.segments] == ["a"]
    assert made.scheduler.fail_step("the device is gone") == (Failed("a", "the device is gone"),)
    made.ends["a"] = "failed"
    made.run()
    assert made.ends["late"] == "length"
    assert made.is_empty
    assert made.scheduler.audit() == []


def test_a_failed_step_with_moves_makes_bystanders_compute_again() -> None:
    """Whether the moves were done is unknown, so pages outside the plan cannot be trusted."""
    made = world_in(State.PREFILLING)
    plan = made.plan()
    assert plan is not None
    made.arrive("c", 5, 5)
    bystander = made.scheduler._roster.live["b"]
    outstanding = made.scheduler._outstanding
    assert outstanding is not None
    # As if `b` had stood aside in a step that moved pages.
    without_b = replace(outstanding, plan=replace(plan, moves=(object(),)), decodes=())  # type: ignore[arg-type]
    made.scheduler._outstanding = without_b
    made.scheduler.fail_step("half way")
    assert bystander.state is State.RETRACTED
    made.ends["a"] = "failed"
    made.outputs["a"] = []
    made.run()
    assert made.ends["b"] == made.ends["c"] == "length"
    made.ends["a"] = "abort"
    made.assert_true_tokens()


def test_failing_without_a_step_says_nothing() -> None:
    assert world().scheduler.fail_step("nothing runs") == ()


class BrokenCommit(Arena):
    """An arena with a defect: the third commit fails although everything was granted."""

    commits = 0

    def commit(self, orders: list[Order]) -> Commit:  # type: ignore[override]
        self.commits += 1
        if self.commits == 3:
            raise InvariantError(["the third commit fails"])
        return super().commit(orders)


def test_a_commit_that_cannot_fail_and_does_fails_those_concerned_only() -> None:
    made = World(tiny_layout(FULL_AND_WINDOW, 60), rules(), make_arena=BrokenCommit)
    made.arrive("a", 6, 30)
    made.step()
    made.step()
    made.check = False  # the audit tells of the defect from here on
    made.arrive("b", 6, 30)
    assert [segment.request_id for segment in made.plan_and_apply().segments] == ["a"], "it needs no page in this step"
    assert "could not be committed" in made.failed["b"]
    assert [violation.law for violation in made.scheduler.audit()] == ["L3"]
    made.run()
    assert made.ends["a"] == "length"
    assert made.is_empty


def test_an_order_beyond_its_grant_fails_its_request_and_the_step_goes_on_without_it() -> None:
    made = World(tiny_layout(FULL_AND_WINDOW, 60), rules())
    for name in "abc":
        made.arrive(name, 6, 30)
    wanted = made.scheduler._keeper.wanted

    def too_much(holding: Holding, start: int, end: int) -> Demand:
        right = wanted(holding, start, end)
        return right.plus(Demand((100, 0))) if holding.grant.owner == "b" else right

    made.scheduler._keeper.wanted = too_much  # type: ignore[method-assign]
    made.check = False  # the audit tells of the defect from here on
    plan = made.plan()
    assert plan is not None
    assert [segment.request_id for segment in plan.segments] == ["a", "c"]
    made.apply(made.backend.run(plan))
    assert list(made.failed) == ["b"]
    assert "cannot commit 102 pages of full" in made.failed["b"]
    assert [violation.law for violation in made.scheduler.audit()] == ["L3"]
    made.run().assert_true_tokens()
    assert [made.ends[name] for name in "ac"] == ["length", "length"]
    assert made.is_empty


class NeverCommits(Arena):
    """An arena whose defect is not an order's."""

    def commit(self, orders: list[Order]) -> Commit:  # type: ignore[override]
        raise InvariantError(["no commit ever works"])


def test_a_commit_that_fails_without_orders_too_ends_in_a_defect_and_not_in_a_loop() -> None:
    made = World(tiny_layout(FULL_AND_WINDOW, 60), rules(), make_arena=NeverCommits, check=False)
    made.arrive("a", 6, 30)
    assert made.plan() is None
    assert list(made.failed) == ["a"]
    assert made.is_empty


class BreaksInPlanning(Arena):
    """An arena with a defect outside of `commit`: page numbers cannot be looked up once, before or after pages came."""

    broken = False

    def physical(self, pool: int, handles: Handles) -> NDArray[np.int32]:
        if self.broken:
            self.broken = False
            raise InvariantError(["a look-up fails"])
        return super().physical(pool, handles)


def test_a_plan_that_breaks_half_way_fails_those_concerned_and_leaves_nothing_behind() -> None:
    """A step grant that stayed would be lost for ever: no step would be left to give it back."""
    made = World(tiny_layout(FULL_AND_WINDOW, 60), rules(), make_arena=BreaksInPlanning)
    made.arrive("decodes", 6, 30)
    made.step()
    made.arrive("prefills", 40, 4)
    assert isinstance(made.arena, BreaksInPlanning)
    made.arena.broken = True
    with pytest.raises(InvariantError, match="a look-up fails"):
        made.scheduler.plan(0.0)
    made.note_updates(made.scheduler.fail_step("as the engine does"))
    assert list(made.failed) == ["prefills"]
    assert "a look-up fails" in made.failed["prefills"]
    assert [grant.owner for grant in made.arena.owners.grants.values()] == ["floor"]
    assert state_of(made, "decodes") is State.RETRACTED, "moves that the lost plan ordered will never be done"
    made.run().assert_true_tokens()
    assert made.ends["decodes"] == "length"
    assert made.is_empty


def test_a_result_that_breaks_half_way_fails_its_step_and_leaves_nothing_behind() -> None:
    made = World(tiny_layout(FULL_AND_WINDOW, 60), rules())
    made.arrive("decodes", 6, 30)
    made.step()
    made.arrive("prefills", 40, 4)
    plan = made.plan()
    assert plan is not None
    unusable = replace(made.backend.run(plan), sampled=(Sampled("decodes", 1), Sampled("prefills", [])))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        made.scheduler.apply(unusable)
    made.note_updates(made.scheduler.fail_step("as the engine does"))
    assert sorted(made.failed) == ["decodes", "prefills"]
    assert made.is_empty


# --- order of calls


def test_a_second_plan_before_the_result_is_a_defect() -> None:
    made = world()
    made.arrive("a", 3, 3)
    made.plan()
    with pytest.raises(InvariantError, match="step 0 was planned and not applied yet"):
        made.scheduler.plan(0.0)


@pytest.mark.parametrize("step", [-1, 1])
def test_a_result_of_another_step_is_a_defect(step: int) -> None:
    made = world()
    made.arrive("a", 3, 3)
    made.plan()
    with pytest.raises(InvariantError, match="the outstanding one is 0"):
        made.scheduler.apply(StepResult(step, ()))


def test_a_result_without_a_plan_is_a_defect() -> None:
    with pytest.raises(InvariantError, match="the outstanding one is none"):
        world().scheduler.apply(StepResult(0, ()))


def test_nothing_to_do_is_no_plan() -> None:
    made = world()
    assert made.plan() is None
    assert not made.scheduler.has_work


# --- priorities


def test_a_smaller_priority_is_served_first() -> None:
    made = world(slabs=60, max_running_requests=1)
    for name, priority in (("late", 1), ("normal", 0), ("urgent", -1)):
        made.arrive(name, 3, 2, priority)
    order = []
    while made.scheduler.has_work:
        plan = made.plan()
        assert plan is not None
        if plan.segments[0].request_id not in order:
            order.append(plan.segments[0].request_id)
        made.apply(made.backend.run(plan))
    assert order == ["urgent", "normal", "late"]


def test_a_new_request_does_not_overtake_a_prefill_that_has_begun_however_senior_it_is() -> None:
    made = world(slabs=60, step_tokens=12)
    made.arrive("begun", 28, 2)
    made.step()
    made.arrive("urgent", 4, 2, -1)
    assert [segment.request_id for segment in made.plan_and_apply().segments] == ["begun"]
    assert [segment.request_id for segment in made.plan_and_apply().segments] == ["begun", "urgent"]
    made.run().assert_all_finished()


def test_a_grant_falls_between_two_chunks_as_soon_as_the_life_that_is_left_allows_it() -> None:
    """18 tokens, local attention restarting every 8 in pages of 4: the last local chunk has one page and not two."""
    pools: tuple[PoolSpec, ...] = ((Full(), 4, 1), (Chunked(8), 4, 1))
    made = World(tiny_layout(pools, 30), rules(step_tokens=16))
    made.arrive("a", 18, 1)
    plan = made.plan()
    holding = made.scheduler._roster.live["a"].holding
    assert plan is not None
    assert holding is not None
    assert (plan.segments[0].tokens, tuple(holding.grant.demand)) == (16, (5, 2))
    made.apply(made.backend.run(plan))
    assert tuple(holding.grant.demand) == (5, 1)
    made.run().assert_all_finished()


# --- reasons


def test_reasons_name_slots_and_who_waits_behind_them() -> None:
    made = world(slabs=60, max_running_requests=1)
    for name in "abc":
        made.arrive(name, 3, 5)
    made.step()
    reasons = made.scheduler.reasons()
    assert {name: reason.code for name, reason in reasons.items()} == {"b": "slots", "c": "slots"}


def test_reasons_name_memory_with_its_shortfall_and_the_queue_behind_it() -> None:
    made = world(slabs=9)
    made.arrive("a", 12, 12)
    made.step()
    made.arrive("b", 12, 12)
    made.arrive("c", 1, 1)
    made.step()
    reasons = made.scheduler.reasons()
    assert (reasons["b"].code, reasons["c"].code) == ("memory", "queue")
    assert "together 11 of 9 slabs, 2 too many" in reasons["b"].detail
    assert reasons["c"].detail.startswith("1 more senior")


def test_a_request_that_was_not_looked_at_yet_has_a_reason_too() -> None:
    made = world()
    made.arrive("a", 3, 5)
    assert made.scheduler.reasons()["a"].code == "queue"


def test_reasons_name_step_room_when_only_this_step_is_full() -> None:
    made = world(slabs=60, step_tokens=8)
    made.arrive("a", 20, 5)
    made.arrive("b", 20, 5)
    made.step()
    assert made.scheduler.reasons()["b"].code == "step-room"
    assert "0 of 8 step tokens are left" in made.scheduler.reasons()["b"].detail


def test_who_runs_has_no_reason() -> None:
    made = world()
    made.arrive("a", 3, 5)
    made.step()
    assert made.scheduler.reasons() == {}


# --- figures


def test_figures_count_what_happened() -> None:
    made = world(slabs=60, max_running_requests=2)
    for name in "abc":
        made.arrive(name, 6, 4)
    made.arrive("", (), 4)
    made.step()
    figures = made.scheduler.figures()
    assert (figures.waiting, figures.prefilling, figures.decoding, figures.retracted) == (1, 0, 2, 0)
    made.abort("c")
    made.run()
    totals = made.scheduler.figures().totals
    assert (totals.arrived, totals.rejected, totals.admitted, totals.finished, totals.aborted) == (3, 1, 2, 2, 1)
    assert totals.computed_tokens == 2 * (6 + 3)
    assert totals.output_tokens == 8
    assert totals.peak_running == 2
    assert figures.totals.finished == 0, "a snapshot does not change afterwards"


# --- the liveness rule in small


def foreign(made: World, spare: int) -> Grant:
    """Let a foreign owner take all but `spare` slabs of window pages."""
    room = made.arena.most(1, Demand((0, 0)))
    grant = made.arena.reserve("foreign", Demand((0, room - spare)))
    assert isinstance(grant, Grant)
    return grant


def test_the_last_running_request_that_cannot_fit_alone_fails_and_the_server_lives() -> None:
    """F3: a foreign owner never lets go of what the request needs next."""
    made = world(slabs=30).expect_outputs(64, 2)
    made.arrive("a", 3, 60)
    made.step()
    held = foreign(made, 0)
    for _ in range(20):
        made.step()
        if "a" in made.failed:
            break
    assert "no other request runs, and yet its next page does not fit" in made.failed["a"]
    assert not made.scheduler.has_work
    made.arena.release(held)
    made.arrive("b", 3, 60)
    made.run()
    assert made.ends["b"] == "length"
    assert made.is_empty


def test_the_failure_of_a_request_in_planning_is_told_when_there_is_no_plan() -> None:
    made = world(slabs=30).expect_outputs(64, 2)
    made.arrive("a", 3, 60)
    made.step()
    foreign(made, 0)
    told = []
    for _ in range(20):
        plan = made.scheduler.plan(0.0)
        if plan is None:
            told += made.scheduler.take_updates()
            break
        made.scheduler.apply(made.backend.run(plan))
    assert [type(update) for update in told] == [Failed]


reason_queue = Reason("queue", "it was not looked at yet")


class Stubborn(Arena):
    """An arena that refuses extensions of some owners, as pins of other owners may make it."""

    refuses: frozenset[str] = frozenset()

    def extend(self, grant: Grant, demand: Demand) -> Grant | Refusal:
        if grant.owner in self.refuses:
            extra = demand.minus(grant.demand)
            return Refusal("memory", extra, 1, "1 slab is pinned")
        return super().extend(grant, demand)


def stubborn(slabs: int, *refused: str) -> tuple[World, Stubborn]:
    made = World(tiny_layout(FULL_AND_WINDOW, slabs), rules(), make_arena=Stubborn).expect_outputs(64, 2)
    arena = made.arena
    assert isinstance(arena, Stubborn)
    arena.refuses = frozenset(refused)
    return made, arena


def test_a_short_senior_among_others_waits_and_is_not_retracted() -> None:
    made, arena = stubborn(40, "a")
    made.arrive("a", 3, 60)
    made.arrive("b", 3, greedy(60, ignore_eos=True))
    live = made.scheduler._roster.live
    made.run_until(lambda: made.scheduler.reasons().get("a", reason_queue).code == "memory")
    assert made.scheduler.reasons()["a"] == Reason("memory", "1 slab is pinned")
    made.arrive("c", 3, 3)
    before = len(made.outputs["a"])
    for _ in range(5):
        plan = made.plan_and_apply()
        assert [segment.request_id for segment in plan.segments] == ["b"], "juniors go on with what they have"
    assert made.scheduler.reasons()["c"].code == "senior-short"
    assert (live["a"].state, len(made.outputs["a"])) == (State.DECODING, before)
    arena.refuses = frozenset()
    made.run().assert_all_finished()
    assert made.retractions == 0


def test_while_the_senior_is_short_a_junior_that_outgrows_its_grant_gives_way() -> None:
    made, _ = stubborn(40, "a")
    made.arrive("a", 3, 60)
    made.step()
    made.arrive("b", 2, 60)
    a, b = (made.scheduler._roster.live[name] for name in "ab")
    made.run_until(lambda: b.retractions > 0)
    assert a.retractions == 0
    assert "a" in made.failed, "b gave way, so a was the last to run, and still refused"
    made.run()
    assert made.ends["b"] == "length"
    made.ends["a"] = "abort"
    made.assert_true_tokens()


def test_a_refused_senior_retracts_juniors_and_goes_on_in_the_same_step() -> None:
    made = world(slabs=12).expect_outputs(32, 2)
    made.arrive("senior", 8, greedy(30))
    made.arrive("junior", 8, greedy(30))
    while made.retractions == 0:
        names = [segment.request_id for segment in made.plan_and_apply().segments]
        assert names[0] == "senior"
    assert state_of(made, "junior") is State.RETRACTED
    assert names == ["senior"]
    made.run().assert_all_finished()
    assert made.scheduler.figures().totals.recomputed_tokens > 0


def test_an_asker_without_juniors_retracts_only_itself() -> None:
    made = world(slabs=13).expect_outputs(32, 2)
    made.arrive("senior", 8, greedy(30, ignore_eos=True))  # its whole life is granted
    made.arrive("asker", 8, greedy(30))
    live = made.scheduler._roster.live
    made.run_until(lambda: made.retractions > 0)
    assert live["asker"].state is State.RETRACTED
    assert live["senior"].retractions == 0
    assert made.scheduler.reasons()["asker"].code == "memory"
    made.run().assert_all_finished()
    assert made.retractions == 1, "it came back with its whole demand granted, so it was not retracted again"


def test_while_the_senior_waits_to_return_juniors_get_nothing_new() -> None:
    """A retracted request that became the most senior is short: juniors are not admitted and outgrow nothing."""
    made = world(slabs=14, max_running_requests=3).expect_outputs(32, 2)
    made.arrive("first", 8, greedy(30, ignore_eos=True))
    made.arrive("second", 20, greedy(32))
    made.run_until(lambda: made.retractions > 0)
    assert state_of(made, "second") is State.RETRACTED
    second = made.scheduler._roster.live["second"]
    made.scheduler._growth.refuse(second, Refusal("memory", Demand((13, 0)), 1, "13 pages"))
    made.abort("first")
    assert made.scheduler._growth.short() is second
    made.arrive("third", 4, 4)
    reason = made.scheduler.reasons()["third"]
    assert reason == Reason("senior-short", "second is more senior and was refused memory: 13 pages")
    made.run()
    assert made.ends == {"first": "abort", "second": "length", "third": "length"}
    assert made.scheduler._growth.short() is None


def test_the_returning_most_senior_is_asked_before_juniors_take_room_for_their_chunks() -> None:
    """A junior's prompt takes tokens and room anew in every step, and so would keep the senior out until it ends."""
    pools: tuple[PoolSpec, ...] = ((Full(), 4, 1), (Sliding(8), 4, 1))
    made = World(tiny_layout(pools, 90), rules(max_model_len=400))
    made.arrive("first", 8, greedy(2, ignore_eos=True))
    made.arrive("second", 40, greedy(40))
    made.arrive("junior", 160, greedy(2, ignore_eos=True))
    made.step()
    second = made.scheduler._roster.live["second"]
    made.scheduler._roster.retract(second)
    made.run_until(lambda: "first" in made.ends)
    assert second is made.scheduler._roster.most_senior()
    assert made.scheduler._roster.live["junior"].state is State.PREFILLING
    plan = made.plan_and_apply()
    assert [segment.request_id for segment in plan.segments] == ["second", "junior"]
    made.run().assert_all_finished()


def test_one_that_was_never_admitted_is_not_short_and_juniors_may_grow() -> None:
    made = world(slabs=11).expect_outputs(32, 2)
    made.arrive("junior", 8, greedy(30))
    made.step()
    made.arrive("urgent", 20, greedy(20, ignore_eos=True), -1)
    junior = made.scheduler._roster.live["junior"]
    made.run_until(lambda: "junior" in made.ends)
    assert made.scheduler.figures().totals.extensions > 0
    assert junior.retractions == 0
    assert made.scheduler.reasons()["urgent"].code == "memory", "it was meant to wait all the while"
    made.run().assert_all_finished()


def test_the_floor_stays_free_when_the_most_senior_prefill_has_no_tokens_for_it() -> None:
    """The senior needs a whole granule, 3 tokens are left; the junior's last 3 would fit only on the floor's pages."""
    pools: tuple[PoolSpec, ...] = ((Full(), 4, 1), (Sliding(4), 1, 1))
    made = World(tiny_layout(pools, 60), rules(step_tokens=4, max_running_requests=3))
    made.arrive("junior", 7, 1)
    made.step()
    made.arrive("senior", 24, 1, -1)
    live = made.scheduler._roster.live
    live["senior"].retractions = 1  # so that it returns before the junior's prompt is through
    made.step()
    assert (live["senior"].computed, live["junior"].computed) == (4, 4)
    hog = made.arena.reserve("foreign", Demand((0, made.arena.most(1, Demand((0, 0))))))
    assert isinstance(hog, Grant)
    made.scheduler._rules = replace(made.rules, step_tokens=3, max_running_requests=3)
    assert made.plan() is None, "the junior computed on the senior's floor"
    assert {name: reason.code for name, reason in made.scheduler.reasons().items()} == {
        "senior": "step-room",
        "junior": "step-room",
    }
    made.scheduler._rules = made.rules
    made.run()
    assert made.ends == {"senior": "length", "junior": "length"}


def test_guaranteed_admission_never_retracts() -> None:
    made = world(slabs=12, admission=GUARANTEED)
    for index in range(10):
        made.arrive(f"r{index}", 3 + index, 5 + 3 * (index % 4))
    made.run().assert_all_finished()
    totals = made.scheduler.figures().totals
    assert (totals.retractions, totals.extensions, totals.recomputed_tokens) == (0, 0, 0)


def test_scheduler_and_rules_come_from_one_place() -> None:
    assert Scheduler.__module__ == "halocline.schedule.scheduler"
    assert Rules.__module__ == "halocline.schedule.rules"


# --- what a step costs, in questions rather than seconds


class Counting(Arena):
    """An arena that counts what it is asked to do."""

    acts = 0

    def reserve(self, owner: str, demand: Demand) -> Grant | Refusal:
        self.acts += 1
        return super().reserve(owner, demand)

    def extend(self, grant: Grant, demand: Demand) -> Grant | Refusal:
        self.acts += 1
        return super().extend(grant, demand)

    def shrink(self, grant: Grant, demand: Demand) -> None:
        self.acts += 1
        super().shrink(grant, demand)

    def free(self, grant: Grant, pool: int, handles: Handles) -> None:
        self.acts += 1
        super().free(grant, pool, handles)

    def fits(self, extra: Demand) -> bool:
        self.acts += 1
        return super().fits(extra)

    def physical(self, pool: int, handles: Handles) -> NDArray[np.int32]:
        self.acts += 1
        return super().physical(pool, handles)


def test_decodes_inside_their_pages_ask_the_arena_nothing() -> None:
    """This, and not a stopwatch, is what keeps a step of 256 requests within its millisecond."""
    pools: tuple[PoolSpec, ...] = ((Full(), 16, 4), (Sliding(20), 16, 1))
    made = World(tiny_layout(pools, 60), rules(step_tokens=128), make_arena=Counting, check=False)
    for name in "abcd":
        made.arrive(name, 17, greedy(60, ignore_eos=True))
    while made.scheduler.figures().decoding < 4:
        made.step()
    arena = made.arena
    assert isinstance(arena, Counting)
    costs = []
    for _ in range(32):
        before = arena.acts
        made.plan_and_apply()
        costs.append(arena.acts - before)
    # 17 ... 48 tokens: pages end at 32 and 48, windows slide at 35 (20 - 1 + 16) and 51.
    assert sum(cost > 0 for cost in costs) == 3, costs
    assert max(costs) <= 4 + 2, "at most one act per request that gives a page up, and one look-up per pool"

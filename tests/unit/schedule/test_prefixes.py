"""Scheduler and prefix cache together: who resumes where, what that costs, and how pages come into the tree."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Handles, Move, Order, Refusal
from halocline.memory.retention import Full, Sliding, State
from halocline.schedule import fill
from halocline.schedule.events import Rejected
from halocline.schedule.holding import Holding
from halocline.schedule.request import Request
from testing.schedule import FULL_AND_WINDOW, MIXED, THREE_POOLS, PoolSpec, World, fewest_slabs, stem, world

PAGES: tuple[PoolSpec, ...] = ((Full(), 4, 1),)
STATES: tuple[PoolSpec, ...] = ((State(), 1, 1), (Full(), 4, 1))


def hot_world(pools: tuple[PoolSpec, ...] = FULL_AND_WINDOW, slabs: int = 40, **changes: object) -> World:
    return world(pools, slabs, prefix_cache=True, **changes)


def served(made: World, name: str, tokens: tuple[int, ...], max_tokens: int = 2, salt: str = "") -> int:
    """Serve a request to its end; return how much of its prompt was cached."""
    made.arrive(name, tokens, max_tokens, salt=salt)
    made.run()
    return made.cached_tokens[name]


def request_of(made: World, name: str) -> Request:
    return made.scheduler._roster.live[name]


def reserved(made: World, pages: tuple[int, ...]) -> Grant:
    answer = made.arena.reserve("foreign", Demand(pages))
    assert isinstance(answer, Grant)
    return answer


# --- where a request resumes


def test_a_second_request_computes_only_what_is_not_cached() -> None:
    made = hot_world()
    assert served(made, "first", stem(22)) == 0
    assert served(made, "second", stem(22, branch=1, at=17)) == 16
    assert made.scheduler.figures().totals.computed_tokens == (22 + 1) + (6 + 1)
    made.assert_all_finished()


def test_with_the_cache_off_nothing_is_kept() -> None:
    made = world(FULL_AND_WINDOW, 40)
    assert served(made, "first", stem(22)) == served(made, "second", stem(22)) == 0
    assert made.arena.figures().used_bytes == 0
    assert made.scheduler.figures().cache is None


@pytest.mark.parametrize("length", [3, 4, 5, 16, 17])
def test_a_full_hit_leaves_a_token_to_compute(length: int) -> None:
    """D6: no empty extend."""
    made = hot_world()
    served(made, "first", stem(length))
    made.arrive("again", stem(length), 2)
    plan = made.plan_and_apply()
    assert made.cached_tokens["again"] == (length - 1) // 4 * 4
    assert plan.segments[0].tokens == length - made.cached_tokens["again"] >= 1
    made.run().assert_all_finished()


def test_namespaces_share_nothing() -> None:
    made = hot_world()
    assert served(made, "mine", stem(20), salt="mine") == 0
    assert served(made, "other", stem(20), salt="other") == 0
    assert served(made, "mine again", stem(20), salt="mine") == 16


def test_every_request_is_told_once_how_much_was_cached() -> None:
    """A return after a retraction is not told again: `World` fails if it is."""
    made = hot_world()
    served(made, "first", stem(20))
    made.arrive("second", stem(20), 6)
    assert made.plan() is not None
    assert made.cached_tokens == {"first": 0, "second": 16}
    made.apply(made.backend.run(made.scheduler._outstanding.plan))  # type: ignore[union-attr]
    made.scheduler._roster.retract(request_of(made, "second"))
    made.run().assert_all_finished()


def test_an_output_can_be_continued() -> None:
    """The next turn of a conversation resumes after the answer, not after the question."""
    made = hot_world()
    served(made, "first", stem(18), 11)
    turn = (*stem(18), *made.outputs["first"], 9, 9, 9)
    assert served(made, "next", turn) == 28  # 28 of 18 + 10 computed positions
    made.assert_all_finished()


# --- what that costs: the borders of admission


@pytest.mark.parametrize("pools", [PAGES, ((Full(), 4, 1), (Sliding(6), 4, 1))], ids=["full", "window"])
def test_hot_is_admitted_exactly_where_it_fits(pools: tuple[PoolSpec, ...]) -> None:
    """Four cached pages, two more to come: six slabs are enough, and five are not, though five are free."""
    windows = len(pools) - 1
    price = 6 + 3 * windows  # the window holds three pages at most
    for spare in (price, price - 1):
        made = hot_world(pools, 24)
        served(made, "first", stem(17), 2)
        foreign = reserved(made, (24 - windows - spare, *([0] * windows)))  # beside the floor's page per window
        made.arrive("second", stem(20, branch=1, at=16), 5)
        made.plan()
        if spare == price:
            assert made.cached_tokens["second"] == 16
            continue
        assert made.scheduler.reasons()["second"].code == "memory"
        made.arena.release(foreign)
        made.run().assert_all_finished()


def test_what_an_empty_arena_cannot_hold_is_rejected_hot_or_cold() -> None:
    made = hot_world(PAGES, 6)
    served(made, "first", stem(17), 2)
    assert isinstance(made.arrive("second", stem(20), 6), Rejected)


@pytest.mark.parametrize(("slabs", "copied"), [(8, 0), (9, 1)])
def test_a_checkpoint_is_handed_over_where_a_copy_beside_it_could_never_fit(slabs: int, copied: int) -> None:
    """Hot takes a checkpoint beside the working state: 2 states + 6 pages + the floor's state are 9 slabs, cold 8."""
    made = hot_world(STATES, slabs)
    served(made, "first", stem(9), 2)
    made.arrive("second", stem(20), 5)
    plan = made.plan()
    assert plan is not None
    assert made.cached_tokens["second"] == 8
    assert len(plan.copies) == copied
    made.apply(made.backend.run(plan))
    made.run().assert_all_finished()


def test_a_checkpoint_is_handed_over_where_nobody_could_make_room_for_a_copy() -> None:
    """A foreign owner that never lets go leaves room for everything but the checkpoint."""
    made = hot_world(STATES, 10)
    served(made, "first", stem(9), 2)
    reserved(made, (0, 2))
    assert served(made, "second", stem(20), 5) == 8
    assert made.ends["second"] == "length"
    made.assert_true_tokens()


def test_cold_is_taken_where_the_checkpoint_can_only_be_copied() -> None:
    """A reader outside the stream has pinned it, and lets nobody have it: then the request computes from 0."""
    made = hot_world(STATES, 8)
    served(made, "first", stem(9), 2)
    tree = made.scheduler._sharing.tree  # type: ignore[attr-defined]
    tree.locks.is_sole = lambda walk, granules: False
    assert served(made, "second", stem(20), 5) == 0
    made.assert_all_finished()


def test_a_checkpoint_comes_back_when_its_request_cannot_be_admitted_after_all() -> None:
    made = hot_world(STATES, 8)
    served(made, "first", stem(9), 2)
    cached = made.arena.figures().cached_bytes
    made.arrive("second", stem(20), 5)
    request, sharing = request_of(made, "second"), made.scheduler._sharing
    candidate = made.scheduler._gate.candidate(request)
    holding = sharing.open(request, candidate.entrance, candidate.demand)
    assert isinstance(holding, Holding)
    assert len(holding.handles[0]) == 1
    sharing.leave(request, holding, keep=False)
    assert made.arena.figures().cached_bytes == cached
    assert made.scheduler.audit() == []
    made.run().assert_all_finished()
    assert made.cached_tokens["second"] == 8


def prices_then_locks(made: World) -> None:
    """A wrong policy: what is cached costs nothing, so the rest is priced, and then the cached pages are locked."""
    lock, budget = made.arena.lock, made.arena.budget

    def wrong(owner: str | Grant, handles: list[Handles], demand: Demand) -> Grant | Refusal:
        budget.slabs += sum(map(len, handles))  # one page per slab here
        budget.caps[0] = budget.slabs
        return lock(owner, handles, demand)

    made.arena.lock = wrong  # type: ignore[method-assign, assignment]
    made.arena.shortfall = lambda extra: None  # type: ignore[method-assign, assignment]
    made.check = False


def a14_world() -> tuple[World, Grant]:
    """Its own prefix is what would have to be evicted: five slabs are free of others, it needs four cached and two."""
    made = hot_world(PAGES, 12)
    served(made, "first", stem(17), 2)
    return made, reserved(made, (7,))


def test_the_own_prefix_counts_before_anything_is_taken() -> None:
    """A14: nothing is taken, and whoever was granted the rest gets it."""
    made, foreign = a14_world()
    before = made.arena.figures(), list(made.arena.budget.promised)
    made.arrive("second", stem(20, branch=1, at=16), 5)
    assert made.plan() is None
    assert made.scheduler.reasons()["second"].code == "memory"
    assert (made.arena.figures(), list(made.arena.budget.promised)) == before
    assert len(made.arena.commit([Order(foreign, foreign.demand)]).handles[0][0]) == 7


def test_pricing_before_locking_overdraws_the_arena() -> None:
    """The wrong policy of A14 fails the same case: more is held and granted than there is."""
    made, _ = a14_world()
    prices_then_locks(made)
    made.arrive("second", stem(20, branch=1, at=16), 5)
    assert made.plan() is not None
    made.arena.budget.slabs = made.arena.budget.caps[0] = made.layout.slabs
    assert "need [13] slabs, 13 of 12" in str(made.arena.audit())


def test_a_window_that_is_cached_is_not_charged_twice() -> None:
    """A2: 2 W of window pages, a cached prefix longer than W and five tokens left: it starts at once."""
    made = world(((Full(), 4, 1), (Sliding(8), 4, 1)), 12, caps=(8, 4), prefix_cache=True)
    served(made, "first", stem(17), 2)
    made.arrive("second", stem(21, branch=1, at=16), 1)
    plan = made.plan_and_apply()
    assert made.cached_tokens["second"] == 16
    assert plan.segments[0].tokens == 5
    made.run().assert_all_finished()


# --- pages on their way into the tree


def test_the_same_prefix_twice_at_once_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first insertion wins, and the later request swaps to the tree's pages when its chunk is done."""
    monkeypatch.setattr(fill, "MOST_WAIT_STEPS", 0)
    made = hot_world(slabs=40)
    made.arrive("a", stem(18), 12)
    made.arrive("b", stem(18), 12)
    plan = made.plan()
    assert plan is not None
    assert [segment.tokens for segment in plan.segments] == [18, 18]
    pages = [set(plan.tables[0].pages[s:e].tolist()) for s, e in zip([0, 5], [5, 10], strict=True)]
    assert not pages[0] & pages[1]
    made.apply(made.backend.run(plan))
    first, second = request_of(made, "a").holding, request_of(made, "b").holding
    assert first is not None
    assert second is not None
    assert np.array_equal(first.handles[0][:4], second.handles[0][:4])
    assert np.array_equal(first.places[0][:4], second.places[0][:4])
    assert made.arena.budget.held[0] == 4 + 2  # one prefix and two last pages
    made.run().assert_all_finished()


def test_a_request_waits_for_a_prefix_that_another_one_computes() -> None:
    made = hot_world(slabs=60, step_tokens=18)  # chunks of 16: two tokens are left for others
    made.arrive("a", stem(40), 4)
    made.arrive("b", stem(40, branch=1, at=37), 4)
    made.arrive("c", tuple(range(60, 70)), 4)
    made.plan_and_apply()
    reason = made.scheduler.reasons()["b"]
    assert reason.code == "prefix"
    assert "a has computed 0 of 36 tokens" in reason.detail
    made.run().assert_all_finished()
    assert made.cached_tokens == {"a": 0, "b": 36, "c": 0}
    figures = made.scheduler.figures().cache
    assert figures is not None
    assert figures.waited == 1


def test_who_waits_for_a_prefix_lets_others_pass() -> None:
    made = hot_world(slabs=60, step_tokens=64)
    made.arrive("a", stem(40), 4)
    made.arrive("b", stem(40), 4)
    made.arrive("c", tuple(range(60, 70)), 4)
    plan = made.plan_and_apply()
    assert [segment.request_id for segment in plan.segments] == ["a", "c"]


def test_waiting_for_a_prefix_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one needs ten steps; after three the request would compute its own, and lacks only the step's room."""
    monkeypatch.setattr(fill, "MOST_WAIT_STEPS", 3)
    made = hot_world(slabs=60, step_tokens=10)
    made.arrive("a", stem(80), 4)
    made.arrive("b", stem(80), 4)
    codes = []
    for _ in range(5):
        made.plan_and_apply()
        codes.append(made.scheduler.reasons()["b"].code)
    assert codes == ["prefix", "prefix", "prefix", "step-room", "step-room"]
    assert request_of(made, "b").waits == 3
    made.run().assert_all_finished()


def test_nobody_waits_for_a_prefix_of_another_namespace() -> None:
    made = hot_world(slabs=60)
    made.arrive("a", stem(20), 4, salt="x")
    made.arrive("b", stem(20), 4, salt="y")
    assert len(made.plan_and_apply().segments) == 2


# --- retraction


@pytest.mark.parametrize("length", [255, 256, 257])
@pytest.mark.parametrize("decoded", [1, 2, 3])
def test_a_retracted_request_resumes_where_it_was(length: int, decoded: int) -> None:
    """D7: pages of 256 tokens, and no index beyond the table."""
    made = hot_world(((Full(), 256, 1), (Sliding(300), 256, 1)), 12, step_tokens=512, max_model_len=1024)
    made.arrive("a", stem(length), 8)
    made.plan_and_apply()
    for _ in range(decoded):
        made.plan_and_apply()
    request = request_of(made, "a")
    known = len(request.history)
    made.scheduler._roster.retract(request)
    plan = made.plan_and_apply()
    assert plan.segments[0].start == (known - 1) // 256 * 256
    assert plan.segments[0].tokens == known - plan.segments[0].start
    made.run().assert_all_finished()


@pytest.mark.parametrize("salt", ["", "mine"])
@pytest.mark.parametrize("pools", [PAGES, FULL_AND_WINDOW], ids=["full", "window"])
def test_a_retraction_costs_less_than_a_granule_and_a_page(pools: tuple[PoolSpec, ...], salt: str) -> None:
    """What it generated is found again, too, in its own namespace."""
    made = hot_world(pools)
    made.arrive("a", stem(21), 30, salt=salt)
    for _ in range(14):
        made.plan_and_apply()
    made.scheduler._roster.retract(request_of(made, "a"))
    made.run().assert_all_finished()
    figures = made.scheduler.figures()
    assert figures.cache is not None
    assert figures.cache.resumed_tokens == 32  # 34 were computed
    assert figures.totals.recomputed_tokens == 2


def test_what_comes_free_is_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every set of victims: pages that only they lock, none that others lock, window pages passed on."""
    monkeypatch.setattr(fill, "MOST_WAIT_STEPS", 0)
    shared = 0
    for pools in (FULL_AND_WINDOW, MIXED, THREE_POOLS):
        made = hot_world(pools, 90)
        for index in range(4):
            made.arrive(f"r{index}", stem(20 + index, branch=index, at=(20, 16, 12, 12)[index]), 20)
            made.plan_and_apply()
        later_said = made.scheduler._sharing
        for count in (1, 2, 3, 4):
            for names in combinations([f"r{index}" for index in range(4)], count):
                later = copy.deepcopy(made)
                victims = [request_of(later, name) for name in names]
                said = later.scheduler._sharing.given_back(victims)
                before = [h + p for h, p in zip(later.arena.budget.held, later.arena.budget.promised, strict=True)]
                for victim in victims:
                    later.scheduler._roster.retract(victim)
                after = [h + p for h, p in zip(later.arena.budget.held, later.arena.budget.promised, strict=True)]
                assert said == tuple(b - a for b, a in zip(before, after, strict=True)), f"{names} of {pools}"
                apart = [later_said.given_back((request_of(made, name),)) for name in names]
                shared += said != tuple(map(sum, zip(*apart, strict=True)))
    assert shared, "nobody shared anything, so nothing was tested"


def test_a_step_that_failed_with_moves_leaves_nothing_cached() -> None:
    made = hot_world()
    served(made, "first", stem(20))
    made.arrive("second", stem(20), 6)
    plan = made.plan()
    assert plan is not None
    assert made.scheduler._outstanding is not None
    moved = replace(plan, moves=(Move(0, 0, 1),))
    made.scheduler._outstanding = replace(made.scheduler._outstanding, plan=moved)
    made.note_updates(made.scheduler.fail_step("the device is gone"))
    assert made.arena.figures().used_bytes == 0
    figures = made.scheduler.figures().cache
    assert figures is not None
    assert figures.nodes == 0


def test_a_request_that_failed_gives_the_tree_nothing_of_its_last_step() -> None:
    made = hot_world()
    made.arrive("a", stem(20), 6)
    plan = made.plan()
    assert plan is not None
    made.backend.fails = {"a"}
    made.apply(made.backend.run(plan))
    assert made.arena.figures().used_bytes == 0


# --- states


def test_a_shared_prefix_hits_from_its_third_use_on() -> None:
    """D5: the second use reveals where the prompts part, and leaves a checkpoint there."""
    made = hot_world(STATES, 60)
    hits = [served(made, f"r{index}", stem(30, branch=index + 1, at=17)) for index in range(5)]
    assert hits == [0, 0, 16, 16, 16]
    assert made.backend.copies_done > 0
    made.assert_all_finished()


def test_a_prompt_with_states_hits_when_it_is_sent_again() -> None:
    made = hot_world(STATES, 60)
    assert [served(made, f"r{index}", stem(18)) for index in range(3)] == [0, 16, 16]
    # A prompt that ends with a granule needs a checkpoint one granule earlier, which its second use leaves.
    assert [served(made, f"s{index}", tuple(range(40, 56))) for index in range(3)] == [0, 0, 12]
    made.assert_all_finished()


def test_chunks_go_without_a_checkpoint_where_there_is_no_room_for_one() -> None:
    """The floor's spare state is the most senior one's; the other's chunk is not held up by its checkpoint."""
    made = hot_world(STATES, 6)
    made.arrive("a", stem(6), 2)
    made.arrive("b", tuple(range(50, 53)), 1)
    made.run().assert_all_finished()


def test_full_pages_are_read_and_not_written_where_only_states_are_missing() -> None:
    """H8: the second use computes [0, 16) for the state's sake; the plan says that full pages are not to be written."""
    made = hot_world(STATES, 60)
    served(made, "first", stem(30, branch=1, at=17))
    made.arrive("second", stem(30, branch=2, at=17), 2)
    plan = made.plan_and_apply()
    assert plan.tables[1].write_from.tolist() == [16]
    assert made.arena.budget.locked[1] == 4
    made.run().assert_all_finished()


# --- the audit


def test_the_audit_sees_a_table_that_begins_with_other_pages_than_are_locked() -> None:
    made = hot_world()
    served(made, "first", stem(20))
    made.arrive("second", stem(20), 6)
    made.plan_and_apply()
    holding = request_of(made, "second").holding
    assert holding is not None
    holding.handles[0] = np.concatenate((holding.handles[0][1::-1], holding.handles[0][2:]))
    found = [
        violation for violation in made.scheduler.audit() if "begins with other pages than the 5" in str(violation)
    ]
    assert [violation.law for violation in found] == ["L1"]


def test_the_audit_recounts_the_tree() -> None:
    made = hot_world()
    served(made, "first", stem(20))
    made.arrive("second", stem(20), 6)
    made.plan_and_apply()
    tree = made.scheduler._sharing.tree  # type: ignore[attr-defined]
    tree.forest.books[0].lockers[:] += 1
    assert any(violation.law == "L5" for violation in made.scheduler.audit())


# --- prefill delay


def delayed(seconds: float = 3.0, **changes: object) -> World:
    made = hot_world(slabs=80, prefill_delay_seconds=seconds, prefill_delay_tokens=30, **changes)
    made.arrive("a", stem(20), 30)
    made.plan_and_apply()
    return made


def test_a_new_request_waits_for_a_fuller_batch_while_others_decode() -> None:
    made = delayed()
    made.arrive("b", tuple(range(40, 50)), 4)
    for _ in range(3):  # the clock of `World` counts steps
        assert [segment.request_id for segment in made.plan_and_apply().segments] == ["a"]
        assert made.scheduler.reasons()["b"].code == "delay"
    assert len(made.plan_and_apply().segments) == 2
    made.run().assert_all_finished()


def test_a_full_batch_ends_the_delay() -> None:
    made = delayed()
    made.arrive("b", tuple(range(40, 50)), 4)
    made.plan_and_apply()
    made.arrive("c", tuple(range(60, 80)), 4)
    assert len(made.plan_and_apply().segments) == 3


def test_nobody_is_held_back_while_nobody_decodes_or_little_is_used() -> None:
    made = hot_world(slabs=80, prefill_delay_seconds=9.0)
    made.arrive("a", stem(20), 4)
    assert len(made.plan_and_apply().segments) == 1
    used = made.arena.figures().running_bytes + made.arena.figures().locked_bytes
    for low, held_back in ((used, True), (used + 10**6, False)):
        made = delayed(prefill_delay_low_bytes=low)
        made.arrive("b", tuple(range(40, 50)), 4)
        assert (len(made.plan_and_apply().segments) == 1) == held_back


def test_the_delay_is_bounded_when_the_clock_stands_still() -> None:
    made = hot_world(slabs=200, prefill_delay_seconds=9.0, max_model_len=900)
    made.arrive("a", stem(4), 800)
    made.plan_and_apply()
    made.arrive("b", tuple(range(40, 50)), 4)
    made.check = False
    plan = made.scheduler.plan(0.0)
    while plan is not None and len(plan.segments) == 1:
        made.apply(made.backend.run(plan))
        plan = made.scheduler.plan(0.0)
    assert made.steps == 1 + 512


def test_the_spare_state_is_in_the_floor_and_nowhere_else() -> None:
    assert fewest_slabs(FULL_AND_WINDOW, 20, 5) == fewest_slabs(FULL_AND_WINDOW, 20, 5, prefix_cache=True)
    assert fewest_slabs(STATES, 20, 5) + 1 == fewest_slabs(STATES, 20, 5, prefix_cache=True)


# --- reasons


@pytest.mark.parametrize("slots", [2, 3])
def test_whoever_waits_behind_a_prefill_that_got_no_chunk_is_told_so(slots: int) -> None:
    """A state cannot be cut, so a first chunk ends where it leaves what is cached, and another prompt begins beside it.

    In the next step the senior of the two takes all tokens.
    """
    made = hot_world(STATES, 80, step_tokens=16, max_running_requests=slots)
    served(made, "first", stem(12))
    made.arrive("senior", stem(30, 1, 8), 2)
    made.arrive("junior", range(40, 70), 2)
    made.plan_and_apply()
    made.arrive("next", stem(4), 2)
    plan = made.plan()
    assert plan is not None
    reasons = made.scheduler.reasons()
    assert reasons["junior"].code == "step-room"
    assert reasons["next"].code == ("slots" if slots == 2 else "step-room")
    made.apply(made.backend.run(plan))
    made.run().assert_all_finished()

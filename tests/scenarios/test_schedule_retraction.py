"""Scenarios E4, E5 and F1 to F4: what retraction and refusals cost, and what they must never cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Refusal
from halocline.memory.retention import Full, Sliding
from halocline.schedule.request import State
from halocline.schedule.retract import Victims
from testing import wrong
from testing.schedule import FULL_AND_WINDOW, GUARANTEED, PoolSpec, World, greedy, rules, takes, tiny_layout

Spoil = Callable[[World], None]


def right(made: World) -> None:
    """Spoil nothing."""


# --- E4: the n-th reserve is refused, for every n


class RefusesOnce(Arena):
    """An arena that says no to the n-th question for room, whatever it could do."""

    refuse_at = -1
    asked = 0

    def _says_no(self) -> bool:
        self.asked += 1
        return self.asked == self.refuse_at

    def reserve(self, owner: str, demand: Demand) -> Grant | Refusal:
        if self._says_no():
            return Refusal("memory", demand, 1, f"question {self.asked} is answered with 1 refusal")
        return super().reserve(owner, demand)

    def extend(self, grant: Grant, demand: Demand) -> Grant | Refusal:
        if self._says_no():
            return Refusal("memory", demand, 1, f"question {self.asked} is answered with 1 refusal")
        return super().extend(grant, demand)


def e4_world(refuse_at: int, admission: tuple, caps: tuple[int, int] | None) -> World:
    made = World(
        tiny_layout(FULL_AND_WINDOW, 14),
        rules(admission=admission, step_tokens=16),
        caps,
        make_arena=RefusesOnce,
    ).expect_outputs(16, 2)
    assert isinstance(made.arena, RefusesOnce)
    made.arena.refuse_at = refuse_at + 1  # the first question is the floor
    for index in range(6):
        made.arrive(f"r{index}", 3 + 7 * (index % 3), greedy(9 + index, ignore_eos=index == 1))
    return made


@pytest.mark.parametrize("admission", [("expected", 0.9), GUARANTEED], ids=["expected", "guaranteed"])
@pytest.mark.parametrize("caps", [None, (7, 7)], ids=["shared", "split"])
def test_e4_nothing_leaks_and_nothing_sticks_whichever_reserve_is_refused(admission: tuple, caps: object) -> None:
    calm = e4_world(-1, admission, caps).run().assert_all_finished()  # type: ignore[arg-type]
    assert isinstance(calm.arena, RefusesOnce)
    questions = calm.arena.asked
    assert questions > 6
    for number in range(1, questions + 1):
        made = e4_world(number, admission, caps)  # type: ignore[arg-type]
        # One refusal of what the arena could do may cost a step, but no request.
        for _ in range(2000):
            if not made.scheduler.has_work:
                break
            made.step()
        made.assert_all_finished()


# --- F1: throughput comes back within a step

F_POOLS: tuple[PoolSpec, ...] = ((Full(), 4, 1), (Sliding(8), 4, 1))
SPLIT_OR_SHARED = pytest.mark.parametrize("split", [True, False], ids=["split", "shared"])


def send_the_largest(made: World, length: int, max_tokens: int) -> None:
    """Send one request more, the most junior: the shared arena is the smallest that takes it."""
    slabs = made.layout.slabs
    assert takes(F_POOLS, slabs, length, max_tokens)
    assert not takes(F_POOLS, slabs - 1, length, max_tokens)
    made.arrive("largest", length, greedy(max_tokens))


def run_f1(split: bool, spoil: Spoil = right) -> World:
    """Eight requests outgrow what they were granted, in room for about two."""
    made = World(tiny_layout(F_POOLS, 26), rules(), (16, 10) if split else None).expect_outputs(64, 4)
    spoil(made)
    for index in range(8):
        made.arrive(f"r{index}", 6, greedy(40))
    requests = list(made.scheduler._roster.live.values())
    if not split:
        send_the_largest(made, 40, 49)
    while made.scheduler.has_work:
        before = made.retractions
        names = [segment.request_id for segment in made.plan_and_apply().segments]
        if made.retractions > before and made.scheduler.has_work:
            kept = [name for name in names if name in made.scheduler._roster.live]
            after = [segment.request_id for segment in made.plan_and_apply().segments]
            assert after[: len(kept)] == kept, "the step after a retraction computes everyone who was kept"
    made.assert_all_finished()
    assert made.retractions > 0
    most = max(request.retractions for request in requests)
    assert most == 1, f"who came back was retracted again, {most} times in all"
    return made


@SPLIT_OR_SHARED
def test_f1_who_comes_back_stays_and_nobody_waits_longer_than_a_step(split: bool) -> None:
    run_f1(split)


@SPLIT_OR_SHARED
def test_f1_bites_when_the_return_is_granted_too_little(split: bool) -> None:
    with pytest.raises(AssertionError, match="who came back was retracted again"):
        run_f1(split, wrong.grants_only_the_next_token_on_return)


# --- F2: no timers


def run_f2(split: bool, spoil: Spoil = right) -> None:
    """Outputs as long as the estimate says: whatever the number of steps, nobody outgrows a grant."""
    changed = rules(max_waiting_requests=200)
    made = World(tiny_layout(F_POOLS, 30), changed, (16, 14) if split else None, check=False).expect_outputs(16, 12)
    spoil(made)
    for index in range(80):
        made.arrive(f"r{index}", 4 + index % 5, greedy(12))
    if not split:
        send_the_largest(made, 92, 13)
    made.run().assert_all_finished()
    assert made.steps > 200
    assert made.scheduler.figures().totals.extensions == 0, "somebody outgrew its grant"
    assert made.retractions == 0


@SPLIT_OR_SHARED
def test_f2_a_steady_load_is_not_retracted_periodically(split: bool) -> None:
    run_f2(split)


@SPLIT_OR_SHARED
def test_f2_bites_when_estimates_decay_on_a_timer(split: bool) -> None:
    with pytest.raises(AssertionError, match="outgrew its grant"):
        run_f2(split, wrong.estimates_decay_on_a_timer)


# --- F4: victims by deficit


def run_f4(split: bool) -> World:
    """One page is missing; a short junior has it, a long one has more and much more work to lose."""
    made = World(tiny_layout(F_POOLS, 29), rules(), (19, 10) if split else None).expect_outputs(64, 2)
    made.arrive("senior", 12, greedy(40))
    made.arrive("long", 40, greedy(9, ignore_eos=True))
    made.arrive("short", 4, greedy(9, ignore_eos=True))
    live = dict(made.scheduler._roster.live)
    if not split:
        send_the_largest(made, 60, 41)
    made.run_until(lambda: made.retractions > 0)
    assert (live["short"].retractions, live["long"].retractions) == (1, 0), "the long one was retracted"
    made.run().assert_all_finished()
    return made


@SPLIT_OR_SHARED
def test_f4_the_deficit_decides_who_goes(split: bool) -> None:
    run_f4(split)


@SPLIT_OR_SHARED
def test_f4_bites_when_the_longest_goes(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Victims, "choose", wrong.choose_the_longest)
    with pytest.raises(AssertionError, match="the long one was retracted"):
        run_f4(split)


# --- E5 (as far as there is no host tier)


def test_e5_aborting_a_retracted_request_leaves_nothing() -> None:
    made = World(tiny_layout(F_POOLS, 24), rules()).expect_outputs(64, 2)
    made.arrive("senior", 12, greedy(40))
    made.arrive("junior", 12, greedy(40))
    made.run_until(lambda: made.retractions > 0)
    assert made.scheduler._roster.live["junior"].state is State.RETRACTED
    made.abort("junior")
    made.run().assert_all_finished()


# --- F3: the last running request cannot fit alone


@pytest.mark.parametrize("caps", [None, (20, 20)], ids=["shared", "split"])
def test_f3_the_last_request_that_cannot_go_on_alone_fails_and_the_server_lives(caps: tuple[int, int] | None) -> None:
    """A foreign owner takes all that is left and never lets go. Juniors give way first, then the last one fails."""
    made = World(tiny_layout(F_POOLS, 40), rules(), caps).expect_outputs(64, 2)
    for name in ("senior", "junior"):
        made.arrive(name, 5, greedy(60))
        made.step()
    nothing = Demand((0, 0))
    for pool in (0, 1):
        left = made.arena.most(pool, nothing)
        if left:
            assert isinstance(made.arena.reserve("foreign", Demand(left if p == pool else 0 for p in (0, 1))), Grant)
    assert made.arena.most(0, nothing) == 0
    made.run_until(lambda: made.retractions > 0)
    assert made.scheduler._roster.live["junior"].state is State.RETRACTED
    made.run_until(lambda: "senior" in made.failed)
    assert "its next page does not fit beside what other owners hold" in made.failed["senior"]
    assert made.scheduler.has_work, "the junior goes on waiting, with a reason or with memory"
    for grant in [grant for grant in made.arena.owners.grants.values() if grant.owner == "foreign"]:
        made.arena.release(grant)
    made.arrive("later", 5, greedy(20))
    made.run()
    assert (made.ends["junior"], made.ends["later"]) == ("length", "length")
    assert made.is_empty
    made.assert_true_tokens()

"""Prompts that another worker computes, seen from both sides: who waits, what is told, and what is given back when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Order
from halocline.memory.retention import Full, Sliding
from halocline.schedule.events import (
    Abort,
    Admitted,
    Arrive,
    Computed,
    Failed,
    Landed,
    LandingReady,
    Lost,
    NewToken,
    Offered,
    PagesReady,
    PeerAccepted,
    PeerReleased,
    PeerRevoked,
    PeerTook,
    Rejected,
    RevokeWanted,
    Sent,
    Update,
)
from halocline.schedule.request import State
from halocline.step import Move, TokenLogprobs
from testing.schedule import (
    FULL_AND_WINDOW,
    GUARANTEED,
    MIXED,
    PoolSpec,
    World,
    fewest_slabs,
    greedy,
    prompt,
    rules,
    tiny_layout,
)
from testing.transfers import BROKEN, Pair, Side, state_of


def side(slabs: int = 24, pools: tuple[PoolSpec, ...] = FULL_AND_WINDOW, **changes: object) -> Side:
    """Return one worker; the other one is played by the test."""
    return Side(tiny_layout(pools, slabs), rules(**changes))


def ask(
    made: Side, name: str, tokens: int, most: int, route: str = "receive", priority: int = 0, **fields: object
) -> Update:
    """Send a request whose prompt goes between workers."""
    event = Arrive(name, prompt(tokens, len(made.arrivals)), greedy(most, **fields), 0, priority, route=route)  # type: ignore[arg-type]
    made.arrivals[name] = event
    return made.tell(event)[-1]


def heard(made: Side, kind: type) -> list:
    """Return all updates of one kind so far."""
    return [update for update in made.said if isinstance(update, kind)]


def landing_of(made: Side, name: str) -> LandingReady:
    """Offer the first attempt, step until its landing is told, and return it."""
    made.tell(Offered(name, 0))
    while not [update for update in heard(made, LandingReady) if update.request_id == name]:
        made.step()
    return [update for update in heard(made, LandingReady) if update.request_id == name][-1]


def prefilled(made: Side, name: str = "a", tokens: int = 20) -> list[PagesReady]:
    """Accept the first attempt of a request to send, let it be computed wholly, and return its chunks."""
    ask(made, name, tokens, 9, "send")
    made.tell(PeerAccepted(name, 0, 0))
    made.run_until(lambda: state_of(made, name) == "sending")
    return heard(made, PagesReady)


# ---- receive: coming in


def test_without_an_offer_it_holds_nothing_says_why_and_blocks_nobody() -> None:
    made = side()
    ask(made, "a", 20, 5)
    made.arrive("b", 9, 4)
    assert made.step()
    assert state_of(made, "a") == "waiting"
    assert state_of(made, "b") == "decoding"
    reason = made.scheduler.reasons()["a"]
    assert (reason.code, "offered" in reason.detail) == ("transfer", True)
    figures = made.scheduler.figures()
    assert (figures.waiting, figures.absent, made.scheduler.waiting) == (1, 1, 1)


def test_where_all_who_wait_are_absent_the_head_reason_is_theirs() -> None:
    made = side()
    ask(made, "a", 20, 5)
    assert made.plan() is None
    reason = made.scheduler.head_reason()
    assert reason is not None
    assert reason.code == "transfer"


def test_offered_it_is_admitted_in_its_turn_and_told_at_once_where_nothing_moves() -> None:
    made = side()
    ask(made, "a", 20, 5)
    made.tell(Offered("a", 3))
    assert made.plan() is None, "there is nothing to compute"
    (ready,) = heard(made, LandingReady)
    assert (ready.attempt, ready.start_tokens) == (3, 0)
    assert [(run.first_page, len(run.pages)) for run in ready.pools] == [(0, 5), (3, 2)], "window 6: from 15 // 4 on"
    assert state_of(made, "a") == "receiving"
    assert made.scheduler.running == 1
    assert made.scheduler.reasons()["a"].code == "transfer"
    assert heard(made, Admitted) == [Admitted("a", 0)]


def test_the_grant_counts_the_first_token_and_the_reserve_and_no_more_than_is_left() -> None:
    for reserve, most, pages in ((0, 30, 5), (4, 30, 6), (512, 30, 13), (512, 5, 6)):
        made = side(40, decode_reserve_tokens=reserve)
        ask(made, "a", 20, most)
        landing_of(made, "a")
        request = made.scheduler._roster.live["a"]
        assert request.holding is not None
        assert request.holding.grant.demand[0] == pages, (reserve, most)


@pytest.mark.parametrize(("changes", "fields"), [({"admission": GUARANTEED}, {}), ({}, {"ignore_eos": True})])
def test_the_whole_life_is_granted_where_it_is_promised(changes: dict, fields: dict) -> None:
    made = side(40, decode_reserve_tokens=0, **changes)
    ask(made, "a", 20, 30, **fields)
    landing_of(made, "a")
    request = made.scheduler._roster.live["a"]
    assert request.holding is not None
    assert request.holding.grant.demand[0] == 13


def test_a_landing_takes_no_step_tokens() -> None:
    made = side(40, step_tokens=8, max_running_requests=8)
    made.arrive("local", 8, 9)
    made.step()
    ask(made, "a", 20, 5)
    made.tell(Offered("a", 0))
    made.arrive("next", 8, 9)
    plan = made.plan()
    assert plan is not None
    assert state_of(made, "a") == "receiving"
    assert [segment.request_id for segment in plan.segments] == ["local", "next"][: len(plan.segments)]


def test_who_comes_later_does_not_overtake_a_landing_that_does_not_fit() -> None:
    made = side(10)
    made.arrive("first", 30, greedy(3, ignore_eos=True))
    made.step()
    ask(made, "a", 30, 3)
    made.tell(Offered("a", 0))
    made.arrive("b", 1, 1)
    made.step()
    assert made.scheduler.reasons()["a"].code == "memory"
    assert state_of(made, "b") == "waiting"


def test_slots_count_for_landings() -> None:
    made = side(40, max_running_requests=1)
    made.arrive("local", 4, 9)
    made.step()
    ask(made, "a", 4, 4)
    made.tell(Offered("a", 0))
    made.step()
    assert made.scheduler.reasons()["a"].code == "slots"


# ---- receive: what is told, and when


def test_pages_that_land_are_pinned_until_it_is_over() -> None:
    made = side()
    ask(made, "a", 20, 5)
    landing_of(made, "a")
    (pin,) = made.arena.pins.open
    assert pin.is_in_force
    made.tell(Landed("a", 0, 7))
    assert not made.arena.pins.open
    assert state_of(made, "a") == "decoding"


def test_the_first_token_comes_with_its_log_probabilities_and_decoding_goes_on() -> None:
    made = side()
    ask(made, "a", 20, 5)
    landing_of(made, "a")
    said = TokenLogprobs(-0.5, 1, ((7, -0.5),))
    updates = made.tell(Landed("a", 0, 7, said))
    assert updates == (NewToken("a", 7, said),)
    plan = made.plan()
    assert plan is not None
    (segment,) = plan.segments
    assert (segment.start, segment.tokens, plan.token_ids.tolist()) == (20, 1, [7])


def test_one_token_is_all_where_no_more_was_asked_for() -> None:
    made = side()
    ask(made, "a", 20, 1)
    landing_of(made, "a")
    assert made.tell(Landed("a", 0, 7)) == (NewToken("a", 7, None, "length"),)
    assert made.scheduler.figures().totals.finished == 1
    assert made.is_empty


def test_a_stop_token_ends_it_and_min_tokens_holds_that_back() -> None:
    for min_tokens, end in ((0, "stop"), (2, None)):
        made = side(eos_token_ids=(7,))
        ask(made, "a", 20, 5, min_tokens=min_tokens)
        landing_of(made, "a")
        assert made.tell(Landed("a", 0, 7)) == (NewToken("a", 7, None, end),)


def test_what_has_landed_is_in_the_prefix_cache_at_once() -> None:
    made = side(40, prefix_cache=True)
    text = prompt(24)
    made.tell(Arrive("a", text, greedy(5), 0, route="receive"))
    landing_of(made, "a")
    made.tell(Landed("a", 0, 7))
    made.arrive("b", (*text, 1, 2), 5)
    made.plan()
    assert made.cached_tokens["b"] == 24


def test_what_is_cached_here_is_locked_and_does_not_travel() -> None:
    made = side(40, prefix_cache=True)
    text = prompt(33)
    made.arrive("before", text[:25], 1)
    made.run()
    made.tell(Arrive("a", text, greedy(5), 0, route="receive"))
    ready = landing_of(made, "a")
    assert ready.start_tokens == 24
    assert [(run.first_page, len(run.pages)) for run in ready.pools] == [(6, 3), (7, 2)], "first read at 33: 28"
    assert heard(made, Admitted)[-1] == Admitted("a", 24)


def test_window_pages_that_are_cached_and_still_read_do_not_travel_either() -> None:
    made = side(40, ((Full(), 4, 3), (Sliding(16), 4, 1)), prefix_cache=True)
    text = prompt(33)
    made.arrive("before", text[:25], 1)
    made.run()
    made.tell(Arrive("a", text, greedy(5), 0, route="receive"))
    ready = landing_of(made, "a")
    # Position 33 reads from 18 on: pages 4 and 5 are locked, 6 to 8 land.
    assert [(run.first_page, len(run.pages)) for run in ready.pools] == [(6, 3), (6, 3)]
    holding = made.scheduler._roster.live["a"].holding
    assert holding is not None
    assert (holding.first_page[1], len(holding.handles[1])) == (4, 5)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_page_that_came_in_part_is_never_cached_and_what_follows_it_is(is_cut: bool) -> None:
    """Position 12 reads from 6 on: of page 0 of the window, a worker with smaller pages has sent two positions only."""
    pair = Pair((tiny_layout(((Full(), 8, 1), (Sliding(7), 8, 1)), 30), rules(prefix_cache=True)))
    pair.is_cut = is_cut
    text = prompt(12)
    pair.submit("a", text, 30)
    pair.run_until(lambda: len(pair.decode.outputs["a"]) == 2)
    pair.decode.arrive("early", (*text[:8], 5, 5), 3)
    pair.run_until(lambda: "early" in pair.decode.ends)
    assert pair.decode.cached_tokens["early"] == (0 if is_cut else 8)
    pair.run()
    pair.decode.arrive("late", (*text, *pair.decode.outputs["a"]), 3)
    pair.run().assert_all_finished()
    assert pair.decode.cached_tokens["late"] == 40


def test_a_request_that_leaves_before_its_windows_passed_such_a_page_leaves_nothing() -> None:
    pair = Pair((tiny_layout(((Full(), 8, 1), (Sliding(7), 8, 1)), 30), rules(prefix_cache=True)))
    pair.is_cut = True
    pair.submit("a", prompt(12), 2)
    pair.run().assert_all_finished()
    assert not pair.decode.scheduler.figures().arena.cached_bytes


# ---- receive: ends


def test_lost_it_gives_everything_back_and_waits_for_a_higher_attempt() -> None:
    made = side()
    ask(made, "a", 20, 5)
    landing_of(made, "a")
    assert made.tell(Lost("a", 0, "the link broke", is_final=False)) == ()
    assert state_of(made, "a") == "waiting"
    assert made.is_empty
    assert not made.arena.pins.open
    made.tell(Offered("a", 0))
    assert made.plan() is None, "attempt 0 is over"
    assert state_of(made, "a") == "waiting"
    assert "attempt 0 was lost" in made.scheduler.reasons()["a"].detail
    made.tell(Offered("a", 1))
    made.plan()
    assert [update.attempt for update in heard(made, LandingReady)] == [0, 1]
    assert heard(made, Admitted) == [Admitted("a", 0)], "told once"


def test_lost_for_good_it_fails_with_a_code_that_tells_to_try_elsewhere() -> None:
    for offered in (False, True):
        made = side()
        ask(made, "a", 20, 5)
        if offered:
            landing_of(made, "a")
        assert made.tell(Lost("a", 0, "no worker is left", is_final=True)) == (
            Failed("a", "no worker is left", "prefill_lost"),
        )
        assert made.is_empty
        assert not made.scheduler.has_work


def test_an_offer_is_withdrawn_before_it_was_taken_up() -> None:
    made = side(max_running_requests=1)
    made.arrive("local", 4, 9)
    made.step()
    ask(made, "a", 4, 4)
    made.tell(Offered("a", 0))
    made.tell(Lost("a", 0, "it is gone", is_final=False))
    assert made.scheduler.reasons()["a"].code == "transfer"
    made.run_until(lambda: "local" in made.ends)
    assert made.plan() is None
    assert state_of(made, "a") == "waiting"


STALE = (
    Landed("a", 0, 7),
    Lost("a", 0, "late", False),
    Lost("a", 0, "late", True),
    Offered("a", 0),
    Offered("a", 1),
    PeerAccepted("a", 5, 0),
    PeerRevoked("a", 1),
    PeerTook("a", 1, 0),
    PeerReleased("a", 1),
    *(event("nobody", 0) for event in (Offered, PeerRevoked, PeerReleased)),
    Landed("nobody", 0, 7),
    Lost("nobody", 0, "", True),
    PeerTook("nobody", 0, 0),
    PeerAccepted("nobody", 0, 0),
)


@pytest.mark.parametrize("event", STALE, ids=repr)
def test_what_is_said_of_another_attempt_or_request_does_nothing(event: object) -> None:
    made = side()
    ask(made, "a", 20, 5)
    landing_of(made, "a")
    made.tell(Lost("a", 0, "again", is_final=False))
    made.tell(Offered("a", 1))
    made.plan()
    before = made.arena.figures()
    assert made.tell(event) == ()  # type: ignore[arg-type]
    assert state_of(made, "a") == "receiving"
    assert made.arena.figures() == before
    made.tell(Landed("a", 1, 7))
    assert state_of(made, "a") == "decoding"
    for late in (Lost("a", 1, "late", False), Lost("a", 2, "late", True), Landed("a", 1, 8), Offered("a", 2)):
        assert made.tell(late) == ()
        assert state_of(made, "a") == "decoding"


def test_nothing_can_land_before_it_was_told_where() -> None:
    made = side()
    ask(made, "a", 20, 5)
    made.tell(Offered("a", 0))
    assert made.tell(Landed("a", 0, 7)) == ()
    assert state_of(made, "a") == "waiting"


def test_an_abort_frees_a_landing_at_once() -> None:
    made = side()
    ask(made, "a", 20, 5)
    landing_of(made, "a")
    assert made.tell(Abort("a")) == (NewToken("a", None, None, "abort"),)
    assert made.is_empty
    assert not made.arena.pins.open


# ---- receive: a senior is short


def short_senior(reserve: int = 0) -> Side:
    """Return a worker whose most senior request needs pages that two landings hold, and no junior else."""
    made = side(12, max_running_requests=8, decode_reserve_tokens=reserve).expect_outputs(32, 1)
    made.arrive("senior", 4, greedy(30))
    made.step()
    for name in ("b", "c"):
        ask(made, name, 16, 2)
        landing_of(made, name)
    return made


def test_juniors_are_asked_back_from_the_most_junior_on_as_many_as_suffice() -> None:
    made = short_senior()
    made.run_until(lambda: bool(heard(made, RevokeWanted)), 40)
    assert heard(made, RevokeWanted) == [RevokeWanted("c", 0)]
    made.step()
    assert heard(made, RevokeWanted) == [RevokeWanted("c", 0)], "asked once"
    made.tell(Lost("c", 0, "revoked", is_final=False))
    request = made.scheduler._roster.live["c"]
    assert (request.state, request.retractions) == (State.RETRACTED, 1), "it comes back with its whole life granted"


def test_while_the_senior_is_short_nobody_else_is_accepted() -> None:
    made = short_senior()
    ask(made, "d", 1, 1)
    made.run_until(lambda: bool(heard(made, RevokeWanted)), 40)
    made.tell(Offered("d", 0))
    made.plan()
    assert made.scheduler.reasons()["d"].code == "senior-short"


def test_what_lands_before_it_is_given_back_decodes_like_any_other() -> None:
    made = short_senior()
    made.run_until(lambda: bool(heard(made, RevokeWanted)), 40)
    made.tell(Landed("c", 0, 5))
    made.tell(Lost("c", 0, "revoked", is_final=False))
    assert state_of(made, "c") == "decoding"
    made.tell(Landed("b", 0, 5))
    made.run()
    assert set(made.ends) == {"senior", "b", "c"}


def test_a_landing_is_never_a_victim_but_what_decodes_is() -> None:
    made = short_senior()
    made.arrive("local", 1, 2, priority=5)
    made.run_until(lambda: made.retractions > 0 or bool(heard(made, RevokeWanted)), 60)
    assert state_of(made, "b") == "receiving"


# ---- send


def test_without_being_accepted_it_holds_nothing_and_blocks_nobody() -> None:
    made = side()
    ask(made, "a", 20, 9, "send")
    made.arrive("b", 9, 4)
    made.step()
    assert state_of(made, "a") == "waiting"
    assert state_of(made, "b") == "decoding"
    assert made.scheduler.reasons()["a"].code == "transfer"


def test_it_is_checked_and_priced_for_one_token() -> None:
    slabs = fewest_slabs(FULL_AND_WINDOW, 20, 1)
    made = side(slabs)
    assert not isinstance(ask(made, "a", 20, 400, "send"), Rejected)
    assert isinstance(ask(made, "b", 28, 1, "send"), Rejected)
    made.tell(PeerAccepted("a", 0, 0))
    made.plan()
    holding = made.scheduler._roster.live["a"].holding
    assert holding is not None
    assert holding.grant.demand[0] == 5


def test_chunks_tell_each_page_once_when_it_is_whole_and_of_windows_only_the_tail() -> None:
    made = side(24, step_tokens=8)
    ready = prefilled(made, tokens=22)
    assert [(r.chunk, r.computed_tokens, r.left_tokens) for r in ready] == [(0, 8, 14), (1, 16, 6), (2, 22, 0)]
    full = [(r.pools[0].first_page, len(r.pools[0].pages)) for r in ready]
    assert full == [(0, 2), (2, 2), (4, 2)]
    window = [(r.pools[1].first_page, len(r.pools[1].pages)) for r in ready]
    assert window == [(4, 0), (4, 0), (4, 2)], "position 22 reads from 17 on: page 4"
    token = reference_token(made)
    assert heard(made, Computed) == [Computed("a", 0, 3, token)]


def reference_token(made: Side) -> int:
    """Return the first output token of "a"."""
    made.limits["a"] = 1
    return made.expected("a")[0]


def test_a_window_page_is_told_as_soon_as_it_is_whole() -> None:
    made = side(24, step_tokens=8, pools=((Full(), 4, 3), (Sliding(14), 4, 1)))
    ready = prefilled(made, tokens=22)
    window = [(r.pools[1].first_page, len(r.pools[1].pages)) for r in ready]
    assert window == [(2, 0), (2, 2), (4, 2)], "position 22 reads from 9 on: page 2"


def test_states_travel_at_the_end() -> None:
    made = side(24, MIXED, step_tokens=8)
    ready = prefilled(made)
    assert [len(r.pools[2].pages) for r in ready] == [0, 0, 1]


def test_pages_below_the_accepted_start_are_not_told() -> None:
    made = side(24, step_tokens=64)
    ask(made, "a", 22, 9, "send")
    made.tell(PeerAccepted("a", 0, 12))
    made.run_until(lambda: state_of(made, "a") == "sending")
    (ready,) = heard(made, PagesReady)
    assert [(run.first_page, len(run.pages)) for run in ready.pools] == [(3, 3), (4, 2)]


def test_a_chunk_is_pinned_until_it_was_taken_and_the_rest_until_it_is_released() -> None:
    made = side(24, step_tokens=8)
    prefilled(made)
    assert len(made.arena.pins.open) == 3
    made.tell(PeerTook("a", 0, 1))
    assert len(made.arena.pins.open) == 2
    made.tell(PeerTook("a", 0, 1))
    assert len(made.arena.pins.open) == 2
    assert made.tell(PeerReleased("a", 0)) == (Sent("a"),)
    assert not made.arena.pins.open
    assert made.is_empty
    assert made.scheduler.figures().totals.finished == 1


def test_it_keeps_its_pages_until_it_is_released_although_all_were_taken() -> None:
    made = side(24, step_tokens=64)
    prefilled(made)
    made.tell(PeerTook("a", 0, 0))
    holding = made.scheduler._roster.live["a"].holding
    assert holding is not None
    assert holding.pages[0] == 5
    assert made.scheduler.figures().sending == 1
    assert made.scheduler.running == 1


def test_released_before_it_was_computed_it_ends_as_aborted() -> None:
    for steps in (0, 1):
        made = side(24, step_tokens=8)
        ask(made, "a", 20, 9, "send")
        made.tell(PeerAccepted("a", 0, 0))
        for _ in range(steps):
            made.step()
        assert made.tell(PeerReleased("a", 0)) == ()
        assert made.is_empty
        assert not made.arena.pins.open
        assert made.scheduler.figures().totals.aborted == 1


def test_released_before_it_was_accepted_it_ends_too() -> None:
    made = side()
    ask(made, "a", 20, 9, "send")
    assert made.tell(PeerReleased("a", 0)) == ()
    assert not made.scheduler.has_work


def test_an_abort_leaves_pinned_pages_to_whoever_reads_them() -> None:
    made = side(24, step_tokens=8)
    prefilled(made)
    made.tell(Abort("a"))
    assert sum(made.arena.budget.transfer) == 5 + 2
    made.tell(PeerTook("a", 0, 0))
    made.tell(PeerTook("a", 0, 1))
    assert sum(made.arena.budget.transfer) == 1 + 1
    made.tell(PeerReleased("a", 0))
    assert made.is_empty


@pytest.mark.parametrize("in_step", [False, True])
def test_revoked_it_waits_again_and_what_it_computed_is_cached(in_step: bool) -> None:
    made = side(24, step_tokens=8, prefix_cache=True)
    ask(made, "a", 20, 9, "send")
    made.tell(PeerAccepted("a", 0, 0))
    made.step()
    plan = made.plan() if in_step else None
    made.tell(PeerRevoked("a", 0))
    assert state_of(made, "a") == "waiting"
    if plan is not None:
        made.apply(made.backend.run(plan))
    assert not made.arena.pins.open
    assert made.plan() is None
    made.tell(PeerAccepted("a", 0, 0))
    assert made.plan() is None, "attempt 0 is over"
    made.tell(PeerAccepted("a", 1, 0))
    plan = made.plan()
    assert plan is not None
    assert plan.segments[0].start == 8, "the first chunk is cached"
    made.apply(made.backend.run(plan))
    made.run_until(lambda: state_of(made, "a") == "sending")
    assert [r.chunk for r in heard(made, PagesReady) if r.attempt == 1] == [0, 1]
    told = [r.pools[0].first_page for r in heard(made, PagesReady) if r.attempt == 1]
    assert told[0] == 0, "a new attempt tells everything again"
    made.tell(PeerReleased("a", 1))
    assert made.is_empty


def test_retracted_for_a_senior_it_goes_on_with_what_was_not_told() -> None:
    made = side(24, step_tokens=8)
    ask(made, "a", 20, 9, "send")
    made.tell(PeerAccepted("a", 0, 0))
    made.step()
    made.scheduler._roster.retract(made.scheduler._roster.live["a"])
    made.run_until(lambda: state_of(made, "a") == "sending")
    ready = heard(made, PagesReady)
    assert [r.chunk for r in ready] == [0, 1, 2, 3]
    assert [(r.pools[0].first_page, len(r.pools[0].pages)) for r in ready] == [(0, 2), (2, 0), (2, 2), (4, 1)]
    made.tell(PeerReleased("a", 0))
    assert made.is_empty


# ---- steps that break


@pytest.mark.parametrize("moves", [False, True])
def test_a_step_that_breaks_leaves_told_landings_alone(moves: bool) -> None:
    made = side(40, prefix_cache=True)
    text = prompt(33)
    made.arrive("before", text[:25], 1)
    made.run()
    made.tell(Arrive("a", text, greedy(5), 0, route="receive"))
    landing_of(made, "a")
    made.arrive("local", 9, 9)
    assert made.plan() is not None
    break_step(made, moves=moves)
    assert "local" in made.failed
    assert state_of(made, "a") == "receiving"
    made.tell(Landed("a", 0, 7))
    made.tell(Abort("a"))
    assert made.is_empty


def break_step(made: Side, *, moves: bool) -> None:
    """Let the backend raise; with `moves`, as if the plan had had some that may not have been done."""
    step = made.scheduler._outstanding
    assert step is not None
    if moves:
        made.scheduler._outstanding = replace(step, plan=replace(step.plan, moves=(Move(0, 0, 1),)))
    made.note_updates(made.scheduler.fail_step(BROKEN))


def test_a_step_that_breaks_with_moves_fails_what_is_being_sent_and_keeps_its_pins() -> None:
    made = side(24, step_tokens=8)
    prefilled(made)
    made.tell(PeerTook("a", 0, 0))
    made.arrive("local", 9, 9)
    assert made.plan() is not None
    break_step(made, moves=True)
    assert "a" in made.failed
    assert len(made.arena.pins.open) == 2
    made.tell(PeerReleased("a", 0))
    assert made.is_empty


def test_a_send_request_that_fails_is_told_and_its_pins_stay_until_it_is_released() -> None:
    made = side(24, step_tokens=8)
    ask(made, "a", 20, 9, "send")
    made.tell(PeerAccepted("a", 0, 0))
    made.step()
    made.backend.fails.add("a")
    made.step()
    assert "a" in made.failed
    assert len(made.arena.pins.open) == 1
    made.tell(PeerTook("a", 0, 0))
    assert made.is_empty


def half_taken() -> Side:
    """Return a worker whose send request has failed with its first chunk taken and the second one still pinned."""
    made = side(12, pools=((Full(), 4, 1),), step_tokens=8, prefix_cache=True)
    ask(made, "a", 32, 9, "send")
    made.tell(PeerAccepted("a", 0, 0))
    made.step()
    made.step()
    made.tell(PeerTook("a", 0, 0))
    made.backend.fails.add("a")
    made.step()
    assert "a" in made.failed
    assert [pin.owner for pin in made.arena.pins.open] == ["chunk 1 of a"]
    return made


def test_what_is_cached_above_pages_that_were_not_taken_is_in_a_unit() -> None:
    made = half_taken()
    assert made.scheduler.audit() == []
    made.tell(PeerReleased("a", 0))
    assert made.scheduler.audit() == []
    assert made.is_empty


@pytest.mark.parametrize("distrusted", [False, True])
def test_pages_that_were_not_taken_outlive_what_is_cached_above_them(distrusted: bool) -> None:
    made = half_taken()
    made.arrive("big", prompt(16 if distrusted else 36, 77), 2)
    if distrusted:
        assert made.plan() is not None
        break_step(made, moves=True)
    else:
        made.run()
        assert made.outputs["big"] == made.expected("big")
    assert made.scheduler.audit() == []
    assert sum(made.arena.budget.transfer) == 2
    made.tell(PeerReleased("a", 0))
    assert made.scheduler.audit() == []


# ---- pins that wait for moves


def scattered(**changes: object) -> Side:
    """Return a worker whose request to send has its first full page in one slab and its second one in the next.

    Both could stand in one slab, so the second one is not pinned where it is.
    """
    made = side(24, step_tokens=12, **changes)
    made.arrive("before", 7, 2)
    ask(made, "a", 8, 9, "send")
    made.tell(PeerAccepted("a", 0, 0))
    made.run_until(lambda: made.scheduler._roster.live["a"].computed == 8)
    assert "before" in made.ends
    (pin,) = [pin for pin in made.arena.pins.open if not pin.is_in_force]
    assert pin.owner == "chunk 1 of a"
    return made


@pytest.mark.parametrize("cache", [False, True])
def test_what_must_be_gathered_first_is_told_when_the_moves_are_done_by_a_plan_without_segments(cache: bool) -> None:
    made = scattered(prefix_cache=cache)
    assert [ready.chunk for ready in heard(made, PagesReady)] == [0]
    assert not heard(made, Computed), "it follows the last chunk"
    assert made.arena.awaits_commit
    plan = made.plan()
    assert plan is not None
    assert (len(plan.moves), plan.segments, len(plan.token_ids)) == (1, (), 0)
    assert [ready.chunk for ready in heard(made, PagesReady)] == [0], "its move is not done yet"
    made.apply(made.backend.run(plan))
    first, second = heard(made, PagesReady)
    assert second.pools[0].pages.tolist() == [plan.moves[0].target]
    assert first.pools[0].pages[0] // 3 == second.pools[0].pages[0] // 3, "in one slab"
    assert len(heard(made, Computed)) == 1
    assert made.plan() is None


@pytest.mark.parametrize("cache", [False, True])
def test_what_was_not_told_when_its_moves_broke_is_neither_told_nor_cached(cache: bool) -> None:
    made = scattered(prefix_cache=cache)
    plan = made.plan()
    assert plan is not None
    assert plan.moves
    made.note_updates(made.scheduler.fail_step(BROKEN))  # nothing of it was carried out
    assert "a" in made.failed
    assert [ready.chunk for ready in heard(made, PagesReady)] == [0]
    assert len(made.arena.pins.open) == 1
    made.arrive("again", made.arrivals["a"].prompt, 3)
    made.run()
    assert made.outputs["again"] == made.expected("again")
    made.tell(PeerReleased("a", 0))
    assert made.is_empty


def test_a_landing_in_a_slab_that_was_just_vacated_is_told_after_its_moves() -> None:
    """Somebody's six pages stand alone in six slabs of seven: one of them moves, and its slab is where windows land.

    Told at once, the other worker would write where the page still stands that has yet to be read.
    """
    made = side(7)
    somebody = made.arena.reserve("somebody", Demand((18, 0)))
    assert isinstance(somebody, Grant)
    handles = made.arena.commit([Order(somebody, somebody.demand)]).handles[0][0]
    made.arena.free(somebody, 0, handles[made.arena.physical(0, handles) % 3 != 0])
    made.arena.shrink(somebody, Demand((6, 0)))
    ask(made, "a", 8, 2)
    made.tell(Offered("a", 0))
    plan = made.plan()
    assert plan is not None
    landing = made.scheduler._roster.live["a"].landing
    assert landing is not None
    assert landing.pin.is_in_force, "it waits for nothing but the moves"
    vacated = {move.source // 3 for move in plan.moves}
    assert vacated & set(made.arena.physical(1, landing.handles[1]).tolist()), "a window page stands in a vacated slab"
    assert not heard(made, LandingReady)
    made.apply(made.backend.run(plan))
    assert [told.request_id for told in heard(made, LandingReady)] == ["a"]


# ---- pins and room


def test_what_pins_keep_of_victims_is_not_given_back() -> None:
    """Eight pages of the victim are pinned by its reader: retracted, it frees the others only."""
    for cache in (False, True):
        made = side(40, step_tokens=32, prefix_cache=cache)
        ask(made, "a", 40, 9, "send")
        made.tell(PeerAccepted("a", 0, 0))
        made.step()
        request = made.scheduler._roster.live["a"]
        said = made.scheduler._sharing.given_back([request])
        before = made.arena.most(0, Demand((0, 0)))
        made.scheduler._roster.retract(request)
        freed = made.arena.most(0, Demand((0, 0))) - before
        assert said[0] == 10 - 8
        assert freed >= said[0]
        made.tell(PeerReleased("a", 0))


def test_a_floor_that_lost_a_pinned_page_is_whole_again_when_the_page_is_free() -> None:
    """A page borrowed from the floor is pinned by a reader when its request leaves: its bytes are in use."""
    made = side(8, ((Full(), 4, 1), (Sliding(6), 4, 1)), step_tokens=64)
    made.arrive("a", 16, 1)
    plan = made.plan()
    assert plan is not None
    request = made.scheduler._roster.live["a"]
    holding, floor = request.holding, made.scheduler._floor
    assert holding is not None
    assert floor.lent[1] == 1, "the prefill borrows from the floor"
    pin = made.arena.pin("a reader", [holding.handles[0][:0], holding.handles[1]])
    made.abort("a")
    made.apply(made.backend.run(plan))
    held = made.arena.budget.transfer[1]
    assert held == len(pin.handles[1])
    made.arena.unpin(pin)
    made.plan()
    assert floor.demand == (0, 1)
    made.arrive("b", 16, 1)
    made.run()
    assert made.ends["b"] == "length"


# ---- two of them


@pytest.mark.parametrize("cache", [False, True])
def test_two_workers_give_the_tokens_that_one_gives(cache: bool) -> None:
    pair = Pair((tiny_layout(FULL_AND_WINDOW, 40), rules(prefix_cache=cache, step_tokens=16)))
    texts = [prompt(40), prompt(13, 1), prompt(64, 2), prompt(45)]
    for number, text in enumerate(texts):
        pair.submit(f"r{number}", text, 3 + number)
        if number == 2:
            pair.run()
    pair.run().assert_all_finished()
    assert pair.sent == ["r0", "r1", "r2", "r3"]
    assert pair.accepted[3].start_tokens == (40 if cache else 0)


def test_a_world_alone_is_what_it_was() -> None:
    made = World(tiny_layout(FULL_AND_WINDOW, 24), rules())
    made.arrive("a", 20, 5)
    made.run().assert_all_finished()

"""Scenarios A1 to A16, H2, H4 and H6 against the real scheduler, arena and token oracle.

Each case runs under the static split it was seen on and in a shared arena with the fewest bytes in which its largest
request fits alone; where that would be too few for several requests at once, the largest one comes last. Where a wrong
policy is known, the same check must fail with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from halocline.errors import ConfigError
from halocline.memory.arena import Arena
from halocline.memory.capacity import longest_request
from halocline.memory.demand import Demand, resident, step_price
from halocline.memory.grant import Grant
from halocline.memory.retention import Chunked, Full, Sliding, State
from halocline.schedule.events import Accepted, Rejected
from halocline.schedule.request import State as RequestState
from halocline.step import Sampled, StepPlan, StepResult
from halocline.units import ceil_div
from testing import wrong
from testing.schedule import GUARANTEED, PoolSpec, World, fewest_slabs, greedy, rules, takes, tiny_layout

Spoil = Callable[[World], None]
SPLIT_OR_SHARED = pytest.mark.parametrize("split", [True, False], ids=["split", "shared"])
ADMISSIONS = pytest.mark.parametrize("admission", [("expected", 0.9), GUARANTEED], ids=["expected", "guaranteed"])
Prices = Callable[..., Demand]


def right(made: World) -> None:
    """Spoil nothing."""


def with_price(monkeypatch: pytest.MonkeyPatch, price: Prices) -> None:
    """Let the gate price requests wrongly."""
    monkeypatch.setattr("halocline.schedule.admission.resident", price)


def send_the_largest(made: World, split: bool, length: int, max_tokens: int) -> None:
    """Send one request more. In a shared arena it is the largest: with one slab less it is refused at the door."""
    if split:
        return
    pools = [(pool.retention, pool.page_tokens, pool.pages_per_slab) for pool in made.layout.pools]
    changes = {"step_tokens": made.rules.step_tokens, "max_running_requests": made.rules.max_running_requests}
    assert fewest_slabs(pools, length, max_tokens, **changes) == made.layout.slabs
    assert isinstance(made.arrive("largest", length, greedy(max_tokens, ignore_eos=True)), Accepted)


# --- A1: long prompts on an idle server, windows smaller than a chunk

A1_POOLS: tuple[PoolSpec, ...] = ((Full(), 256, 1), (Sliding(128), 256, 1))
A1_RULES = {"step_tokens": 8192, "max_running_requests": 16, "max_model_len": 65536}


def run_a1(split: bool, spoil: Spoil = right) -> World:
    longest = 20_000 + 15 * 37
    slabs = 512 + 51 if split else fewest_slabs(A1_POOLS, longest, 3, **A1_RULES)
    made = World(tiny_layout(A1_POOLS, slabs), rules(**A1_RULES), (512, 51) if split else None)
    spoil(made)
    for index in range(16):
        made.arrive(f"r{index}", 20_000 + 37 * index, 3)
    made.run()
    assert list(made.ends.values()) == ["length"] * 16
    assert made.is_empty
    return made


@SPLIT_OR_SHARED
def test_a1_sixteen_long_prompts_all_finish(split: bool) -> None:
    made = run_a1(split)
    assert made.outputs["r0"] == made.expected("r0")
    assert made.retractions == 0
    if not split:
        assert not takes(A1_POOLS, made.layout.slabs - 1, 20_000 + 15 * 37, 3, **A1_RULES)


@SPLIT_OR_SHARED
def test_a1_bites_when_windows_are_given_up_too_late(split: bool) -> None:
    with pytest.raises(AssertionError):
        run_a1(split, wrong.keeps_windows_while_prefilling)


# --- A3: an arena smaller than one window, one page and one full page


@pytest.mark.parametrize(("full", "window", "starts"), [(16, 1, False), (0, 8, False), (16, 2, True)])
def test_a3_a_split_too_small_for_one_window_is_refused_at_start(full: int, window: int, starts: bool) -> None:
    """F = 4096 tokens and a ratio of 0.1 leave one window page of 256, and a request needs one beside the floor."""
    build = lambda: World(tiny_layout(A1_POOLS, 24), rules(**A1_RULES), (full, window))  # noqa: E731
    if starts:
        assert isinstance(build().arrive("a", 1, 1), Accepted)
    else:
        with pytest.raises(ConfigError, match=r"\d+ \+ \d+ pages of sliding-128"):
            build()


def test_a3_a_shared_arena_one_slab_too_small_is_refused_at_start() -> None:
    """One full page, one window page, one page of the floor."""
    assert isinstance(World(tiny_layout(A1_POOLS, 3), rules(**A1_RULES)).arrive("a", 1, 1), Accepted)
    with pytest.raises(ConfigError, match="3 slabs where the arena has 2"):
        World(tiny_layout(A1_POOLS, 2), rules(**A1_RULES))


# --- A4: three regimes for a candidate

A4_POOLS: tuple[PoolSpec, ...] = ((Full(), 4, 1), (Sliding(8), 4, 1))
# The running request holds 10 + 3 pages to its end, the floor 1. A candidate of L tokens needs ceil(L / 4) + 3.
#   shared: 30 slabs, 16 left: up to L = 52 at once, up to 104 alone.   split: 23 + 7, so up to 52 at once, 92 alone.


def a4_world(split: bool, spoil: Spoil = right) -> World:
    made = World(tiny_layout(A4_POOLS, 30), rules(max_model_len=400, step_tokens=128), (23, 7) if split else None)
    spoil(made)
    made.arrive("running", 8, greedy(33, ignore_eos=True))
    made.step()
    return made


def a4_regime(made: World, length: int, max_tokens: int = 1) -> str:
    """Send a candidate and return what happened to it at once, after running everything to its end."""
    if isinstance(made.arrive("candidate", length, greedy(max_tokens, ignore_eos=True)), Rejected):
        return "reject"
    plan = made.plan_and_apply()
    chunk = {segment.request_id: segment.tokens for segment in plan.segments}.get("candidate")
    if chunk is None:
        assert made.scheduler.reasons()["candidate"].code == "memory"
    made.run().assert_all_finished()
    totals = made.scheduler.figures().totals
    assert (totals.retractions, totals.recomputed_tokens) == (0, 0), "a chunk or an admission cost somebody its grant"
    return "wait" if chunk is None else f"admit {chunk}"


SHARED_BORDERS = [(5, "admit 5"), (51, "admit 16"), (52, "admit 16"), (53, "wait"), (104, "wait"), (105, "reject")]
SPLIT_BORDERS = [(5, "admit 5"), (51, "admit 16"), (52, "admit 16"), (53, "wait"), (92, "wait"), (93, "reject")]


@pytest.mark.parametrize(("length", "regime"), SHARED_BORDERS)
def test_a4_both_borders_of_the_three_regimes_shared(length: int, regime: str) -> None:
    assert a4_regime(a4_world(split=False), length) == regime


@pytest.mark.parametrize(("length", "regime"), SPLIT_BORDERS)
def test_a4_both_borders_of_the_three_regimes_split(length: int, regime: str) -> None:
    assert a4_regime(a4_world(split=True), length) == regime


@SPLIT_OR_SHARED
def test_a4_who_must_wait_costs_nobody_anything(split: bool) -> None:
    """53 positions to its end, one page more than is left."""
    assert a4_regime(a4_world(split), 24, 30) == "wait"


@SPLIT_OR_SHARED
def test_a4_bites_when_room_granted_to_others_is_used(split: bool) -> None:
    with pytest.raises(AssertionError, match="cost somebody its grant"):
        a4_regime(a4_world(split, wrong.takes_granted_room), 24, 30)


def test_a4_the_sweep_has_no_other_regime() -> None:
    lengths = [*range(1, 52, 10), 52, 53, *range(60, 104, 11), 104, 105, 106, 107]
    seen = [a4_regime(a4_world(split=False), length).split()[0] for length in lengths]
    assert seen == ["admit" if length <= 52 else "wait" if length <= 104 else "reject" for length in lengths]


# --- A5: a chunk that was prepared and never ran


def run_a5(split: bool, spoil: Spoil = right) -> None:
    slabs = 20 if split else fewest_slabs(A4_POOLS, 40, 4, step_tokens=16)
    made = World(tiny_layout(A4_POOLS, slabs), rules(step_tokens=16), (11, 9) if split else None)
    spoil(made)
    made.arrive("a", 40, 4)
    plan = made.plan()
    assert plan is not None
    request = made.scheduler._roster.live["a"]
    assert request.computed == 0, "a planned chunk counts as computed"
    chunk = plan.segments[0].tokens
    assert chunk >= 4
    made.arrive("b", 3, 1)
    made.abort("b")
    made.apply(made.backend.run(plan))
    assert request.computed == chunk
    made.scheduler._roster.retract(request)
    made.run().assert_all_finished()


@SPLIT_OR_SHARED
def test_a5_no_chunk_counts_before_its_step_ran(split: bool) -> None:
    run_a5(split)


@SPLIT_OR_SHARED
def test_a5_bites_when_planned_chunks_count(split: bool) -> None:
    with pytest.raises(AssertionError, match="planned chunk counts"):
        run_a5(split, wrong.counts_chunks_when_planned)


@SPLIT_OR_SHARED
def test_a5_a_candidate_that_does_not_enter_changes_nothing(split: bool) -> None:
    made = World(tiny_layout(A4_POOLS, 30), rules(step_tokens=128), (23, 7) if split else None)
    made.arrive("running", 8, greedy(33, ignore_eos=True))
    made.step()
    made.arrive("candidate", 60, 1)
    for _ in range(5):
        made.step()
        promised = [h + p for h, p in zip(made.arena.budget.held, made.arena.budget.promised, strict=True)]
        assert promised == [10, 3 + 1]
        assert [grant.owner for grant in made.arena.owners.grants.values()] == ["floor", "running"]


# --- A6: requests near the ceiling


def run_a6(split: bool, prompts: range) -> None:
    for length in prompts:
        made = World(tiny_layout(A4_POOLS, 16), rules(), (11, 5) if split else None)
        most = made.scheduler._gate.largest_output(length)
        if most < 1:
            assert isinstance(made.arrive("a", length, 1), Rejected)
            continue
        assert isinstance(made.arrive("b", length, most + 1), Rejected)
        made.arrive("a", length, greedy(most, ignore_eos=True))
        made.run().assert_all_finished()
        totals = made.scheduler.figures().totals
        assert (totals.retractions, totals.recomputed_tokens) == (0, 0)


@SPLIT_OR_SHARED
def test_a6_what_the_door_lets_in_finishes_without_computing_twice(split: bool) -> None:
    run_a6(split, range(1, 60, 3))


@SPLIT_OR_SHARED
def test_a6_bites_when_the_check_asks_for_less_than_the_peak(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with_price(monkeypatch, wrong.price_of_the_prompt_only)
    with pytest.raises(AssertionError):
        run_a6(split, range(1, 60, 3))


# --- A7: longer than the capacity, but within the model's own maximum

A7_POOLS: tuple[PoolSpec, ...] = ((Full(), 16, 1), (Sliding(128), 16, 1))


@SPLIT_OR_SHARED
def test_a7_a_prompt_beyond_capacity_is_refused_at_once_and_others_are_unaffected(split: bool) -> None:
    """37,392 tokens are 2,337 full pages, 9 window pages; the floor is one more."""
    long_rules = rules(max_model_len=262_144, step_tokens=4096)
    made = World(tiny_layout(A7_POOLS, 2337 + 10), long_rules, (2337, 10) if split else None)
    made.arrive("before", 20, 10)
    made.step()
    answer = made.arrive("too-long", 40_000, 1)
    assert isinstance(answer, Rejected)
    assert answer.code == "context_length_exceeded"
    assert "2500 + 0 pages of full" in answer.message
    assert "2510 slabs where the arena has 2347" in answer.message
    made.arrive("after", 20, 10)
    made.arrive("aborted", 20, 10)
    made.step()
    made.abort("aborted")
    made.run().assert_all_finished()
    assert isinstance(made.arrive("longest", 37_392, 1), Accepted)
    assert isinstance(made.arrive("longer", 37_393, 1), Rejected)


# --- A8: windows are priced by the window

A8_POOLS: tuple[PoolSpec, ...] = ((Full(), 16, 6), (Sliding(1024), 16, 1))


def test_a8_a_chunk_of_a_long_prompt_holds_576_window_pages_and_not_1001() -> None:
    layout = tiny_layout(A8_POOLS, 10)
    assert step_price(layout, 8192, 8192)[1] == 576
    assert resident(layout, 16_000, 16)[1] == 65


class NullBackend:
    """Answers with token 1, without looking at anything: for worlds too large for the oracle."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, tuple(Sampled(s.request_id, 1) for s in plan.segments if s.samples))


def run_a8(split: bool) -> int:
    """Return how many of eight 65K sessions run together in the bytes that eight exact ones take."""
    full, windows = ceil_div(8 * ceil_div(65_536 + 79, 16), 6), 8 * 65 + 1 + 512  # and room for a chunk of 8,192
    changed = rules(max_model_len=70_000, step_tokens=8192)
    made = World(tiny_layout(A8_POOLS, full + windows), changed, (full, windows) if split else None, check=False)
    made.backend = NullBackend()  # type: ignore[assignment]
    for index in range(8):
        made.arrive(f"r{index}", (1,) * 65_536, greedy(80, ignore_eos=True))
    made.run()
    assert made.is_empty
    return made.scheduler.figures().totals.peak_running


@SPLIT_OR_SHARED
def test_a8_eight_long_sessions_run_together_where_the_bytes_allow(split: bool) -> None:
    assert run_a8(split) == 8


@SPLIT_OR_SHARED
def test_a8_bites_when_windows_are_priced_at_full_length(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with_price(monkeypatch, wrong.price_of_a_full_length_window)
    with pytest.raises((AssertionError, ConfigError)):
        assert run_a8(split) == 8


# --- A9: a window that is shorter than a page straddles two

A9_POOLS: tuple[PoolSpec, ...] = ((Full(), 8, 1), (Sliding(3), 8, 1))


def run_a9(split: bool, admission: tuple) -> World:
    """Shared: 12 slabs take the largest request alone (9 + 2 pages, the floor), or two of the others (2 + 2 each)."""
    slabs = 40 if split else 12
    made = World(tiny_layout(A9_POOLS, slabs), rules(admission=admission), (35, 5) if split else None)
    for index in range(6):
        made.arrive(f"r{index}", 6, greedy(30 if split else 10, ignore_eos=True))
    made.run().assert_all_finished()
    send_the_largest(made, split, 40, 30)
    made.run().assert_all_finished()
    assert made.scheduler.figures().totals.peak_running > 1, "the case is about concurrent decodes"
    assert made.retractions == 0
    return made


@SPLIT_OR_SHARED
@ADMISSIONS
def test_a9_concurrent_decodes_of_short_windows_do_not_block_each_other(split: bool, admission: tuple) -> None:
    run_a9(split, admission)


@SPLIT_OR_SHARED
def test_a9_bites_when_a_short_window_is_taken_for_one_page(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with_price(monkeypatch, wrong.price_of_one_window_page)
    with pytest.raises(AssertionError, match=r"still lends \[0, 1\] pages|L3"):
        run_a9(split, GUARANTEED)


# --- A10: any byte that comes free opens admission again

A10_POOLS: tuple[PoolSpec, ...] = ((Full(), 4, 1), (Chunked(8), 4, 1))


def run_a10(split: bool, spoil: Spoil = right) -> None:
    """The running request's last local chunk has one page instead of two: the page that falls away lets `next` in.

    `running` is granted 5 + 2 pages for 18 positions, the floor 1, `next` needs 1 + 1: one page too many until then.
    """
    made = World(tiny_layout(A10_POOLS, 9), rules(), (6, 3) if split else None)
    spoil(made)
    made.arrive("running", 4, greedy(15, ignore_eos=True))
    made.step()
    made.arrive("next", 2, 2)
    running = made.scheduler._roster.live["running"]
    while running.computed < 16:
        made.step()
        if running.computed < 16:
            assert made.scheduler.reasons()["next"].code == "memory"
    plan = made.plan_and_apply()
    names = [segment.request_id for segment in plan.segments]
    assert names == ["running", "next"], f"room came free and {names} were computed"
    send_the_largest(made, split, 4, 19)
    made.run().assert_all_finished()


@SPLIT_OR_SHARED
def test_a10_a_page_that_a_grant_gives_up_in_mid_life_opens_admission(split: bool) -> None:
    run_a10(split)


@SPLIT_OR_SHARED
def test_a10_bites_when_fullness_is_latched(split: bool) -> None:
    with pytest.raises(AssertionError, match="room came free"):
        run_a10(split, wrong.latches_full)


@pytest.mark.parametrize("event", ["finish", "abort", "failure"])
def test_a10_every_end_opens_admission(event: str) -> None:
    made = World(tiny_layout(A10_POOLS, 9), rules())
    made.arrive("running", 4, greedy(6 if event == "finish" else 15, ignore_eos=True))
    made.step()
    made.arrive("next", 16, 2)
    made.step()
    assert made.scheduler.reasons()["next"].code == "memory"
    if event == "abort":
        made.abort("running")
    elif event == "failure":
        made.backend.fails = {"running"}
        made.step()
    else:
        made.run_until(lambda: "running" in made.ends)
    assert [segment.request_id for segment in made.plan_and_apply().segments] == ["next"]
    made.run()


# --- A11: exact fits


@pytest.mark.parametrize("page_tokens", [4, 64])
@pytest.mark.parametrize("ignore_eos", [True, False])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_a11_what_fits_exactly_is_admitted_at_once(page_tokens: int, ignore_eos: bool, length: int) -> None:
    pools: tuple[PoolSpec, ...] = ((Full(), page_tokens, 1), (Sliding(100), page_tokens, 1))
    slabs = fewest_slabs(pools, length, 70, step_tokens=64)
    made = World(tiny_layout(pools, slabs), rules(step_tokens=64))
    made.arrive("a", length, greedy(70, ignore_eos=ignore_eos))
    assert made.step(), made.scheduler.reasons()
    made.run().assert_all_finished()
    assert made.retractions == 0
    assert not takes(pools, slabs - 1, length, 70, step_tokens=64)


# --- A12: the longest request as printed

A12_POOLS: dict[str, tuple[PoolSpec, ...]] = {
    "full": ((Full(), 4, 3),),
    "full-window": ((Full(), 8, 2), (Sliding(12), 4, 5)),
    "three-kinds": ((Full(), 4, 3), (Sliding(7), 2, 4), (State(), 1, 1)),
    "chunked": ((Full(), 2, 5), (Chunked(10), 4, 2)),
}


@pytest.mark.parametrize("shape", A12_POOLS)
@pytest.mark.parametrize("step_tokens", [8, 13, 64])
@pytest.mark.parametrize("policy", ["expected", "guaranteed", "split"])
def test_a12_the_longest_request_as_printed_finishes_and_one_token_more_is_refused(
    shape: str, step_tokens: int, policy: str
) -> None:
    pools = A12_POOLS[shape]
    slabs = 11
    caps = (slabs - 3 * (len(pools) - 1), *(3,) * (len(pools) - 1)) if policy == "split" else None
    admission = GUARANTEED if policy == "guaranteed" else ("expected", 0.9)
    longest = longest_request(tiny_layout(pools, slabs), caps)
    assert longest > 8
    for length in (1, longest // 2, longest - 1):
        changed = rules(step_tokens=step_tokens, admission=admission, max_running_requests=4)
        made = World(tiny_layout(pools, slabs), changed, caps)
        refused = made.arrive("one-more", length, longest - length + 1)
        # A longer prompt may need less of a window than the printed length supposes; the shortest needs the most.
        assert length > 1 or isinstance(refused, Rejected)
        if isinstance(refused, Accepted):
            made.abort("one-more")
        made.arrive("a", length, greedy(longest - length, ignore_eos=True))
        made.run()
        assert made.ends["a"] == "length"
        assert made.outputs["a"] == made.expected("a")
        assert made.retractions == 0


# --- A13: two candidates in one pass


A13_POOLS: tuple[PoolSpec, ...] = ((Full(), 4, 1), (Sliding(8), 4, 1))


def run_a13(split: bool, kind: type[Arena] = Arena) -> None:
    """Each needs 3 + 3 pages, the floor is 1: 12 slabs are one too few for both, and just enough for the largest."""
    caps = (5, 7) if split else None
    made = World(tiny_layout(A13_POOLS, 12), rules(), caps, make_arena=kind)
    for name in ("first", "second"):
        made.arrive(name, 10, greedy(3, ignore_eos=True))
    price = resident(made.layout, 10, 3)
    if isinstance(made.arena, wrong.SameRoomForAll):
        made.arena.begins()
    made.plan()
    budget = made.arena.budget
    charged = [held + promised for held, promised in zip(budget.held, budget.promised, strict=True)]
    step_grant = made.scheduler._outstanding.room.held_by_chunks  # type: ignore[union-attr]
    assert charged == list(price.plus(made.floor).plus(step_grant)), "the first is charged once"
    assert made.scheduler.reasons()["second"].code == "memory"
    alone = World(tiny_layout(A13_POOLS, 12), rules(), caps)
    alone.arrive("second", 10, greedy(3, ignore_eos=True))
    assert alone.step()
    send_the_largest(alone, split, 20, 12)
    alone.run().assert_all_finished()


@SPLIT_OR_SHARED
def test_a13_the_second_of_two_that_do_not_fit_together_waits(split: bool) -> None:
    run_a13(split)


@SPLIT_OR_SHARED
def test_a13_bites_when_both_are_judged_by_the_same_room(split: bool) -> None:
    with pytest.raises(AssertionError, match="L3"):
        run_a13(split, wrong.SameRoomForAll)


# --- A15: decodes first, and nobody overtakes

A15_POOLS: tuple[PoolSpec, ...] = ((Full(), 4, 1), (Sliding(4), 4, 1))


def run_a15(split: bool, spoil: Spoil = right) -> None:
    """Six decodes cross a page in both pools while a long prompt is half way; for six steps they leave 3 tokens.

    Without drafts the decodes of one step never grow by more than the prefill before them took, so the step's budget is
    cut instead, as draft tokens will cut it.
    """
    made = World(tiny_layout(A15_POOLS, 60), rules(step_tokens=40, max_running_requests=9), (40, 20) if split else None)
    spoil(made)
    for index in range(6):
        made.arrive(f"decode{index}", (1, 2, 3, index), greedy(12, ignore_eos=True))
    made.step()
    made.scheduler._rules = replace(made.rules, step_tokens=6 + 8, max_running_requests=7)
    made.arrive("long", 32, 2)
    made.step()
    made.scheduler._rules = replace(made.rules, step_tokens=6 + 3, max_running_requests=9)
    made.arrive("short", (7,), 1)  # one token: it would fit into what the decodes leave
    long = made.scheduler._roster.live["long"]
    assert long.holding is not None
    kept = [list(handles) for handles in long.holding.handles]
    crossed = 0
    for _ in range(6):
        plan = made.plan()
        assert plan is not None
        names = [segment.request_id for segment in plan.segments]
        crossed += sum(segment.start % 4 == 0 for segment in plan.segments)
        assert names[:6] == [f"decode{index}" for index in range(6)], "every decode is computed"
        assert "short" not in names, "a new request overtook a prefill that had begun"
        assert made.scheduler.reasons()["long"].code == "step-room"
        assert (long.computed, [list(handles) for handles in long.holding.handles]) == (8, kept), "it keeps its pages"
        made.apply(made.backend.run(plan))
    assert crossed >= 6, "the decodes were meant to cross a page"
    made.scheduler._rules = made.rules
    assert [segment.request_id for segment in made.plan_and_apply().segments][6:] == ["long", "short"]
    send_the_largest(made, split, 200, 29)
    made.run().assert_all_finished()
    assert made.retractions == 0


@SPLIT_OR_SHARED
def test_a15_decodes_come_first_and_a_continued_prefill_is_not_overtaken(split: bool) -> None:
    run_a15(split)


@SPLIT_OR_SHARED
def test_a15_bites_when_new_requests_may_overtake(split: bool) -> None:
    with pytest.raises(AssertionError, match="overtook"):
        run_a15(split, wrong.lets_new_requests_overtake)


# --- A16: more requests than slots, with bytes free


@SPLIT_OR_SHARED
def test_a16_the_reason_is_slots_and_not_memory(split: bool) -> None:
    """Two run on 8 of the shared arena's 20 slabs; the others would fit, and the largest takes all of them later."""
    slabs = 60 if split else 20
    made = World(tiny_layout(A15_POOLS, slabs), rules(max_running_requests=2), (40, 20) if split else None)
    for index in range(4):
        made.arrive(f"r{index}", 4, 4)
    send_the_largest(made, split, 60, 9)
    made.step()
    assert {reason.code for reason in made.scheduler.reasons().values()} == {"slots"}
    assert all("2 requests are running" in reason.detail for reason in made.scheduler.reasons().values())
    made.run().assert_all_finished()


# --- H2: rounded once


def run_h2(split: bool) -> None:
    """7 prompt tokens and 4 new ones compute 10 positions: 3 pages of 4, and there are no more."""
    pools: tuple[PoolSpec, ...] = ((Full(), 4, 1), (Sliding(4), 4, 1))
    made = World(tiny_layout(pools, 6), rules(), (3, 3) if split else None)
    assert isinstance(made.arrive("a", 7, 4), Accepted)
    made.run().assert_all_finished()


@SPLIT_OR_SHARED
def test_h2_ten_positions_are_three_pages(split: bool) -> None:
    run_h2(split)


@SPLIT_OR_SHARED
def test_h2_bites_when_prompt_and_output_are_rounded_each(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with_price(monkeypatch, wrong.price_rounded_twice)
    with pytest.raises(AssertionError):
        run_h2(split)


# --- H4: half of a pool is free and nothing can be evicted


@SPLIT_OR_SHARED
def test_h4_a_request_waits_with_numbers_while_others_hold_the_bytes(split: bool) -> None:
    """Shared: 11 slabs, the fewest that take the request (7 + 3 pages and the floor); 5 of them are another owner's."""
    made = World(tiny_layout(A4_POOLS, 20 if split else 11), rules(), (12, 8) if split else None)
    foreign = made.arena.reserve("foreign", Demand((6, 4) if split else (3, 2)))
    assert isinstance(foreign, Grant)
    if not split:
        assert not takes(A4_POOLS, 10, 20, 8)
    made.arrive("a", 20, 8)
    for _ in range(3):
        assert made.plan() is None
        reason = made.scheduler.reasons()["a"]
        assert reason.code == "memory"
        pages = "6 promised + 7 asked = 13" if split else "3 promised + 7 asked = 10"
        assert f"{pages} pages" in reason.detail
    made.arena.release(foreign)
    made.run().assert_all_finished()


# --- H6: running decodes hold at most ceil((W - 1) / P) + 1 window pages


def run_h6(split: bool, spoil: Spoil = right) -> None:
    """Shared: 32 slabs, as many as the largest request needs alone, or two of the others (12 + 3 pages each)."""
    made = World(tiny_layout(A4_POOLS, 60 if split else 32), rules(), (40, 20) if split else None, check=False)
    spoil(made)
    for index in range(3):
        made.arrive(f"r{index}", 5 + index, greedy(40, ignore_eos=True))
    send_the_largest(made, split, 60, 53)
    most = 0
    while made.scheduler.has_work:
        plan = made.plan()
        assert plan is not None
        held = [len(r.holding.handles[1]) for r in made.scheduler._roster.decoding if r.holding is not None]
        if all(segment.tokens == 1 for segment in plan.segments):
            most = max(most, *held)
        made.apply(made.backend.run(plan))
    made.assert_all_finished()
    assert most == 3 == resident(made.layout, 5, 40)[1], f"decodes held {most} window pages, priced 3"


@SPLIT_OR_SHARED
def test_h6_decodes_hold_what_the_price_says(split: bool) -> None:
    run_h6(split)


@SPLIT_OR_SHARED
def test_h6_bites_when_windows_are_kept(split: bool) -> None:
    with pytest.raises(AssertionError):
        run_h6(split, wrong.keeps_windows_while_decoding)


def test_states_of_a_request_are_what_the_scenarios_say() -> None:
    made = World(tiny_layout(A4_POOLS, 30), rules(step_tokens=16))
    made.arrive("a", 20, 3)
    request = made.scheduler._roster.live["a"]
    seen = [request.state]
    while made.scheduler.has_work:
        made.step()
        seen.append(request.state)
    order = [RequestState.WAITING, RequestState.PREFILLING, RequestState.DECODING, RequestState.DECODING]
    assert seen == [*order, RequestState.FINISHED]

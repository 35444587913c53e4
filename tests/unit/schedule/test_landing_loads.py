"""Prompts that another worker computes, where the host's level of the prefix cache has a part of them.

What the host has is loaded in the step whose commit admits the request; only the rest travels, and the other worker is
told of the landing when the loads are done. All tokens are checked against the oracle, which reads what pages hold.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from halocline.memory.host import HostCosts
from halocline.memory.retention import Chunked, Full, Sliding, State
from halocline.schedule.events import Abort, Arrive, Landed, LandingReady, Lost, NewToken, Offered
from halocline.schedule.holding import Holding
from halocline.schedule.receive import Receiving
from halocline.schedule.request import Request
from halocline.step import StepPlan
from testing.schedule import FULL_AND_WINDOW, PoolSpec, greedy, prompt, rules, tiny_layout
from testing.transfers import BROKEN, Pair, Side, state_of

WIDE: tuple[PoolSpec, ...] = ((Full(), 4, 3), (Sliding(16), 4, 1))
STATE: tuple[PoolSpec, ...] = ((Full(), 4, 3), (State(), 1, 1))
CHUNKED: tuple[PoolSpec, ...] = ((Full(), 4, 3), (Chunked(16), 4, 1))
TEXT = prompt(33)
CACHED = 24
"""What a request before has left of it."""


def flushed(pools: tuple[PoolSpec, ...] = FULL_AND_WINDOW, slabs: int = 24, **changes: object) -> Side:
    """Return a worker whose host has the first 24 tokens of TEXT, and whose device has nothing cached any more."""
    made = Side(tiny_layout(pools, slabs), rules(prefix_cache=True, **changes), host_slabs=32)
    made.arrive("before", TEXT[: CACHED + 1], 1)
    made.run()
    crowd(made)
    return made


def crowd(made: Side) -> None:
    """Let a request take the whole arena, so that everything cached on the device dies; it is given up at once."""
    longest = max(n for n in range(8, 400) if made.scheduler._gate.largest_output(n) >= 1)
    name = f"crowd-{len(made.arrivals)}"
    made.arrive(name, prompt(longest, 5), 1)
    made.run_until(lambda: name in made.ends)


def offered(made: Side, name: str = "a", attempt: int = 0) -> None:
    """Let a request arrive whose prompt is computed elsewhere, and be offered."""
    if attempt == 0:
        made.tell(Arrive(name, TEXT, greedy(5), 0, route="receive"))
    made.tell(Offered(name, attempt))


def told(made: Side) -> list[LandingReady]:
    return [update for update in made.said if isinstance(update, LandingReady)]


def planned(made: Side) -> StepPlan:
    plan = made.plan()
    assert plan is not None
    return plan


def loads(plan: StepPlan) -> dict[int, int]:
    """Pages that a plan loads, by pool."""
    return {work.pool: len(work.host_pages) for work in plan.loads}


def host_is_unlocked(made: Side) -> bool:
    assert made.host is not None
    return not sum(made.host.arena.budget.held)


# ---- what is loaded, and what lands


@pytest.mark.parametrize(
    ("pools", "loaded", "lands"),
    [
        # Position 33 reads from 28 on: no window page before 24 is read, pages 7 and 8 land.
        (FULL_AND_WINDOW, {0: 6}, [(6, 3), (7, 2)]),
        # Position 33 reads from 18 on: pages 4 and 5 are loaded, 6 to 8 land; page 3, which 24 reads, is not.
        (WIDE, {0: 6, 1: 2}, [(6, 3), (6, 3)]),
        # Position 33 reads from 32 on.
        (CHUNKED, {0: 6}, [(6, 3), (8, 1)]),
        # The state comes at the end: none is loaded.
        (STATE, {0: 6}, [(6, 3), (0, 1)]),
    ],
    ids=["past", "window", "chunked", "state"],
)
def test_what_only_the_host_has_is_loaded_as_far_as_the_first_decode_reads_it(
    pools: tuple[PoolSpec, ...], loaded: dict[int, int], lands: list[tuple[int, int]]
) -> None:
    made = flushed(pools)
    offered(made)
    plan = planned(made)
    assert loads(plan) == loaded
    assert not plan.segments
    assert told(made) == [], "its loads are outstanding"
    made.apply(made.backend.run(plan))
    (ready,) = told(made)
    assert ready.start_tokens == CACHED
    assert [(run.first_page, len(run.pages)) for run in ready.pools] == lands


def test_the_host_is_locked_until_the_loads_are_done_and_no_longer() -> None:
    made = flushed(WIDE)
    offered(made)
    plan = planned(made)
    assert made.host is not None
    assert sum(made.host.arena.budget.held) == 8, "6 full pages, and of the window the two that are loaded"
    made.apply(made.backend.run(plan))
    assert state_of(made, "a") == "receiving"
    assert host_is_unlocked(made)


def without_tail(pools: tuple[PoolSpec, ...]) -> Side:
    """Return a worker whose device has the full pages of what the host has, and none of its window pages."""
    made = flushed(pools)
    made.arrive("again", TEXT[: CACHED + 1], 1)  # loads all of it
    made.run()
    tree = made.scheduler._sharing.tree  # type: ignore[attr-defined]
    (node,) = [node for node in tree.forest.nodes.values() if node.mark is not None and node.end * 4 == CACHED]
    tail = tree.marks.tail(node.mark, 1)
    made.arena.evict(1, tail)
    made.scheduler._sharing.forget([tail[:0], tail], ())
    return made


def test_full_pages_that_the_device_still_has_are_locked_and_not_loaded() -> None:
    made = without_tail(WIDE)
    offered(made)
    plan = planned(made)
    assert loads(plan) == {1: 2}
    made.apply(made.backend.run(plan))
    assert told(made)[0].start_tokens == CACHED


def test_where_nothing_is_left_to_load_the_host_is_not_locked_until_somebody_computes() -> None:
    """The device has the full pages, and the first decode reads no window page that the host has."""
    made = without_tail(FULL_AND_WINDOW)
    offered(made)
    assert made.plan() is None
    assert told(made)[0].start_tokens == CACHED
    assert host_is_unlocked(made)


def test_what_was_loaded_and_what_landed_are_cached_together() -> None:
    made = flushed(WIDE)
    offered(made)
    made.run_until(lambda: bool(told(made)))
    made.tell(Landed("a", 0, 7))
    made.arrive("b", (*TEXT, 1, 2), 5)
    made.plan()
    assert made.cached_tokens["b"] == 32


# ---- what it costs


@pytest.mark.parametrize(
    ("link", "start", "loaded"), [(8e9, 0, {}), (7.9e9, CACHED, {0: 6})], ids=["as fast as copies", "slower"]
)
def test_a_load_is_made_where_copying_is_faster_than_the_link(link: float, start: int, loaded: dict) -> None:
    made = flushed(host_costs=replace(HostCosts(8e9), link_bytes_per_second=link))
    offered(made)
    plan = made.plan()
    assert loads(plan) == loaded if plan is not None else not loaded
    if plan is not None:
        made.apply(made.backend.run(plan))
    assert told(made)[0].start_tokens == start
    cache = made.scheduler.figures().cache
    assert cache is not None
    assert cache.tier is not None
    assert cache.tier.lookups["host" if loaded else "not worth it"] == 1
    assert cache.tier.hit_tokens == start


def test_computing_elsewhere_does_not_make_a_load_worth_more() -> None:
    """Computing is dear here, but nothing of it is saved: only the link counts."""
    made = flushed(host_costs=HostCosts(8e9, compute_tokens_per_second=1e-3, link_bytes_per_second=9e9))
    offered(made)
    made.run_until(lambda: bool(told(made)))
    assert told(made)[0].start_tokens == 0


# ---- how it ends


def test_given_back_it_leaves_nothing_and_loads_again_when_it_is_offered_again() -> None:
    made = flushed(WIDE)
    offered(made)
    made.run_until(lambda: bool(told(made)))
    made.tell(Lost("a", 0, "the link broke", is_final=False))
    assert not made.arena.pins.open
    offered(made, attempt=1)
    plan = planned(made)
    assert loads(plan) == {0: 6, 1: 2}
    made.apply(made.backend.run(plan))
    made.tell(Abort("a"))
    assert made.is_empty


def test_aborted_while_it_loads_it_leaves_the_host_unlocked() -> None:
    made = flushed(WIDE)
    offered(made)
    plan = planned(made)
    made.tell(Abort("a"))
    assert host_is_unlocked(made)
    made.apply(made.backend.run(plan))
    assert made.is_empty
    assert told(made) == []


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_a_step_that_breaks_takes_the_landing_back_whose_loads_it_had(done: bool, writes: bool) -> None:
    made = flushed(WIDE)
    offered(made)
    if not writes:  # what had to be evicted for it is written back in a step that does not break
        made.run_until(lambda: bool(told(made)))
        made.tell(Lost("a", 0, "the link broke", is_final=False))
        made.said.clear()
        offered(made, attempt=1)
    assert made.break_step(moves_are_done=done)
    assert told(made) == []
    assert state_of(made, "a") == "retracted"
    assert host_is_unlocked(made)
    made.run_until(lambda: bool(told(made)))
    assert told(made)[0].start_tokens == (0 if writes else CACHED), "the host is believed where nothing was written"
    made.tell(Landed("a", told(made)[0].attempt, 7))
    assert NewToken("a", 7) in made.said


# ---- what the audit sees


def laws(made: Side) -> set[str]:
    return {violation.law for violation in made.scheduler.audit()}


def landing(made: Side, *, is_told: bool = False) -> Request:
    """Return a request whose landing is committed, or told."""
    offered(made)
    plan = planned(made)
    if is_told:
        made.apply(made.backend.run(plan))
    assert laws(made) == set()
    return made.scheduler._roster.live["a"]


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("pools", [FULL_AND_WINDOW, WIDE, STATE, CHUNKED], ids=["past", "window", "state", "chunked"])
def test_the_audit_sees_pages_before_a_landing_that_nobody_loads(pools: tuple[PoolSpec, ...], is_told: bool) -> None:
    made = flushed(pools)
    request = landing(made, is_told=is_told)
    sharing = made.scheduler._sharing
    sharing.load_of = lambda request: None  # type: ignore[method-assign]
    found = [violation for violation in made.scheduler.audit() if violation.law == "L1"]
    assert [violation.message.split(" of pool ")[1][:1] for violation in found] == (
        ["0", "1"] if pools is WIDE else ["0"]
    )
    assert request.landing is not None


@pytest.mark.parametrize("host_slabs", [0, 32])
def test_the_audit_sees_a_landing_that_skips_a_page(host_slabs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lands_from = Receiving._lands_from

    def late(self: Receiving, holding: Holding, own_from: list[int], start: int) -> tuple[int, ...]:
        full, window = lands_from(self, holding, own_from, start)
        return full + 1, window

    monkeypatch.setattr(Receiving, "_lands_from", late)
    made = flushed(WIDE) if host_slabs else Side(tiny_layout(WIDE, 24), rules(prefix_cache=True))
    made.check = False
    offered(made)
    made.run_until(lambda: bool(told(made)))
    assert laws(made) == {"L1"}


def test_the_audit_sees_a_landing_that_is_told_while_its_pages_are_loaded() -> None:
    made = flushed(WIDE)
    request = landing(made)
    assert request.landing is not None
    request.landing.is_told = True
    assert laws(made) == {"L5"}


# ---- both sides


@pytest.mark.parametrize("pools", [FULL_AND_WINDOW, WIDE, STATE, CHUNKED], ids=["past", "window", "state", "chunked"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_was_loaded_does_not_travel_and_the_tokens_stay(pools: tuple[PoolSpec, ...], is_cut: bool) -> None:
    travelled = []
    for host_slabs in (0, 32):
        made = (tiny_layout(pools, 24), rules(prefix_cache=True))
        pair = Pair(made, host_slabs=host_slabs)
        pair.is_cut = is_cut
        pair.decode.arrive("before", TEXT[: CACHED + 1], 1)
        pair.run()
        crowd(pair.decode)
        pair.submit("a", TEXT, 12)
        pair.run().assert_all_finished()
        assert pair.accepted[0].start_tokens == (CACHED if host_slabs else 0)
        travelled.append(pair.copied_pages)
    loaded_pages = {FULL_AND_WINDOW: 6, WIDE: 8, STATE: 6, CHUNKED: 6}[pools]
    assert travelled[0] - travelled[1] == loaded_pages


def test_a_senior_that_is_short_gets_back_what_a_load_has_filled() -> None:
    made = (tiny_layout(WIDE, 24), rules(prefix_cache=True))
    pair = Pair(made, host_slabs=32)
    pair.decode.arrive("before", TEXT[: CACHED + 1], 1)
    pair.run()
    crowd(pair.decode)
    pair.decode.arrive("senior", 9, 200, priority=-1)
    pair.decode.run_until(lambda: state_of(pair.decode, "senior") == "decoding")
    pair.prefill.arrive("other", 40, 200, priority=-1)  # the other worker is slow
    pair.submit("a", TEXT, 100)
    pair.run().assert_all_finished()
    assert BROKEN not in pair.decode.failed.values()

"""Scenarios G1 to G3, G5, G6, H3 and H5: what a decoding worker reserves for prompts that another one computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halocline.memory.demand import Demand, resident, zero
from halocline.memory.grant import Grant, Order, Refusal
from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Full, Sliding, State
from halocline.schedule.events import Arrive, Landed, LandingReady, Lost, Offered, Rejected, RevokeWanted
from halocline.schedule.holding import Holding
from halocline.schedule.request import Request
from halocline.schedule.request import State as Stage
from halocline.schedule.sharing import Entrance
from halocline.units import ceil_div
from testing.schedule import PoolSpec, World, fewest_slabs, greedy, prompt, rules, tiny_layout
from testing.transfers import Pair, Side, state_of

Spoil = Callable[[World], None]


def right(made: World) -> None:
    """Spoil nothing."""


def heard(made: Side, kind: type) -> list:
    return [update for update in made.said if isinstance(update, kind)]


def receive(made: Side, name: str, text: tuple[int, ...], most: int, **fields: object) -> None:
    """Let a request arrive whose prompt another worker offers to compute."""
    event = Arrive(name, text, greedy(most, **fields), 0, route="receive")
    made.arrivals[name] = event
    made.tell(event)
    made.tell(Offered(name, 0))


# --- G1: four requests of 574 tokens, at most 67 more each, and 18 free pages in each pool

G1_POOLS: tuple[PoolSpec, ...] = ((Full(), 128, 1), (Sliding(2047), 128, 1))
G1_FLOOR = 1
"""One granule of the window pool: it stands beside the 18."""
G1 = {"shared": (2 * 18 + G1_FLOOR, None), "split": (2 * 18 + G1_FLOOR, (18, 18 + G1_FLOOR))}


def reserves_uncapped(made: World) -> None:
    """Wrong: the decode reserve is granted whole, also to whom less is left."""
    gate = made.scheduler._gate
    gate._further = lambda request: 1 + 512  # type: ignore[method-assign]


def rounds_twice(made: World) -> None:
    """Wrong: prompt and output are rounded up to pages apart."""
    gate = made.scheduler._gate

    def priced(prompt_tokens: int, max_tokens: int, start: int = 0) -> Demand:
        apart = ceil_div(prompt_tokens, 128) + ceil_div(max_tokens, 128)
        return Demand((apart, apart))

    gate._price = priced  # type: ignore[method-assign]


def g1_world(kind: str, spoil: Spoil, **changes: object) -> Side:
    slabs, caps = G1[kind]
    made = Side(tiny_layout(G1_POOLS, slabs), rules(step_tokens=1024, max_model_len=4096, **changes), caps)
    spoil(made)
    assert [made.arena.most(pool, zero(2)) for pool in (0, 1)] == ([18, 18] if caps else [36, 36])
    return made


@pytest.mark.parametrize("kind", G1)
@pytest.mark.parametrize(("spoil", "resumed", "left"), [(right, 3, 3), (reserves_uncapped, 2, 0), (rounds_twice, 3, 0)])
@pytest.mark.parametrize("reserve", [0, 66, 512])
def test_g1_of_four_prompts_elsewhere_exactly_three_are_accepted(
    kind: str, spoil: Spoil, resumed: int, left: int, reserve: int
) -> None:
    made = g1_world(kind, spoil, decode_reserve_tokens=reserve)
    for number in range(4):
        receive(made, f"r{number}", prompt(574, number), 67)
    assert made.plan() is None
    assert [update.request_id for update in heard(made, LandingReady)] == ["r0", "r1", "r2"][:resumed]
    free = [made.arena.most(pool, zero(2)) for pool in (0, 1)]
    assert free == ([left, left] if G1[kind][1] else [2 * left, 2 * left])
    waiting = made.scheduler.reasons()["r3"]
    assert waiting.code == ("memory" if resumed == 3 else "queue")
    if spoil is right:
        for ready in heard(made, LandingReady):
            assert [(run.first_page, len(run.pages)) for run in ready.pools] == [(0, 5), (0, 5)]


@pytest.mark.parametrize("kind", G1)
def test_g1_of_four_retracted_requests_exactly_three_come_back(kind: str) -> None:
    """The same four, whose answers had begun here: retracted once they come back with their whole lives, 5 pages."""
    slabs, caps = G1[kind]
    grown = None if caps is None else (caps[0] + 2, caps[1] + 2)
    made = Side(tiny_layout(G1_POOLS, slabs + 4), rules(step_tokens=1024, max_model_len=4096), grown)
    for number in range(4):
        made.arrive(f"r{number}", prompt(573, number), 68)
    made.run_until(lambda: all(state_of(made, f"r{number}") == "decoding" for number in range(4)))
    for request in made.scheduler._roster.decoding.snapshot():
        assert len(request.history) >= 574
        made.scheduler._roster.retract(request)
    others = made.arena.reserve("others", Demand((2, 2)))
    made.step()
    made.run_until(lambda: made.scheduler.running == 3, 10)
    free = [made.arena.most(pool, zero(2)) for pool in (0, 1)]
    assert free == ([3, 3] if caps else [6, 6])
    assert made.scheduler.reasons()["r3"].code == "memory"
    made.arena.release(others)  # type: ignore[arg-type]
    made.run().assert_all_finished()


# --- G2: the cache fills the pool that a landing does not need


def keeps_cached_pages(made: World) -> None:
    """Wrong: cached pages count as if they were held."""
    refuses_unless(made, made.arena.budget.fits_untouched)


def refuses_unless(made: World, fits: Callable[[Demand], bool]) -> None:
    """Let nobody come in whose whole price `fits` does not take."""
    sharing = made.scheduler._sharing
    opens = sharing.open

    def opened(request: Request, entrance: Entrance, demand: Demand) -> Holding | Refusal:
        return opens(request, entrance, demand) if fits(demand) else Refusal("memory", demand, 1, f"{demand} is no fit")

    sharing.open = opened  # type: ignore[method-assign]
    made.arena.fits = lambda extra: fits(extra) or extra.is_zero  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [right, keeps_cached_pages])
def test_g2_a_landing_evicts_its_shortfall_from_whoever_has_it(spoil: Spoil) -> None:
    pools: tuple[PoolSpec, ...] = ((Full(), 16, 1), (Sliding(64), 16, 1))
    made = Side(tiny_layout(pools, 160), rules(prefix_cache=True, max_model_len=2048, step_tokens=512))
    made.arrive("before", prompt(1200), 1)
    made.run()
    spoil(made)
    cached = made.arena.figures().cached_bytes // pools_stride(made.layout)
    free = made.arena.figures().free_bytes // pools_stride(made.layout)
    assert (cached, free) == (75 + 75, 160 - 150)
    receive(made, "a", prompt(320, 9), 1)
    made.plan()
    told = heard(made, LandingReady)
    if spoil is not right:
        assert not told
        assert made.scheduler.reasons()["a"].code == "memory"
        return
    (ready,) = told
    needed = sum(len(run.pages) for run in ready.pools)
    assert needed == 20 + 4, "of the window what position 320 reads: from 257 on, page 16"
    figures = made.scheduler.figures().cache
    assert figures is not None
    assert figures.evicted_pages == (0, needed - free), "the shortfall and not the demand, of the pool that has it"


def pools_stride(layout: ArenaLayout) -> int:
    assert len({pool.stride_bytes for pool in layout.pools}) == 1
    return layout.pools[0].stride_bytes


G2_POOLS: tuple[PoolSpec, ...] = ((Full(), 256, 1), (Sliding(1024), 256, 1))
G2_PAGES = 445 * 1024 // 256
"""445K tokens of the window pool, 1,780 pages, all of them evictable."""
G2_FREE = {"shared": (4, None, 6), "split": (6, (5, G2_PAGES + 1), 4)}
"""Slabs beside them, shares, and what must die: a prompt of 1,025 tokens takes 5 full and 5 window pages. In the shared
arena 4 of the 10 are free; of the split one 5 full pages and the one that is the floor's."""


@pytest.mark.parametrize("kind", G2_FREE)
@pytest.mark.parametrize("spoil", [right, keeps_cached_pages])
def test_g2_a_cache_of_445k_tokens_is_not_full(kind: str, spoil: Spoil) -> None:
    """Where the pools are split it is the window pool that is short, and pays for itself."""
    free, caps, died = G2_FREE[kind]
    made = Side(tiny_layout(G2_POOLS, G2_PAGES + free), rules(max_model_len=8192, step_tokens=512), caps)
    given = Demand((0, G2_PAGES))
    others = made.arena.reserve("others", given)
    assert isinstance(others, Grant)
    made.arena.cache(others, 1, made.arena.commit([Order(others, given)]).handles[0][1])
    made.arena.release(others)
    spoil(made)
    receive(made, "a", prompt(1025), 1)
    made.plan()
    assert bool(heard(made, LandingReady)) is (spoil is right), made.scheduler.reasons()
    if spoil is right:
        assert G2_PAGES - made.arena.budget.cached[1] == died, "the shortfall, and no page more"
    else:
        assert made.scheduler.reasons()["a"].code == "memory"


# --- G3: out of memory after the transfer has succeeded


def waits_for_its_transfer_again(made: World) -> None:
    """Wrong: a request that was retracted goes back to the line of those whose prompts come from elsewhere."""
    roster = made.scheduler._roster
    retract = roster.retract

    def requeue(request, **how):  # type: ignore[no-untyped-def]
        retract(request, **how)
        roster.recall(request)

    roster.retract = requeue  # type: ignore[method-assign]


SPLIT_OR_SHARED = pytest.mark.parametrize("is_split", [False, True], ids=["shared", "split"])


def g3_pair(*, is_split: bool) -> Pair:
    """Three requests of 16 + 32 tokens, 12 full pages each at their end; the split arena has 18 for all of them."""
    pools: tuple[PoolSpec, ...] = ((Full(), 4, 3), (Sliding(6), 4, 1))
    changes: dict = {"decode_reserve_tokens": 0, "max_model_len": 64}
    slabs, caps = fewest_slabs(pools, 16, 32, **changes) + 2, None
    if is_split:
        slabs, caps = 6 + 10, (6, 10)
    return Pair((tiny_layout(pools, slabs), rules(**changes)), caps=caps)


@SPLIT_OR_SHARED
def test_g3_what_has_landed_and_is_retracted_is_runnable(is_split: bool) -> None:
    pair = g3_pair(is_split=is_split)
    for number in range(3):
        pair.submit(f"r{number}", 16, 32)
    pair.run().assert_all_finished()
    assert pair.decode.retractions > 0
    assert len(pair.accepted) == 3, "nobody's prompt travelled twice"


@SPLIT_OR_SHARED
def test_g3_bites_when_whoever_is_retracted_waits_for_its_transfer_again(is_split: bool) -> None:
    pair = g3_pair(is_split=is_split)
    waits_for_its_transfer_again(pair.decode)
    for number in range(3):
        pair.submit(f"r{number}", 16, 32)
    with pytest.raises(AssertionError, match="stuck"):
        pair.run()


# --- G5: how many tokens are reserved, and which of them travel

REQUIRED = [((128, 2047, 574, 0), (640, 640)), ((64, 128, 1000, 512), (1536, 192))]
TAILS = [
    ((16, 32, 50), 34),
    ((16, 32, 47), 31),
    ((16, 128, 200), 136),
    ((64, 128, 1024), 128),
    ((64, 128, 1000), 168),
    ((128, 2047, 574), 574),
    ((64, 100, 1000), 104),
]


@pytest.mark.parametrize(("case", "tokens"), REQUIRED)
def test_g5_what_is_granted_is_rounded_once(case: tuple[int, int, int, int], tokens: tuple[int, int]) -> None:
    page, window, fill, reserved = case
    pools: tuple[PoolSpec, ...] = ((Full(), page, 1), (Sliding(window), page, 1))
    made = Side(tiny_layout(pools, 80), rules(decode_reserve_tokens=reserved, max_model_len=4096, step_tokens=256))
    receive(made, "a", prompt(fill), 2000)
    made.plan()
    holding = made.scheduler._roster.live["a"].holding
    assert holding is not None
    assert tuple(pages * page for pages in holding.grant.demand) == tokens


@pytest.mark.parametrize(("case", "tokens"), TAILS)
def test_g5_of_a_window_exactly_what_decoding_reads_travels(case: tuple[int, int, int], tokens: int) -> None:
    page, window, fill = case
    pools: tuple[PoolSpec, ...] = ((Full(), page, 1), (Sliding(window), page, 1))
    layout = tiny_layout(pools, 2 * ceil_div(fill, page) + ceil_div(window, page) + 8)
    pair = Pair((layout, rules(max_model_len=4096, step_tokens=256)))
    pair.submit("a", fill, 2)
    pair.run().assert_all_finished()
    (ready,) = pair.accepted
    assert ready.pools[0].first_page == 0
    assert fill - ready.pools[1].first_page * page == tokens
    told = {chunk.pools[1].first_page + at for chunk in pair.chunks for at in range(len(chunk.pools[1].pages))}
    assert told == set(range(ready.pools[1].first_page, ceil_div(fill, page)))


# --- G6: a long generation behind a window


def prices_windows_as_full(made: World) -> None:
    """Wrong: the window pool is priced like a full one."""
    gate = made.scheduler._gate
    layout = made.layout

    def priced(prompt_tokens: int, max_tokens: int, start: int = 0) -> Demand:
        pages = ceil_div(prompt_tokens + max_tokens - 1, 64)
        return Demand(pages for _ in layout.pools)

    gate._price = priced  # type: ignore[method-assign]


G6_SLABS = 27 + 3 + 1
"""1000 + 4000 - 1 tokens are 79 full pages in 27 slabs of 3; three window pages and the floor take one slab each."""


@pytest.mark.parametrize("spoil", [right, prices_windows_as_full])
def test_g6_the_window_demand_stays_capped_however_long_the_answer_is(spoil: Spoil) -> None:
    pools: tuple[PoolSpec, ...] = ((Full(), 64, 3), (Sliding(128), 64, 1))
    made = Side(tiny_layout(pools, G6_SLABS), rules(max_model_len=5000, step_tokens=256, decode_reserve_tokens=512))
    if spoil is not right:
        spoil(made)
        assert "needs 79 + 0 pages" in made.arrive("a", prompt(1000), 4000).message  # type: ignore[union-attr]
        return
    tighter = Side(tiny_layout(pools, G6_SLABS - 1), made.rules)
    assert isinstance(tighter.arrive("a", prompt(1000), 4000), Rejected), "a slab less must be refused at the door"
    receive(made, "a", prompt(1000), 4000)
    made.plan()
    made.tell(Landed("a", 0, 1))
    made.check = False
    most = [0, 0]
    while made.scheduler.has_work:
        plan = made.plan_and_apply()
        holding = made.scheduler._roster.live["a"].holding if "a" in made.scheduler._roster.live else None
        assert min(made.arena.budget.promised) >= 0, f"step {plan.step}"
        if holding is not None:
            most = list(map(max, most, holding.pages))
            assert made.arena.fits(zero(2))
    made.check = True
    assert most == [79, 3]
    assert len(made.outputs["a"]) == 4000
    assert made.is_empty


# --- H3: a hand-off and its states

H3_POOLS: tuple[PoolSpec, ...] = ((Full(), 4, 4), (State(), 1, 1))


def forgets_the_state(made: World) -> None:
    """Wrong: a request whose state comes from elsewhere is granted no page for it."""
    gate = made.scheduler._gate

    def priced(prompt_tokens: int, max_tokens: int, start: int = 0) -> Demand:
        full, states = resident(made.layout, prompt_tokens, max_tokens, start)
        return Demand((full, states - 1))

    gate._price = priced  # type: ignore[method-assign]


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("spoil", [right, forgets_the_state])
def test_h3_a_hand_off_needs_no_state_that_was_not_reserved(spoil: Spoil, cache: bool) -> None:
    """Arenas in which the request fits alone exactly, both sides; with a cache its checkpoint is there already."""
    slabs = fewest_slabs(H3_POOLS, 33, 8, prefix_cache=cache)
    pair = Pair((tiny_layout(H3_POOLS, slabs), rules(prefix_cache=cache, step_tokens=16)))
    text = prompt(33)
    if cache:
        for side in (pair.decode, pair.prefill):
            side.arrive("before", text[:17], 1)
            side.run()
    if spoil is not right:
        spoil(pair.decode)
        pair.decode.check = False
    pair.submit("a", text, 8)
    if spoil is not right:
        pair.decode.step()
        assert any("cannot commit 1 pages of state" in each.message for each in pair.decode.scheduler.audit())
        return
    pair.run().assert_all_finished()
    assert not pair.decode.scheduler.audit()
    assert not pair.prefill.scheduler.audit()


# --- H5: a transfer in progress, and pages that have nothing to do with it


def spares_pools_with_pins(made: World) -> None:
    """Wrong: while a page of a pool is pinned, nothing of that pool is evicted."""
    budget = made.arena.budget

    def with_cached(extra: Demand) -> bool:
        kept = [budget.cached[pool] if budget.pinned_slabs[pool] else 0 for pool in range(len(extra))]
        return budget.fits(extra.plus(Demand(kept)))

    refuses_unless(made, with_cached)


@pytest.mark.parametrize("spoil", [right, spares_pools_with_pins])
def test_h5_a_transfer_in_progress_does_not_stop_reclaim(spoil: Spoil) -> None:
    """A landing stays open for ever; others come, evict what is cached, move what is in the way, and finish."""
    pools: tuple[PoolSpec, ...] = ((Full(), 4, 3), (Sliding(6), 4, 2))
    made = Side(tiny_layout(pools, 24), rules(prefix_cache=True, step_tokens=32))
    for number in range(4):
        made.arrive(f"old{number}", prompt(28, number), 2)
    made.run()
    assert made.arena.figures().cached_bytes > made.arena.figures().free_bytes
    receive(made, "a", prompt(30, 9), 9)
    while not heard(made, LandingReady):
        made.step()
    spoil(made)
    (ready,) = heard(made, LandingReady)
    names = [f"new{number}" for number in range(8)]
    for number, name in enumerate(names):
        made.arrive(name, prompt(36, 20 + number), 6)
    for _ in range(300):
        made.step()
        made.assert_stays(ready.pools)
    finished = set(names) <= set(made.ends)
    assert finished == (spoil is right), made.scheduler.reasons()
    if spoil is right:
        evicted: list[int] = list(made.scheduler.figures().cache.evicted_pages)  # type: ignore[union-attr]
        assert min(evicted) > 0
        made.tell(Lost("a", 0, "given up", is_final=True))
        assert made.is_empty


def test_what_cannot_be_retracted_is_asked_back_and_the_senior_goes_on() -> None:
    """The liveness rule beside transfers: the most senior is short, its juniors are landings only."""
    pools: tuple[PoolSpec, ...] = ((Full(), 4, 3), (Sliding(6), 4, 1))
    made = Side(tiny_layout(pools, 12), rules(decode_reserve_tokens=0, max_model_len=64)).expect_outputs(32, 1)
    made.arrive("senior", 4, greedy(30))
    made.step()
    for name in ("b", "c"):
        receive(made, name, prompt(16), 2)
    steps = 0
    while made.step() or made.scheduler.has_work:
        for update in heard(made, RevokeWanted):
            if state_of(made, update.request_id) == Stage.RECEIVING.value:
                made.tell(Lost(update.request_id, update.attempt, "revoked", is_final=False))
        steps += 1
        if steps > 60:
            break
    assert made.ends["senior"] == "length"

"""What a retracted request keeps in the host arena and how it comes back, with exact numbers (E5, I1, design 6)."""

from __future__ import annotations

import pytest

from halocline.memory.host import HostCopies, HostCosts
from halocline.memory.retention import Full, Sliding, State
from halocline.schedule.events import Arrive, Landed, Offered
from halocline.schedule.request import Request
from halocline.step import StepPlan
from testing.schedule import World, greedy, prompt, rules, tiny_layout
from testing.transfers import Side

ALWAYS = HostCosts(1e12, 1.0)
WINDOW, PAGE = 9, 4
POOLS = ((Full(), PAGE, 3), (Sliding(WINDOW), PAGE, 2), (State(), 1, 1))


def pressed(slabs: int = 17, host_slabs: int = 30, **changes: object) -> World:
    """Return a world in which the junior of two requests is about to be retracted: both outgrow what they expect."""
    changed = rules(**{"host_costs": ALWAYS, "max_model_len": 200} | changes)
    world = World(tiny_layout(POOLS, slabs), changed, host_slabs=host_slabs).expect_outputs(64, 2)
    world.arrive("senior", 30, 60)
    world.arrive("junior", 41, 50)
    return world


def request(world: World, name: str = "junior") -> Request:
    """Return a live request."""
    return world.scheduler._roster.live[name]


def retract(world: World) -> StepPlan:
    """Step until the junior has just been retracted; return the plan that carries its copy out, not yet applied."""
    while True:
        plan = world.plan()
        assert plan is not None
        if world.retractions:
            return plan
        world.apply(world.backend.run(plan))


def bring_back(world: World) -> StepPlan:
    """Step until the junior is planned again; return the plan, not yet applied."""
    while True:
        plan = world.plan()
        assert plan is not None
        if any(segment.request_id == "junior" for segment in plan.segments):
            return plan
        world.apply(world.backend.run(plan))


def pages(work: tuple) -> dict[int, int]:
    """Return how many pages per pool are copied."""
    counts: dict[int, int] = {}
    for copies in work:
        assert isinstance(copies, HostCopies)
        counts[copies.pool] = counts.get(copies.pool, 0) + len(copies.host_pages)
    return counts


def live_pages(computed: int) -> dict[int, int]:
    """Return what position `computed` and later ones read, page-exactly: all full pages, the window's tail, a state."""
    return {0: -(-computed // PAGE), 1: -(-computed // PAGE) - max(0, computed - WINDOW + 1) // PAGE, 2: 1}


def test_a_retraction_copies_what_is_read_later_and_the_return_loads_just_that() -> None:
    world = pressed()
    plan = retract(world)
    computed = request(world).high_water
    assert pages(plan.offloads) == live_pages(computed)
    assert plan.loads == ()
    world.apply(world.backend.run(plan))
    figures = world.scheduler.figures().host
    assert figures is not None
    assert figures.arena.running_bytes == world.host.bytes_of(list(live_pages(computed).values()))
    back = bring_back(world)
    assert pages(back.loads) == live_pages(computed)
    (segment,) = (segment for segment in back.segments if segment.request_id == "junior")
    assert (segment.start, segment.tokens, segment.samples) == (computed, 1, True), "back within one step"
    world.apply(world.backend.run(back))
    assert world.host.figures().used_bytes == 0
    world.run().assert_all_finished()
    assert world.scheduler.figures().totals.recomputed_tokens == 0


def test_whoever_comes_back_has_its_whole_resident_demand() -> None:
    world = pressed()
    world.apply(world.backend.run(retract(world)))
    world.apply(world.backend.run(bring_back(world)))
    extensions = world.scheduler.figures().totals.extensions
    world.run_until(lambda: "junior" in world.ends)
    assert world.scheduler.figures().totals.extensions == extensions


def test_a_host_page_stays_until_its_load_was_carried_out() -> None:
    world = pressed()
    world.apply(world.backend.run(retract(world)))
    held = world.host.figures().running_bytes
    plan = bring_back(world)
    world.abort("junior")
    assert world.host.figures().running_bytes == held > 0, "a step reads these pages"
    world.apply(world.backend.run(plan))
    assert world.host.figures().used_bytes == 0
    world.run().assert_true_tokens()
    assert world.is_empty


@pytest.mark.parametrize("when", ["before its copy", "while it waits"])
def test_e5_the_abort_of_a_retracted_request_frees_its_copy(when: str) -> None:
    world = pressed()
    plan = retract(world)
    if when == "before its copy":
        world.abort("junior")
        assert world.host.figures().used_bytes == 0
        world.apply(world.backend.run(plan))
    else:
        world.apply(world.backend.run(plan))
        world.abort("junior")
    assert world.host.figures().used_bytes == 0
    assert world.scheduler.figures().host.dropped == 1
    world.run().assert_true_tokens()
    assert world.is_empty


def test_e5_bites_an_abort_that_forgets_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    world = pressed()
    world.apply(world.backend.run(retract(world)))
    monkeypatch.setattr(world.host.arena, "release", lambda grant: None)
    with pytest.raises(AssertionError, match=r"still holds \(18, 3, 1\) pages of a copy of junior"):
        world.abort("junior")


@pytest.mark.parametrize("when", ["before its copy", "while it waits", "while it comes back"])
def test_e5_the_abort_of_a_retracted_request_whose_prompt_came_from_elsewhere_frees_its_copy(when: str) -> None:
    """Its landing, its copy and its return are three owners one after the other; none of them frees twice."""
    changes: dict = {"host_costs": ALWAYS, "max_model_len": 200, "decode_reserve_tokens": 0}
    world = Side(tiny_layout(POOLS, 19), rules(**changes), host_slabs=30)
    for number, (name, length) in enumerate((("senior", 30), ("junior", 41))):
        event = Arrive(name, prompt(length, number), greedy(50), 0, route="receive")
        world.arrivals[name] = event
        world.tell(event)
        world.tell(Offered(name, 0))
    assert world.plan() is None, "nothing is to be computed before the prompts are there"
    for name in ("senior", "junior"):
        world.tell(Landed(name, 0, 1))
    world.check = False  # the words of these prompts never came
    plan = retract(world)
    if when == "before its copy":
        world.abort("junior")
        world.apply(world.backend.run(plan))
    else:
        world.apply(world.backend.run(plan))
        plan = bring_back(world) if when == "while it comes back" else None
        world.abort("junior")
        if plan is not None:
            world.apply(world.backend.run(plan))
    assert world.host.figures().used_bytes == 0
    assert world.arena.audit() == world.scheduler.audit() == []
    world.run_until(lambda: "senior" in world.ends, 200)
    assert world.is_empty


@pytest.mark.parametrize("carried_out", [False, True])
def test_a_copy_of_a_step_that_broke_is_not_trusted(carried_out: bool) -> None:
    world = pressed()
    plan = retract(world)
    if carried_out:
        world.backend.run(plan)
    world.note_updates(world.scheduler.fail_step("the device is gone"))
    figures = world.scheduler.figures().host
    assert (figures.copies, figures.dropped, figures.arena.used_bytes) == (0, 1, 0)
    world.run().assert_true_tokens()
    assert world.ends["junior"] == "length"
    assert world.is_empty


@pytest.mark.parametrize("carried_out", [False, True])
def test_whoever_was_being_loaded_by_a_step_that_broke_fails_and_leaves_nothing(carried_out: bool) -> None:
    world = pressed(prefix_cache=True)
    world.apply(world.backend.run(retract(world)))
    plan = bring_back(world)
    assert plan.loads
    if carried_out:
        world.backend.run(plan)
    world.abort("junior")  # it leaves what it holds to the prefix cache: pages that may never have been loaded
    world.note_updates(world.scheduler.fail_step("the device is gone"))
    assert world.arena.figures().cached_bytes == 0, "what was not loaded must not be found"
    assert world.host.figures().running_bytes == 0
    world.run().assert_true_tokens()


def test_a_copy_that_does_not_fit_is_done_without() -> None:
    world = pressed(host_slabs=2)
    plan = retract(world)
    assert plan.offloads == ()
    figures = world.scheduler.figures().host
    assert (figures.refused, figures.offloaded, figures.arena.used_bytes) == (1, 0, 0)
    world.apply(world.backend.run(plan))
    world.run().assert_all_finished()
    assert world.scheduler.figures().totals.recomputed_tokens > 0


@pytest.mark.parametrize("excess", [0, 1])
def test_what_is_cheaper_to_compute_again_is_not_copied(excess: int) -> None:
    """Both ways of the copy count: it is chosen while they take less time than the tokens."""
    probe = pressed()
    retract(probe)
    computed = request(probe).high_water
    both_ways = 2 * probe.host.bytes_of(list(live_pages(computed).values()))
    world = pressed(host_costs=HostCosts(both_ways + 1 - excess, computed))  # a second for either, or a little less
    plan = retract(world)
    assert bool(plan.offloads) is (excess == 0)
    world.apply(world.backend.run(plan))
    world.run().assert_all_finished()


def test_full_pages_that_the_prefix_cache_still_has_are_locked_and_not_loaded() -> None:
    world = pressed(prefix_cache=True)
    world.apply(world.backend.run(retract(world)))
    plan = bring_back(world)
    holding = request(world).holding
    assert holding is not None
    assert holding.lock is not None
    shared = holding.lock.full_tokens // PAGE
    computed = request(world).computed
    assert computed == request(world).high_water
    if plan.loads:
        wanted = live_pages(computed)
        assert pages(plan.loads) == {pool: count - shared * (pool == 0) for pool, count in wanted.items()
                                     if count - shared * (pool == 0)}  # fmt: skip
    world.apply(world.backend.run(plan))
    world.run().assert_all_finished()
    assert world.scheduler.figures().totals.recomputed_tokens == 0


def test_seniors_come_back_first() -> None:
    """Three are retracted one after another; they return in the order in which they arrived."""
    world = World(tiny_layout(POOLS, 30), rules(host_costs=ALWAYS, max_model_len=200), host_slabs=60)
    world.expect_outputs(64, 2)
    for name in ("a", "b", "c", "d"):
        world.arrive(name, 30, 60)
    returned: list[str] = []
    retracted: set[str] = set()
    for _ in range(400):
        plan = world.plan()
        if plan is None:
            break
        retracted |= {r.id for r in world.scheduler._roster.waiting if r.retractions}
        returned += [s.request_id for s in plan.segments if s.request_id in retracted and s.request_id not in returned]
        world.apply(world.backend.run(plan))
    assert len(retracted) >= 2, "the arena was meant to be so small that several are retracted"
    assert returned == sorted(returned)
    world.assert_all_finished()
    assert world.scheduler.figures().host.restored == world.retractions

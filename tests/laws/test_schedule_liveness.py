"""L10: every request that passed validation finishes if no new work arrives.

Small worlds, exhaustively: three or four requests on about a dozen pages, two or three kinds of memory, every order of
arrivals, aborts, early ends and steps up to a depth. Worlds that look the same to every later decision are followed
once. From each world at the depth everything must then finish, within a bound, and leave the arena empty.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from halocline.memory.retention import Chunked, Full, Sliding, State
from halocline.schedule.events import Arrive
from halocline.schedule.request import Request
from halocline.step import Sampled, StepPlan, StepResult
from testing.schedule import GUARANTEED, PoolSpec, World, greedy, rules, tiny_layout

EOS = 0
Sketch = tuple[int, int, int]
"""(prompt tokens, max_tokens, priority) of a request."""


class Stopper:
    """A backend that ends the most senior sampled request when it is told to, and no other."""

    stop_next = False

    def run(self, plan: StepPlan) -> StepResult:
        names = [segment.request_id for segment in plan.segments if segment.samples]
        stopped = min(names) if self.stop_next and names else None
        self.stop_next = False
        return StepResult(plan.step, tuple(Sampled(name, EOS if name == stopped else 1) for name in names))


@dataclass(frozen=True)
class Case:
    """A small world and the requests that may arrive in it, in this order."""

    pools: tuple[PoolSpec, ...]
    slabs: int
    sketches: tuple[Sketch, ...]
    admission: tuple = ("expected", 0.9)
    caps: tuple[int, ...] | None = None
    slots: int = 4
    estimate: int = 1

    def start(self) -> World:
        changed = rules(step_tokens=8, max_running_requests=self.slots, admission=self.admission, eos_token_ids=(EOS,))
        made = World(tiny_layout(self.pools, self.slabs), changed, self.caps)
        made.backend = Stopper()  # type: ignore[assignment]
        for max_tokens in {sketch[1] for sketch in self.sketches}:
            made.expect_outputs(max_tokens, self.estimate)
        return made


TWO: tuple[PoolSpec, ...] = ((Full(), 2, 2), (Sliding(3), 2, 1))
THREE: tuple[PoolSpec, ...] = ((Full(), 2, 2), (Sliding(4), 1, 3), (State(), 1, 2))
LOCAL: tuple[PoolSpec, ...] = ((Full(), 2, 1), (Chunked(4), 2, 2))

CASES = {
    "two-kinds": Case(TWO, 8, ((3, 6, 0), (4, 6, 0), (2, 7, 0))),
    "three-kinds": Case(THREE, 8, ((3, 6, 0), (4, 6, 0), (2, 7, 0))),
    "local": Case(LOCAL, 9, ((3, 7, 0), (5, 6, 0), (1, 9, 0))),
    "priorities": Case(TWO, 8, ((3, 6, 1), (4, 6, 0), (2, 7, -1))),
    "split": Case(TWO, 10, ((3, 6, 0), (4, 6, 0), (2, 7, 0)), caps=(4, 6)),
    "guaranteed": Case(TWO, 9, ((3, 6, 0), (4, 6, 0), (2, 7, 0)), admission=GUARANTEED),
    "two-slots": Case(TWO, 9, ((3, 6, 0), (4, 6, 0), (2, 7, -1), (6, 2, 0)), slots=2),
    "four": Case(THREE, 10, ((3, 6, 0), (6, 3, 0), (1, 9, -1), (2, 7, 1))),
    # In these the return of a retracted request is refused when it has become the most senior.
    "short-two-kinds": Case(TWO, 9, ((2, 2, 0), (1, 17, 0), (8, 12, 0), (5, 3, 0))),
    "short-three-kinds": Case(THREE, 10, ((1, 5, 0), (1, 9, 0), (7, 16, 0), (2, 4, 0))),
    "short-local": Case(LOCAL, 12, ((4, 7, 0), (1, 13, 0), (5, 14, 0), (8, 3, 0))),
}
SHORT = [name for name in CASES if name.startswith("short")]


def acts(case: Case, made: World) -> Iterator[Callable[[World], None]]:
    """Yield everything that may happen next."""
    arrived = len(made.arrivals)
    if arrived < len(case.sketches):
        length, max_tokens, priority = case.sketches[arrived]
        yield lambda world: world.arrive(f"r{arrived}", length, greedy(max_tokens), priority) and None
    if made.scheduler.has_work:
        yield lambda world: world.step() and None
        yield stop
    for name in made.scheduler._roster.live:
        yield lambda world, name=name: world.abort(name)  # type: ignore[misc]


def stop(made: World) -> None:
    """Step, and let one request end early."""
    made.backend.stop_next = True  # type: ignore[attr-defined]
    made.step()


def looks(made: World) -> tuple[object, ...]:
    """Return all that a later decision can depend on: counts, not places."""
    requests = tuple(
        (r.key, r.state, len(r.history), r.computed, r.resumed_at, r.retractions > 0, _grant(r))
        for r in made.scheduler._roster.live.values()
    )
    short = made.scheduler._growth.short()
    lengths = tuple((kind, tuple(seen)) for kind, seen in sorted(made.scheduler._gate.lengths._sorted.items()))
    return requests, len(made.arrivals), short.id if short else None, lengths


def _grant(request: Request) -> tuple[object, ...] | None:
    if request.holding is None:
        return None
    return tuple(request.holding.grant.demand), tuple(request.holding.pages)


def worlds_at(case: Case, depth: int) -> list[World]:
    """Return every distinct world after `depth` acts."""
    frontier = [case.start()]
    for _ in range(depth):
        found: dict[tuple[object, ...], World] = {}
        for made in frontier:
            for act in list(acts(case, made)):
                later = copy.deepcopy(made)
                act(later)
                found.setdefault(looks(later), later)
        frontier = list(found.values())
    return frontier


def finish(case: Case, made: World) -> int:
    """Let everyone arrive who has not, run to the end, and return the retractions of the whole history."""
    for index in range(len(made.arrivals), len(case.sketches)):
        length, max_tokens, priority = case.sketches[index]
        made.arrive(f"r{index}", length, greedy(max_tokens), priority)
    assert not made.rejected, f"{made.rejected}: every request was meant to fit alone"
    made.run(most_steps=150)
    assert set(made.ends) == {f"r{index}" for index in range(len(case.sketches))}
    assert set(made.ends.values()) <= {"length", "stop", "abort"}, made.failed
    assert made.is_empty
    return made.retractions


def explore(case: Case, depth: int) -> tuple[int, int]:
    """Return how many distinct worlds there are at `depth`, and the retractions in all of them together."""
    worlds = worlds_at(case, depth)
    return len(worlds), sum(finish(case, made) for made in worlds)


@pytest.mark.parametrize("name", CASES)
def test_everyone_finishes_from_every_world_of_five_acts(name: str) -> None:
    worlds, retractions = explore(CASES[name], 5)
    assert worlds > 20
    assert (retractions == 0) == (CASES[name].admission == GUARANTEED), f"{retractions} retractions"


@pytest.mark.laws
@pytest.mark.parametrize("name", CASES)
def test_everyone_finishes_from_every_world_of_nine_acts(name: str) -> None:
    explore(CASES[name], 9)


def never_retracts(made: World) -> None:
    """A wrong policy: whoever is refused stands still until room comes."""
    growth = made.scheduler._growth
    growth._make_room = lambda request, holding, demand, refusal: refusal  # type: ignore[method-assign]
    growth._give_way = lambda request, refusal: None  # type: ignore[method-assign]


def test_the_small_worlds_bite_when_nobody_is_retracted() -> None:
    made = CASES["two-kinds"].start()
    never_retracts(made)
    with pytest.raises(AssertionError, match="stuck"):
        finish(CASES["two-kinds"], made)


# --- while the senior is short


def follow_short(case: Case, made: World) -> int:
    """Run to the end; return in how many plans the most senior was short. Juniors must get nothing new meanwhile."""
    for index, (length, max_tokens, priority) in enumerate(case.sketches):
        made.tell(Arrive(f"r{index}", (1,) * length, greedy(max_tokens), 0, priority))
    roster, growth, seen = made.scheduler._roster, made.scheduler._growth, 0
    while made.scheduler.has_work:
        before = growth.short()
        granted = {r.id: r.holding.grant.demand for r in roster.live.values() if r.holding is not None}
        plan = made.plan()
        assert plan is not None, f"stuck: {made.scheduler.reasons()}"
        short = growth.short()
        if short is not None:
            seen += 1
            assert short is roster.most_senior()
            assert made.arena.shortfall(made.scheduler._gate.candidate(short).demand) is not None
        if short is not None and short is before:
            now = {r.id: r.holding.grant.demand for r in roster.live.values() if r.holding is not None}
            new = [name for name, demand in now.items() if name not in granted or not granted[name].covers(demand)]
            assert not new, f"{new} got a new grant while {short.id} is short"
        made.apply(made.backend.run(plan))
    assert growth.short() is None
    return seen


@pytest.mark.parametrize("name", SHORT)
def test_a_refused_return_makes_the_most_senior_short_and_juniors_get_nothing_new(name: str) -> None:
    assert follow_short(CASES[name], CASES[name].start()) > 0, "nobody was short, so nothing was tested"


@pytest.mark.parametrize("name", SHORT)
def test_the_short_worlds_bite_when_juniors_get_new_grants(name: str) -> None:
    made = CASES[name].start()
    made.scheduler._growth.short_reason = lambda request: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="got a new grant while"):
        follow_short(CASES[name], made)

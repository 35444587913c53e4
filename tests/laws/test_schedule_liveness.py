"""L10: every request that passed validation finishes if no new work arrives.

Small worlds as graphs: three or four requests on about a dozen pages, two or three kinds of memory. A node is all that
a later decision can depend on; the edges are everything that may happen next: an arrival of any request that is still
to come, an abort, a step, a step in which one request ends early. After every edge scheduler and arena are audited and
the bytes are counted (`World`). The law is a property of the graph: from every node, steps in which nobody new comes
lead to an empty arena, without a cycle and within a bound.

Explored breadth first up to a number of nodes; from there on, only steps are followed, to the end. Where the whole
graph is smaller, every interleaving there is has been seen.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from halocline.cache.node import TOMBSTONE
from halocline.memory.pool import INDEX_MASK
from halocline.memory.retention import Chunked, Full, Sliding, State
from halocline.schedule.events import Arrive
from halocline.schedule.request import Request
from halocline.step import Sampled, StepPlan, StepResult
from testing.schedule import GUARANTEED, PoolSpec, World, greedy, rules, tiny_layout

EOS = 0
Sketch = tuple[int, int, int]
"""(prompt tokens, max_tokens, priority) of a request."""


class Stopper:
    """A backend that ends one sampled request early when it is told to, and no other."""

    stops = ""

    def run(self, plan: StepPlan) -> StepResult:
        names = [segment.request_id for segment in plan.segments if segment.samples]
        stopped, self.stops = self.stops, ""
        return StepResult(plan.step, tuple(Sampled(name, EOS if name == stopped else 1) for name in names))


@dataclass(frozen=True)
class Case:
    """A small world and the requests that may arrive in it, in any order."""

    pools: tuple[PoolSpec, ...]
    slabs: int
    sketches: tuple[Sketch, ...]
    admission: tuple = ("expected", 0.9)
    caps: tuple[int, ...] | None = None
    slots: int = 4
    estimate: int = 1
    prefix_cache: bool = False
    alike: int = 2
    """With the cache on: how many tokens all prompts have in common."""

    def prompt(self, index: int) -> tuple[int, ...]:
        """Return a request's tokens."""
        length = self.sketches[index][0]
        return (1,) * min(length, self.alike) + (index + 2,) * (length - self.alike)

    def start(self) -> World:
        changed = rules(
            step_tokens=8,
            max_running_requests=self.slots,
            admission=self.admission,
            eos_token_ids=(EOS,),
            prefix_cache=self.prefix_cache,
        )
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
PAIRS = {
    "two of two kinds": Case(TWO, 7, ((3, 5, 0), (2, 5, 0))),
    "two of other ranks": Case(TWO, 7, ((3, 5, 0), (2, 5, -1))),
    "two of three kinds": Case(THREE, 7, ((3, 5, 0), (2, 5, 0))),
    "two with local attention": Case(LOCAL, 8, ((3, 5, 0), (2, 6, 0))),
}
GROUPS = {
    "three of two kinds": Case(TWO, 7, ((3, 4, 0), (2, 4, 0), (1, 3, 0))),
    "three of other ranks": Case(TWO, 7, ((3, 4, 0), (2, 4, 1), (1, 3, -1))),
    "three of three kinds": Case(THREE, 7, ((3, 4, 0), (2, 4, 0), (1, 3, 0))),
    "three with local attention": Case(LOCAL, 8, ((3, 4, 0), (2, 4, 0), (1, 4, 0))),
    "three in a split": Case(TWO, 9, ((3, 4, 0), (2, 4, 0), (1, 3, 0)), caps=(4, 5)),
    "three guaranteed": Case(TWO, 8, ((3, 4, 0), (2, 4, 0), (1, 3, 0)), admission=GUARANTEED),
    "four of two kinds": Case(TWO, 7, ((3, 3, 0), (2, 3, 0), (1, 3, 0), (2, 2, 0))),
}
HOT = {
    "hot, two of two kinds": Case(TWO, 7, ((3, 5, 0), (2, 5, 0)), prefix_cache=True),
    "hot, two of three kinds": Case(THREE, 7, ((3, 5, 0), (2, 5, 0)), prefix_cache=True),
    "hot, two of other ranks": Case(TWO, 7, ((3, 5, 0), (2, 5, -1)), prefix_cache=True),
    "hot, two with local attention": Case(LOCAL, 8, ((3, 5, 0), (2, 6, 0)), prefix_cache=True),
    "hot, two that share more": Case(TWO, 7, ((5, 4, 0), (4, 5, 0)), prefix_cache=True, alike=4),
    "hot, three of two kinds": Case(TWO, 7, ((3, 4, 0), (2, 4, 0), (1, 3, 0)), prefix_cache=True),
    "hot, three of three kinds": Case(THREE, 8, ((3, 4, 0), (4, 4, 0), (1, 3, 0)), prefix_cache=True),
}
HOT_GROUPS = {
    "hot, three in a split": Case(TWO, 9, ((3, 4, 0), (2, 4, 0), (1, 3, 0)), caps=(4, 5), prefix_cache=True),
    "hot, four of two kinds": Case(TWO, 7, ((3, 3, 0), (2, 3, 0), (1, 3, 0), (2, 2, 0)), prefix_cache=True),
    "hot, four of other ranks": Case(
        THREE, 10, ((3, 6, 0), (6, 3, 0), (1, 9, -1), (2, 7, 1)), prefix_cache=True, alike=4
    ),
}
QUICK_HOT = list(HOT)[:2]
ALL = 10**9
SHORT = [name for name in CASES if name.startswith("short")]


# --- the graph

Look = tuple[object, ...]
Note = Callable[[str, object], None]
"""pytest's `record_property`."""
Act = Callable[[World], object]
MOST_STEPS = 80
"""No world of these cases may need more steps to its end."""


def acts(case: Case, made: World) -> Iterator[tuple[str, Act]]:
    """Yield everything that may happen next."""
    for index, (_, max_tokens, priority) in enumerate(case.sketches):
        name, text = f"r{index}", case.prompt(index)
        if name not in made.arrivals:
            yield (
                f"{name} arrives",
                lambda world, name=name, text=text, limit=max_tokens, priority=priority: world.arrive(
                    name, text, greedy(limit), priority
                ),
            )
    for name in made.scheduler._roster.live:
        yield f"{name} aborts", lambda world, name=name: world.abort(name)
        yield f"step, {name} ends", lambda world, name=name: step(world, name)


def step(made: World, stops: str = "") -> None:
    """Step; whoever `stops` ends early if it is sampled. Work that cannot be computed is stuck."""
    made.backend.stops = stops  # type: ignore[attr-defined]
    moved = made.step() or not made.scheduler.has_work
    assert moved, f"stuck: {made.scheduler.reasons()}"


def looks(made: World) -> Look:
    """Return all that a later decision can depend on: counts, not places; the order of arrivals, not their number."""
    live = sorted(made.scheduler._roster.live.values(), key=lambda request: request.key)
    requests = tuple(
        (r.id, r.state, len(r.history), r.computed, r.resumed_at, r.retractions > 0, _grant(r)) for r in live
    )
    refused = made.scheduler._growth._refused
    short = refused.id if refused is not None and not refused.is_ended else None
    lengths = tuple((kind, tuple(seen)) for kind, seen in sorted(made.scheduler._gate.lengths._sorted.items()))
    return requests, frozenset(made.arrivals), short, lengths, _cached(made)


def _cached(made: World) -> object:
    """Return what the prefix cache keeps, how it would go, and what it remembers; None without a cache."""
    if not made.rules.prefix_cache:
        return None
    tree = made.scheduler._sharing.tree  # type: ignore[attr-defined]
    states = [pool.state for pool in made.arena.pools]
    order = {unit.id: at for at, unit in enumerate(sorted(made.arena.ranking.units.values(), key=lambda u: u.order))}
    clock = tree.marks._clock
    nodes = []
    for node in tree.forest.nodes.values():
        pages = tuple(
            tuple(-1 if h == TOMBSTONE else int(states[pool][h & INDEX_MASK]) for h in handles.tolist())
            for pool, handles in enumerate(node.pages)
        )
        place = order.get(node.body.id, -1) if node.body is not None else -1
        mark = node.mark
        kept = (
            None if mark is None else (mark.proven, mark.returned, mark.bytes, round(mark.key - clock[mark.proven], 6))
        )
        nodes.append((b"".join(above.key for above in node.path()), node.granules, node.locks, place, pages, kept))
    return tuple(sorted(nodes, key=repr)), frozenset(tree.marks.ghosts._known)


def _grant(request: Request) -> tuple[object, ...] | None:
    if request.holding is None:
        return None
    grant, lock = request.holding.grant, getattr(request.holding, "lock", None)
    books = (tuple(grant.demand), tuple(request.holding.pages), tuple(request.holding.first_page))
    if lock is None:
        return books
    locked = (
        lock.node.end,
        lock.resumed,
        lock.inserted,
        lock.revealed_tokens,
        tuple(lock.owed),
        tuple(lock.first_page),
    )
    return *books, tuple(grant.held), *locked


def right(made: World) -> None:
    """Spoil nothing."""


def is_idle(made: World) -> bool:
    """Whether nothing is held, and nothing promised but the floor; what is cached may stay."""
    budget = made.arena.budget
    return not any(budget.held) and list(budget.promised) == list(made.floor)


@dataclass
class Graph:
    """What was explored: where each world's quiet step leads, None where nothing is left to do."""

    after: dict[Look, Look | None] = field(default_factory=dict)
    edges: int = 0
    retracting: int = 0
    """Edges on which somebody was retracted."""
    is_whole: bool = True
    """Whether every edge there is was followed."""

    def longest(self) -> int:
        """Return the most quiet steps that any world needs to its end; a cycle is a livelock."""
        steps: dict[Look, int] = {}
        for look in self.after:
            path = []
            at: Look | None = look
            while at is not None and at not in steps:
                path.append(at)
                assert len(path) <= len(self.after), f"L10: a livelock through {at}"
                at = self.after[at]
            count = 0 if at is None else steps[at] + 1
            for node in reversed(path):
                steps[node] = count
                count += 1
        return max(steps.values())


def explore(case: Case, most_states: int, spoil: Callable[[World], None] = right) -> Graph:
    """Explore a case's graph up to a number of worlds, then follow quiet steps alone; check L10 on all of it."""
    graph, start = Graph(), case.start()
    spoil(start)
    seen = {looks(start)}
    queue = deque([(looks(start), pickle.dumps(start), ())])
    while queue:
        look, state, story = queue.popleft()
        made: World = pickle.loads(state)
        more = list(acts(case, made)) if len(graph.after) < most_states else []
        graph.is_whole &= bool(more) or not made.scheduler.has_work
        graph.after[look] = None
        if made.scheduler.has_work:
            more.append(("step", step))
        else:
            assert is_idle(made), f"after {story}: {made.arena.figures()}"
        for name, act in more:
            later: World = pickle.loads(state)
            try:
                act(later)
                assert not later.rejected, f"{later.rejected}: every request was meant to fit alone"
                assert not later.failed, later.failed
            except Exception as error:
                raise AssertionError(f"after {(*story, name)}: {error}") from error
            graph.edges += 1
            graph.retracting += later.retractions > made.retractions
            found = looks(later)
            if name == "step":
                graph.after[look] = found
            if found not in seen:
                seen.add(found)
                queue.append((found, pickle.dumps(later), (*story, name)))
    longest = graph.longest()
    assert longest <= MOST_STEPS, f"L10: {longest} steps from some world to its end"
    return graph


def explored(name: str, most_states: int, note: Note) -> Graph:
    """Explore a case and check that it was worth it: memory was tight, unless everyone was granted everything."""
    case = (CASES | PAIRS | GROUPS | HOT | HOT_GROUPS)[name]
    graph = explore(case, most_states)
    whole = "the whole graph" if graph.is_whole else "a part of the graph"
    note(
        "explored",
        f"{whole}, {len(graph.after)} worlds, {graph.edges} edges, {graph.longest()} steps at most to the end",
    )
    assert len(graph.after) >= 100
    assert (graph.retracting == 0) == (case.admission == GUARANTEED), f"{graph.retracting} retractions"
    return graph


@pytest.mark.parametrize("name", [name for name in CASES if name not in SHORT])
def test_l10_everyone_finishes_from_every_world_of_a_small_graph(name: str, record_property: Note) -> None:
    explored(name, 12, record_property)


@pytest.mark.parametrize("name", [*PAIRS, *QUICK_HOT])
def test_l10_everyone_finishes_whatever_two_requests_do_and_whenever(name: str, record_property: Note) -> None:
    assert explored(name, ALL, record_property).is_whole


@pytest.mark.laws
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*GROUPS, *(name for name in HOT if name not in QUICK_HOT)])
def test_l10_everyone_finishes_whatever_three_or_four_requests_do(name: str, record_property: Note) -> None:
    assert explored(name, ALL, record_property).is_whole


@pytest.mark.laws
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*CASES, *HOT_GROUPS])
def test_l10_everyone_finishes_from_every_world_of_a_large_graph(name: str, record_property: Note) -> None:
    explored(name, 350, record_property)


def never_retracts(made: World) -> None:
    """A wrong policy: whoever is refused stands still until room comes."""
    growth = made.scheduler._growth
    growth._make_room = refuses  # type: ignore[method-assign]
    growth._give_way = stands_still  # type: ignore[method-assign]


def refuses(request: Request, holding: object, demand: object, refusal: object) -> object:
    return refusal


def stands_still(request: Request, refusal: object) -> None:
    """Do nothing."""


def test_l10_the_graph_bites_when_nobody_is_retracted() -> None:
    with pytest.raises(AssertionError, match="stuck"):
        explore(PAIRS["two of two kinds"], ALL, never_retracts)


def test_l10_the_graph_bites_when_work_goes_in_circles() -> None:
    end: Look = ("end",)
    assert Graph({("a",): ("b",), ("b",): end, end: None}).longest() == 2
    with pytest.raises(AssertionError, match="livelock"):
        Graph({("a",): ("b",), ("b",): ("a",), end: None}).longest()


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
def test_l10_a_refused_return_makes_the_most_senior_short_and_juniors_get_nothing_new(name: str) -> None:
    assert follow_short(CASES[name], CASES[name].start()) > 0, "nobody was short, so nothing was tested"


@pytest.mark.parametrize("name", SHORT)
def test_l10_the_short_worlds_bite_when_juniors_get_new_grants(name: str) -> None:
    made = CASES[name].start()
    made.scheduler._growth.short_reason = lambda request: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="got a new grant while"):
        follow_short(CASES[name], made)

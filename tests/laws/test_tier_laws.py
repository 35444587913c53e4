"""L1 and L5 to L8 with two levels, in every small world: all short histories on a device and a host that are too small.

What the host offers is compared with a search that knows no tree: it looks which contents the host's bytes have, place
by place. Histories that lead to worlds that look alike are followed once.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from halocline.cache.keys import EVERYBODY, token_key
from halocline.cache.node import TOMBSTONE
from halocline.cache.tree import Tree
from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Order
from halocline.memory.pool import CACHED, INDEX_MASK, LOCKED
from halocline.memory.retention import Chunked, Full, State
from halocline.memory.retention import Sliding as Window
from testing.cache import arena_of
from testing.tier import TieredWorld

Act = Callable[[TieredWorld], bool]
"""Does one thing and returns True, or does nothing and returns False where it does not apply."""

PROMPTS = {"a": (1, 2, 3, 4, 5, 6, 7), "b": (1, 2, 3, 4, 9, 9, 9)}
WORLDS = {
    "sliding": ((Full(), 2, 2), (Window(4), 2, 1)),
    "small pages": ((Full(), 4, 1), (Window(3), 2, 2)),
    "chunked": ((Full(), 2, 2), (Chunked(4), 2, 2)),
    "state": ((Full(), 2, 2), (State(), 1, 1)),
    "full": ((Full(), 2, 3),),
}


def enter(name: str) -> Act:
    def act(world: TieredWorld) -> bool:
        return len(world.running) < 2 and world.enter(PROMPTS[name], 2) is not None

    return act


def compute(world: TieredWorld) -> bool:
    """The last request computes its prompt up to the last boundary, where states are saved; then what is left."""
    left = [runner for runner in world.running if runner.computed < runner.prompt]
    if not left:
        return False
    runner = left[-1]
    boundary = (runner.prompt - 1) // world.tree.shape.granule_tokens * world.tree.shape.granule_tokens
    end = boundary if runner.computed < boundary else runner.prompt
    return world.compute([(runner, end - runner.computed)])


def leave(at: int) -> Act:
    def act(world: TieredWorld) -> bool:
        if world.running:
            world.leave(world.running[at])
            return True
        return False

    return act


def lose_all(world: TieredWorld) -> bool:
    """All that nobody locks on the device dies."""
    died = [pool.handle_of[np.flatnonzero(pool.state == CACHED)] for pool in world.arena.pools]
    for pool, handles in enumerate(died):
        world.arena.evict(pool, handles)
    world.forget(died)
    return any(map(len, died))


def lose_one(world: TieredWorld) -> bool:
    """Somebody takes one page more of the last pool than is free, for a moment."""
    last = world.layout.pools[-1]
    figures = world.arena.figures()
    pages = figures.free_bytes // world.layout.slab_bytes * last.pages_per_slab
    pages += figures.pools[-1].hole_bytes // last.stride_bytes + 1
    return taken(world, world.arena, Demand([*[0] * (len(world.layout.pools) - 1), pages]), world.carry_out)


def crowd(world: TieredWorld) -> bool:
    """Copies of others take all of the host for a moment."""
    arena = world.host.arena
    zero = Demand((0,) * len(world.layout.pools))
    demand = Demand([arena.most(0, zero), *zero[1:]])

    def told(commit: object) -> None:
        world.tier.host_evicted(commit.evicted)  # type: ignore[attr-defined]

    return any(arena.budget.cached) and taken(world, arena, demand, told)


def taken(world: TieredWorld, arena: object, demand: Demand, told: Callable[..., None]) -> bool:
    """Take and free `demand`."""
    del world
    grant = arena.reserve("another", demand)  # type: ignore[attr-defined]
    if not isinstance(grant, Grant):
        return False
    told(arena.commit([Order(grant, demand)]))  # type: ignore[attr-defined]
    arena.release(grant)  # type: ignore[attr-defined]
    return True


ACTS: dict[str, Act] = {
    "enter a": enter("a"),
    "enter b": enter("b"),
    "compute": compute,
    "first leaves": leave(0),
    "last leaves": leave(-1),
    "lose all": lose_all,
    "lose one": lose_one,
    "crowd": crowd,
}


def looks(world: TieredWorld) -> object:
    """Return both trees by contents, what is locked of them, and the requests: equal ones behave alike."""
    runners = tuple((r.name in world.loads, tuple(r.tokens), r.computed, r.lock.node.end) for r in world.running)
    budgets = [(tuple(a.budget.held), tuple(a.budget.cached)) for a in (world.arena, world.host.arena)]
    return looks_of(world.tree), looks_of(world.tier.tree), runners, tuple(budgets)


def looks_of(tree: Tree) -> object:
    nodes = []
    for node in tree.forest.nodes.values():
        pages = []
        for pool, handles in enumerate(node.pages):
            lockers = tree.forest.books[pool].lockers
            pages.append(tuple(int(lockers[h & INDEX_MASK]) if h != TOMBSTONE else -1 for h in handles.tolist()))
        mark = node.mark
        worth = None if mark is None else (round(mark.worth, 6), mark.proven, mark.returned)
        nodes.append((b"".join(above.key for above in node.path()), node.granules, tuple(pages), worth))
    return tuple(sorted(nodes))


def histories(start: TieredWorld, depth: int) -> Iterator[tuple[tuple[str, ...], TieredWorld]]:
    """Yield every world that at most `depth` acts lead to, once each, with the shortest history."""
    seen = {looks(start)}
    frontier = deque([((), pickle.dumps(start))])
    while frontier:
        done, state = frontier.popleft()
        for name, act in ACTS.items():
            world: TieredWorld = pickle.loads(state)
            if not act(world):
                continue
            look = looks(world)
            if look in seen:
                continue
            seen.add(look)
            yield (*done, name), world
            if len(done) + 1 < depth:
                frontier.append(((*done, name), pickle.dumps(world)))


# ---- what must hold, without trusting either tree


def check_offers(world: TieredWorld) -> None:
    """L7 on two levels: what is offered can be resumed from the host's bytes, and nothing longer can."""
    granule = world.tree.shape.granule_tokens
    stored: list[set[object]] = [set() for _ in world.layout.pools]
    for pool, of_pool in enumerate(world.host.arena.pools):
        for index in np.flatnonzero(np.isin(of_pool.state, (CACHED, LOCKED))).tolist():
            stored[pool].add(world.on_host[pool][int(of_pool.place[index])])
    for tokens in PROMPTS.values():
        able = [b for b in range(granule, len(tokens), granule) if is_stored(world, stored, tokens, b)]
        found = world.tree.match(token_key(tokens))
        offer = world.tier.offer(found)
        longest = max(able, default=0)
        if longest <= found.boundary_tokens:
            assert offer.verdict == "no longer", f"L7: {offer}, the host can resume at {able}"
        else:
            assert offer.verdict in ("host", "no room"), f"L7: {offer}, the host can resume at {able}"
            wanted = longest if offer.verdict == "host" else found.boundary_tokens
            assert offer.boundary_tokens == wanted, f"L7: {offer}, the host can resume at {able}"


def is_stored(world: TieredWorld, stored: list[set[object]], tokens: tuple[int, ...], boundary: int) -> bool:
    for pool, shape in enumerate(world.layout.pools):
        if isinstance(shape.retention, State):
            if (EVERYBODY, tokens[:boundary]) not in stored[pool]:
                return False
            continue
        first = shape.retention.first_needed(boundary) // shape.page_tokens
        ends = range((first + 1) * shape.page_tokens, boundary + 1, shape.page_tokens)
        if not all((EVERYBODY, tokens[:end]) in stored[pool] for end in ends):
            return False
    return True


def check_counts(world: TieredWorld) -> None:
    """L6 and L8 on the host: its tree's pages are the cached and the locked ones; and no byte beyond the quota."""
    arena, tree = world.host.arena, world.tier.tree
    for pool, books in enumerate(tree.forest.books):
        owned = [int(h) & INDEX_MASK for n in tree.forest.nodes.values() for h in n.pages[pool] if h != TOMBSTONE]
        of_tree = np.flatnonzero(np.isin(arena.pools[pool].state, (CACHED, LOCKED))).tolist()
        assert sorted(owned) == of_tree, f"L6: pool {pool} of the host keeps {of_tree}, the nodes have {sorted(owned)}"
        assert arena.budget.cached[pool] + arena.budget.locked[pool] == len(owned)
        assert np.flatnonzero(books.node).tolist() == of_tree, f"L8: pool {pool} maps pages that no node has"
    assert arena.figures().used_bytes <= world.host.quota_bytes


def check_loads_live(world: TieredWorld) -> None:
    """L5: whatever is taken from the host, a load that was admitted finds all its pages."""
    crowd(world)
    world.check()
    while world.loads:
        runner = next(runner for runner in world.running if runner.name in world.loads)
        if not world.compute([(runner, 1 if runner.prompt - runner.computed < 2 else 2)]):
            return
        world.check()


def explore(kind: str, depth: int, slabs: int = 12, host_slabs: int = 6) -> tuple[int, int]:
    """Check every world of up to `depth` acts; return how many there are, and how many of them load."""
    count = loading = 0
    world = TieredWorld(arena_of(*WORLDS[kind], slabs=slabs), host_slabs)
    for text in PROMPTS.values():  # with something on the host, so that short histories load
        world.serve(text, chunk=world.tree.shape.granule_tokens)
        lose_all(world)
    for done, each in histories(world, depth):
        try:
            each.check()
            check_offers(each)
            check_counts(each)
            check_loads_live(pickle.loads(pickle.dumps(each)))
        except Exception as error:
            raise AssertionError(f"after {done}: {error!r}") from error
        count, loading = count + 1, loading + bool(each.loads)
    return count, loading


@pytest.mark.parametrize("kind", WORLDS)
def test_l1_l5_l6_l7_l8_hold_in_every_small_world_of_two_levels(kind: str) -> None:
    count, loading = explore(kind, 4)
    assert count > 40
    assert loading > 0


@pytest.mark.laws
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("host_slabs", [4, 6, 12])
@pytest.mark.parametrize("kind", WORLDS)
def test_l1_l5_l6_l7_l8_hold_in_every_larger_world_of_two_levels(
    kind: str, host_slabs: int, record_property: Callable[[str, object], None]
) -> None:
    count, loading = explore(kind, 5, host_slabs=host_slabs)
    record_property("explored", f"{count} worlds, every history of up to 5 acts, {loading} of them with a load")
    assert count > 100


# ---- long histories


KINDS = WORLDS | {
    "one to five": ((Full(), 4, 5), (Window(9), 4, 1)),
    "three kinds": ((Full(), 2, 2), (Window(3), 1, 3), (State(), 1, 1)),
    "windows only": ((Window(9), 4, 2), (Window(5), 2, 3)),
    "moving": ((Full(), 4, 7), (Window(5), 2, 5)),
}


def drive(kind: str, seed: int, acts: int = 120) -> TieredWorld:
    """Let requests come, compute, decode and leave at random, and look at everything after each act."""
    draw = random.Random(seed)
    slack = draw.choice((0, 4, 8))
    world = TieredWorld(arena_of(*KINDS[kind], slabs=draw.randint(8, 20)), draw.randint(3, 40), slack)
    for _ in range(acts):
        act = draw.random()
        if act < 0.4 and len(world.running) < 3:
            base, length = draw.randint(0, 5) * 100, draw.randint(5, 20)
            text = list(range(base, base + length))
            text += [draw.randint(1000, 1010) for _ in range(draw.choice((0, 0, 3, 8)))]
            world.enter(text, draw.randint(1, 4))
        elif world.running and act < 0.85:
            runner = draw.choice(world.running)
            if runner.computed == len(runner.tokens) < runner.end - 1:
                runner.tokens.append(5000 + draw.randint(0, 3))
            if runner.computed < runner.end - 1:
                world.compute([(runner, draw.randint(1, max(1, runner.prompt - runner.computed)))])
            else:
                world.leave(runner)
        elif world.running:
            world.leave(draw.choice(world.running))
        world.check()
    return world


@pytest.mark.parametrize("kind", KINDS)
def test_l1_l5_l6_l8_hold_in_long_histories_of_two_levels(kind: str) -> None:
    worlds = [drive(kind, seed) for seed in range(2)]
    assert sum(world.tier.counts.written for world in worlds) > 0


@pytest.mark.laws
@pytest.mark.parametrize("kind", KINDS)
def test_l1_l5_l6_l8_hold_in_many_long_histories_of_two_levels(
    kind: str, record_property: Callable[[str, object], None]
) -> None:
    counts = [drive(kind, seed).tier.counts for seed in range(100, 116)]
    loads, written = sum(each.loads for each in counts), sum(each.written for each in counts)
    record_property("explored", f"{written} boundaries written back, {loads} loads, {len(counts)} histories")
    assert loads > 3


def loads_are_not_locked(patch: pytest.MonkeyPatch) -> None:
    lock = Tree.lock

    def careless(self: Tree, found: object, boundary: int, owner: str, demand: Demand, **how: bool) -> object:
        answer = lock(self, found, boundary, owner, demand, **how)  # type: ignore[arg-type]
        if owner.startswith("request") and how.get("hand_over") is None and boundary:
            self.arena.unlock([pages.copy() for pages in answer.pages])  # type: ignore[union-attr]
        return answer

    patch.setattr(Tree, "lock", careless)


def the_host_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("halocline.cache.tier.Tier.host_evicted", lambda self, evicted: None)


@pytest.mark.parametrize("fault", [loads_are_not_locked, the_host_is_not_told], ids=lambda fault: fault.__name__)
def test_the_small_worlds_of_two_levels_bite(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(Exception, match=r"L\d|locked|stale|freed|assert"):
        explore("sliding", 4)

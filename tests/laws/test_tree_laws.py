"""L5 to L8 on the prefix tree, in every small world: all short histories of requests that share prefixes.

`match` is compared with a search that knows no tree: it looks which contents the tree's pages have, position by
position. Histories that lead to trees that look alike are followed once.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from halocline.cache.forest import Forest
from halocline.cache.keys import EVERYBODY, token_key
from halocline.cache.match import Resume
from halocline.cache.node import TOMBSTONE
from halocline.memory.demand import Demand
from halocline.memory.grant import Grant, Order
from halocline.memory.pool import CACHED, INDEX_MASK, LOCKED, TRANSFER_CACHED
from halocline.memory.retention import Chunked, Full, Sliding, State
from halocline.units import ceil_to
from testing.cache import CacheWorld, arena_of

Act = Callable[[CacheWorld], bool]
"""Does one thing and returns True, or does nothing and returns False where it does not apply."""

PROMPTS = {
    "a": (1, 2, 3, 4, 5, 6, 7),
    "b": (1, 2, 3, 4, 5, 6, 7, 8, 9),
    "c": (1, 2, 3, 4, 9, 9, 9),
    "d": (1, 2, 7),
}
WORLDS = {
    "sliding": ((Full(), 2, 2), (Sliding(4), 2, 1)),
    "small pages": ((Full(), 4, 1), (Sliding(5), 2, 2)),
    "chunked": ((Full(), 2, 2), (Chunked(4), 2, 2)),
    "state": ((Full(), 2, 2), (State(), 1, 1)),
    "three kinds": ((Full(), 2, 2), (Sliding(3), 1, 3), (State(), 1, 1)),
}


def enter(name: str) -> Act:
    def act(world: CacheWorld) -> bool:
        return len(world.running) < 2 and world.enter(PROMPTS[name], 3) is not None

    return act


def compute(which: slice) -> Act:
    """Compute a chunk of some requests: the prompt's next four tokens, or one output token."""

    def act(world: CacheWorld) -> bool:
        chunks = []
        for runner in world.running[which]:
            if runner.computed >= runner.end - 1:
                continue
            if runner.computed == len(runner.tokens):
                runner.tokens.append(5)
            chunks.append((runner, max(1, min(4, runner.prompt - runner.computed))))
        return bool(chunks) and world.compute(chunks)

    return act


def leave(at: int) -> Act:
    def act(world: CacheWorld) -> bool:
        if world.running:
            world.leave(world.running[at])
            return True
        return False

    return act


def squeeze(pool: int) -> Act:
    """Let somebody take and free one more page than is free in `pool`, so that something dies."""

    def act(world: CacheWorld) -> bool:
        number = pool % len(world.layout.pools)
        shape = world.layout.pools[number]
        free = world.arena.figures().free_bytes // world.layout.slab_bytes * shape.pages_per_slab
        holes = world.arena.figures().pools[number].hole_bytes // shape.stride_bytes
        demand = Demand(free + holes + 1 if p == number else 0 for p in range(len(world.layout.pools)))
        grant = world.arena.reserve("another", demand)
        if not isinstance(grant, Grant):
            return False
        world.forget(world.arena.commit([Order(grant, demand)]).evicted)
        world.arena.release(grant)
        return True

    return act


ACTS: dict[str, Act] = {
    **{f"enter {name}": enter(name) for name in PROMPTS},
    "all compute": compute(slice(None)),
    "last computes": compute(slice(-1, None)),
    "first leaves": leave(0),
    "last leaves": leave(-1),
    "squeeze full": squeeze(0),
    "squeeze last": squeeze(-1),
}


@dataclass(frozen=True)
class Start:
    """A shape, a size, and how many tokens before a window a tail keeps."""

    shape: str
    slabs: int
    slack: int = 0

    def make(self) -> CacheWorld:
        return CacheWorld(arena_of(*WORLDS[self.shape], slabs=self.slabs), self.slack)


STARTS = {name: Start(name, 14) for name in WORLDS} | {"slack": Start("sliding", 12, 4)}


def looks(world: CacheWorld) -> object:
    """Return the tree by contents, what is locked of it and by whom, and the requests: equal ones behave alike."""
    names = {runner.lock.id: number for number, runner in enumerate(world.running)}
    nodes = []
    for node in world.tree.forest.nodes.values():
        key = b"".join(above.key for above in node.path())
        pages = []
        for pool, handles in enumerate(node.pages):
            books = world.tree.forest.books[pool]
            there = [(int(h) != TOMBSTONE, int(h) & INDEX_MASK) for h in handles]
            pages.append(
                tuple(
                    (int(books.lockers[i]), names.get(int(books.charge[i]), -1)) if is_page else None
                    for is_page, i in there
                )
            )
        mark = node.mark
        worth = None if mark is None else (round(mark.worth, 6), mark.proven, mark.returned)
        nodes.append((key, node.granules, tuple(pages), worth))
    runners = tuple(
        (tuple(r.tokens), r.computed, r.end, r.lock.node.end, tuple(r.lock.grant.demand), tuple(r.lock.grant.held))
        for r in world.running
    )
    budget = world.arena.budget
    return tuple(sorted(nodes)), runners, tuple(budget.held), tuple(budget.cached), len(world.arena.stock.free)


def histories(start: CacheWorld, depth: int) -> Iterator[tuple[tuple[str, ...], CacheWorld]]:
    """Yield every world that at most `depth` acts lead to, once each, with the shortest history."""
    seen = {looks(start)}
    frontier = deque([((), pickle.dumps(start))])
    while frontier:
        done, state = frontier.popleft()
        for name, act in ACTS.items():
            world: CacheWorld = pickle.loads(state)
            if not act(world):
                continue
            look = looks(world)
            if look in seen:
                continue
            seen.add(look)
            yield (*done, name), world
            if len(done) + 1 < depth:
                frontier.append(((*done, name), pickle.dumps(world)))


# ---- what must hold, without trusting the tree


def contents(world: CacheWorld) -> list[set[object]]:
    """Return per pool what the pages of all nodes contain: (namespace, all tokens up to the page's end).

    With the key of their granule: pages smaller than a granule are kept for a whole one only, so that two prompts which
    part within a granule have equal first pages, and neither can use the other's.
    """
    found: list[set[object]] = [set() for _ in world.layout.pools]
    for node in world.tree.forest.nodes.values():
        path = b"".join(above.key for above in node.path())
        begin = len(path) - len(node.key)
        for pool, handles in enumerate(node.pages):
            for at, handle in enumerate(handles.tolist()):
                if handle != TOMBSTONE:
                    granules = at // max(1, len(handles) // node.granules) + 1
                    is_state = isinstance(world.layout.pools[pool].retention, State)
                    end = len(path) if is_state else begin + granules * world.tree.shape.granule_bytes
                    found[pool].add((world.content[pool, handle], path[:end]))
    return found


def can_resume(world: CacheWorld, kept: list[set[object]], tokens: tuple[int, ...], boundary: int) -> bool:
    """Whether everything that position `boundary` reads, and every full page before it, is in the tree's pages."""
    granule, data = world.tree.shape.granule_tokens, token_key(tokens).data

    def is_kept(pool: int, end: int) -> bool:
        whole = ceil_to(end, granule) // granule * world.tree.shape.granule_bytes
        return ((EVERYBODY, tokens[:end]), data[:whole]) in kept[pool]

    for pool, shape in enumerate(world.layout.pools):
        if isinstance(shape.retention, State):
            if not is_kept(pool, boundary):
                return False
            continue
        first = shape.retention.first_needed(boundary) // shape.page_tokens
        ends = range((first + 1) * shape.page_tokens, boundary + 1, shape.page_tokens)
        if not all(is_kept(pool, end) for end in ends):
            return False
    return True


def check_matches(world: CacheWorld) -> None:
    """L7, both ways: a match can be resumed, and no longer boundary can be."""
    kept, granule = contents(world), world.tree.shape.granule_tokens
    for tokens in PROMPTS.values():
        able = [b for b in range(granule, len(tokens), granule) if can_resume(world, kept, tokens, b)]
        found = world.tree.match(token_key(tokens))
        assert found.boundary_tokens == max(able, default=0), f"L7: {tokens} matches {found}, {able} can be resumed"
        told = list(world.tree.boundaries(found))
        assert told == [*sorted(able, reverse=True), 0], f"L7: {tokens} is said to resume at {told}, not at {able}"


def check_counts(world: CacheWorld) -> None:
    """L6 and L8: the tree's pages are the cached and the locked ones, and no other page is mapped to a node."""
    for pool, books in enumerate(world.tree.forest.books):
        owned = [int(h) & INDEX_MASK for n in world.tree.forest.nodes.values() for h in n.pages[pool] if h != TOMBSTONE]
        state = world.arena.pools[pool].state
        of_tree = np.flatnonzero(np.isin(state, (CACHED, LOCKED, TRANSFER_CACHED))).tolist()
        assert sorted(owned) == of_tree, f"L6: pool {pool} keeps pages {of_tree}, the nodes have {sorted(owned)}"
        budget = world.arena.budget
        assert budget.cached[pool] + budget.locked[pool] == len(owned), f"L6: {budget.cached[pool]} evictable"
        assert np.flatnonzero(books.node).tolist() == of_tree, f"L8: pool {pool} maps pages that no node has"


def check_locked_pages_live(world: CacheWorld) -> None:
    """L5: whatever is evicted to the last page, every request still has what it reads."""
    for pool in range(len(world.layout.pools)):
        most = world.arena.most(pool, Demand((0,) * len(world.layout.pools)))
        demand = Demand(most if p == pool else 0 for p in range(len(world.layout.pools)))
        grant = world.arena.reserve("another", demand)
        assert isinstance(grant, Grant)
        world.forget(world.arena.commit([Order(grant, demand)]).evicted)
        world.check()
        world.arena.release(grant)
    assert all(count == 0 for count in world.arena.budget.cached) or world.running


def explore(start: Start, depth: int) -> int:
    """Check every world of up to `depth` acts; return how many there are."""
    count = 0
    for done, world in histories(start.make(), depth):
        try:
            world.check()
            check_matches(world)
            check_counts(world)
            check_locked_pages_live(pickle.loads(pickle.dumps(world)))
        except Exception as error:
            raise AssertionError(f"after {done}: {error!r}") from error
        count += 1
    return count


@pytest.mark.parametrize("start", STARTS)
def test_l5_l6_l7_l8_hold_in_every_small_tree(start: str) -> None:
    assert explore(STARTS[start], 4 if start in ("sliding", "three kinds") else 3) > 40


@pytest.mark.laws
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", STARTS)
def test_l5_l6_l7_l8_hold_in_every_larger_tree(start: str, record_property: Callable[[str, object], None]) -> None:
    count = explore(STARTS[start], 6)
    record_property("explored", f"{count} trees, every history of up to 6 acts")
    assert count > 500


def windows_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Resume, "_windows_whole", lambda self, walk, pool, most: np.ones(most, np.bool_))
    patch.setattr(Resume, "missing", lambda self, walk, granules: None)


def mappings_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Forest, "disown", lambda self, pool, index: None)


@pytest.mark.parametrize("fault", [windows_are_not_looked_at, mappings_stay], ids=lambda fault: fault.__name__)
def test_l7_l8_the_small_trees_bite(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"L7|L8"):
        explore(STARTS["sliding"], 5)

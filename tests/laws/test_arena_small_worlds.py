"""Small worlds, exhaustively: every history of acts up to a depth, from several starts, with three pools, pins, caps.

After each history: the audit, the bytes and the naive model (L1, L2, L5, L6, L13), the brute-force oracle at the border
of what fits (L3), all that is promised committed at once on a copy (L3), and no freeing act ever took a yes away (L4).
Histories that lead to the same world, up to the names of handles, are followed once.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from halocline.errors import InvariantError
from halocline.memory import moves, pins, reclaim
from halocline.memory.budget import Budget
from halocline.memory.demand import Demand, zero
from halocline.memory.grant import Grant
from halocline.memory.pool import Pool
from halocline.units import ceil_div
from testing.memory import Holding, World, arena, can_place

NOTHING = zero(3)
GRID = [Demand(pages) for pages in itertools.product(range(3), repeat=3)]

Act = Callable[[World], bool]
"""Does one thing and returns True, or does nothing and returns False where it does not apply."""


def reserve(*pages: int) -> Act:
    return lambda world: world.reserve(Demand(pages)) is not None


def commit_all(world: World) -> bool:
    return bool(any(world.promised()) or world.arena.awaits_commit) and world.commit_all() is not None


def commit_one(world: World) -> bool:
    for holding in world.holdings:
        for pool, room in enumerate(holding.grant.room):
            if room:
                world.commit([(holding, Demand(int(p == pool) for p in range(3)), None)])
                return True
    return False


def part(pool: int, at: int, fate: str) -> Act:
    def act(world: World) -> bool:
        holding = next((holding for holding in world.holdings if holding.handles[pool]), None)
        if holding is not None:
            leave = world.free if fate == "free" else world.cache
            leave(holding, pool, [holding.handles[pool][at]])
        return holding is not None

    return act


def release(at: int) -> Act:
    def act(world: World) -> bool:
        if world.holdings:
            world.release(world.holdings[at])
            return True
        return False

    return act


def lock(*pages: int) -> Act:
    """Lock the oldest cached page of each pool, and the pages that only a transfer keeps for the cache."""

    def act(world: World) -> bool:
        kept = [[h for h, fate in transfer.items() if fate == "cached"] for transfer in world.transfer]
        chosen = [cached[:1] + more for cached, more in zip(world.cached, kept, strict=True)]
        return any(chosen) and world.lock(chosen, Demand(pages)) is not None

    return act


def unlock(world: World) -> bool:
    if any(world.locked):
        world.unlock(world.locked_copy(), world.holdings[0] if world.holdings else None)
        return True
    return False


def pin(at: int) -> Act:
    """Pin one held page of each pool."""

    def act(world: World) -> bool:
        held = [world.locked[p] + [h for owner in world.holdings for h in owner.handles[p]] for p in range(3)]
        if any(held):
            world.pin([[handles[at]] if handles else [] for handles in held])
            return True
        return False

    return act


def unpin(world: World) -> bool:
    if world.pins:
        world.unpin(world.pins[0])
        return True
    return False


FREEING = {
    "free full",
    "free last full",
    "free sliding",
    "cache full",
    "release oldest",
    "release newest",
    "unlock",
    "unpin",
}
ACTS: dict[str, Act] = {
    "reserve 2,1,0": reserve(2, 1, 0),
    "reserve 0,0,1": reserve(0, 0, 1),
    "commit all": commit_all,
    "commit one": commit_one,
    "free full": part(0, 0, "free"),
    "free last full": part(0, -1, "free"),
    "free sliding": part(1, 0, "free"),
    "cache full": part(0, 0, "cache"),
    "release oldest": release(0),
    "release newest": release(-1),
    "lock": lock(0, 0, 0),
    "lock and reserve": lock(1, 0, 0),
    "unlock": unlock,
    "pin first": pin(0),
    "pin last": pin(-1),
    "unpin": unpin,
}

CAPS: dict[str, tuple[int | None, ...] | None] = {"shared": None, "capped": (2, None, 1)}


def empty(caps: tuple[int | None, ...] | None) -> World:
    return World(arena(full=2, sliding=3, state=1, slabs=3, caps=caps), caps)


def full_of_holes(caps: tuple[int | None, ...] | None) -> World:
    """Two slabs of full pages, one page each, the third slab with a window page: a state needs a move."""
    world = empty(caps)
    owner = _hold(world, 4, 1, 0)
    world.free(owner, 0, owner.handles[0][1:3])
    world.arena.shrink(owner.grant, owner.grant.held)
    return world


def full_of_cache(caps: tuple[int | None, ...] | None) -> World:
    """Everything cached except one page in each of two slabs."""
    world = empty(caps)
    owner = _hold(world, 4, 3, 0)
    world.cache(owner, 0, owner.handles[0][1:3])
    world.cache(owner, 1, owner.handles[1][:2])
    world.arena.shrink(owner.grant, owner.grant.held)
    return world


def scattered_pins(caps: tuple[int | None, ...] | None) -> World:
    """Two held pages in two slabs, one pinned, neighbours cached: pinning the other must gather."""
    world = empty(caps)
    owner = _hold(world, 4, 0, 0)
    world.cache(owner, 0, owner.handles[0][1:3])
    world.arena.shrink(owner.grant, owner.grant.held)
    world.pin([[owner.handles[0][0]], [], []])
    return world


def _hold(world: World, *pages: int) -> Holding:
    holding = world.reserve(Demand(pages))
    assert holding is not None
    world.commit_all()
    return holding


STARTS = {"empty": empty, "holes": full_of_holes, "cache": full_of_cache, "pins": scattered_pins}


def histories(start: World, depth: int) -> Iterator[tuple[tuple[str, ...], World]]:
    """Yield every world that a history of at most `depth` acts leads to, with the shortest such history, once each."""
    seen = {start.fingerprint()}
    frontier = deque([((), pickle.dumps(start))])
    while frontier:
        done, state = frontier.popleft()
        for name, act in ACTS.items():
            world: World = pickle.loads(state)
            yes_before = [demand for demand in GRID if world.arena.fits(demand)] if name in FREEING else []
            if not act(world):
                continue
            lost = [demand for demand in yes_before if not world.arena.fits(demand)]
            assert not lost, f"L4: after {(*done, name)} {lost} no longer fit"
            fingerprint = world.fingerprint()
            if fingerprint in seen:
                continue
            seen.add(fingerprint)
            yield (*done, name), world
            if len(done) + 1 < depth:
                frontier.append(((*done, name), pickle.dumps(world)))


def check_border(world: World) -> None:
    """The most of each pool that fits can be placed, one page more cannot."""
    key = (tuple(world.held()), tuple(world.promised()), tuple(map(frozenset, world.pinned_places())), world.caps)
    for pool in range(3):
        most = world.arena.most(pool, NOTHING)
        for more, possible in ((most, True), (most + 1, False)):
            demand = Demand(more if p == pool else 0 for p in range(3))
            assert world.arena.fits(demand) == possible
            assert oracle(key, demand, world) == possible, f"{more} more pages of pool {pool}"


def oracle(key: object, demand: Demand, world: World) -> bool:
    """`can_place`, remembered by all that it depends on."""
    if (key, demand) not in ANSWERS:
        ANSWERS[key, demand] = can_place(world, demand)
    return ANSWERS[key, demand]


ANSWERS: dict[tuple[object, Demand], bool] = {}


def explore(start: str, policy: str, depth: int) -> int:
    count = 0
    for done, world in histories(STARTS[start](CAPS[policy]), depth):
        try:
            world.check()
            check_border(world)
            world.check_every_grant_commits()
        except Exception as error:
            raise AssertionError(f"after {done}: {error}") from error
        count += 1
    return count


def explore_everything(depth: int) -> None:
    """Explore all starts, the richest first, one act deeper each time: a fault is found sooner so."""
    for reached, start, policy in itertools.product(range(1, depth + 1), reversed(STARTS), CAPS):
        explore(start, policy, reached)


@pytest.mark.parametrize(("policy", "depth"), [("shared", 4), ("capped", 3)])
@pytest.mark.parametrize("start", STARTS)
def test_all_laws_hold_after_every_short_history(start, policy, depth):
    assert explore(start, policy, depth) >= 26


@pytest.mark.parametrize("policy", CAPS)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.laws
@pytest.mark.timeout(3600)
def test_all_laws_hold_after_every_longer_history(start, policy, record_property):
    depth = (6 if start == "empty" else 5) - (policy == "capped")
    count = explore(start, policy, depth)
    record_property("explored", f"{count} worlds, every history of up to {depth} acts")
    assert count > 400


# Each fault was made, or could be, and breaks one law. The worlds must notice every one.


def promises_are_forgotten(patch):
    patch.setattr(
        Budget, "fits", lambda self, extra: self.slabs_needed(map(int.__add__, self.held, extra)) <= self.slabs
    )


def equality_does_not_fit(patch):
    def fits(self, extra):
        return self._allows(self.slabs_by_pool(self._with(extra))) and self.slabs_needed(self._with(extra)) < self.slabs

    patch.setattr(Budget, "fits", fits)


def demands_are_rounded_twice(patch):
    def fits(self, extra):
        taken = self.slabs_by_pool(map(int.__add__, self.held, self.promised))
        return self._allows(
            [need + ceil_div(more, k) for need, more, k in zip(taken, extra, self.pages_per_slab, strict=True)]
        )

    patch.setattr(Budget, "fits", fits)


def pins_do_not_count(patch):
    def fits(self, extra):
        return self._allows(list(map(ceil_div, self._with(extra), self.pages_per_slab)))

    patch.setattr(Budget, "fits", fits)


def caps_do_not_count(patch):
    patch.setattr(Budget, "fits", lambda self, extra: self.slabs_needed(self._with(extra)) <= self.slabs)


def cached_pages_count_against_a_demand(patch):
    patch.setattr(Budget, "fits", Budget.fits_untouched)


def pins_never_gather(patch):
    enforce = pins._try_enforce

    def always(pool, budget, index):
        promised, budget.promised = budget.promised, [10**6] * len(budget.promised)
        done = enforce(pool, budget, index)
        budget.promised = promised
        return done

    patch.setattr(pins, "_try_enforce", always)


def pinned_slabs_are_vacated(patch):
    def emptiest(self, kept):
        return [slab for slab in self.owned_slabs() if slab not in set(kept)]

    patch.setattr(Pool, "emptiest", emptiest)


def a_pool_can_only_evict_itself(patch):
    def plan(pressure):
        alone = dataclasses.replace(pressure, cached=(0, *pressure.cached[1:]))
        return reclaim.reclaim_plan(alone)

    patch.setattr(moves, "reclaim_plan", plan)


def a_transfer_gives_the_promise_back(patch):
    patch.setattr(Grant, "hand_over", Grant.pay)


def moves_go_into_vacated_slabs(patch):
    patch.setattr(Pool, "hide", lambda self, slabs: None)


def handles_stay_behind(patch):
    patch.setattr(Pool, "swap", lambda self, sources, targets: None)


FAULTS = [
    promises_are_forgotten, equality_does_not_fit, demands_are_rounded_twice, pins_do_not_count, caps_do_not_count,
    cached_pages_count_against_a_demand, pins_never_gather, pinned_slabs_are_vacated, a_pool_can_only_evict_itself,
    a_transfer_gives_the_promise_back, moves_go_into_vacated_slabs, handles_stay_behind,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_worlds_notice(fault, monkeypatch):
    fault(monkeypatch)
    ANSWERS.clear()
    with pytest.raises((AssertionError, InvariantError, KeyError)):
        explore_everything(depth=3)

"""Builders for arenas of a few slabs, fake owners for their pages, and the oracle of what fits."""

from __future__ import annotations

import itertools
import math
import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from hypothesis import HealthCheck, Phase, settings

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.grant import Commit, Grant, Handles, Move, Order, Pin, Refusal
from halocline.memory.layout import ArenaLayout, PoolLayout
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State, describe


def layout(
    *,
    full: int | None = None,
    sliding: int | None = None,
    chunked: int | None = None,
    state: int | None = None,
    slabs: int,
    page_tokens: int = 16,
    window_tokens: int = 64,
) -> ArenaLayout:
    """Make a layout by hand: each number is the pages_per_slab of that pool; pools come in the order of the names."""
    kinds: list[tuple[Retention, int | None, int]] = [
        (Full(), full, page_tokens),
        (Sliding(window_tokens), sliding, page_tokens),
        (Chunked(window_tokens), chunked, page_tokens),
        (State(), state, 1),
    ]
    present = [(kind, per_slab, tokens) for kind, per_slab, tokens in kinds if per_slab is not None]
    slab_bytes = 64 * math.lcm(*(per_slab for _, per_slab, _ in present))
    pools = tuple(_pool(kind, per_slab, tokens, slab_bytes) for kind, per_slab, tokens in present)
    return ArenaLayout(pools, slab_bytes, slabs, slabs * slab_bytes)


def arena(*, slabs: int, caps: tuple[int | None, ...] | None = None, **kinds: int) -> Arena:
    """Make an arena; `kinds` are what `layout` takes."""
    return Arena(layout(slabs=slabs, **kinds), caps)


def _pool(retention: Retention, per_slab: int, page_tokens: int, slab_bytes: int) -> PoolLayout:
    stride = slab_bytes // per_slab
    return PoolLayout(describe(retention), retention, (), page_tokens, stride, per_slab, stride)


def profile(examples: int, steps: int = 50) -> settings:
    """Return the settings of a property test: no deadline; in CI no randomness and no shrinking."""
    in_ci = bool(os.environ.get("CI"))
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=in_ci,
        database=None if in_ci else settings.default.database,
        phases=phases if in_ci else [*phases, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        print_blob=True,
    )


def can_place(world: World, extra: Demand) -> bool:
    """Search for a placement of all held, promised and `extra` pages: the oracle of `fits`, which knows no formula.

    It may move what is not pinned in force and evict what is not locked. It deals the slabs out to the pools in every
    way, pinned pages keeping their slots, and looks whether the slots that are left are enough for the other pages.
    """
    pinned = world.pinned_places()
    loose = [held - len(places) for held, places in zip(world.held(), pinned, strict=True)]
    pages = list(map(sum, zip(loose, world.promised(), extra, strict=True)))
    shapes = world.arena.layout.pools
    owners = [{page // pool.pages_per_slab for page in places} for places, pool in zip(pinned, shapes, strict=True)]
    anybody = range(-1 if world.caps else 0, world.pools)  # -1: nobody's, where caps may leave slabs over
    choices = [
        [pool for pool, slabs in enumerate(owners) if slab in slabs] or anybody
        for slab in range(world.arena.layout.slabs)
    ]
    return any(_holds(world, dealt, pinned, pages) for dealt in itertools.product(*choices))


def _holds(world: World, dealt: tuple[int, ...], pinned: list[set[int]], pages: list[int]) -> bool:
    for pool, shape in enumerate(world.arena.layout.pools):
        mine = [slab for slab, owner in enumerate(dealt) if owner == pool]
        if world.caps is not None and world.caps[pool] is not None and len(mine) > world.caps[pool]:
            return False
        slots = {slab * shape.pages_per_slab + at for slab in mine for at in range(shape.pages_per_slab)}
        if len(slots - pinned[pool]) < pages[pool]:
            return False
    return True


@dataclass(eq=False)
class Holding:
    """What a fake owner knows of its grant: the handles it was given."""

    grant: Grant
    handles: list[list[int]]


class World:
    """An arena with fake owners: requests, a cache, transfers, and a backend that really moves bytes.

    Every act is carried out on the arena and on a naive model; `check` compares the two. `memory` is the arena's bytes
    in units that divide every page: each live page is filled with its handle, so that any wrong move, any overlap and
    any page given out twice shows as a wrong content.
    """

    def __init__(self, arena: Arena, caps: tuple[int | None, ...] | None = None) -> None:
        self.arena = arena
        self.caps = caps
        self.pools = len(arena.layout.pools)
        self.holdings: list[Holding] = []
        self.cached: list[list[int]] = [[] for _ in range(self.pools)]
        """In the order of eviction."""
        self.locked: list[list[int]] = [[] for _ in range(self.pools)]
        self.transfer: list[dict[int, str]] = [{} for _ in range(self.pools)]
        """Handle -> what becomes of it when its last pin ends."""
        self.pins: list[Pin] = []
        self.units = math.lcm(*(pool.pages_per_slab for pool in arena.layout.pools))
        self.memory = np.full(arena.layout.slabs * self.units, -1, np.int64)
        self.moves = self.evictions = self.deferrals = 0

    # ---- the model's own counts

    def held(self) -> list[int]:
        counts = [len(locked) + len(transfer) for locked, transfer in zip(self.locked, self.transfer, strict=True)]
        return [n + sum(len(holding.handles[pool]) for holding in self.holdings) for pool, n in enumerate(counts)]

    def promised(self) -> list[int]:
        return [sum(holding.grant.room[pool] for holding in self.holdings) for pool in range(self.pools)]

    def live(self, pool: int) -> list[int]:
        held = [handle for holding in self.holdings for handle in holding.handles[pool]]
        return held + self.cached[pool] + self.locked[pool] + list(self.transfer[pool])

    def locked_copy(self) -> list[list[int]]:
        return [list(locked) for locked in self.locked]

    def claims(self, pool: int) -> set[int]:
        return {handle for pin in self.pins for handle in pin.handles[pool].tolist()}

    def pinned_places(self) -> list[set[int]]:
        """Pages, per pool, that pins in force keep where they are."""
        places: list[set[int]] = []
        for pool in range(self.pools):
            handles = [h for pin in self.pins if pool not in pin.deferred for h in pin.handles[pool].tolist()]
            places.append(set(self.places(pool, handles)))
        return places

    def places(self, pool: int, handles: Sequence[int]) -> list[int]:
        return self.arena.physical(pool, as_handles(handles)).tolist()

    # ---- acts

    def reserve(self, demand: Demand, owner: str = "request") -> Holding | None:
        answer = self.arena.reserve(owner, demand)
        return self._granted(answer)

    def commit(self, orders: Sequence[tuple[Holding, Demand, Grant | None]]) -> Commit:
        before = [set(places) for places in self.pinned_places()]
        stays = [
            {handle: place for handle, place in self._where(pool).items() if place in before[pool]}
            for pool in range(self.pools)
        ]
        done = self.arena.commit([Order(holding.grant, pages, step) for holding, pages, step in orders])
        for pool, died in enumerate(done.evicted):
            count = len(died)
            assert sorted(died.tolist()) == sorted(set(died.tolist()) & set(self.cached[pool])), (
                "only cached pages are evicted"
            )
            self.cached[pool] = [handle for handle in self.cached[pool] if handle not in set(died.tolist())]
            self.evictions += count
        self._move(done.moves)
        for (holding, pages, _), handles in zip(orders, done.handles, strict=True):
            assert tuple(map(len, handles)) == tuple(pages), f"{pages} ordered, {handles} given"
            for pool, new in enumerate(handles):
                holding.handles[pool] += new.tolist()
                self._write(pool, new.tolist())
        for pool, kept in enumerate(stays):
            assert self.places(pool, list(kept)) == list(kept.values()), "a pinned page has moved"
        return done

    def commit_all(self) -> Commit:
        return self.commit([(holding, Demand(holding.grant.room), None) for holding in self.holdings])

    def free(self, holding: Holding, pool: int, handles: Sequence[int]) -> None:
        self.arena.free(holding.grant, pool, as_handles(handles))
        self._part(holding, pool, handles, "free")

    def cache(self, holding: Holding, pool: int, handles: Sequence[int]) -> None:
        self.arena.cache(holding.grant, pool, as_handles(handles))
        self._part(holding, pool, handles, "cached")

    def release(self, holding: Holding) -> None:
        self.arena.release(holding.grant)
        for pool in range(self.pools):
            self._part(holding, pool, list(holding.handles[pool]), "free")
        self.holdings.remove(holding)

    def evict(self, pool: int, handles: Sequence[int]) -> None:
        self.arena.evict(pool, as_handles(handles))
        self.cached[pool] = [handle for handle in self.cached[pool] if handle not in handles]

    def lock(self, handles: Sequence[Sequence[int]], demand: Demand) -> Holding | None:
        answer = self.arena.lock("locker", [as_handles(of_pool) for of_pool in handles], demand)
        holding = self._granted(answer)
        if holding is not None:
            for pool, of_pool in enumerate(handles):
                for handle in of_pool:
                    if self.transfer[pool].pop(handle, None) is None:
                        self.cached[pool].remove(handle)
                    self.locked[pool].append(handle)
        return holding

    def unlock(self, handles: Sequence[Sequence[int]], heir: Holding | None = None) -> None:
        self.arena.unlock([as_handles(of_pool) for of_pool in handles], None if heir is None else heir.grant)
        for pool, of_pool in enumerate(handles):
            claims = self.claims(pool)
            for handle in of_pool:
                self.locked[pool].remove(handle)
                if handle in claims:
                    self.transfer[pool][handle] = "cached"
                else:
                    self.cached[pool].append(handle)

    def pin(self, handles: Sequence[Sequence[int]]) -> Pin:
        pin = self.arena.pin("transfer", [as_handles(of_pool) for of_pool in handles])
        self.pins.append(pin)
        self.deferrals += bool(pin.deferred)
        return pin

    def unpin(self, pin: Pin) -> None:
        self.pins.remove(pin)
        self.arena.unpin(pin)
        for pool in range(self.pools):
            claims = self.claims(pool)
            for handle in [handle for handle in pin.handles[pool].tolist() if handle in self.transfer[pool]]:
                if handle not in claims and self.transfer[pool].pop(handle) == "cached":
                    self.cached[pool].append(handle)

    # ---- laws

    def check(self) -> None:
        """Raise unless the audit is clean, every live page has its own content and the counters fit the model."""
        assert self.arena.audit() == []
        assert self.arena.budget.held == self.held()
        assert self.arena.budget.promised == self.promised()
        assert self.arena.budget.cached == list(map(len, self.cached))
        for pool, shape in enumerate(self.arena.layout.pools):
            width = self.units // shape.pages_per_slab
            for handle, place in self._where(pool).items():
                content = self.memory[place * width : (place + 1) * width]
                assert (content == self._tag(pool, handle)).all(), f"page {place} of pool {pool} holds {content}"
            queued = self.arena.pools[pool].queue.waiting()
            assert self.arena.pools[pool].handle_of[queued].tolist() == self.cached[pool], (
                "the order of eviction differs"
            )

    def check_every_grant_commits(self) -> None:
        """L3: commit all that is promised, at once, on a copy."""
        copy = self.copy()
        copy.commit_all()
        copy.check()
        assert not copy.arena.awaits_commit, "a pin is still deferred after a commit"
        assert copy.promised() == [0] * self.pools

    def fingerprint(self) -> object:
        """Return all that decides what can happen next, free of the names of handles: equal ones behave alike."""
        grants = [
            (*holding.grant.demand, *holding.grant.held, *holding.grant.room, self._placed(holding.handles))
            for holding in self.holdings
        ]
        fates = tuple(tuple(transfer.values()) for transfer in self.transfer)
        pins = [(self._placed(pin.handles), pin.deferred) for pin in self.pins]
        shelves = tuple(tuple(pool.owned_slabs()) for pool in self.arena.pools)
        pages = (self._placed(self.cached), self._placed(self.locked), self._placed(self.transfer))
        return tuple(grants), tuple(pins), fates, shelves, pages, tuple(self.arena.stock.free)

    def copy(self) -> World:
        return pickle.loads(pickle.dumps(self))

    # ---- workings

    def _granted(self, answer: Grant | Refusal) -> Holding | None:
        if isinstance(answer, Refusal):
            assert answer.slabs_missing > 0
            return None
        holding = Holding(answer, [[] for _ in range(self.pools)])
        self.holdings.append(holding)
        return holding

    def _part(self, holding: Holding, pool: int, handles: Sequence[int], fate: str) -> None:
        claims = self.claims(pool)
        for handle in handles:
            holding.handles[pool].remove(handle)
            if handle in claims:
                self.transfer[pool][handle] = fate
            elif fate == "cached":
                self.cached[pool].append(handle)

    def _placed(self, handles: Sequence[Iterable[int]]) -> object:
        return tuple(tuple(self.places(pool, list(of_pool))) for pool, of_pool in enumerate(handles))

    def _where(self, pool: int) -> dict[int, int]:
        live = self.live(pool)
        return dict(zip(live, self.places(pool, live), strict=True))

    def _tag(self, pool: int, handle: int) -> int:
        return handle * self.pools + pool

    def _write(self, pool: int, handles: Sequence[int]) -> None:
        width = self.units // self.arena.layout.pools[pool].pages_per_slab
        for handle, place in zip(handles, self.places(pool, handles), strict=True):
            self.memory[place * width : (place + 1) * width] = self._tag(pool, handle)

    def _move(self, moves: Sequence[Move]) -> None:
        # One parallel pass: sources and targets are disjoint, so the order cannot matter; the worst one is taken.
        sources = {(move.pool, move.source) for move in moves}
        targets = {(move.pool, move.target) for move in moves}
        assert len(sources) == len(targets) == len(moves), "two moves share a source or a target"
        assert not self._units(sources) & self._units(targets), "a source and a target overlap"
        for move in reversed(moves):
            width = self.units // self.arena.layout.pools[move.pool].pages_per_slab
            content = self.memory[move.source * width : (move.source + 1) * width]
            self.memory[move.target * width : (move.target + 1) * width] = content
        self.moves += len(moves)

    def _units(self, places: set[tuple[int, int]]) -> set[int]:
        widths = [self.units // pool.pages_per_slab for pool in self.arena.layout.pools]
        return {unit for pool, page in places for unit in range(page * widths[pool], (page + 1) * widths[pool])}


def as_handles(handles: Sequence[int]) -> Handles:
    return np.asarray(handles, np.int64)


def crowded(random: Random, caps: tuple[int | None, ...] | None = None) -> World:
    """Make a small world of three pools, full of held and cached pages with holes between them."""
    per_slab = [random.choice((1, 2, 3, 4)), random.choice((1, 2, 3)), random.choice((1, 2))]
    slabs = random.randint(2, 6)
    world = World(arena(full=per_slab[0], sliding=per_slab[1], state=per_slab[2], slabs=slabs, caps=caps), caps)
    for pool in random.sample(range(3), 3):
        most = world.arena.most(pool, Demand((0, 0, 0)))
        count = random.randint(most // 2, most)
        holding = world.reserve(Demand(count if p == pool else 0 for p in range(3)))
        world.commit_all()
        shuffled = random.sample(holding.handles[pool], count)
        freed = random.randint(0, count)
        cached = random.randint(freed, count)
        world.free(holding, pool, shuffled[:freed])
        world.cache(holding, pool, shuffled[freed:cached])
        world.arena.shrink(holding.grant, holding.grant.held)
    return world


FREEING_ACTS = ("free", "cache", "release", "unlock", "unpin", "shrink", "evict")
ACTS = (*FREEING_ACTS, "reserve", "reserve", "extend", "commit", "commit", "commit all", "lock", "pin", "pin", "borrow")


def act(world: World, random: Random) -> str:
    """Do one random act, or nothing where it does not apply; return its name."""
    name = random.choice(ACTS)
    demand = Demand(random.randint(0, 3) for _ in range(world.pools))
    holding = random.choice(world.holdings) if world.holdings else None
    pool = random.randrange(world.pools)

    def some(handles: Sequence[int], most: int = 99) -> list[int]:
        return random.sample(list(handles), random.randint(0, min(most, len(handles))))

    match name:
        case "reserve":
            world.reserve(demand)
        case "extend" if holding:
            world.arena.extend(holding.grant, holding.grant.demand.plus(demand))
        case "shrink" if holding:
            less = Demand(random.randint(0, room) for room in holding.grant.room)
            world.arena.shrink(holding.grant, holding.grant.demand.minus(less))
        case "commit":
            world.commit([(h, Demand(random.randint(0, room) for room in h.grant.room), None) for h in world.holdings])
        case "commit all":
            world.commit_all()
        case "borrow" if len(world.holdings) > 1:
            borrower, lender = random.sample(world.holdings, 2)
            beyond = [0] * world.pools if lender.grant.loans else lender.grant.room
            pages = Demand(
                random.randint(0, room + more) for room, more in zip(borrower.grant.room, beyond, strict=True)
            )
            world.commit([(borrower, pages, lender.grant)])
        case "free" if holding:
            world.free(holding, pool, some(holding.handles[pool]))
        case "cache" if holding:
            world.cache(holding, pool, some(holding.handles[pool]))
        case "release" if holding and not any(holding.grant.lent):
            world.release(holding)
        case "evict":
            world.evict(pool, some(world.cached[pool], 2))
        case "lock":
            kept = [[h for h, fate in transfer.items() if fate == "cached"] for transfer in world.transfer]
            world.lock([some(cached + more) for cached, more in zip(world.cached, kept, strict=True)], demand)
        case "unlock":
            world.unlock([some(locked) for locked in world.locked], random.choice([holding, None]))
        case "pin":
            held = [
                world.locked[p] + [h for owner in world.holdings for h in owner.handles[p]] for p in range(world.pools)
            ]
            world.pin([some(handles, 2) for handles in held])
        case "unpin" if world.pins:
            world.unpin(random.choice(world.pins))
    return name

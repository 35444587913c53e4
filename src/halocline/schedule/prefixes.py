"""Where scheduler and prefix cache meet: how requests come in hot, give the tree what they compute, and leave.

    pages of a request     0 ........... lock.first_page ......... own_from ......... end of the table
    full pool              |the tree's, locked as a path ..............|own ............|
    window pool                          |the tree's, locked page by page|own ............|

What a request computes becomes the tree's as it goes on, see `halocline.schedule.handover`. Whoever leaves gives the
rest first, then ends its lock, then its grant.

The price of a request is the same hot and cold; what locked pages cover of it, its grant need not hold:

    price = grant's demand + locked full pages + window pages charged to the lock - charges owed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from halocline.cache.keys import Key, common_granules
from halocline.cache.match import Match
from halocline.cache.tier import Hold, Tier
from halocline.cache.tree import Tree
from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.memory.demand import Demand, zero
from halocline.memory.grant import NO_HANDLES, Handles, Move, Pin, Refusal
from halocline.memory.host import HostArena, HostCopies, HostCosts
from halocline.memory.pool import CACHED, INDEX_MASK, TRANSFER_CACHED
from halocline.memory.retention import Full, State
from halocline.schedule.chunk import Chunk
from halocline.schedule.figures import CacheFigures, TierFigures
from halocline.schedule.handover import Handover, key_of, lock_of
from halocline.schedule.holding import Holding, Keeper
from halocline.schedule.leaving import Leaving
from halocline.schedule.request import Request
from halocline.schedule.sharing import Awaited, Entrance, FitsAlone, Standing, Stop, holding_of, may_fall
from halocline.step import Copy
from halocline.units import floor_to


class Prefixes:
    """The one user of the tree: `Sharing` with pages that many read."""

    def __init__(
        self, arena: Arena, keeper: Keeper, host: HostArena | None = None, costs: HostCosts | None = None
    ) -> None:
        self._arena = arena
        self._keeper = keeper
        self._nothing = zero(len(arena.layout.pools))
        self.tree = Tree(arena)
        self.tier = None if host is None else Tier(self.tree, host, costs)
        """The second level, where there is a host arena."""
        self._loading: dict[str, tuple[Holding, Hold]] = {}
        """By request: loads that no applied step has carried out; of who receives, until the rest has landed."""
        self._handover = Handover(arena, keeper, self.tree)
        self._leaving = Leaving(arena, self.tree)
        self._granule_tokens = arena.layout.granule_tokens
        pools = list(enumerate(arena.layout.pools))
        self._full = [(number, pool.page_tokens) for number, pool in pools if isinstance(pool.retention, Full)]
        self._windows = [number for number, pool in pools if not isinstance(pool.retention, Full | State)]
        self._states = [number for number, pool in pools if isinstance(pool.retention, State)]
        self._lookups: dict[str, int] = {}
        self._verdicts: dict[str, int] = {}
        self._agreed_of: Request | None = None
        self._agreed: dict[tuple[str, int, int], int] = {}
        """How far the last one who asked agrees with others: (id, length of its history, of his own)."""
        self._counts = dict.fromkeys(("looked_up", "hit", "loaded", "shortened", "resumed", "waited"), 0)
        self._evicted = [0] * len(pools)
        self.changes = 0
        """Locks and insertions let others pay less: what is locked already costs them nothing. Locks that end and
        evictions only let them pay more, but for a checkpoint: to copy it costs a state more than to begin cold."""

    # ---- coming in

    def arrived(self, request: Request, packed: bytes) -> None:
        """Remember the prompt as the tree reads it."""
        request.prefix = Key(packed, request.prompt_tokens, request.namespace)

    def entrance(self, request: Request, fits_alone: FitsAlone) -> Entrance:
        """Return the longest cached boundary whose whole life an empty arena holds beside the floor."""
        found = self.tree.match(key_of(request))
        hot = self._hot(found, fits_alone)
        if self.tier is None:
            return hot
        offer = self.tier.offer(found, len(request.history) if request.route == "receive" else None)
        if offer.verdict == "host" and fits_alone(offer.boundary_tokens, self._nothing):
            return Entrance(offer.boundary_tokens, found, offer=offer)
        return replace(hot, offer=offer)

    def _hot(self, found: Match, fits_alone: FitsAlone) -> Entrance:
        # On the device alone.
        for start in self._boundaries(found):
            if start == 0 or fits_alone(start, self.tree.hot_demand(start, self._nothing)):
                return Entrance(start, found)
            if fits_alone(start, self.tree.hot_demand(start, self._nothing, hand_over=True)):
                return Entrance(start, found, hands_over=True)
        raise AssertionError("0 is always a boundary")

    def standing(self, request: Request) -> Standing | None:
        """Return on what of the tree it depends how much `request` asks for; None beside a second level."""
        if self.tier is not None:
            return None
        found, less = self.tree.standing(key_of(request))
        return None if less is None else Standing(found.boundary_tokens, found.full_tokens, less)

    def awaited(self, request: Request, entrance: Entrance, prefilling: Iterable[Request]) -> Awaited | None:
        """Return who of `prefilling` will bring the longest boundary beyond the entrance, None if nobody."""
        key, best = key_of(request), None
        if self._agreed_of is not request:
            self._agreed_of, self._agreed = request, {}
        for other in prefilling:
            # Neither history grows while one waits and the other prefills; the one is asked for in every step.
            pair = other.id, len(other.history), key.tokens
            boundary = self._agreed.get(pair, -1)
            if boundary < 0:
                boundary = self._agreed[pair] = self._agree(key, other)
            if boundary > max(entrance.start, other.computed, best.boundary if best is not None else 0):
                best = Awaited(other, boundary)
        return best

    def _agree(self, key: Key, other: Request) -> int:
        # The longest boundary that `other` will leave and `key` can resume at. States cannot be cut: all of it or none.
        if other.namespace != key.namespace:
            return 0
        tokens = self._granule_tokens
        unit, theirs = self.tree.shape.granule_bytes, key_of(other)
        most = min(key.tokens - 1, len(other.history)) // tokens
        agreed = common_granules(key.data[: most * unit], theirs.data, 0, unit) * tokens
        if self._states and agreed < floor_to(len(other.history), tokens):
            return 0
        return agreed

    def open(self, request: Request, entrance: Entrance, demand: Demand) -> Holding | Refusal:
        """Lock what resuming at the entrance reads and reserve the rest of `demand`; refused, nothing has changed."""
        assert entrance.found is not None, f"{request.id} enters without having asked the tree"
        # What comes from a copy on the host is not the tree's to lock: then only its full pages are.
        boundary = 0 if entrance.copy is not None or entrance.loads else entrance.start
        lock = self.tree.lock(entrance.found, boundary, request.id, demand, hand_over=entrance.hands_over)
        if isinstance(lock, Refusal):
            return lock
        self.changes += 1
        holding = Holding(lock.grant, len(self._arena.pools), lock)
        path, table = lock.node.path(), [NO_HANDLES] * len(self._arena.pools)
        for pool, _ in self._full:
            table[pool] = np.concatenate([NO_HANDLES, *(node.pages[pool] for node in path)])
        for pool in self._windows:
            table[pool] = lock.pages[pool].copy()
            holding.first_page[pool] = lock.first_page[pool]
        for pool in self._states:
            table[pool] = lock.handed[pool].copy()
        if self.tier is not None and entrance.offer is not None and entrance.loads:
            for pool in self._windows:  # its own pages begin where those that are loaded do
                holding.first_page[pool] = self.tree.first_page(pool, entrance.start)
            self._loading[request.id] = holding, self.tier.hold(entrance.offer, request.id, lock.full_tokens)
        self._keeper.begin_with(holding, table)
        return holding

    def entered(self, request: Request, entrance: Entrance) -> None:
        """Count an admission."""
        found = entrance.found
        assert found is not None, f"{request.id} entered without having asked the tree"
        counts = self._counts
        counts["shortened"] += entrance.start < found.boundary_tokens
        if request.retractions:
            counts["resumed"] += entrance.start
            return
        counts["waited"] += request.waits > 0
        counts["looked_up"] += len(request.history)
        counts["hit"] += entrance.start
        if entrance.offer is not None:
            verdict = entrance.offer.verdict
            self._verdicts[verdict] = self._verdicts.get(verdict, 0) + 1
            counts["loaded"] += entrance.start - entrance.offer.device_tokens if entrance.loads else 0
        self._lookups[found.reason] = self._lookups.get(found.reason, 0) + 1

    # ---- what a lock covers

    def covered(self, holding: Holding) -> Demand:
        """Return what of a request's price the tree holds for it, less the charges that it still owes."""
        lock = lock_of(holding)
        pages = [-owed for owed in lock.owed]
        for pool, page_tokens in self._full:
            pages[pool] += lock.full_tokens // page_tokens
        for pool in self._windows:
            pages[pool] += lock.charged[pool]
        return Demand(pages)

    def reserved(self, holding: Holding) -> Demand:
        """Return the room that is kept for locked pages charged to others: it may have to pay for them any moment."""
        if not any(self.tree.locks.waiting):
            return self._nothing
        lock, pages = lock_of(holding), list(self._nothing)
        for pool in self._windows:
            pages[pool] = len(lock.pages[pool]) - lock.charged[pool]
        return Demand(pages)

    def given_back(self, requests: Sequence[Request]) -> Demand:
        """Return what can be granted anew when all of `requests` leave: grants, and pages that only they lock."""
        return self._leaving.given_back(requests)

    # ---- moving on

    def settle(self, moved: Sequence[Request]) -> None:
        """Take requests forward to what they have computed: insert, let windows slide, then let grants fall."""
        if not moved:
            return
        holdings = [holding_of(request) for request in moved]
        for holding in holdings if self._states else ():
            self.tree.drop_states(lock_of(holding))
        self.changes += self._handover.advance(moved, holdings)
        for request, holding in zip(moved, holdings, strict=True) if self._loading else ():
            _, hold = self._loading.pop(request.id, (None, None))
            if self.tier is not None and hold is not None:
                self.tier.arrive(hold, lock_of(holding), key_of(request))
        for request, holding in zip(moved, holdings, strict=True):
            if any(lock_of(holding).owed):
                self.tree.locks.pay(lock_of(holding))
            if may_fall(self._keeper, request):
                covered = self.covered(holding)
                self._keeper.reprice(holding, request.resumed_at, request.end, request.computed, covered)

    def leave(self, request: Request, holding: Holding, *, keep: bool) -> None:
        """Give the tree what `request` has computed, if it is to be kept; then end its lock and its grant."""
        lock = lock_of(holding)
        self.changes += 1
        _, hold = self._loading.pop(request.id, (None, None))
        if self.tier is not None and hold is not None:  # what it begins with is not loaded yet, or what follows lacks
            self.tier.end(hold)
        elif keep and request.computed > lock.resumed_tokens:
            self._handover.finish(request, holding)
        elif not request.is_running:
            self._handover.undo(request, holding)
        self.tree.close(lock)
        self._keeper.close(holding)

    def pass_to(self, holding: Holding, tokens: int) -> None:
        """End the locks of the checkpoint and of the window pages that position `tokens` does not read."""
        self.tree.pass_to(lock_of(holding), tokens)

    def unpin(self, pin: Pin) -> None:
        """End a pin: pages of the tree that only it has kept are evictable."""
        loose = []
        for pool, handles in zip(self._arena.pools, pin.handles, strict=True):
            index = handles & INDEX_MASK
            loose.append(handles[(pool.state[index] == TRANSFER_CACHED) & (pool.claims[index] == 1)])
        self._arena.unpin(pin)
        self.tree.loosened(loose)

    def next_stop(self, request: Request, holding: Holding, start: int) -> Stop:
        """Return the next boundary at which states are worth a checkpoint, else the end of the history.

        A state cannot be cut, so chunks end where somebody may resume: at the last granule of the history, and where
        this prompt leaves what others have brought, which is the branch that its coming has revealed.
        """
        last = len(request.history)
        if self._states:
            revealed = min(lock_of(holding).revealed_tokens, last - 1)
            for boundary in sorted((floor_to(revealed, self._granule_tokens), floor_to(last, self._granule_tokens))):
                if boundary > start:
                    return Stop(boundary, self._keeper.states)
        return Stop(last)

    def copies(self, chunks: Sequence[Chunk]) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """Return checkpoints to working states for those who begin hot, and the other way where one is to be saved."""
        if not self._states:
            return (), ()
        copies: list[Copy] = []
        saves: list[Copy] = []
        for chunk in chunks:
            holding = holding_of(chunk.request)
            for pool in self._states:
                working = int(self._keeper.places(holding, pool)[0])
                locked = self._arena.physical(pool, lock_of(holding).pages[pool]).tolist()
                copies += [Copy(pool, source, working) for source in locked]
                saved = self._arena.physical(pool, holding.saved[pool]).tolist()
                saves += [Copy(pool, working, target) for target in saved]
        return tuple(copies), tuple(saves)

    # ---- the arena's word

    def forget(self, evicted: Sequence[Handles], moves: Sequence[Move]) -> None:
        """Take pages that a commit evicted out of the tree, before anything else is asked of it.

        What of them is worth it is written back to the second level, as work of the step that this commit is of.
        """
        if not any(map(len, evicted)):
            return
        if self.tier is None:
            self._count_dead(evicted, self.tree.forget(evicted))
        else:
            self._count_dead(evicted, self.tier.forget(evicted, moves))
            self.changes += 1  # who resumes later asks for less

    def _count_dead(self, evicted: Sequence[Handles], beyond: Sequence[Handles]) -> None:
        self.changes += bool(self._states)
        for pool, (died, more) in enumerate(zip(evicted, beyond, strict=True)):
            self._evicted[pool] += len(died) + len(more)

    def distrust(self) -> None:
        """Evict everything that is cached: its pages may have been moved half way.

        Only transfers lock anything now, and what they lock is pinned, so it was not moved.
        """
        died = []
        for number, pool in enumerate(self._arena.pools):
            handles: Handles = pool.handle_of[np.flatnonzero(pool.state == CACHED)]
            self._arena.evict(number, handles)
            died.append(handles)
        self._count_dead(died, self.tree.forget(died))  # nothing of it is worth writing back

    # ---- the second level

    def host_loads(self) -> tuple[HostCopies, ...]:
        """Return what those who have just come in begin with, from the host to their own pages."""
        work: list[HostCopies] = []
        for holding, hold in self._loading.values():
            if self.tier is not None and not hold.is_planned:
                places = [self._keeper.places(holding, pool) for pool in range(len(holding.handles))]
                work += self.tier.loads(hold, list(zip(holding.first_page, places, strict=True)))
        return tuple(work)

    def host_loaded(self) -> None:
        """End the locks on the host of loads that are over: of those who go on to receive, all others have ended."""
        for _, hold in self._loading.values():
            if self.tier is not None and hold.is_planned:
                self.tier.end(hold)

    def load_of(self, request: Request) -> Hold | None:
        """Return what of the host `request` begins with, until it has computed on; None without a load."""
        _, hold = self._loading.get(request.id, (None, None))
        return hold

    def host_evicted(self, evicted: Sequence[Handles]) -> None:
        """Forget pages of the host arena that gave way to copies of others."""
        if self.tier is not None:
            self.tier.host_evicted(evicted)

    def host_distrust(self) -> None:
        """Keep nothing on the host: it may not have been copied."""
        if self.tier is not None:
            self.tier.distrust()

    # ---- what others may ask

    def figures(self) -> CacheFigures:
        """Return what the cache has done since the start."""
        counts = self._counts
        return CacheFigures(
            looked_up_tokens=counts["looked_up"],
            hit_tokens=counts["hit"],
            lookups=dict(self._lookups),
            shortened=counts["shortened"],
            resumed_tokens=counts["resumed"],
            waited=counts["waited"],
            evicted_pages=tuple(self._evicted),
            nodes=len(self.tree.forest.nodes),
            cached_bytes=self._arena.figures().cached_bytes,
            tier=self._tier_figures(),
        )

    def _tier_figures(self) -> TierFigures | None:
        if self.tier is None:
            return None
        counts = self.tier.counts
        return TierFigures(
            hit_tokens=self._counts["loaded"],
            lookups=dict(self._verdicts),
            loads=counts.loads,
            loaded_bytes=counts.loaded_bytes,
            written=counts.written,
            written_bytes=counts.written_bytes,
            refused=counts.refused,
            nodes=len(self.tier.tree.forest.nodes),
            cached_bytes=self.tier.arena.figures().cached_bytes,
        )

    def audit(self) -> list[Violation]:
        """Recount the tree from scratch, and its second level."""
        return self.tree.audit() if self.tier is None else [*self.tree.audit(), *self.tier.audit()]

    # ---- small things

    def _boundaries(self, found: Match) -> Iterator[int]:
        # The longest one is known; the others are looked for when it will not do.
        yield found.boundary_tokens
        if found.boundary_tokens:
            yield from (start for start in self.tree.boundaries(found) if start < found.boundary_tokens)

"""The second level: what the device's tree loses, kept in the host's arena until somebody comes back for it.

    Commit.evicted ---> forget ---> written back            copies to the host, before the moves of the same step
    match (device) ---> offer  ---> hold ---> loads ---> end      copies to the device, before its forward

Both levels are the same code: a tree over an arena. So the host keeps whole paths, marks with their tails, and one
order of worth; it gives up what is worth least when it needs room, never exceeds its arena, and loses to whoever holds
a grant there (retracted decodes). A page is on both levels where a path has died on the device in part, and after a
load.

    positions            0 .............. full ............... b          b: a boundary that the host can resume
    full, device         |the tree's, locked|
    full, host           |..................|loaded ............|
    sliding, host                                    |loaded ...|          the last W - 1 positions before b
    state, host                                                 |loaded    becomes the working state

A request that is loaded enters as one that begins cold and has computed b tokens: what is loaded is its own pages,
priced and committed as such, and the tree's when the step is over. Nothing is loaded twice into the same pages: until
then the host's pages are locked, so that they are neither evicted nor written.

Whether a load is worth its bytes: bytes / bandwidth against tokens / speed. Worked example (Gemma 3 27B): 12,288 tokens
are 1,584 MiB; at 25 GB/s from the host that is 66 ms, at 5,000 tokens/s of prefill they are 2.5 s. A model with a
checkpoint of 73.7 MiB at b = 16: 3 ms either way.

A prompt that another worker computes is computed there from its beginning, whatever is loaded here; what a load saves
are bytes on the link. Its first decode reads at L, the prompt's end, so less is loaded than for computing from b on:

    sliding, host                  |not loaded|loaded|lands ...|      from floor_P(max(0, L - W + 1)) on
    state                                                 |lands      the one at L, and none at b

Worth it where bytes / bandwidth of copies is below bytes / bandwidth of links. Worked example (Gemma 3 27B, b = 12,288,
L = 12,400): 960 MiB of full pages and, from position 11,376 on, 57 sliding pages, 370.5 MiB: 56 ms at 25 GB/s instead
of 0.7 s at 2 GB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from halocline.cache.ghosts import digests
from halocline.cache.insert import Advance, Own
from halocline.cache.keys import Key
from halocline.cache.lock import Lock
from halocline.cache.match import Match
from halocline.cache.node import Node
from halocline.cache.tree import Tree
from halocline.cache.writeback import Dying, Obituary
from halocline.memory.audit import Violation
from halocline.memory.demand import Demand
from halocline.memory.grant import NO_HANDLES, Handles, Move, Refusal
from halocline.memory.host import HostArena, HostCopies, HostCosts
from halocline.memory.pool import CACHED, Places
from halocline.memory.retention import Sliding

Verdict = Literal["host", "no longer", "not worth it", "no room"]


@dataclass(frozen=True, slots=True)
class Offer:
    """What the host has of a prompt beyond the device. Stale after the next change of either tree."""

    key: Key
    """Of the prefix up to the boundary, with one token more."""
    boundary_tokens: int
    """Where computing could start after the load; the device's own boundary where nothing is loaded."""
    device_tokens: int
    """The device's own boundary."""
    verdict: Verdict
    """`host`: load it. `no longer`: it reaches no further than the device. `not worth it`: computing is faster. `no
    room`: its pages cannot be locked, because grants fill the host's arena."""
    bytes: int = 0
    """What would be loaded."""
    lands_at: int | None = None
    """The prompt's length where another worker sends the rest: only what its first decode reads is loaded."""


@dataclass(slots=True)
class Hold:
    """A load: what of the host is locked for it until it has been carried out."""

    boundary_tokens: int
    lock: Lock
    """On the host."""
    pages: tuple[Own, ...]
    """Per pool: the host's pages to load, in a row."""
    saved_tokens: int
    """What need not be computed beside what the device had."""
    is_planned: bool = False
    """Whether a step's plan has it."""
    is_over: bool = False
    """Whether it has been carried out, and nothing is locked for it any more."""


@dataclass(slots=True)
class TierCounts:
    """What the second level has done since the start."""

    written_bytes: int = 0
    written: int = 0
    """Boundaries written back."""
    refused: int = 0
    """Boundaries that were not, because grants fill the host's arena."""
    loaded_bytes: int = 0
    loads: int = 0
    loaded_tokens: int = 0
    """Tokens that did not have to be computed because of loads."""


class Tier:
    """The host's tree beside the device's."""

    def __init__(self, device: Tree, host: HostArena, costs: HostCosts | None = None) -> None:
        """Keep in `host` what `device` loses; without `costs` every load is worth its bytes."""
        arenas = (device.arena, host.arena)
        shapes = [[(pool.page_tokens, pool.stride_bytes) for pool in each.layout.pools] for each in arenas]
        assert shapes[0] == shapes[1], f"pages of the host {shapes[1]} are not those of the device {shapes[0]}"
        shape = device.shape
        self.device = device
        self.host = host
        self.arena = host.arena
        self.tree = Tree(host.arena, shape.granule_tokens, shape.granule_bytes)
        self.counts = TierCounts()
        self._shape = shape
        self._costs = costs
        self._obituary = Obituary(device)
        self._holds: dict[int, Hold] = {}

    # ---- questions

    def offer(self, found: Match, lands_at: int | None = None) -> Offer:
        """Return what the host has of the prompt of `found`, the device's match, beyond that. Changes nothing.

        `lands_at`: the length of a prompt that another worker computes, where it is one.
        """
        key, unit = found.key, self._shape.granule_bytes
        on_host = self.tree.match(key)
        boundary, device = on_host.boundary_tokens, found.boundary_tokens
        if boundary <= device:
            return Offer(key, device, device, "no longer")
        prefix = Key(key.data[: boundary // self._shape.granule_tokens * unit], boundary + 1, key.namespace)
        size = self.host.bytes_of(self._lacking(boundary, found.full_tokens, lands_at))
        if not self._is_worth(size, boundary, device, lands_at):
            return Offer(prefix, device, device, "not worth it", size, lands_at)
        if not self.arena.fits(self._read(boundary)):  # rather too much: what other loads lock counts twice
            return Offer(prefix, device, device, "no room", size, lands_at)
        return Offer(prefix, boundary, device, "host", size, lands_at)

    def _is_worth(self, size: int, boundary: int, device: int, lands_at: int | None) -> bool:
        if self._costs is None:
            return True
        if lands_at is None:
            return self._costs.is_worth(size, boundary - device)
        sent = [
            max(0, boundary // layout.page_tokens - max(self._first(pool, lands_at), device // layout.page_tokens))
            if layout.is_positional
            else 0
            for pool, layout in enumerate(self.arena.layout.pools)
        ]
        return self._costs.is_worth_sending(size, self.host.bytes_of(sent))

    def audit(self) -> list[Violation]:
        """Recount the host's tree, and that its locks are those of loads under way."""
        found = self.tree.audit()
        loads = {hold.lock.id for hold in self._holds.values()}
        if loads != self.tree.locks.open.keys():
            found.append(Violation("L5", f"{len(self.tree.locks.open)} locks on the host for {len(loads)} loads"))
        return found

    # ---- from the device to the host

    def forget(self, evicted: Sequence[Handles], moves: Sequence[Move]) -> list[Handles]:
        """Take what a commit evicted out of the device's tree, and write back what is worth it.

        In place of `Tree.forget`, whose answer it gives. The copies are the host's work (`HostArena.take_work`) of the
        same step, made before the `moves` of that commit.
        """
        dying = self._obituary.dying(evicted, moves) if any(map(len, evicted)) else []
        beyond = self.device.forget(evicted)
        for each in dying:
            self._write(each)
        return beyond

    def host_evicted(self, evicted: Sequence[Handles]) -> None:
        """Be told what a commit in the host's arena has evicted, before anything else is asked."""
        if any(map(len, evicted)):
            self.tree.forget(evicted)

    def _write(self, dying: Dying) -> None:
        boundary, runs = dying.granules * self._shape.granule_tokens, enumerate(dying.runs)
        found = self.tree.match(dying.key)
        is_there = found.boundary_tokens == boundary
        if is_there and not dying.is_marked:
            return
        lacking = [0 if is_there and pool not in self.tree.locks.full else len(run.places) for pool, run in runs]
        lock = self.tree.lock(found, 0, "write-back", Demand(lacking))
        if isinstance(lock, Refusal):
            self.counts.refused += 1
            return
        if not is_there:
            self._bring(dying, lock)
        self._mark(self.tree.forest.end_at(lock.node, dying.granules), dying, found.full_tokens)
        self.tree.close(lock)
        self.arena.release(lock.grant)

    def _bring(self, dying: Dying, lock: Lock) -> None:
        # Takes the pages that `lock` has reserved, and makes them the tree's. What of a tail was there already is
        # copied once more, and freed.
        boundary, own, places = dying.granules * self._shape.granule_tokens, [], []
        for pool, run in enumerate(dying.runs):
            first = run.first_page
            if pool in self.tree.locks.full:
                first = lock.full_tokens // self.arena.layout.pools[pool].page_tokens
            places.append(run.places[first - run.first_page :])
            own.append(first)
        done = self.host.store(lock.grant, places)
        self.host_evicted(done.evicted)
        taken = [Own(first, handles) for first, handles in zip(own, done.handles[0], strict=True)]
        self.tree.advance([Advance(lock, dying.key, boundary, boundary, taken)])
        self.counts.written += 1
        self.counts.written_bytes += self.host.bytes_of(list(map(len, places)))

    def _mark(self, node: Node, dying: Dying, had_tokens: int) -> None:
        # Its tail reaches as far back as the device's did: where the slack counts from follows from its first page.
        boundary, served = node.end * self._shape.granule_tokens, []
        for pool in self.tree.locks.windows:
            layout = self.arena.layout.pools[pool]
            first = dying.runs[pool].first_page * layout.page_tokens
            retention = layout.retention
            served.append(first + retention.window_tokens - 1 if isinstance(retention, Sliding) else first)
        serves = min([boundary, *served])
        had = had_tokens // self._shape.granule_tokens
        self.tree.marks.keep(node, dying.prefix, proven=dying.proven, resumed=had, serves_tokens=serves)

    # ---- from the host to the device

    def hold(self, offer: Offer, owner: str, full_tokens: int) -> Hold:
        """Lock what the load of `offer` reads: no byte moves before. `full_tokens`: up to where the device has full
        pages, which are not loaded."""
        assert offer.verdict == "host", f"{owner!r} loads what is {offer.verdict}"
        boundary = offer.boundary_tokens
        found = self.tree.match(offer.key)
        read = self._read(boundary)
        states = Demand(int(pool in self._shape.states) for pool in range(self._shape.pools))
        lock = self.tree.lock(found, boundary, owner, read.minus(states))  # a checkpoint stands in place of nothing
        assert not isinstance(lock, Refusal), f"the room for a load is gone: {lock}"
        if offer.lands_at is not None:  # nobody computes on from the boundary
            self.tree.pass_to(lock, offer.lands_at)
        path, pages = lock.node.path(), []
        for pool, layout in enumerate(self.arena.layout.pools):
            if pool in self.tree.locks.full:
                first, last = full_tokens // layout.page_tokens, boundary // layout.page_tokens
                handles = np.concatenate([NO_HANDLES, *(node.pages[pool] for node in path)])[first:last]
                pages.append(Own(first, handles))
            else:
                pages.append(Own(lock.first_page[pool], lock.pages[pool].copy()))
        hold = Hold(boundary, lock, tuple(pages), boundary - offer.device_tokens)
        self._holds[lock.id] = hold
        return hold

    def loads(self, hold: Hold, device: Sequence[tuple[int, Places]]) -> tuple[HostCopies, ...]:
        """Return the copies of `hold`; `device`: per pool the first page and the places of the request's pages.

        Both are places as they are now: to be asked after the step's last commit in either arena.
        """
        targets = []
        for run, (first, places) in zip(hold.pages, device, strict=True):
            begin = run.first_page - first if len(run.handles) else 0
            there = places[begin : begin + len(run.handles)]
            assert 0 <= begin <= len(places) - len(run.handles), f"{hold.lock.grant.owner!r} lacks pages for {run}"
            targets.append(there)
        hold.is_planned = True
        self.counts.loads += 1
        self.counts.loaded_bytes += self.host.bytes_of(list(map(len, targets)))
        return self.host.loads([run.handles for run in hold.pages], targets)

    def arrive(self, hold: Hold, lock: Lock, key: Key) -> None:
        """End `hold`: it has been carried out, and the request with `lock` has given the device's tree its pages."""
        granules = hold.boundary_tokens // self._shape.granule_tokens
        if lock.node.end >= granules:  # what was received in smaller pages is not the tree's yet
            node = self.device.forest.end_at(lock.node, granules)
            self.device.marks.use(node, digests(key, granules, self._shape.granule_bytes))
        self.counts.loaded_tokens += hold.saved_tokens
        self.end(hold)

    def end(self, hold: Hold) -> None:
        """End `hold`: the load has been carried out, or will never be. A second call does nothing."""
        if hold.is_over:
            return
        hold.is_over = True
        del self._holds[hold.lock.id]
        self.tree.close(hold.lock)
        self.arena.release(hold.lock.grant)

    def distrust(self) -> None:
        """Keep nothing: copies that were ordered were perhaps not made. Nobody loads anything any more."""
        died = []
        for number, pool in enumerate(self.arena.pools):
            handles: Handles = pool.handle_of[np.flatnonzero(pool.state == CACHED)]
            self.arena.evict(number, handles)
            died.append(handles)
        self.host_evicted(died)

    def _read(self, boundary: int) -> Demand:
        # The pages that resuming at `boundary` reads.
        pages = []
        for pool, layout in enumerate(self.arena.layout.pools):
            first = 0
            if pool in self.tree.locks.windows:
                first = self.tree.first_page(pool, boundary)
            pages.append(boundary // layout.page_tokens - first if layout.is_positional else 1)
        return Demand(pages)

    def _lacking(self, boundary: int, full_tokens: int, lands_at: int | None) -> list[int]:
        # The pages that are loaded where the device has full pages up to `full_tokens`.
        pages = list(self._read(boundary))
        for pool, layout in enumerate(self.arena.layout.pools):
            if pool in self.tree.locks.full:
                pages[pool] = max(0, pages[pool] - min(boundary, full_tokens) // layout.page_tokens)
            elif lands_at is not None:
                last = boundary // layout.page_tokens if layout.is_positional else 0
                pages[pool] = max(0, last - self._first(pool, lands_at))
        return pages

    def _first(self, pool: int, tokens: int) -> int:
        # The first page that position `tokens` reads.
        return self.tree.first_page(pool, tokens) if pool in self.tree.locks.windows else 0

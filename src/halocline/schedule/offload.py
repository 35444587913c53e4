"""What retracted requests keep in the host arena, and how they come back from there without computing again.

    retract    pages read at `computed`: |full ............|  |window's tail|  state  ----> host, noted for this step
    return     price from `computed` on:  |locked |own .....|  |own ........|  own    <---- host, with the first chunk

    tokens     0 ................ tree's, if any ............. computed ... history
                                                               ^ start: one token for a decode, and it goes on

A retraction never waits. The copy is noted for the step that is being planned, which carries it out before its moves:
what the pages hold is still what they held, whoever gets them. A copy is chosen when both ways of it take less time
than to compute its tokens again, and when it fits the quota, where copies of the prefix cache give way to it.

A request comes back in its turn, with the same price as everybody who starts at `computed`. Pages that the prefix cache
still has are locked and not loaded. A copy lives until the step that loads it has been applied, or until its request
ends; what a step that broke should have copied is not trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from halocline.memory.arena import Arena
from halocline.memory.audit import Violation, differ
from halocline.memory.demand import Demand
from halocline.memory.grant import Handles, Refusal
from halocline.memory.host import HostArena, HostCopies, HostCopy, HostCosts, HostWork, Places, read_span
from halocline.memory.retention import Full
from halocline.schedule.admission import Candidate, Gate
from halocline.schedule.figures import HostFigures
from halocline.schedule.holding import Holding, Keeper
from halocline.schedule.request import Request, State
from halocline.schedule.sharing import Entrance, Sharing

COPY_OF = "copy of "
"""In whose name the grants of copies stand: this and the request's id."""


class HostDesk:
    """Copies of retracted requests. Without a host arena it does nothing."""

    def __init__(
        self, arena: Arena, keeper: Keeper, sharing: Sharing, host: HostArena | None, costs: HostCosts
    ) -> None:
        self._arena = arena
        self._keeper = keeper
        self._sharing = sharing
        self._host = host
        self._costs = costs
        self._copies: dict[str, HostCopy] = {}
        """Of requests that wait."""
        self._loading: dict[str, HostCopy] = {}
        """Of requests that came back in the step that is outstanding or planned now."""
        self._loaded_pages = [0] * len(arena.layout.pools)
        self._offloaded_pages = [0] * len(arena.layout.pools)
        self._counts = dict.fromkeys(("offloaded", "restored", "refused", "dropped"), 0)
        self._tokens = dict.fromkeys(("offloaded_tokens", "restored_tokens"), 0)

    # ---- leaving

    def offload(self, request: Request) -> None:
        """Copy what `request` would resume from, before it gives its pages up; only while a step is planned."""
        host, holding = self._host, request.holding
        if host is None or holding is None or request.computed == 0 or holding.is_torn:
            return
        first_page, sources = self._live_pages(holding, request.computed)
        demand = Demand(map(len, sources))
        if not self._costs.is_worth(2 * host.bytes_of(demand), request.computed):
            return
        self.drop(request.id)
        grant = host.reserve(f"{COPY_OF}{request.id}", demand)
        if isinstance(grant, Refusal):
            self._counts["refused"] += 1
            return
        commit = host.store(grant, sources)
        self._sharing.host_evicted(commit.evicted)
        handles = tuple(commit.handles[0])
        self._copies[request.id] = HostCopy(grant.owner, request.computed, grant, first_page, handles)
        self._counts["offloaded"] += 1
        self._tokens["offloaded_tokens"] += request.computed
        self._count(self._offloaded_pages, sources)

    def _live_pages(self, holding: Holding, computed: int) -> tuple[tuple[int, ...], list[Places]]:
        """Return the pages that position `computed` and later ones read, per pool, and where they are now."""
        firsts, places = [], []
        for number, pool in enumerate(self._arena.layout.pools):
            first, end = holding.first_page[number], holding.first_page[number] + len(holding.handles[number])
            low, high = read_span(pool, computed)
            low, high = max(first, low), min(end, high)
            firsts.append(low)
            places.append(self._arena.physical(number, holding.handles[number][low - first : high - first]))
        return tuple(firsts), places

    # ---- coming back

    def candidate(self, request: Request, gate: Gate) -> Candidate:
        """Price `request` for admission now: from the end of its copy on where that is cheapest, else as all others."""
        candidate = gate.candidate(request)
        entrance = self._entrance(request, candidate.entrance)
        return candidate if entrance is candidate.entrance else gate.priced(request, entrance)

    def _entrance(self, request: Request, entrance: Entrance) -> Entrance:
        # Where the copy of `request` ends, if that is cheaper than to compute from `entrance` on.
        copy, host = self._copies.get(request.id), self._host
        if copy is None or host is None or copy.tokens <= entrance.start:
            return entrance
        known = 0 if entrance.found is None else entrance.found.full_tokens
        pages = [len(handles) for handles in copy.handles]
        for number, pool in enumerate(self._arena.layout.pools):
            if isinstance(pool.retention, Full):
                pages[number] = max(0, pages[number] - known // pool.page_tokens)
        if not self._costs.is_worth(host.bytes_of(pages), copy.tokens - entrance.start):
            return entrance
        return replace(entrance, start=copy.tokens, hands_over=False, copy=copy)

    def prepare(self, holding: Holding, copy: HostCopy) -> None:
        """Let the table of a request that was opened begin where its copy does: its windows begin there."""
        for number, pool in enumerate(self._arena.layout.pools):
            if not isinstance(pool.retention, Full):
                holding.first_page[number] = copy.first_page[number]
        self._keeper.refresh(holding)

    def entered(self, request: Request, copy: HostCopy | None) -> None:
        """Be told that `request` is admitted: with `copy`, or without need of the one that it may have."""
        if copy is None:
            self.drop(request.id)
            return
        self._loading[request.id] = self._copies.pop(request.id)
        self._counts["restored"] += 1
        self._tokens["restored_tokens"] += copy.tokens

    def take_work(self, chunked: Sequence[Request]) -> tuple[tuple[HostWork, ...], tuple[HostCopies, ...]]:
        """Return the host's work of a step that is committed: what is copied there, and what is loaded from there.

        Those of `chunked` who came back from a copy get their pages loaded, and the cache what it asks for.
        """
        if self._host is None:
            return (), ()
        offloads = self._host.take_work()
        return offloads, (*self._loads(chunked), *self._sharing.host_loads())

    def _loads(self, returned: Sequence[Request]) -> tuple[HostCopies, ...]:
        work: list[HostCopies] = []
        for request in returned:
            copy, holding = self._loading.get(request.id), request.holding
            if copy is not None and holding is not None and self._host is not None:
                pages, places = self._lacking(copy, holding)
                work += self._host.loads(pages, places)
                self._count(self._loaded_pages, places)
        return tuple(work)

    def _lacking(self, copy: HostCopy, holding: Holding) -> tuple[list[Handles], list[Places]]:
        """Return the pages of `copy` that are the request's own, and where they go: shared ones are there already."""
        pages, places = [], []
        for number, pool in enumerate(self._arena.layout.pools):
            first, handles = copy.first_page[number], copy.handles[number]
            low = first
            if isinstance(pool.retention, Full) and holding.lock is not None:
                low = min(first + len(handles), holding.lock.full_tokens // pool.page_tokens)
            at = low - holding.first_page[number]
            pages.append(handles[low - first :])
            places.append(self._keeper.places(holding, number)[at : at + len(pages[-1])])
            assert len(places[-1]) == len(pages[-1]), f"{copy.owner} has no room for {pages[-1]} in {pool.name}"
        return pages, places

    @property
    def has_work(self) -> bool:
        """Whether copies are noted that a step must carry out, even one that computes nothing."""
        return self._host is not None and self._host.has_work

    # ---- ends

    def applied(self) -> None:
        """Be told that the outstanding step is over: what it has loaded is needed no more."""
        for copy in self._loading.values():
            self._release(copy)
        self._loading.clear()
        self._sharing.host_loaded()

    def drop(self, request_id: str) -> None:
        """Free the copy of a request that ended or needs it no more; one that is being loaded stays until then."""
        copy = self._copies.pop(request_id, None)
        if copy is not None:
            self._counts["dropped"] += 1
            self._release(copy)

    def distrust(self) -> None:
        """Drop everything: what a step that broke should have done on the host may not have been done."""
        self.applied()
        for request_id in list(self._copies):
            self.drop(request_id)
        if self._host is not None:
            self._host.drop_work()
            self._sharing.host_distrust()

    def _release(self, copy: HostCopy) -> None:
        if self._host is not None:
            self._host.arena.release(copy.grant)

    # ---- what others may ask

    def figures(self) -> HostFigures | None:
        """Return what the host arena holds and what was done with it; None without one."""
        host = self._host
        if host is None:
            return None
        return HostFigures(
            arena=host.figures(),
            copies=len(self._copies),
            offloaded_bytes=host.bytes_of(self._offloaded_pages),
            loaded_bytes=host.bytes_of(self._loaded_pages),
            **self._counts,
            **self._tokens,
        )

    def audit(self, live: Mapping[str, Request]) -> list[Violation]:
        """Recount the copies of `live` requests and the host arena from scratch."""
        if self._host is None:
            return []
        found = list(self._host.arena.audit())
        waits = {name for name, request in live.items() if request.state is State.RETRACTED}
        found += [
            Violation("L1", f"the host arena keeps a copy of {request_id}, which does not wait to come back")
            for request_id in self._copies
            if request_id not in waits
        ]
        copies = [*self._copies.values(), *self._loading.values()]
        for copy in copies:
            for number, handles in enumerate(copy.handles):
                name = f"host pages of {copy.owner} in pool {number}"
                found += differ("L1", name, len(handles), copy.grant.pages(number))
        known = {copy.grant.id for copy in copies}
        found += [
            Violation("L1", f"the host arena still holds {tuple(grant.held)} pages of a {grant.owner}")
            for grant in self._host.arena.owners.grants.values()
            if grant.owner.startswith(COPY_OF) and grant.id not in known
        ]
        return found

    @staticmethod
    def _count(totals: list[int], pages: Sequence[Places]) -> None:
        for number, of_pool in enumerate(pages):
            totals[number] += len(of_pool)

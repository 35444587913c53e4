"""Prompts that another worker computes: their pages are reserved, committed and pinned here before it begins.

    Offered     now it may be admitted, in its turn, by the same predicate as everybody
    admitted    match, lock, price, reserve; then the prompt's L tokens have pages, exactly those that decoding reads:

        full      |the cache's, locked      |own, to land ..............|          up to ceil(L / P)
        window               |locked|own, to land ......................|          from floor_P(max(0, L - W + 1)) on
        state                                                 one page
                  0 ..... first read at L ... start ................... L

    or, where the host's level of the cache reaches further and copying is faster than the link:

        full      |the cache's, locked|own, loaded |own, to land .......|          loaded in the step of this commit
        window                    |own, loaded     |own, to land .......|          only what is read at L
        state                                                 one page             it lands: none is loaded
                  0 ............ first read at L .. start ............. L

    committed   the whole table is pinned: what lands must stay where it is, and what it continues must still be true
                when a step breaks whose moves nobody can trust
    told        once the pins are in force and the moves and loads of that commit are carried out: `LandingReady`
    Landed      a decode like any other; its whole granules go into the prefix cache

Its grant counts 1 + `decode_reserve_tokens` output tokens, or the whole life where that is granted at once. It is never
a victim: what it holds comes free only when its landing is closed, which `RevokeWanted` asks for where a more senior
request is short, or where it gives way (`courtesy`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.memory.demand import Demand
from halocline.memory.grant import Handles, Pin
from halocline.schedule.admission import Candidate, Gate
from halocline.schedule.events import Landed, LandingReady, Lost, Offered, PoolPages, RevokeWanted
from halocline.schedule.growth import Growth
from halocline.schedule.handover import NOTHING
from halocline.schedule.holding import Holding, Keeper
from halocline.schedule.request import Landing, Request, State
from halocline.schedule.results import Results
from halocline.schedule.roster import Roster
from halocline.schedule.sharing import Sharing, holding_of
from halocline.step import Sampled

PREFILL_LOST = "prefill_lost"
"""The code with which a request fails whose prompt nobody computed."""


class Receiving:
    """The requests of one scheduler whose prompts come from elsewhere."""

    def __init__(
        self,
        arena: Arena,
        keeper: Keeper,
        sharing: Sharing,
        roster: Roster,
        growth: Growth,
        results: Results,
    ) -> None:
        self._arena = arena
        self._keeper = keeper
        self._sharing = sharing
        self._roster = roster
        self._growth = growth
        self._results = results
        self._has_states = any(not pool.is_positional for pool in arena.layout.pools)

    # ---- what the other worker says

    def offered(self, event: Offered) -> None:
        """Let a request that waits be admitted from now on."""
        request = self._waiting(event.request_id)
        if request is not None and event.attempt > request.attempt:
            request.attempt = event.attempt
            self._roster.call(request)

    def landed(self, event: Landed) -> None:
        """Let a request decode whose prompt has arrived."""
        request = self._receiving(event.request_id, event.attempt)
        if request is None or request.landing is None or not request.landing.is_told:
            return
        self._roster.land(request)
        if event.is_cut:
            self._keeper.tear(holding_of(request), request.computed)
        self._results.take_first(request, Sampled(request.id, event.token_id, event.logprobs))

    def lost(self, event: Lost) -> None:
        """Give back what an attempt held, or withdraw an offer; the request waits for the next one, or fails."""
        request = self._receiving(event.request_id, event.attempt)
        if request is None:
            request = self._waiting(event.request_id)
            if request is None or event.attempt < request.attempt:
                return
            request.attempt = event.attempt
        if event.is_final:
            self._roster.fail(request, event.message, PREFILL_LOST)
        elif request.landing is None:
            self._roster.recall(request)
        else:
            self._roster.give_back(request, is_retraction=request.landing.is_revoked)

    def _waiting(self, request_id: str) -> Request | None:
        request = self._roster.live.get(request_id)
        return request if request is not None and request.route == "receive" and not request.is_running else None

    def _receiving(self, request_id: str, attempt: int) -> Request | None:
        request = self._roster.live.get(request_id)
        is_it = request is not None and request.state is State.RECEIVING and request.attempt == attempt
        return request if is_it else None

    # ---- coming in

    def candidate(self, request: Request, gate: Gate, *, is_cold: bool = False) -> Candidate:
        """Price a request for admission: locked is what the device's cache has up to the boundary, and nothing beyond.

        A checkpoint is of no use to it, its state comes from elsewhere. Where locking one beside the working state
        would not fit, or was not asked about, it comes in cold. Loaded is what the host has up to a longer boundary.
        """
        candidate = gate.candidate(request)
        entrance, found = candidate.entrance, candidate.entrance.found
        if found is None:
            return candidate
        if entrance.loads and not is_cold:
            known = min(found.full_tokens, entrance.start)
            key = replace(found.key, tokens=entrance.start + 1)
            found = replace(found, key=key, boundary_tokens=min(found.boundary_tokens, known), full_tokens=known)
            return gate.priced(request, replace(entrance, found=found))
        start = min(entrance.start, found.boundary_tokens)
        if is_cold or entrance.hands_over or (start < entrance.start and self._has_states):
            start = 0
        key = replace(found.key, tokens=start + 1)  # so that no full page beyond is locked: it will come anyway
        found = replace(found, key=key, boundary_tokens=start, full_tokens=start)
        return gate.priced(request, replace(entrance, start=start, found=found, hands_over=False))

    def enter(self, request: Request, holding: Holding) -> Demand:
        """Let the table of a request that was opened begin where its first decode reads; return the pages it lacks."""
        fill = len(request.history)
        self._sharing.pass_to(holding, fill)
        self._keeper.begin_at(holding, fill)
        return self._keeper.wanted_at(holding, fill)

    def committed(self, request: Request, wanted: Demand) -> None:
        """Pin the table of a request that was admitted in this step, its new pages included.

        What lands of its `wanted` new pages begins at its start: those before are loaded from the host in this step.
        """
        holding = request.holding
        if holding is None:
            return  # its order failed, and so did it
        fresh = [len(handles) - count for handles, count in zip(holding.handles, wanted, strict=True)]
        first_page = self._lands_from(holding, fresh, request.computed)
        lows = [first - begin for first, begin in zip(first_page, holding.first_page, strict=True)]
        request.landing = Landing(
            start_tokens=request.computed,
            first_page=first_page,
            handles=tuple(handles[low:] for handles, low in zip(holding.handles, lows, strict=True)),
            pin=self._arena.pin(f"landing of {request.id}", holding.handles),
        )

    def _lands_from(self, holding: Holding, own_from: Sequence[int], start: int) -> tuple[int, ...]:
        # Per pool: the first page that lands. Positions before `start` are there or loaded; of a state, none is.
        return tuple(
            max(first + low, start // pool.page_tokens if pool.is_positional else 0)
            for pool, first, low in zip(self._arena.layout.pools, holding.first_page, own_from, strict=True)
        )

    def tell(self) -> None:
        """Tell of the landings that are ready: pinned in force, with no move outstanding."""
        for request in self._roster.receiving:
            landing = request.landing
            if landing is None or landing.is_told or not landing.pin.is_in_force:
                continue
            landing.is_told = True
            pools = tuple(
                PoolPages(first, self._arena.physical(pool, handles))
                for pool, (first, handles) in enumerate(zip(landing.first_page, landing.handles, strict=True))
            )
            self._roster.outbox.append(LandingReady(request.id, request.attempt, landing.start_tokens, pools))

    # ---- giving way

    def revoke(self) -> None:
        """Ask juniors of a short senior for what they hold, the most junior first, as many as suffice.

        What was not told yet is given back at once; the others answer with `Lost`.
        """
        short = self._growth.short()
        if short is None:
            return
        lacking = self._growth.lacking
        for request in reversed(self._roster.receiving.juniors(short)):
            if self._arena.fits(lacking):
                return
            lacking = lacking.minus(holding_of(request).grant.demand)
            landing = request.landing
            if landing is not None and landing.is_told:
                if not landing.is_revoked:
                    landing.is_revoked = True
                    self._roster.outbox.append(RevokeWanted(request.id, request.attempt))
            else:
                self._roster.retract(request, keep=False)

    def distrust(self) -> None:
        """Take back what was not told when moves cannot be trusted. What was told is pinned, and was not moved."""
        for request in self._roster.receiving.snapshot():
            if request.landing is None or not request.landing.is_told:
                self._roster.retract(request, keep=False)

    # ---- what others may ask

    def pins(self) -> Iterator[Pin]:
        """Yield the pins of all landings."""
        for request in self._roster.receiving:
            if request.landing is not None:
                yield request.landing.pin

    def audit(self) -> Iterator[Violation]:
        """Every receiving request has a landing with the pages that it lacks, and nobody else has one.

        What it lacks is counted from locks and loads, not from where it starts: each page before must be one of either.
        """
        for request in self._roster.live.values():
            landing, name = request.landing, f"request {request.id} ({request.state.value})"
            if (landing is not None) != (request.state is State.RECEIVING):
                yield Violation("L5", f"{name} {'has' if landing is not None else 'lacks'} a landing")
            elif landing is not None:
                yield from self._look_at(request, landing, holding_of(request), name)

    def _look_at(self, request: Request, landing: Landing, holding: Holding, name: str) -> Iterator[Violation]:
        hold = self._sharing.load_of(request)
        if hold is not None and not (hold.is_over if landing.is_told else hold.is_planned):
            yield Violation("L5", f"{name}: its landing is told: {landing.is_told}, and what is loaded is not there")
        for pool, handles in enumerate(landing.handles):
            table: Handles = holding.handles[pool]
            low = landing.first_page[pool] - holding.first_page[pool]
            if table[low:].tolist() != handles.tolist() or landing.pin.handles[pool].tolist() != table.tolist():
                yield Violation("L5", f"{name}: what lands in pool {pool} is not the end of its table, or not pinned")
            there = holding.first_page[pool] + len(table) - holding.grant.pages(pool)
            run = NOTHING if hold is None else hold.pages[pool]
            if len(run.handles):  # what is loaded must follow on what is locked
                there = run.first_page + len(run.handles) if run.first_page == there else there
            if landing.first_page[pool] != there:
                begins = f"begins at page {landing.first_page[pool]} of pool {pool}"
                yield Violation("L1", f"{name}: what lands {begins}, locked or loaded is all before page {there}")

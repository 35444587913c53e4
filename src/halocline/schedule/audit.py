"""Recounts requests, lines and pages from scratch, against the arena's own books. Trusts no counter that it checks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from halocline.errors import InvariantError
from halocline.memory.arena import Arena
from halocline.memory.audit import Violation, differ
from halocline.memory.demand import Demand, floor_demand
from halocline.memory.grant import NO_HANDLES, Grant, Handles
from halocline.memory.layout import PoolLayout
from halocline.memory.retention import Full
from halocline.memory.retention import State as StateRetention
from halocline.schedule.chunk import STEP_OWNER
from halocline.schedule.holding import Holding
from halocline.schedule.request import Request, State
from halocline.schedule.roster import Roster
from halocline.schedule.rules import Rules
from halocline.units import ceil_div

RUNNING = (State.PREFILLING, State.DECODING, State.RECEIVING, State.SENDING)


def audit(
    arena: Arena, roster: Roster, rules: Rules, floor: Grant, busy: frozenset[str] | None, *, places_known: bool = True
) -> list[Violation]:
    """Return every broken law of scheduler and arena.

    `busy` are the requests of the outstanding plan, None between steps; `places_known` says that no page has moved for
    another owner since the last plan, which will look them up again.
    """
    found = [*_lines(roster), *_ends(roster), *_slots(roster, rules)]
    wanted = floor_demand(arena.layout, rules.prefix_cache)
    if floor.is_open and not arena.fits(wanted.minus(floor.demand)):
        wanted = floor.demand  # pages that left it pinned are still in use: it is short, and will be whole again
    found += _standing_grants(arena, roster, (floor, wanted), between_steps=busy is None)
    for request in roster.live.values():
        found += _request(request)
        if request.holding is not None:
            found += _pages(arena, request, request.holding, busy is not None and request.id in busy)
            found += _borders(arena, request, request.holding)
    return found + list(_shared_pages(arena, roster, places_known)) + arena.audit()


def _lines(roster: Roster) -> Iterator[Violation]:
    """Every live request stands in the line of its state, once, and lines are in order of seniority."""
    standing = 0
    for line in (
        roster.waiting, roster.absent, roster.prefilling, roster.decoding, roster.receiving, roster.sending,
    ):  # fmt: skip
        members = line.snapshot()
        standing += len(members)
        keys = [request.key for request in members]
        if keys != sorted(set(keys)):
            yield Violation("L10", f"a line is out of order: {keys}")
        for request in members:
            if roster.live.get(request.id) is not request:
                yield Violation("L10", f"request {request.id} stands in a line and is not live: {request.state.value}")
            elif roster.line_of(request) is not line:
                yield Violation("L10", f"request {request.id} is {request.state.value} and stands in another line")
    if standing != len(roster.live):
        yield Violation("L10", f"{standing} requests stand in lines, {len(roster.live)} are live")


def _ends(roster: Roster) -> Iterator[Violation]:
    """Every request that was taken is still here or has come to one end."""
    totals = roster.totals
    ended = totals.finished + totals.aborted + totals.failed
    yield from differ("L10", "requests taken", len(roster.live) + ended, totals.arrived)


def _standing_grants(
    arena: Arena, roster: Roster, standing: tuple[Grant, Demand], *, between_steps: bool
) -> Iterator[Violation]:
    """The floor stands, whole between steps; a step's grant ends with its step; nobody has two."""
    floor, wanted = standing
    if not floor.is_open or floor.demand != wanted or (between_steps and tuple(floor.room) != wanted):
        is_now = f"the floor is {tuple(floor.demand)} pages, open: {floor.is_open}; it should be {tuple(wanted)}"
        yield Violation("L3", f"{is_now}, of which {tuple(floor.lent)} are lent")
    held = {id(request.holding.grant) for request in roster.live.values() if request.holding is not None}
    for grant in arena.owners.grants.values():
        if grant is floor or id(grant) in held:
            continue
        if grant.owner == STEP_OWNER:
            if between_steps:
                yield Violation("L3", f"a step grant of {tuple(grant.demand)} pages is open between steps")
        elif grant.owner in roster.live:
            what = f"a second grant of {tuple(grant.demand)} pages"
            yield Violation("L1", f"{what} is open in the name of request {grant.owner}")


def _slots(roster: Roster, rules: Rules) -> Iterator[Violation]:
    if roster.running > rules.max_running_requests:
        yield Violation("L3", f"{roster.running} requests run, {rules.max_running_requests} may")


def _request(request: Request) -> Iterator[Violation]:
    """State, memory and positions of one request agree."""
    known, name = len(request.history), f"request {request.id} ({request.state.value})"
    if (request.holding is not None) != (request.state in RUNNING):
        yield Violation("L1", f"{name} {'holds' if request.holding else 'lacks'} a grant")
    if known >= request.end:
        yield Violation("L10", f"{name} has all its {request.end} tokens and has not ended")
    expected = {
        State.DECODING: (known - 1, known - 1),
        State.PREFILLING: (0, request.resumed_at - 1),
        State.RECEIVING: (0, known - 1),
        State.SENDING: (known, known),
    }
    low, high = expected.get(request.state, (0, 0))
    if not low <= request.computed <= high:
        yield Violation("L9", f"{name} has computed {request.computed} of {known} tokens, not {low} to {high}")


def _pages(arena: Arena, request: Request, holding: Holding, busy: bool) -> Iterator[Violation]:
    """Handles, grant and windows agree; between steps a request holds its windows and nothing more."""
    grant = holding.grant
    if grant.owner != request.id or not grant.is_open:
        yield Violation("L1", f"request {request.id} holds the grant of {grant.owner} (open: {grant.is_open})")
        return
    for number, pool in enumerate(arena.layout.pools):
        count, name = len(holding.handles[number]), f"request {request.id} in {pool.name}"
        shared = _shared(holding, pool, number)
        if not np.array_equal(holding.handles[number][: len(shared)], shared):
            yield Violation("L1", f"{name}: its table begins with other pages than the {len(shared)} that it locks")
        own = count - len(shared) + len(holding.saved[number])
        if own != grant.pages(number):
            sign = "missing" if own < grant.pages(number) else "counted twice"
            yield Violation("L1", f"{name}: {abs(own - grant.pages(number))} pages {sign}: {own} handles")
        first = holding.first_page[number]
        want_first, want_end = _window(pool, _in_place(request))
        if first > want_first or first + count < want_end:
            yield Violation(
                "L7", f"{name} lacks pages: holds {first} to {first + count}, sees {want_first} to {want_end}"
            )
        want_end = max(want_end, first + len(shared))  # full pages may be locked further than it has computed
        if not busy and count > max(0, want_end - want_first):
            yield Violation("L9", f"{name} holds {count} pages between steps, its windows are {want_end - want_first}")
    if not busy and not grant.demand.covers(grant.held):
        yield Violation("L9", f"request {request.id} holds {grant.held} between steps, granted {grant.demand}")
    if not busy and any(grant.borrowed):
        yield Violation("L9", f"request {request.id} owes {grant.borrowed} pages between steps")


def _shared(holding: Holding, pool: PoolLayout, number: int) -> Handles:
    """Return the pages of the prefix cache with which a table must begin, from the lock and the path alone."""
    lock = holding.lock
    if lock is None or isinstance(pool.retention, StateRetention):
        return NO_HANDLES
    if isinstance(pool.retention, Full):
        return np.concatenate([NO_HANDLES, *(node.pages[number] for node in lock.node.path())])
    return lock.pages[number]


def _borders(arena: Arena, request: Request, holding: Holding) -> Iterator[Violation]:
    """The request is touched no later than its next page is needed and its next page is out of the window."""
    for number, pool in enumerate(arena.layout.pools):
        if isinstance(pool.retention, StateRetention):
            continue
        first, name = holding.first_page[number], f"request {request.id} in {pool.name}"
        end = (first + len(holding.handles[number])) * pool.page_tokens
        if holding.page_until > end:
            yield Violation("L7", f"{name} asks for its next page at {holding.page_until}, its pages end at {end}")
        if pool.retention.first_needed(holding.slide_at - 1) >= (first + 1) * pool.page_tokens:
            yield Violation("L9", f"{name} lets go of its next page at {holding.slide_at}, it is not seen before that")


def _in_place(request: Request) -> int:
    """Return for how many positions a request must hold what is read: those that land count from the start."""
    return len(request.history) if request.state is State.RECEIVING else request.computed


def _window(pool: PoolLayout, computed: int) -> tuple[int, int]:
    """Return the pages [first, end) that must be held once `computed` positions are computed."""
    if isinstance(pool.retention, StateRetention):
        return 0, min(1, computed)
    return pool.retention.first_needed(computed) // pool.page_tokens, ceil_div(computed, pool.page_tokens)


def _shared_pages(arena: Arena, roster: Roster, places_known: bool) -> Iterator[Violation]:
    """No two requests hold one page of their own, and the remembered places are the pages' places."""
    for number, pool in enumerate(arena.layout.pools):
        owner: dict[int, str] = {}
        for request in roster.live.values():
            holding = request.holding
            handles = NO_HANDLES if holding is None else holding.handles[number]
            if not len(handles):
                continue
            try:
                pages = arena.physical(number, handles).tolist()
            except InvariantError as stale:
                yield Violation("L1", f"request {request.id} in {pool.name}: {stale}")
                continue
            if places_known and holding is not None and holding.places[number].tolist() != pages:
                yield Violation("L1", f"request {request.id} in {pool.name}: its pages moved to {pages} unnoticed")
            shared = 0 if holding is None else len(_shared(holding, pool, number))
            for page in pages[shared:]:
                other = owner.setdefault(page, request.id)
                if other != request.id:
                    yield Violation("L1", f"page {page} of {pool.name} is held by {other} and by {request.id}")

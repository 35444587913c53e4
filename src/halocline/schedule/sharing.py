"""How requests come into memory, move on in it and leave it: one interface, and the plain case of it.

`Alone` is the prefix cache switched off: nobody shares a page. `halocline.schedule.prefixes` does the same with pages
that many read. Whoever admits, advances or ends requests does not know which of the two it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from halocline.cache.match import Match
from halocline.cache.tier import Hold, Offer
from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.memory.demand import Demand, zero
from halocline.memory.grant import Handles, Move, Pin, Refusal
from halocline.memory.host import HostCopies, HostCopy
from halocline.schedule.chunk import Chunk
from halocline.schedule.figures import CacheFigures
from halocline.schedule.holding import Holding, Keeper
from halocline.schedule.request import Request, State
from halocline.step import Copy

FitsAlone = Callable[[int, Demand], bool]
"""Whether an empty arena holds a request that starts at a boundary, with so many pages beside its price."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where a request would begin to compute."""

    start: int
    found: Match | None = None
    """What the prefix cache has of it; None without one."""
    hands_over: bool = False
    """Whether a checkpoint becomes its working state, because there is no room for a copy beside it."""
    copy: HostCopy | None = None
    """What the host arena has of it: then all that the cache lacks comes from there, up to `start`."""
    offer: Offer | None = None
    """What the second level of the cache has of it beyond the device; None without one."""

    @property
    def loads(self) -> bool:
        """Whether the second level's pages are loaded, so that computing starts where they end."""
        return (
            self.copy is None
            and self.offer is not None
            and self.offer.verdict == "host"
            and self.start == self.offer.boundary_tokens
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """On what of the cache it depends how many pages a request asks for."""

    start: int
    """The longest boundary at which it could begin."""
    full_tokens: int
    """How far its full pages are cached."""
    less: Demand
    """What of its price it would not be asked for, because others lock it."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """A request that computes what another one lacks, and up to which boundary they agree."""

    request: Request
    boundary: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a request's next chunk must end at the latest."""

    end: int
    checkpoint: Demand | None = None
    """The pages into which its states should be saved there; None where they should not."""


class Sharing(Protocol):
    """What the parts of the scheduler ask when requests come, move on and leave."""

    changes: int
    """Grows with everything after which a request that comes in might ask for fewer pages than before."""

    def arrived(self, request: Request, packed: bytes) -> None:
        """Be told of a new request; `packed` is its prompt in 4 bytes a token."""
        ...

    def entrance(self, request: Request, fits_alone: FitsAlone) -> Entrance:
        """Return the longest boundary at which `request` can begin to compute and whose whole life fits alone."""
        ...

    def standing(self, request: Request) -> Standing | None:
        """Return on what of the cache it depends how much `request` asks for; None where more is to be looked at."""
        ...

    def awaited(self, request: Request, entrance: Entrance, prefilling: Iterable[Request]) -> Awaited | None:
        """Return which of `prefilling` computes a longer part of `request`'s history than is cached; None if nobody."""
        ...

    def open(self, request: Request, entrance: Entrance, demand: Demand) -> Holding | Refusal:
        """Reserve `demand`, the whole price from the entrance on, for `request`; refused, nothing has changed."""
        ...

    def entered(self, request: Request, entrance: Entrance) -> None:
        """Be told that `request`, which was opened, is admitted."""
        ...

    def covered(self, holding: Holding) -> Demand:
        """Return the pages of a request's price that its grant need not hold."""
        ...

    def reserved(self, holding: Holding) -> Demand:
        """Return the pages of a request's room that it must not take for anything new."""
        ...

    def given_back(self, requests: Sequence[Request]) -> Demand:
        """Return the pages that can be granted anew when all of `requests` leave, together: none that a pin keeps."""
        ...

    def pass_to(self, holding: Holding, tokens: int) -> None:
        """Let go of what was locked for computing on, and of window pages that position `tokens` does not read."""
        ...

    def unpin(self, pin: Pin) -> None:
        """End a pin of pages that requests hold or have left."""
        ...

    def next_stop(self, request: Request, holding: Holding, start: int) -> Stop:
        """Return where the chunk of `request` at `start` must end: at a boundary to be saved, or with its history."""
        ...

    def copies(self, chunks: Sequence[Chunk]) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """Return what is copied before this step's forward and saved after it, now that all pages are committed."""
        ...

    def settle(self, moved: Sequence[Request]) -> None:
        """Take requests forward to what they have computed: windows slide, then grants fall."""
        ...

    def leave(self, request: Request, holding: Holding, *, keep: bool) -> None:
        """End what `request` holds; `keep` says that others may use what it has computed."""
        ...

    def forget(self, evicted: Sequence[Handles], moves: Sequence[Move]) -> None:
        """Be told of the cached pages that a commit evicted, before anything else is asked, and of its moves."""
        ...

    def distrust(self) -> None:
        """Keep nothing of what is cached: it may have been moved half way. Nobody holds anything any more."""
        ...

    def host_loads(self) -> tuple[HostCopies, ...]:
        """Return what this step loads from the host arena for the cache, now that all pages are committed."""
        ...

    def host_loaded(self) -> None:
        """Be told that the outstanding step is over, and with it what it loaded."""
        ...

    def load_of(self, request: Request) -> Hold | None:
        """Return what of the second level `request` begins with, until it has computed on; None without a load."""
        ...

    def host_evicted(self, evicted: Sequence[Handles]) -> None:
        """Be told of cached pages of the host arena that gave way, before anything else is asked."""
        ...

    def host_distrust(self) -> None:
        """Keep nothing of what is cached in the host arena: it may not have been copied."""
        ...

    def figures(self) -> CacheFigures | None:
        """Return what the cache has done; None without one."""
        ...

    def audit(self) -> list[Violation]:
        """Recount the cache from scratch."""
        ...


class Alone:
    """Every request has its own pages, and only those."""

    def __init__(self, arena: Arena, keeper: Keeper) -> None:
        self.changes = 0
        self._arena = arena
        self._keeper = keeper
        self._nothing = zero(len(arena.layout.pools))

    def arrived(self, request: Request, packed: bytes) -> None:
        """Nobody looks for it."""

    def entrance(self, request: Request, fits_alone: FitsAlone) -> Entrance:
        """Every request begins at its beginning."""
        del request, fits_alone
        return Entrance(0)

    def standing(self, request: Request) -> Standing | None:
        """Every request asks for its whole price."""
        del request
        return Standing(0, 0, self._nothing)

    def awaited(self, request: Request, entrance: Entrance, prefilling: Iterable[Request]) -> Awaited | None:
        """Nobody can use what another computes."""
        del request, entrance, prefilling
        return None

    def open(self, request: Request, entrance: Entrance, demand: Demand) -> Holding | Refusal:
        """Reserve the whole price."""
        del entrance
        return self._keeper.open(request.id, demand)

    def entered(self, request: Request, entrance: Entrance) -> None:
        """Nothing to count."""

    def covered(self, holding: Holding) -> Demand:
        """Nothing is."""
        del holding
        return self._nothing

    def reserved(self, holding: Holding) -> Demand:
        """Nothing is."""
        del holding
        return self._nothing

    def given_back(self, requests: Sequence[Request]) -> Demand:
        """All their grants, but what pins keep."""
        pages = list(granted(self._nothing, requests))
        for holding in map(holding_of, requests):
            for pool, handles in enumerate(holding.handles):
                pages[pool] -= self._arena.count_pinned(pool, handles)
        return Demand(pages)

    def pass_to(self, holding: Holding, tokens: int) -> None:
        """Nothing is locked."""

    def unpin(self, pin: Pin) -> None:
        """Pages that nobody holds any more are free."""
        self._arena.unpin(pin)

    def next_stop(self, request: Request, holding: Holding, start: int) -> Stop:
        """The end of its history."""
        del holding, start
        return Stop(len(request.history))

    def copies(self, chunks: Sequence[Chunk]) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """Nothing is."""
        del chunks
        return (), ()

    def settle(self, moved: Sequence[Request]) -> None:
        """Slide the windows and lower the grants."""
        for request in moved:
            holding = holding_of(request)
            self._keeper.slide(holding, request.computed)
            if may_fall(self._keeper, request):
                self._keeper.reprice(holding, request.resumed_at, request.end, request.computed)

    def leave(self, request: Request, holding: Holding, *, keep: bool) -> None:
        """Free everything."""
        del request, keep
        self._keeper.close(holding)

    def forget(self, evicted: Sequence[Handles], moves: Sequence[Move]) -> None:
        """Nothing is cached here; pages that another owner keeps in the arena are that one's business."""
        del evicted, moves

    def distrust(self) -> None:
        """Nothing is cached."""

    def host_loads(self) -> tuple[HostCopies, ...]:
        """Nothing is."""
        return ()

    def host_loaded(self) -> None:
        """Nothing is."""

    def load_of(self, request: Request) -> Hold | None:
        """Nothing is."""
        del request
        return None

    def host_evicted(self, evicted: Sequence[Handles]) -> None:
        """Nothing is cached there either."""
        del evicted

    def host_distrust(self) -> None:
        """Nothing is cached there either."""

    def figures(self) -> CacheFigures | None:
        """There is no cache."""
        return None

    def audit(self) -> list[Violation]:
        """There is no cache."""
        return []


def may_fall(keeper: Keeper, request: Request) -> bool:
    """Whether pricing `request` again can lower its grant: after a chunk, and near the end of a decode's life."""
    is_decode = request.state is State.DECODING and request.computed > request.resumed_at
    return not is_decode or keeper.may_fall(request.end, request.computed)


def granted(nothing: Demand, requests: Sequence[Request]) -> Demand:
    """Return the sum of the grants of running `requests`."""
    total = nothing
    for request in requests:
        total = total.plus(holding_of(request).grant.demand)
    return total


def holding_of(request: Request) -> Holding:
    """Return what a running request holds."""
    assert request.holding is not None, f"{request.id} is {request.state.value} and holds nothing"
    return request.holding

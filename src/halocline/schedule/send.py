"""Prompts that are computed here for another worker: an ordinary prefill whose pages are told as they come.

    PeerAccepted    from now on it may be admitted: the other worker has its pages ready
    each chunk      is settled as always (whole granules go into the prefix cache, windows slide); then what the other
                    worker must hold and was not told yet is pinned and told, once:

        full      |there already|told ...............|told now .....|        whole pages; at the end the last one too
        window                        |told ...|told now|                    from the first page that position L reads
        state                                                 told at the end
                  0 .......... start ............................ computed .. L

    last chunk      `Computed` tells the first token; the request is `sending` and keeps its pages
    PeerReleased    it ends, and its pages go to the prefix cache

A `Delivery` is one attempt: its pins outlive the request where that fails or is aborted, because the other worker may
still be reading; `PeerTook` and `PeerReleased` end them. A local retraction does not end an attempt: what was told
stays told, and computing goes on to what was not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.memory.grant import NO_HANDLES, Handles, Pin
from halocline.memory.layout import PoolLayout
from halocline.memory.retention import State as StateRetention
from halocline.schedule.events import (
    Computed,
    PagesReady,
    PeerAccepted,
    PeerReleased,
    PeerRevoked,
    PeerTook,
    PoolPages,
    Sent,
)
from halocline.schedule.holding import Holding
from halocline.schedule.request import Request, State
from halocline.schedule.roster import Roster
from halocline.schedule.sharing import Sharing
from halocline.step import Sampled
from halocline.units import ceil_div, floor_to


@dataclass(slots=True, eq=False)
class Piece:
    """What one chunk has brought and was not told yet."""

    chunk: int
    computed_tokens: int
    first_page: tuple[int, ...]
    handles: tuple[Handles, ...]
    pin: Pin


@dataclass(slots=True, eq=False)
class Delivery:
    """One attempt: what of the prompt was told, and which of it is pinned."""

    attempt: int
    prompt_tokens: int
    told: list[int]
    """Per pool: the first page that was not told yet."""
    chunks: int = 0
    """Pieces made so far."""
    untold: deque[Piece] = field(default_factory=deque)
    """Pieces whose pins are not in force yet, or whose moves are not carried out."""
    pins: dict[int, Pin] = field(default_factory=dict)
    """By chunk, of those that were not taken."""
    first: Sampled | None = None
    """The first output token, once it is known and until it is told."""
    is_told: bool = False
    """Whether `Computed` was told."""


class Sending:
    """The requests of one scheduler whose answers are given elsewhere."""

    def __init__(self, arena: Arena, sharing: Sharing, roster: Roster) -> None:
        self._arena = arena
        self._sharing = sharing
        self._roster = roster
        self._deliveries: dict[str, Delivery] = {}

    # ---- what the other worker says

    def accepted(self, event: PeerAccepted) -> None:
        """Let a request that waits be admitted from now on."""
        request = self._roster.live.get(event.request_id)
        if request is None or request.route != "send" or request.is_called or event.attempt <= request.attempt:
            return
        start = floor_to(event.start_tokens, self._arena.layout.granule_tokens)
        length = len(request.history)
        told = [_first_wanted(pool, start, length) for pool in self._arena.layout.pools]
        request.attempt = event.attempt
        self._deliveries[request.id] = Delivery(event.attempt, length, told)
        self._roster.call(request)

    def revoked(self, event: PeerRevoked) -> None:
        """Stop an attempt: what it computed is cached, and the request waits to be accepted again."""
        delivery = self._delivery(event.request_id, event.attempt)
        request = self._roster.live.get(event.request_id)
        if delivery is None:
            return
        self._end_pins(event.request_id, delivery)
        if request is None:
            return
        if request.is_running:
            self._roster.give_back(request)
        else:
            self._roster.recall(request)

    def took(self, event: PeerTook) -> None:
        """Let go of the pages of a chunk that has arrived."""
        delivery = self._delivery(event.request_id, event.attempt)
        if delivery is None or event.chunk not in delivery.pins or any(p.chunk == event.chunk for p in delivery.untold):
            return
        self._sharing.unpin(delivery.pins.pop(event.chunk))
        if not delivery.pins and event.request_id not in self._roster.live:
            del self._deliveries[event.request_id]

    def released(self, event: PeerReleased) -> None:
        """End a request, and all its pins: the other worker needs nothing more of it."""
        request = self._roster.live.get(event.request_id)
        delivery = self._delivery(event.request_id, event.attempt)
        if request is not None and request.route == "send" and event.attempt >= request.attempt:
            self._end(request, is_sent=delivery is not None and delivery.is_told)
        if delivery is not None:
            self._end_pins(event.request_id, delivery)

    def _end(self, request: Request, *, is_sent: bool) -> None:
        totals = self._roster.totals
        if is_sent:
            totals.finished += 1
        else:
            totals.aborted += 1
        self._roster.end(request)
        if is_sent:
            self._roster.outbox.append(Sent(request.id))

    def _delivery(self, request_id: str, attempt: int) -> Delivery | None:
        delivery = self._deliveries.get(request_id)
        return delivery if delivery is not None and delivery.attempt == attempt else None

    def _end_pins(self, request_id: str, delivery: Delivery) -> None:
        for pin in delivery.pins.values():
            self._sharing.unpin(pin)
        del self._deliveries[request_id]

    # ---- what is computed

    def computed(self, requests: Sequence[Request]) -> None:
        """Pin what the chunks of a step that is over have brought; of requests that go on, or have just ended."""
        for request in requests:
            delivery = self._deliveries.get(request.id)
            if delivery is None or request.holding is None:
                continue
            self._add_piece(request, request.holding, delivery)
            if request.state is State.SENDING:
                delivery.first, request.first = request.first, None

    def _add_piece(self, request: Request, holding: Holding, delivery: Delivery) -> None:
        firsts, handles = [], []
        for number, pool in enumerate(self._arena.layout.pools):
            low, table = delivery.told[number], holding.first_page[number]
            high = max(low, _whole_pages(pool, request.computed, delivery.prompt_tokens))
            firsts.append(low)
            handles.append(holding.handles[number][low - table : high - table] if high > low else NO_HANDLES)
            assert len(handles[-1]) == high - low, f"{request.id} holds not all of pages {low} to {high} of {pool.name}"
            delivery.told[number] = high
        chunk = delivery.chunks
        pin = self._arena.pin(f"chunk {chunk} of {request.id}", handles)
        delivery.chunks += 1
        delivery.pins[chunk] = pin
        delivery.untold.append(Piece(chunk, request.computed, tuple(firsts), tuple(handles), pin))

    def tell(self) -> None:
        """Tell of pieces whose pins are in force, in their order, and of first tokens after the last of them."""
        for request_id, delivery in self._deliveries.items():
            while delivery.untold and delivery.untold[0].pin.is_in_force:
                self._roster.outbox.append(self._ready(request_id, delivery, delivery.untold.popleft()))
            first = delivery.first
            if first is not None and not delivery.untold:
                delivery.first, delivery.is_told = None, True
                done = Computed(request_id, delivery.attempt, delivery.chunks, first.token_id, first.logprobs)
                self._roster.outbox.append(done)

    def distrust(self) -> None:
        """Take back what was not told when moves cannot be trusted: it is computed again, and told then.

        Who is computed wholly fails, because pages of his that were taken already may have been moved since. What was
        told and not taken is pinned, and was not moved.
        """
        for request in self._roster.sending.snapshot():
            self._roster.fail(request, "a step broke that may have moved its pages")
        for delivery in self._deliveries.values():
            while delivery.untold:
                piece = delivery.untold.pop()
                self._sharing.unpin(delivery.pins.pop(piece.chunk))
                delivery.told = list(piece.first_page)
                delivery.chunks -= 1

    def prune(self) -> None:
        """Forget what was not told yet of requests that have ended, and deliveries of theirs that nobody reads."""
        gone = [request_id for request_id in self._deliveries if request_id not in self._roster.live]
        for request_id in gone:
            delivery = self._deliveries[request_id]
            for piece in delivery.untold:
                self._sharing.unpin(delivery.pins.pop(piece.chunk))
            delivery.untold.clear()
            if not delivery.pins:
                del self._deliveries[request_id]

    def _ready(self, request_id: str, delivery: Delivery, piece: Piece) -> PagesReady:
        pools = tuple(
            PoolPages(first, self._arena.physical(pool, handles))
            for pool, (first, handles) in enumerate(zip(piece.first_page, piece.handles, strict=True))
        )
        left = delivery.prompt_tokens - piece.computed_tokens
        return PagesReady(request_id, delivery.attempt, piece.chunk, piece.computed_tokens, left, pools)

    # ---- what others may ask

    def pinned_chunks(self, request_id: str) -> int:
        """Return how many chunks of a request were not taken yet."""
        delivery = self._deliveries.get(request_id)
        return 0 if delivery is None else len(delivery.pins)

    def pins(self) -> Iterator[Pin]:
        """Yield the pins of all deliveries, also of those whose requests have ended."""
        for delivery in self._deliveries.values():
            yield from delivery.pins.values()

    def audit(self) -> Iterator[Violation]:
        """Every send request that was accepted has its delivery; without its request one stays only for its pins."""
        for request in self._roster.live.values():
            delivery = self._deliveries.get(request.id)
            called = request.route == "send" and request.is_called
            if called != (delivery is not None):
                yield Violation("L5", f"request {request.id}, accepted: {called}, has {delivery}")
            if delivery is not None and delivery.attempt != request.attempt:
                yield Violation("L5", f"request {request.id} is at attempt {request.attempt}, delivers {delivery}")
        for request_id, delivery in self._deliveries.items():
            if request_id not in self._roster.live and not delivery.pins:
                yield Violation("L5", f"the delivery of {request_id} has ended and is kept")
            if not {piece.chunk for piece in delivery.untold} <= delivery.pins.keys():
                yield Violation("L5", f"{request_id} has chunks to tell that are not pinned: {delivery}")


def _first_wanted(pool: PoolLayout, start: int, prompt_tokens: int) -> int:
    """Return the first page that the other worker lacks, which has [0, start): of windows, what decoding reads."""
    if isinstance(pool.retention, StateRetention):
        return 0
    return max(pool.retention.first_needed(prompt_tokens), start) // pool.page_tokens


def _whole_pages(pool: PoolLayout, computed: int, prompt_tokens: int) -> int:
    """Return where the pages end that change no more, once `computed` positions are computed."""
    is_last = computed == prompt_tokens
    if not pool.is_positional:
        return int(is_last)
    return ceil_div(computed, pool.page_tokens) if is_last else computed // pool.page_tokens

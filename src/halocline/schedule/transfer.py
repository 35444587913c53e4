"""What scheduler and other workers have to do with each other: one door for their events, one round after each step.

    receive     absent --Offered--> waiting --admitted--> receiving --Landed--> decoding
    send        absent --PeerAccepted--> waiting --admitted--> prefilling --last chunk--> sending --PeerReleased--> ends

`absent` requests have no word of the other worker yet: they hold nothing and stand in nobody's way. The two sides are
`halocline.schedule.receive` and `halocline.schedule.send`; here is what they share.
"""

from __future__ import annotations

from collections.abc import Iterator

from halocline.memory.arena import Arena
from halocline.memory.audit import Violation
from halocline.schedule.chunk import StepRoom
from halocline.schedule.courtesy import Courtesy
from halocline.schedule.events import (
    Landed,
    Lost,
    Offered,
    PeerAccepted,
    PeerReleased,
    PeerRevoked,
    PeerTook,
    Reason,
    TransferEvent,
)
from halocline.schedule.receive import Receiving
from halocline.schedule.roster import Roster
from halocline.schedule.send import Sending


class Transfers:
    """Both sides of all transfers of one scheduler."""

    def __init__(self, arena: Arena, roster: Roster, receiving: Receiving, sending: Sending) -> None:
        self._arena = arena
        self._roster = roster
        self._receiving = receiving
        self._sending = sending
        self._courtesy = Courtesy(roster)

    def handle(self, event: TransferEvent) -> None:
        """Take what another worker says."""
        match event:
            case Offered():
                self._receiving.offered(event)
                self._courtesy.offered(event)
            case Landed():
                self._receiving.landed(event)
            case Lost():
                self._receiving.lost(event)
                self._courtesy.withdrawn(event.request_id)
            case PeerAccepted():
                self._sending.accepted(event)
            case PeerRevoked():
                self._sending.revoked(event)
            case PeerTook():
                self._sending.took(event)
            case PeerReleased():
                self._sending.released(event)

    def committed(self, room: StepRoom) -> None:
        """Be told that the pages of this step are committed: landings are pinned."""
        for request, wanted in room.landings:
            self._receiving.committed(request, wanted)

    def applied(self, room: StepRoom) -> None:
        """Be told that a step, with all its moves, is over, and what it computed."""
        self._sending.computed([chunk.request for chunk in room.chunks])
        self.tell()

    def tell(self) -> None:
        """Tell of all pages that stand where they will stay: no move is outstanding now."""
        self._receiving.tell()
        self._sending.tell()

    def distrust(self) -> None:
        """Be told that pages which are not pinned may have been moved half way, before the cache is."""
        self._receiving.distrust()
        self._sending.distrust()

    def revoke(self, *, is_idle: bool) -> None:
        """Ask juniors of a short senior for what they hold; where there is nothing to compute, who gives way for it."""
        self._receiving.revoke()
        if is_idle:
            self._courtesy.give_way()

    def prune(self) -> None:
        """Forget deliveries whose requests have ended and whose pages nobody reads; call those whose turn it is."""
        self._sending.prune()
        self._courtesy.call()

    def reasons(self) -> Iterator[tuple[str, Reason]]:
        """Yield why each request that waits for another worker does not run."""
        for request in self._roster.absent:
            what = "offered to compute its prompt" if request.route == "receive" else "accepted it"
            tried = f"; attempt {request.attempt} was lost" if request.attempt >= 0 else ""
            yield request.id, Reason("transfer", f"no other worker has {what} yet{tried}")
        yield from self._courtesy.reasons()
        for request in self._roster.receiving:
            pages = sum(map(len, request.landing.handles)) if request.landing is not None else 0
            yield request.id, Reason("transfer", f"{pages} pages of attempt {request.attempt} are on their way to it")
        for request in self._roster.sending:
            left = self._sending.pinned_chunks(request.id)
            yield request.id, Reason("transfer", f"its prompt is computed; {left} chunks of it are not taken yet")

    def audit(self) -> list[Violation]:
        """Recount landings, deliveries and their pins; every pin of a transfer belongs to one of them."""
        known = [*self._receiving.pins(), *self._sending.pins()]
        found = [*self._receiving.audit(), *self._sending.audit()]
        strays = [pin for pin in self._arena.pins.open if pin.owner.startswith(PIN_OWNERS) and pin not in known]
        found += [Violation("L5", f"the pin of {pin.owner!r} belongs to no transfer") for pin in strays]
        found += [Violation("L5", f"the pin of {pin.owner!r} has ended too early") for pin in known if not pin.is_open]
        return found


PIN_OWNERS = ("landing of ", "chunk ")
"""How the names of all pins of transfers begin."""

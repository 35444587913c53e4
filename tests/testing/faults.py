"""Wrong machines: each breaks one rule of the transfers, and the exploration must find every one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as replace_event

from msgspec.structs import replace

from halocline.disagg import messages as wire
from halocline.disagg.actions import Action, Key, Recall, Send, Tell
from halocline.disagg.arena_pages import ArenaPages
from halocline.disagg.exchange import Exchange
from halocline.disagg.landings import Landings
from halocline.disagg.receiver import Receiver
from halocline.disagg.receiver import Session as Received
from halocline.disagg.sender import Sender
from halocline.disagg.sender import Session as Sent
from halocline.faults.words import ByteMemory
from halocline.faults.worker import Makers
from halocline.memory.layout import ArenaLayout
from halocline.schedule.events import Computed, PeerReleased


class OpenLandings(Landings):
    """A landing that is closed stays open to whoever writes into it."""

    def close(self, key: Key) -> None:
        del key


class OpenMemory(ByteMemory):
    def make_landings(self, pages: ArenaPages, layout: ArenaLayout) -> Landings:
        return OpenLandings(pages, layout.pools)


class NoFence(Makers):
    def memory(self, *parts: object) -> ByteMemory:
        return OpenMemory(*parts)  # type: ignore[arg-type]


class WithMachines(Makers):
    """Others' machines in the exchange."""

    receiver: Callable[..., Receiver] = Receiver
    sender: Callable[..., Sender] = Sender
    exchange_class: type[Exchange] = Exchange

    def exchange(self, post, landings, hello, *, lease_seconds, work_before, most_part_bytes):  # type: ignore[no-untyped-def]
        made = self.exchange_class(
            post,
            landings,
            hello,
            lease_seconds=lease_seconds,
            work_before=work_before,
            most_part_bytes=most_part_bytes,
        )
        made.receiver = type(self).receiver(lease_seconds, landings.missing)
        page_bytes = [pool.page_bytes for pool in hello.facts.pools]
        made.sender = type(self).sender(lease_seconds, work_before, page_bytes, most_part_bytes)
        return made


class HeartbeatExchange(Exchange):
    """The life of a connection counts as progress of every request on it."""

    def _deliver(self, news, now: float) -> None:  # type: ignore[no-untyped-def]
        super()._deliver(news, now)
        for received in self.receiver._sessions.values():
            if received.peer is not None and received.peer.name == news.peer:
                received.lease.renew(now)
        for sent in self.sender._sessions.values():
            if sent.lease is not None and sent.peer == news.peer:
                sent.lease.renew(now)


class RenewedByHeartbeat(WithMachines):
    exchange_class = HeartbeatExchange


class CountingReceiver(Receiver):
    """A chunk that comes twice counts twice, and the peer's word is taken for the rest."""

    def __init__(self, lease_seconds: float, missing: Callable[[Key], int]) -> None:
        super().__init__(lease_seconds, lambda key: 0)

    def _pages(self, session: Received, pages: wire.Pages, refused: str, now: float) -> list[Action]:
        while pages.chunk in session.landed:
            pages = replace(pages, chunk=pages.chunk + 1)
        return super()._pages(session, pages, refused, now)


class DuplicateCountedTwice(WithMachines):
    receiver = CountingReceiver


class HastyReceiver(Receiver):
    """Done is done, whatever has not come yet."""

    def _finish(self, session: Received, now: float) -> list[Action]:
        session.landed |= set(range(session.done.chunks if session.done else 0))
        self._missing = lambda key: 0
        return super()._finish(session, now)


class DoneBelieved(WithMachines):
    receiver = HastyReceiver


class LateClosingReceiver(Receiver):
    """The scheduler hears first, and the landing is closed when the next thing happens."""

    def __init__(self, lease_seconds: float, missing: Callable[[Key], int]) -> None:
        super().__init__(lease_seconds, missing)
        self._late: list[Action] = []

    def _close(self, session: Received) -> list[Action]:
        self._late += super()._close(session)
        return []

    def tick(self, now: float) -> list[Action]:
        late, self._late = self._late, []
        return [*super().tick(now), *late]


class ClosedTooLate(WithMachines):
    receiver = LateClosingReceiver


class SameAttemptReceiver(Receiver):
    """What is lost is asked for again under the same number."""

    def _lose(self, session: Received, why: str, now: float, *, is_final: bool = False) -> list[Action]:
        actions = super()._lose(session, why, now, is_final=is_final)
        session.attempt = 1
        return [
            Send(each.peer, replace(each.message, attempt=1)) if isinstance(each, Send) else each for each in actions
        ]


class SameAttempt(WithMachines):
    receiver = SameAttemptReceiver


class StaleReceiver(Receiver):
    """Whatever names the request is believed to mean the present attempt, and the peer's word is taken for the rest."""

    def __init__(self, lease_seconds: float, missing: Callable[[Key], int]) -> None:
        super().__init__(lease_seconds, lambda key: 0)

    def hear(self, peer: str, message: wire.ToReceiver, now: float, refused: str = "") -> list[Action]:
        session = self._sessions.get(message.request)
        if session is not None and message.attempt < session.attempt:
            message, refused = replace(message, attempt=session.attempt), ""
        return super().hear(peer, message, now, refused)


class StaleAccepted(WithMachines):
    receiver = StaleReceiver


class NoRecallSender(Sender):
    """Pages are given back while the link may still read them."""

    def _end(self, session: Sent) -> list[Action]:
        return [action for action in super()._end(session) if not isinstance(action, Recall)]

    def _begin_again(self, session: Sent, attempt: int, now: float) -> list[Action]:
        return [each for each in super()._begin_again(session, attempt, now) if not isinstance(each, Recall)]


class NoRecall(WithMachines):
    sender = NoRecallSender


class HastySender(Sender):
    """Everything is released as soon as it is sent."""

    def _computed(self, session: Sent, update: Computed, now: float) -> list[Action]:
        return [*super()._computed(session, update, now), Tell(PeerReleased(session.local_id, session.attempt))]


class ReleasedBeforeDone(WithMachines):
    sender = HastySender


class DeafSender(Sender):
    """A connection that is lost is no reason to end anything."""

    def down(self, peer: str) -> list[Action]:
        del peer
        return []

    def tick(self, now: float) -> list[Action]:
        self._lease_seconds = 1e9
        return super().tick(now)


class NothingEnds(WithMachines):
    sender = DeafSender


class UncutSender(Sender):
    """A chunk travels whole, however large it is."""

    def __init__(
        self, lease_seconds: float, work_before: Callable[[str], int], page_bytes: Sequence[int], most_part_bytes: int
    ) -> None:
        del most_part_bytes
        super().__init__(lease_seconds, work_before, page_bytes, 1 << 40)


class NeverCut(WithMachines):
    sender = UncutSender


class BlindSender(Sender):
    """What others have on the line before a session's chunks is not seen."""

    def _ahead(self, session: Sent) -> int:
        del session
        return 0


class QueueUnseen(WithMachines):
    sender = BlindSender


class StandingReceiver(Receiver):
    """No landing gives way, in either of two workers that compute for each other."""

    def _offered(self, session: Received) -> list[Action]:
        return [
            Tell(replace_event(each.event, gives_way=False)) if isinstance(each, Tell) else each
            for each in super()._offered(session)
        ]  # type: ignore[type-var]


class NobodyGivesWay(WithMachines):
    receiver = StandingReceiver


WRONG: tuple[type[Makers], ...] = (
    NoFence,
    RenewedByHeartbeat,
    DuplicateCountedTwice,
    DoneBelieved,
    ClosedTooLate,
    SameAttempt,
    StaleAccepted,
    NoRecall,
    ReleasedBeforeDone,
    NothingEnds,
)

WRONG_WHEN_QUIET: tuple[type[Makers], ...] = (NobodyGivesWay,)
"""Those that only worlds without faults show: where a fault could have lost an attempt, nobody is owed an answer."""

WRONG_WHEN_SLOW: tuple[type[Makers], ...] = (NeverCut, QueueUnseen)
"""Those that a slow line shows."""

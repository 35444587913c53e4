"""The side that has its prompts computed elsewhere: a machine without I/O and without a clock.

    CALLING     the worker is dialed, or will be soon
    ASKING      Ask was said; waits for the offer of this attempt
    OFFERED     the scheduler knows that it may reserve; nothing runs out but the connection
    LANDING     accepted: the landing is open and pages come; the lease runs, renewed by progress only

An attempt ends with `Landed`, or with `Lost` when its lease runs out, when the peer fails, or when the connection does.
Its landing is closed before the scheduler hears of either. What is lost is tried again as a new attempt, at most
`MOST_LOSSES` times in all; a revoked attempt is no loss.

`now` is an argument everywhere, in seconds. Every method returns what must be done, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from halocline.disagg import messages as wire
from halocline.disagg.actions import Action, CloseLanding, Dial, Key, OpenLanding, Send, Tell
from halocline.disagg.leases import RESENDS_PER_LEASE, Lease, Repeat
from halocline.schedule.events import Arrive, Landed, LandingReady, Lost, Offered, RevokeWanted
from halocline.units import floor_to

MOST_LOSSES = 3
"""A request whose attempts were lost so often fails: another worker may be tried."""


class Phase(Enum):
    """Where a session is in its life."""

    CALLING = "calling"
    ASKING = "asking"
    OFFERED = "offered"
    LANDING = "landing"


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker that is connected."""

    name: str
    granule_tokens: int
    is_cut: bool = False
    """Whether its pages of some window are shorter than ours: then it may send a part of one of our pages only."""
    is_after: bool = False
    """Whether it comes after this worker in the order of all: then landings of what it computes give way here."""


@dataclass(slots=True)
class Session:
    """One request whose prompt is computed elsewhere."""

    arrive: Arrive
    address: str
    lease: Lease
    repeat: Repeat
    peer: Peer | None = None
    attempt: int = 1
    losses: int = 0
    phase: Phase = Phase.CALLING
    accept: wire.Accept | None = None
    landed: set[int] = field(default_factory=set)
    """Chunks whose pages stand in the landing."""
    done: wire.Done | None = None

    def key(self) -> Key:
        """What its pages belong to; only while there is a peer."""
        assert self.peer is not None, f"{self.arrive.request_id} has no peer"
        return Key(self.peer.name, self.arrive.request_id, self.attempt)


class Receiver:
    """All requests of this worker whose prompts others compute."""

    def __init__(self, lease_seconds: float, missing: Callable[[Key], int]) -> None:
        """`missing(key)` says how much of an open landing nobody has written yet."""
        self._lease_seconds = lease_seconds
        self._repeat_seconds = lease_seconds / RESENDS_PER_LEASE
        self._missing = missing
        self._sessions: dict[str, Session] = {}
        self._peers: dict[str, Peer] = {}
        """By address."""
        self._dialing: set[str] = set()
        self.refused = 0
        """Messages of attempts that are over, or of requests that are not known."""
        self.leases_lost = 0
        self.attempts_lost = 0
        """Attempts that ended before their time, revoked ones included."""
        self.resent = 0
        """Messages that were said again because no answer came."""
        self.landed = 0

    # ---- what others may ask

    def __contains__(self, request_id: str) -> bool:
        """Whether the prompt of this request is yet to come from elsewhere."""
        return request_id in self._sessions

    def phases(self) -> dict[str, int]:
        """Return the number of sessions in each phase."""
        counts = dict.fromkeys((f"receive_{phase.value}" for phase in Phase), 0)
        for session in self._sessions.values():
            counts[f"receive_{session.phase.value}"] += 1
        return counts

    # ---- what the own engine says

    def begin(self, arrive: Arrive, address: str, now: float) -> list[Action]:
        """Take a request that the own scheduler accepted; its prompt is computed by the worker at `address`."""
        lease, repeat = Lease(now, self._lease_seconds), Repeat(now, self._repeat_seconds)
        session = Session(arrive, address, lease, repeat)
        self._sessions[arrive.request_id] = session
        return self._call(session, now)

    def end(self, request_id: str) -> list[Action]:
        """Forget a request that leaves, whatever the reason; before the scheduler hears of it, if it has not yet."""
        session = self._sessions.pop(request_id, None)
        if session is None or session.peer is None:
            return []
        return [*self._close(session), Send(session.peer.name, wire.Abort(request_id, session.attempt))]

    def ready(self, update: LandingReady, now: float) -> list[Action]:
        """Open the landing that the scheduler has reserved, and tell the peer that it is accepted."""
        session = self._sessions.get(update.request_id)
        if session is None or session.peer is None or session.phase is not Phase.OFFERED:
            return []
        if update.attempt != session.attempt:
            return []
        # The peer tells whole pages of its own from there on; what this side has already is skipped when it comes.
        start_tokens = floor_to(update.start_tokens, session.peer.granule_tokens)
        session.phase = Phase.LANDING
        session.accept = wire.Accept(update.request_id, update.attempt, start_tokens)
        session.landed.clear()
        session.done = None
        session.lease, session.repeat = Lease(now, self._lease_seconds), Repeat(now, self._repeat_seconds)
        opened = OpenLanding(session.key(), update.start_tokens, len(session.arrive.prompt), update.pools)
        return [opened, Send(session.peer.name, session.accept)]

    def revoke(self, update: RevokeWanted, now: float) -> list[Action]:
        """Give a landing up for a senior that is short; the peer keeps the request in its line."""
        session = self._sessions.get(update.request_id)
        if session is None or session.attempt != update.attempt or session.phase is not Phase.LANDING:
            return []
        over = session.key()
        self.attempts_lost += 1
        session.attempt += 1
        self._wait_for_offer(session, now)
        lost = Lost(
            over.request,
            over.attempt,
            "its pages were needed for a more senior request, or for a prompt that another worker waits for",
            is_final=False,
        )
        return [CloseLanding(over), Send(over.peer, wire.Revoke(over.request, over.attempt)), Tell(lost)]

    # ---- connections

    def up(self, address: str, peer: Peer, now: float) -> list[Action]:
        """The worker at an address that was dialed answers."""
        self._dialing.discard(address)
        self._peers[address] = peer
        waiting = [each for each in self._sessions.values() if each.address == address and each.peer is None]
        return [action for session in waiting for action in self._call(session, now)]

    def down(self, address: str, why: str, now: float) -> list[Action]:
        """The connection to an address is lost, or was not made; all attempts over it end at once."""
        self._dialing.discard(address)
        self._peers.pop(address, None)
        gone = [each for each in self._sessions.values() if each.address == address]
        return [action for session in gone for action in self._lose(session, why, now)]

    def _call(self, session: Session, now: float) -> list[Action]:
        session.peer = self._peers.get(session.address)
        if session.peer is not None:
            self._wait_for_offer(session, now)
            return [self._ask(session)]
        session.phase = Phase.CALLING
        if session.address in self._dialing:
            return []
        self._dialing.add(session.address)
        return [Dial(session.address)]

    def _wait_for_offer(self, session: Session, now: float) -> None:
        session.phase = Phase.ASKING
        session.accept = session.done = None
        session.landed.clear()
        session.lease, session.repeat = Lease(now, self._lease_seconds), Repeat(now, self._repeat_seconds)

    def _ask(self, session: Session) -> Action:
        arrive = session.arrive
        assert session.peer is not None, f"{arrive.request_id} asks nobody"
        ask = wire.Ask(
            arrive.request_id,
            session.attempt,
            arrive.prompt,
            arrive.params,
            arrive.seed,
            arrive.priority,
            arrive.namespace.salt,
        )
        return Send(session.peer.name, ask)

    # ---- what the peer says

    def hear(self, peer: str, message: wire.ToReceiver, now: float, refused: str = "") -> list[Action]:
        """Take one message of a peer. `refused`: why the pages that came with it do not stand in their landing, or what
        it says cannot be used."""
        session = self._sessions.get(message.request)
        if session is None or session.peer is None or session.peer.name != peer:
            self.refused += 1  # the peer may still hold something for it
            over = isinstance(message, wire.Fail | wire.Decline)
            return [] if over else [Send(peer, wire.Release(message.request, message.attempt))]
        if message.attempt != session.attempt:
            self.refused += 1
            return []
        if isinstance(message, wire.Fail | wire.Decline):
            return self._lose(session, message.message, now, is_final=isinstance(message, wire.Decline))
        if isinstance(message, wire.Offer):
            return self._offered(session)
        if session.phase is not Phase.LANDING:
            self.refused += 1
            return []
        return self._land(session, message, refused, now)

    def _land(
        self, session: Session, message: wire.Progress | wire.Pages | wire.Done, refused: str, now: float
    ) -> list[Action]:
        match message:
            case wire.Progress(left=left):
                session.lease.report(left, now)
                return []
            case wire.Pages():
                return self._pages(session, message, refused, now)
            case wire.Done() if refused:
                return self._lose(session, refused, now)
            case wire.Done():
                if session.done is None:
                    session.done = message
                    session.lease.renew(now)
                return self._finish(session, now)

    def _offered(self, session: Session) -> list[Action]:
        if session.phase is Phase.ASKING:
            session.phase = Phase.OFFERED
            gives_way = session.peer is not None and session.peer.is_after
            return [Tell(Offered(session.arrive.request_id, session.attempt, gives_way))]
        if session.accept is not None and session.peer is not None:  # it has not heard that it is accepted
            return [Send(session.peer.name, session.accept)]
        return []

    def _pages(self, session: Session, pages: wire.Pages, refused: str, now: float) -> list[Action]:
        key = session.key()
        taken = Send(key.peer, wire.Taken(key.request, key.attempt, pages.chunk))
        if pages.chunk in session.landed:
            return [taken]
        # Every chunk brings a page, and no pool has more pages than the prompt has tokens: so renewals are counted.
        most = len(session.arrive.prompt) * len(pages.runs)
        if pages.chunk >= most:
            refused = refused or f"chunk {pages.chunk} of a prompt that has {most} pages at most"
        if refused:
            return self._lose(session, refused, now)
        session.landed.add(pages.chunk)
        session.lease.renew(now)
        return [taken, *self._finish(session, now)]

    def _finish(self, session: Session, now: float) -> list[Action]:
        """Hand the request over when the peer is done and every chunk has come."""
        done, key = session.done, session.key()
        if done is None or sum(chunk < done.chunks for chunk in session.landed) < done.chunks:
            return []
        missing = self._missing(key)
        if missing:
            return self._lose(session, f"the peer is done, and {missing} pages never came", now)
        del self._sessions[key.request]
        self.landed += 1
        is_cut = session.peer is not None and session.peer.is_cut
        landed = Landed(key.request, key.attempt, done.token_id, done.logprobs, is_cut)
        return [CloseLanding(key), Tell(landed), Send(key.peer, wire.Release(key.request, key.attempt))]

    # ---- time, and losses

    def tick(self, now: float) -> list[Action]:
        """Say again what was not answered, and end what waited too long."""
        actions: list[Action] = []
        for session in list(self._sessions.values()):
            if session.phase is not Phase.OFFERED and session.lease.is_over(now):
                self.leases_lost += 1
                actions += self._lose(session, f"no progress for {self._lease_seconds:g} s", now)
            elif session.repeat.is_due(now):
                actions += self._say_again(session, now)
        return actions

    def _say_again(self, session: Session, now: float) -> list[Action]:
        if session.peer is None:
            return self._call(session, now)
        self.resent += session.phase is not Phase.OFFERED
        if session.phase is Phase.ASKING:
            return [self._ask(session)]
        return [] if session.accept is None else [Send(session.peer.name, session.accept)]

    def _lose(self, session: Session, why: str, now: float, *, is_final: bool = False) -> list[Action]:
        """End the attempt, and begin the next one if there are any left."""
        request_id, attempt = session.arrive.request_id, session.attempt
        session.losses += 1
        self.attempts_lost += 1
        is_final = is_final or session.losses >= MOST_LOSSES
        actions: list[Action] = self._close(session)
        if session.phase is not Phase.CALLING or is_final:
            lost = f"attempt {session.losses} of {MOST_LOSSES} to have the prompt computed at {session.address}: {why}"
            actions.append(Tell(Lost(request_id, attempt, lost, is_final)))
        if is_final:
            del self._sessions[request_id]
            if session.peer is not None:
                actions.append(Send(session.peer.name, wire.Abort(request_id, attempt)))
            return actions
        session.attempt += 1
        if session.address in self._peers:
            return [*actions, *self._call(session, now)]
        # Its worker may be starting: the next call is made when the timer says so.
        session.peer, session.phase = None, Phase.CALLING
        session.accept = session.done = None
        session.lease, session.repeat = Lease(now, self._lease_seconds), Repeat(now, self._repeat_seconds)
        return actions

    def _close(self, session: Session) -> list[Action]:
        return [CloseLanding(session.key())] if session.phase is Phase.LANDING else []

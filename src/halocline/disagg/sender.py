"""The side that computes prompts for others: a machine without I/O and without a clock.

    ASKED       the scheduler was told of it (`Arrive`) and has not answered yet
    OFFERED     the peer was offered an attempt; nothing is held, and nothing runs out but the connection
    ACCEPTED    computing; chunks are told as they come, each pinned until the peer took it
    DONE        all is computed and told; waits for the peer's release

Chunks are cut into parts (`parts`), and each is numbered anew: below, and in all messages, a chunk is such a part. The
lease runs while the peer has something to do, chunks to take or a release to give, and each of these renews it once; so
does each chunk of others that was sent to the same peer before, because a connection carries one after the other. When
it ends, the pages are recalled from the link before the scheduler may use them again.

`now` is an argument everywhere, in seconds. Every method returns what must be done, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from halocline.cache.keys import Namespace
from halocline.disagg import messages as wire
from halocline.disagg.actions import Action, Key, Recall, Send, Tell
from halocline.disagg.leases import RESENDS_PER_LEASE, Lease, Repeat
from halocline.disagg.parts import cut
from halocline.schedule.events import (
    Abort,
    Accepted,
    Arrive,
    Computed,
    Failed,
    NewToken,
    PagesReady,
    PeerAccepted,
    PeerReleased,
    PeerRevoked,
    PeerTook,
    Rejected,
    Sent,
    Update,
)

PEERS_MARK = "@"
"""First character of the scheduler's ids of peers' requests; no id of a front end begins with it."""


class Phase(Enum):
    """Where a session is in its life."""

    ASKED = "asked"
    OFFERED = "offered"
    ACCEPTED = "computing"
    DONE = "done"


class Untaken(NamedTuple):
    """A chunk that was told and not taken yet."""

    order: int
    """Of all that this worker has sent, the how manieth: what a peer is sent arrives in this order."""
    source: int
    """The scheduler's chunk of which it is a part."""


@dataclass(slots=True)
class Session:
    """One request of one peer."""

    peer: str
    request: str
    attempt: int
    local_id: str
    repeat: Repeat
    phase: Phase = Phase.ASKED
    chunks: int = 0
    """Chunks told so far."""
    untaken: dict[int, Untaken] = field(default_factory=dict)
    """By chunk, in the order in which they were sent."""
    lease: Lease | None = None
    """Runs while the peer owes something."""
    done: wire.Done | None = None

    @property
    def key(self) -> Key:
        """What its pages belong to."""
        return Key(self.peer, self.request, self.attempt)

    def turn(self, never: int) -> int:
        """Return the order of the first chunk that is not taken yet, `never` where there is none."""
        return next((each.order for each in self.untaken.values()), never)


class Sender:
    """All requests whose prompts this worker computes for others."""

    def __init__(
        self, lease_seconds: float, work_before: Callable[[str], int], page_bytes: Sequence[int], most_part_bytes: int
    ) -> None:
        """`work_before(local id)` says how many tokens are computed here before that request's prompt is done.

        `page_bytes`: of each pool; no part of a chunk is larger than `most_part_bytes`, but where one page is.
        """
        self._lease_seconds = lease_seconds
        self._page_bytes, self._most_part_bytes = page_bytes, most_part_bytes
        self._orders = 0
        """Chunks sent so far, all told."""
        self._repeat_seconds = lease_seconds / RESENDS_PER_LEASE
        self._work_before = work_before
        self._sessions: dict[tuple[str, str], Session] = {}
        self._by_local: dict[str, Session] = {}
        self.refused = 0
        """Messages of attempts that are over, or of requests that are not known."""
        self.leases_lost = 0
        self.sent = 0
        """Prompts that were computed and taken to the end."""
        self.resent = 0
        """Messages that were said again because no answer came."""

    # ---- what others may ask

    def __contains__(self, local_id: str) -> bool:
        """Whether the request with this id of the scheduler is one of a peer's."""
        return local_id in self._by_local

    def phases(self) -> dict[str, int]:
        """Return the number of sessions in each phase."""
        counts = dict.fromkeys((f"send_{phase.value}" for phase in Phase), 0)
        for session in self._sessions.values():
            counts[f"send_{session.phase.value}"] += 1
        return counts

    # ---- what the peer says

    def hear(self, peer: str, message: wire.ToSender, now: float) -> list[Action]:
        """Take one message of a peer."""
        session = self._sessions.get((peer, message.request))
        if isinstance(message, wire.Ask):
            return self._ask(session, peer, message, now)
        if session is None:
            self.refused += 1
            # Who accepts or revokes waits for an answer, and no other will come.
            waits = isinstance(message, wire.Accept | wire.Revoke)
            unknown = wire.Fail(message.request, message.attempt, "this worker does not know the request")
            return [Send(peer, unknown)] if waits else []
        if isinstance(message, wire.Abort) and message.attempt >= session.attempt:
            return self._end(session)
        if message.attempt != session.attempt:
            self.refused += 1
            return []
        return self._answer(session, message, now)

    def _answer(
        self, session: Session, message: wire.Accept | wire.Taken | wire.Release | wire.Revoke | wire.Abort, now: float
    ) -> list[Action]:
        match message:
            case wire.Accept():
                return self._accept(session, message, now)
            case wire.Taken():
                return self._taken(session, message.chunk, now)
            case wire.Revoke():
                return self._begin_again(session, session.attempt + 1, now)
            case wire.Release() | wire.Abort():
                self.sent += session.done is not None and isinstance(message, wire.Release)
                return self._end(session)

    def _ask(self, session: Session | None, peer: str, ask: wire.Ask, now: float) -> list[Action]:
        if session is not None and ask.attempt > session.attempt:
            return self._begin_again(session, ask.attempt, now)
        if session is not None and ask.attempt < session.attempt:
            self.refused += 1
            return []
        if session is not None:
            return self._offer(session) if session.phase is Phase.OFFERED else []
        local_id = f"{PEERS_MARK}{peer}/{ask.request}/{ask.attempt}"
        session = Session(peer, ask.request, ask.attempt, local_id, Repeat(now, self._repeat_seconds))
        self._sessions[peer, ask.request] = self._by_local[local_id] = session
        arrive = Arrive(
            local_id, ask.prompt, ask.params, ask.seed, ask.priority, Namespace(salt=ask.salt), route="send"
        )
        return [Tell(arrive)]

    def _begin_again(self, session: Session, attempt: int, now: float) -> list[Action]:
        """End the present attempt and offer a later one; the request keeps its place in the scheduler's line."""
        over, was = session.key, session.phase
        session.attempt = attempt
        if was is Phase.ASKED:
            return []
        session.phase, session.lease, session.done = Phase.OFFERED, None, None
        session.untaken.clear()
        session.chunks = 0
        session.repeat = Repeat(now, self._repeat_seconds)
        if was is Phase.OFFERED:
            return self._offer(session)
        return [Recall(over), Tell(PeerRevoked(session.local_id, over.attempt)), *self._offer(session)]

    def _offer(self, session: Session) -> list[Action]:
        return [Send(session.peer, wire.Offer(session.request, session.attempt))]

    def _accept(self, session: Session, accept: wire.Accept, now: float) -> list[Action]:
        if session.phase is Phase.ASKED:
            self.refused += 1
            return []
        if session.phase is not Phase.OFFERED:
            return self._progress(session)  # it asks again because it heard nothing
        session.phase = Phase.ACCEPTED
        session.repeat = Repeat(now, self._repeat_seconds)
        accepted = PeerAccepted(session.local_id, session.attempt, accept.start_tokens)
        return [Tell(accepted), Send(session.peer, self._progress_of(session))]

    def _taken(self, session: Session, chunk: int, now: float) -> list[Action]:
        taken = session.untaken.pop(chunk, None)
        if taken is None:
            return []
        session.lease = Lease(now, self._lease_seconds) if session.untaken or session.done else None
        for other in self._of(session.peer):
            if other.lease is not None and other.turn(never=taken.order) > taken.order:
                other.lease.renew(now)
        if any(each.source == taken.source for each in session.untaken.values()):
            return []
        return [Tell(PeerTook(session.local_id, session.attempt, taken.source))]

    def _of(self, peer: str) -> Iterator[Session]:
        return (session for session in self._sessions.values() if session.peer == peer)

    def _ahead(self, session: Session) -> int:
        """Return how many chunks of others must be taken before the next one of this session is, or can be computed.

        Sent chunks wait for those that were sent to the same peer before. What is not computed yet may wait for the
        memory of any that is pinned.
        """
        turn = session.turn(never=self._orders)
        others = self._of(session.peer) if session.untaken else self._sessions.values()
        return sum(each.order < turn for other in others for each in other.untaken.values() if other is not session)

    # ---- what the own scheduler says

    def note(self, update: Update, now: float) -> list[Action]:
        """Take one update of a request that is a peer's."""
        session = self._by_local.get(update.request_id)
        if session is None:
            return []
        match update:
            case Accepted():
                session.phase = Phase.OFFERED
                session.repeat = Repeat(now, self._repeat_seconds)
                return self._offer(session)
            case PagesReady() if self._is_present(session, update.attempt):
                return self._pages(session, update, now)
            case Computed() if self._is_present(session, update.attempt):
                return self._computed(session, update, now)
            case Rejected() | Failed() | NewToken() | Sent():
                return self._gone(session, update)
            case _:
                return []

    def _gone(self, session: Session, update: Rejected | Failed | NewToken | Sent) -> list[Action]:
        """The scheduler has ended the request on its own."""
        match update:
            case Rejected(message=message):
                self._forget(session)
                return [Send(session.peer, wire.Decline(session.request, session.attempt, message[:4000]))]
            case Failed(message=message):
                return self._fail(session, message)
            case _:
                return self._fail(session, "the request was ended by the worker that computes it")

    @staticmethod
    def _is_present(session: Session, attempt: int) -> bool:
        return session.phase is Phase.ACCEPTED and attempt == session.attempt

    def _pages(self, session: Session, update: PagesReady, now: float) -> list[Action]:
        actions: list[Action] = []
        for part in cut(update.pools, self._page_bytes, self._most_part_bytes):
            session.untaken[session.chunks] = Untaken(self._orders, update.chunk)
            runs = tuple(wire.PageRun(pool.first_page, len(pool.pages)) for pool in part)
            pages = wire.Pages(session.request, session.attempt, session.chunks, update.left_tokens, runs)
            actions.append(Send(session.peer, pages, part))
            session.chunks += 1
            self._orders += 1
        if not actions:  # nothing of it travels, so there is nothing to wait for
            return [Tell(PeerTook(session.local_id, session.attempt, update.chunk))]
        session.lease = session.lease or Lease(now, self._lease_seconds)
        return actions

    def _computed(self, session: Session, update: Computed, now: float) -> list[Action]:
        session.phase = Phase.DONE
        session.lease = session.lease or Lease(now, self._lease_seconds)
        session.repeat = Repeat(now, self._repeat_seconds)
        session.done = wire.Done(session.request, session.attempt, session.chunks, update.token_id, update.logprobs)
        return [Send(session.peer, session.done)]

    # ---- time, and the end

    def tick(self, now: float) -> list[Action]:
        """Say again what was not answered, report progress, and end what waited too long."""
        actions: list[Action] = []
        for session in list(self._sessions.values()):
            if session.lease is not None and session.lease.is_over(now):
                self.leases_lost += 1
                actions += self._fail(session, f"nothing was taken for {self._lease_seconds:g} s")
            elif session.repeat.is_due(now):
                actions += self._say_again(session)
        return actions

    def _say_again(self, session: Session) -> list[Action]:
        if session.phase is Phase.ACCEPTED:
            return self._progress(session)
        self.resent += session.phase is not Phase.ASKED
        if session.done is not None:
            ahead = self._ahead(session) if session.untaken else 0
            moves = [Send(session.peer, wire.Progress(session.request, session.attempt, ahead))] if ahead else []
            return [*moves, Send(session.peer, session.done)]
        return self._offer(session) if session.phase is Phase.OFFERED else []

    def _progress(self, session: Session) -> list[Action]:
        return [Send(session.peer, self._progress_of(session))] if session.phase is Phase.ACCEPTED else []

    def _progress_of(self, session: Session) -> wire.Progress:
        # A token that is computed makes one page of each pool at most, so the sum does not rise when it is sent.
        left = self._work_before(session.local_id) * len(self._page_bytes) + self._ahead(session)
        return wire.Progress(session.request, session.attempt, left)

    def down(self, peer: str) -> list[Action]:
        """End all that a lost connection brought: at once, for whoever comes again is another one."""
        return [action for session in list(self._of(peer)) for action in self._end(session)]

    def _end(self, session: Session) -> list[Action]:
        """End a session on this side, whatever the scheduler has done about it; pages are recalled before it hears."""
        self._forget(session)
        if session.phase in (Phase.ASKED, Phase.OFFERED):
            return [Tell(Abort(session.local_id))]
        return [Recall(session.key), Tell(PeerReleased(session.local_id, session.attempt))]

    def _fail(self, session: Session, message: str) -> list[Action]:
        told = Send(session.peer, wire.Fail(session.request, session.attempt, message[:4000]))
        return [*self._end(session), told]

    def _forget(self, session: Session) -> None:
        del self._sessions[session.peer, session.request]
        del self._by_local[session.local_id]

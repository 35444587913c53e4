"""Between a scheduler and the other workers: their words become events, its updates become messages.

    front end --events--> before --events--> scheduler --updates--> after --updates--> front end
                             |                                        |
                             +-- Sender, Receiver (machines) ---------+--- Post, Landings (links)

The machines decide; here their actions are carried out, in their order: a landing is closed, and pages are recalled,
before the scheduler hears that they are its own again. No call blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from halocline.disagg import messages as wire
from halocline.disagg.actions import Action, CloseLanding, Dial, Key, OpenLanding, Recall, Send, Tell
from halocline.disagg.leases import Repeat
from halocline.disagg.parts import part_bytes
from halocline.disagg.post import Delivered, Down, News, Post, Up
from halocline.disagg.receiver import Peer, Receiver
from halocline.disagg.sender import PEERS_MARK, Sender
from halocline.schedule.events import (
    Abort,
    Accepted,
    Arrive,
    Event,
    Failed,
    LandingReady,
    NewToken,
    PoolPages,
    Rejected,
    RevokeWanted,
    Update,
)

HEARTBEATS_PER_LEASE = 4


class LandingsLike(Protocol):
    """What is needed of `disagg.landings.Landings`."""

    def open(self, key: Key, start_tokens: int, fill_tokens: int, pools: tuple[PoolPages, ...]) -> None: ...
    def close(self, key: Key) -> None: ...
    def missing(self, key: Key) -> int: ...


@dataclass(frozen=True)
class ExchangeFigures:
    """What was exchanged since the start, and what is on its way now."""

    sessions: dict[str, int]
    """Transfers now, by phase."""
    totals: dict[str, int]
    """Counts and bytes since the start."""
    peers: int
    """Connections that stand now."""
    landing_bytes: int
    """Bytes of this arena into which pages of others are to come."""


@dataclass
class Connection:
    """One connection; `address` where this side has dialed it."""

    address: str | None
    heard_at: float
    is_up: bool = False


@dataclass
class Arriving:
    """A request whose prompt another worker computes, until the own scheduler has accepted it."""

    arrive: Arrive
    address: str = field(default="")


class Exchange:
    """Both machines of one worker, and the way to their peers."""

    def __init__(
        self,
        post: Post,
        landings: LandingsLike,
        own: wire.Hello,
        *,
        lease_seconds: float,
        work_before: Callable[[str], int],
        most_part_bytes: int | None = None,
    ) -> None:
        """`work_before(request id)`: tokens that the own scheduler computes before that request's prompt is done.

        `most_part_bytes`: of what travels under one number; None: as the lease allows.
        """
        self._post = post
        self._landings = landings
        self._own = own
        self._lease_seconds = lease_seconds
        page_bytes = [pool.page_bytes for pool in own.facts.pools]
        self.sender = Sender(lease_seconds, work_before, page_bytes, most_part_bytes or part_bytes(lease_seconds))
        self.receiver = Receiver(lease_seconds, landings.missing)
        self._stride_bytes = [pool.stride_bytes for pool in own.facts.pools]
        self._connections: dict[str, Connection] = {}
        self._addresses: dict[str, str] = {}
        self._arriving: dict[str, Arriving] = {}
        self._landing_bytes: dict[Key, int] = {}
        self._events: list[Event] = []
        """For the scheduler, not given to it yet."""
        self._heartbeat = Repeat(0.0, lease_seconds / HEARTBEATS_PER_LEASE)
        self._last_turn: float | None = None

    # ---- around the scheduler

    def assign(self, request_id: str, address: str) -> None:
        """Say where the prompt of a request is computed that arrives in the next turn."""
        self._addresses[request_id] = address

    def before(self, events: Sequence[Event], now: float) -> list[Event]:
        """Return what the scheduler is to hear in this turn: the events given, and what comes of peers' words."""
        for event in events:
            if isinstance(event, Abort):
                self._do(self.receiver.end(event.request_id), now)
                self._arriving.pop(event.request_id, None)
            elif isinstance(event, Arrive) and event.route == "receive":
                address = self._addresses.pop(event.request_id, "")
                self._arriving[event.request_id] = Arriving(event, address)
            self._events.append(event)
        for news in self._post.poll():
            self._hear(news, now)
        self._do(self.receiver.tick(now), now)
        self._do(self.sender.tick(now), now)
        self._watch_connections(now)
        told, self._events = self._events, []
        return told

    def after(self, updates: Sequence[Update], now: float) -> list[Update]:
        """Tell peers what concerns them; return the updates that the front end must hear."""
        heard: list[Update] = []
        for update in updates:
            if update.request_id.startswith(PEERS_MARK):
                self._do(self.sender.note(update, now), now)
            elif isinstance(update, LandingReady):
                self._do(self.receiver.ready(update, now), now)
            elif isinstance(update, RevokeWanted):
                self._do(self.receiver.revoke(update, now), now)
            else:
                heard.append(update)
                self._note_own(update, now)
        return heard

    def _note_own(self, update: Update, now: float) -> None:
        """Begin the session of a request that was accepted; end the one of a request that has ended."""
        if isinstance(update, Accepted):
            arriving = self._arriving.pop(update.request_id, None)
            if arriving is not None:
                self._do(self.receiver.begin(arriving.arrive, arriving.address, now), now)
        elif isinstance(update, Rejected | Failed) or (isinstance(update, NewToken) and update.finish_reason):
            self._arriving.pop(update.request_id, None)
            self._do(self.receiver.end(update.request_id), now)

    # ---- what comes from peers

    def _hear(self, news: News, now: float) -> None:
        if isinstance(news, Up):
            self._up(news, now)
        elif isinstance(news, Down):
            self._down(news.peer, news.why, now)
        elif news.peer in self._connections:
            self._connections[news.peer].heard_at = now
            self._deliver(news, now)

    def _deliver(self, news: Delivered, now: float) -> None:
        message = news.message
        if isinstance(message, wire.ToSender):
            self._do(self.sender.hear(news.peer, message, now), now)
        elif isinstance(message, wire.ToReceiver):
            refused = news.refused or self._outside_vocabulary(message)
            self._do(self.receiver.hear(news.peer, message, now, refused), now)

    def _outside_vocabulary(self, message: wire.ToReceiver) -> str:
        """Return what is wrong with a first token that the own model does not have: computing on would break a step."""
        if not isinstance(message, wire.Done):
            return ""
        size, top = self._own.facts.vocab_size, () if message.logprobs is None else message.logprobs.top
        wrong = [token for token in (message.token_id, *(token for token, _ in top)) if not 0 <= token < size]
        return f"the peer is done with token {wrong[0]}; the model's are 0 to {size - 1}" if wrong else ""

    def _up(self, news: Up, now: float) -> None:
        connection = self._connections.setdefault(news.peer, Connection(None, now))
        connection.heard_at, connection.is_up = now, True
        problems = wire.differences(self._own, news.hello)
        if connection.address is not None and news.hello.role == "decode":
            problems.append("its role is decode: it computes no prompts for others")
        if problems:
            why = f"the worker at {connection.address or news.peer} cannot work with this one: " + "; ".join(problems)
            self._hang_up(news.peer, why, now)
        elif connection.address is not None:
            theirs = news.hello.facts
            is_cut = wire.cuts_windows(self._own.facts, theirs)
            # Any order would do that all workers agree on: epochs are drawn anew at every start, and never equal.
            peer = Peer(news.peer, theirs.granule_tokens, is_cut, is_after=news.hello.epoch > self._own.epoch)
            self._do(self.receiver.up(connection.address, peer, now), now)

    def _down(self, peer: str, why: str, now: float) -> None:
        connection = self._connections.pop(peer, None)
        if connection is None:
            return
        self._do(self.sender.down(peer), now)
        if connection.address is not None:
            self._do(self.receiver.down(connection.address, why, now), now)

    def _hang_up(self, peer: str, why: str, now: float) -> None:
        self._post.hang_up(peer, why)
        self._down(peer, why, now)

    def _watch_connections(self, now: float) -> None:
        """Say that this worker lives, and leave peers that do not.

        After a gap between two turns (a long step, a process that was stopped) silence proves nothing: what peers said
        meanwhile may not have been read yet.
        """
        if self._last_turn is None or now - self._last_turn > self._lease_seconds / 2:
            for connection in self._connections.values():
                connection.heard_at = now
        self._last_turn = now
        silent = [name for name, each in self._connections.items() if now - each.heard_at > self._lease_seconds]
        for name in silent:
            self._hang_up(name, f"nothing was heard of it for {self._lease_seconds:g} s", now)
        if self._heartbeat.is_due(now):
            for name, connection in self._connections.items():
                if connection.is_up:
                    self._post.send(name, wire.Heartbeat())

    # ---- what the machines want done

    def _do(self, actions: Iterable[Action], now: float) -> None:
        for action in actions:
            match action:
                case Send(peer, message, runs):
                    self._post.send(peer, message, runs)
                case Tell(event):
                    self._events.append(event)
                case OpenLanding(key, start_tokens, fill_tokens, pools):
                    sizes = zip(pools, self._stride_bytes, strict=True)
                    self._landing_bytes[key] = sum(len(pool.pages) * stride for pool, stride in sizes)
                    self._landings.open(key, start_tokens, fill_tokens, pools)
                case CloseLanding(key):
                    self._landings.close(key)
                    self._landing_bytes.pop(key, None)
                case Recall(key):
                    self._post.recall(*key)
                case Dial(address):
                    self._connections[self._post.dial(address)] = Connection(address, now)

    # ---- what others may ask

    def fileno(self) -> int:
        """Return a file descriptor that is readable when there is something for `before`."""
        return self._post.fileno()

    def figures(self) -> ExchangeFigures:
        """Return counts and bytes of this moment."""
        sender, receiver = self.sender, self.receiver
        totals = {
            "sent": sender.sent,
            "received": receiver.landed,
            "refused": sender.refused + receiver.refused,
            "retries": sender.resent + receiver.resent,
            "attempts_lost": receiver.attempts_lost,
            "leases_lost": sender.leases_lost + receiver.leases_lost,
        }
        return ExchangeFigures(
            sessions={**sender.phases(), **receiver.phases()},
            totals={**totals, **self._post.figures()},
            peers=sum(connection.is_up for connection in self._connections.values()),
            landing_bytes=sum(self._landing_bytes.values()),
        )

    def close(self) -> None:
        """Leave all peers: close every landing, then every connection."""
        for key in list(self._landing_bytes):
            self._landings.close(key)
        self._landing_bytes.clear()
        self._post.close()

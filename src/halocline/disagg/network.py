"""A network that does not exist: it delays, loses, doubles and reorders messages, parts peers, and all from one seed.

Every connection is of one of two kinds, as the real links are

    push    the sender reads its pages when it puts them on the wire; they land when they arrive       (TCP)
    pull    the receiver copies them out of the sender's memory when it hears of them, and only then
            compares the checksum that was taken when they were sent                                  (shared memory)

so that pages which are used again too early are seen, or are caught, as in the real thing. A process that is stopped
neither sends nor receives until it wakes; one that has crashed does so never more, but what it had put on the wire
still arrives, and its memory can still be pulled from.

Time is an argument; whoever drives the network calls `advance`. Nothing here depends on hashes or clocks.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from halocline.disagg import messages as wire
from halocline.disagg.actions import Key
from halocline.disagg.post import Delivered, Down, News, Up
from halocline.schedule.events import PoolPages

Cargo = tuple[NDArray[np.uint8], ...]
"""Bytes of pages, one array of shape (pages, page_bytes) per pool."""


class Memory(Protocol):
    """The pages of one process's life, and its landings."""

    def read(self, runs: Sequence[PoolPages]) -> Cargo:
        """Return a copy of what stands in these pages now."""
        ...

    def write(self, key: Key, pages: wire.Pages, cargo: Cargo, source: wire.PeerFacts) -> str:
        """Write a chunk into the landing of `key` if it is open; return why not, or an empty string."""
        ...


@dataclass(frozen=True, slots=True)
class Weather:
    """How often what goes wrong, per message."""

    loss: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    """A message that takes much longer than others, so that these overtake it."""
    partition: float = 0.0
    crash: float = 0.0
    stop: float = 0.0
    breakdown: float = 0.0
    """A step of one of the two workers that breaks."""

    def shares(self) -> dict[str, float]:
        """Return the probability of each kind, in a fixed order."""
        return {
            "loss": self.loss,
            "duplicate": self.duplicate,
            "delay": self.delay,
            "partition": self.partition,
            "crash": self.crash,
            "stop": self.stop,
            "breakdown": self.breakdown,
        }


@dataclass(eq=False)
class End:
    """One end of a connection."""

    post: SimulatedPost
    name: str
    """What this side calls the other one."""
    other: End | None = None
    is_open: bool = True
    is_pull: bool = False


class Network:
    """All connections of one world."""

    def __init__(
        self,
        random: Random,
        weather: Weather,
        most_faults: int,
        *,
        latency_seconds: float,
        lease_seconds: float,
        strike: Callable[[str, str], None],
    ) -> None:
        """`strike(kind, address)` is told of what a message has brought upon a worker: crash, stop or breakdown."""
        self.now = 0.0
        self.faults: Counter[str] = Counter()
        self._random = random
        shares = weather.shares()
        self._kinds, self._shares = ["", *shares], [1.0 - sum(shares.values()), *shares.values()]
        self._most_faults = most_faults
        self._latency_seconds = latency_seconds
        self._lease_seconds = lease_seconds
        self._strike = strike
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._noted = 0
        self._listening: dict[str, SimulatedPost] = {}
        self._parted: dict[frozenset[str], float] = {}
        self._connections = 0

    @property
    def fault_count(self) -> int:
        """How much has gone wrong so far."""
        return sum(self.faults.values())

    def open(self, address: str, hello: wire.Hello, memory: Memory) -> SimulatedPost:
        """Begin the life of a process at an address, where nobody else lives now."""
        post = SimulatedPost(self, address, hello, memory)
        self._listening[address] = post
        return post

    # ---- time

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._agenda, (seconds, self._noted, act))
        self._noted += 1

    def next_time(self) -> float | None:
        """Return when the next thing happens; None when nothing is on its way."""
        return self._agenda[0][0] if self._agenda else None

    def advance(self, now: float) -> None:
        """Let everything happen up to `now`."""
        while self._agenda and self._agenda[0][0] <= now:
            self.now = max(self.now, self._agenda[0][0])
            heapq.heappop(self._agenda)[2]()
        self.now = max(self.now, now)

    def _latency(self) -> float:
        return self._latency_seconds * (0.5 + self._random.random())

    # ---- connections

    def connect(self, dialer: SimulatedPost, address: str) -> str:
        """Begin a connection."""
        self._connections += 1
        number, is_pull = self._connections, self._random.random() < 0.5
        here = End(dialer, f"{address}#{number}", is_pull=is_pull)
        dialer.ends[here.name] = here
        self.at(self.now + self._latency(), lambda: self._greet(here, address, number))
        return here.name

    def _greet(self, here: End, address: str, number: int) -> None:
        there = self._listening.get(address)
        if self._is_parted(here.post.address, address):
            return  # it will be given up by whoever dialed
        if there is None:
            self._tell_down(here, "connection refused")
            return
        end = End(there, f"{here.post.address}#{number}", here, is_pull=here.is_pull)
        here.other = end
        there.ends[end.name] = end
        there.receive(lambda: there.tell(Up(end.name, here.post.hello)))
        back = self._latency()
        there.receive(lambda: self.at(self.now + back, lambda: self._greeted(here, there)))

    def _greeted(self, here: End, there: SimulatedPost) -> None:
        if here.is_open and not self._is_parted(here.post.address, there.address):
            here.post.receive(lambda: here.post.tell(Up(here.name, there.hello)))

    def _is_parted(self, one: str, other: str) -> bool:
        return self.now < self._parted.get(frozenset((one, other)), 0.0)

    def _tell_down(self, end: End | None, why: str) -> None:
        if end is None or not end.is_open:
            return

        def tell() -> None:
            if end.is_open:
                end.is_open = False
                end.post.tell(Down(end.name, why))

        end.post.receive(tell)

    def part(self, end: End, why: str) -> None:
        """Close one end; the other one hears of it, unless the network between them is broken."""
        if not end.is_open:
            return
        end.is_open = False
        if end.other is None or self._is_parted(end.post.address, end.other.post.address):
            return
        other = end.other
        self.at(self.now + self._latency(), lambda: self._tell_down(other, why))

    def crash(self, address: str, *, is_silent: bool) -> None:
        """End a life. Silent: nobody is told, as when a machine loses its power."""
        post = self._listening.pop(address)
        post.is_dead = True
        for end in post.ends.values():
            if is_silent:
                end.is_open = False
            else:
                self.part(end, "connection reset")

    def stop(self, address: str) -> None:
        """Stop a process: from now on what comes for it waits."""
        self._listening[address].is_stopped = True

    def wake(self, post: SimulatedPost) -> None:
        """Let a stopped process go on with all that has waited."""
        post.is_stopped = False
        held, post.held = post.held, []
        for act in held:
            self.at(self.now, partial(post.receive, act))

    # ---- messages

    def carry(self, end: End, message: wire.Message, runs: Sequence[PoolPages]) -> None:
        """Take a message at one end, and do to it what the weather says."""
        frame = wire.encode(message)
        kind = "" if isinstance(message, wire.Heartbeat) else self._draw_fault(end)
        if kind == "loss":
            return
        waits_long = self._random.random() < 0.5
        delays = [self._latency() for _ in range(2 if kind == "duplicate" else 1)]
        if kind == "duplicate":
            delays[1] += self._random.random() * self._lease_seconds
        if kind == "delay":
            delays[0] += self._random.choice((0.05, 0.5, 1.5)) * self._lease_seconds
        checksum = digest(end.post.memory.read(runs)) if runs and end.is_pull else 0
        for delay in delays:
            parcel = Parcel(end, frame, tuple(runs), checksum)
            if runs and not end.is_pull:
                end.post.outgoing.append(parcel)
                wait = delay * 0.9 if waits_long else self._latency() * 0.1
                self.at(self.now + wait, partial(self._load, parcel, delay - wait))
            else:
                self.at(self.now + delay, partial(self._arrive, parcel))

    def _draw_fault(self, end: End) -> str:
        """Return what happens to a message; partitions, crashes and stops come over the workers besides."""
        if self.fault_count >= self._most_faults or end.other is None:
            return ""
        (kind,) = self._random.choices(self._kinds, self._shares)
        if not kind:
            return ""
        self.faults[kind] += 1
        addresses = [end.post.address, end.other.post.address]
        if kind == "partition":
            seconds = self._random.choice((0.1, 0.6, 1.5, 3.0)) * self._lease_seconds
            self._parted[frozenset(addresses)] = self.now + seconds
        elif kind in ("crash", "stop", "breakdown"):
            victim = self._random.choice(addresses)
            self.at(self.now + self._latency(), partial(self._strike, kind, victim))
        return kind

    def _load(self, parcel: Parcel, rest: float) -> None:
        """Read the pages of a parcel when it goes on the wire; not if they were recalled or their reader is dead."""
        post = parcel.end.post
        if post.is_dead:
            return
        if post.is_stopped:
            post.held.append(partial(self._load, parcel, rest))
            return
        there = parcel.end.other
        if (
            there is not None and there.post.is_stopped
        ):  # nobody drains the connection, so nothing more goes on the wire
            there.post.held.append(partial(self._load, parcel, 0.0))
            return
        if not any(each is parcel for each in post.outgoing):
            return
        post.outgoing = [each for each in post.outgoing if each is not parcel]
        parcel.cargo = post.memory.read(parcel.runs)
        if rest > 0.0:
            self.at(self.now + rest, partial(self._arrive, parcel))
        else:
            self._arrive(parcel)

    def _arrive(self, parcel: Parcel) -> None:
        end = parcel.end
        there = end.other
        if there is None or self._is_parted(end.post.address, there.post.address):
            return
        there.post.receive(lambda: self._deliver(parcel, there))

    def _deliver(self, parcel: Parcel, end: End) -> None:
        if not end.is_open:
            return
        message = wire.decode(parcel.frame)
        refused = ""
        if isinstance(message, wire.Pages):
            refused = self._land(parcel, end, message)
        end.post.tell(Delivered(end.name, message, refused))

    def _land(self, parcel: Parcel, end: End, message: wire.Pages) -> str:
        source = parcel.end.post
        cargo = parcel.cargo if parcel.cargo is not None else source.memory.read(parcel.runs)
        key = Key(end.name, message.request, message.attempt)
        refused = end.post.memory.write(key, message, cargo, source.hello.facts)
        if not refused and parcel.cargo is None and digest(cargo) != parcel.checksum:
            return "the checksum of its pages is wrong"
        return refused


@dataclass(eq=False)
class Parcel:
    """One message on its way, and the pages that go with it."""

    end: End
    """Where it comes from."""
    frame: bytes
    runs: tuple[PoolPages, ...]
    checksum: int
    cargo: Cargo | None = None
    """What was read of the pages; None until then, and where the receiver pulls them."""


def digest(cargo: Cargo) -> int:
    """Return the xxh3 of all bytes of `cargo`."""
    hasher = xxhash.xxh3_64()
    for pages in cargo:
        hasher.update(np.ascontiguousarray(pages).data)
    return hasher.intdigest()


class SimulatedPost:
    """All connections of one process's life; a `halocline.disagg.post.Post`."""

    def __init__(self, network: Network, address: str, hello: wire.Hello, memory: Memory) -> None:
        self._network = network
        self.address = address
        self.hello = hello
        self.memory = memory
        self.ends: dict[str, End] = {}
        self.inbox: list[News] = []
        self.on_news: Callable[[], None] = lambda: None
        """Called when something has come into an empty inbox."""
        self.held: list[Callable[[], None]] = []
        """What came while the process was stopped."""
        self.outgoing: list[Parcel] = []
        """Pages that were given to `send` and are not read yet."""
        self.is_dead = False
        self.is_stopped = False

    def receive(self, act: Callable[[], None]) -> None:
        """Let something happen in this process: now, when it wakes, or never."""
        if self.is_stopped:
            self.held.append(act)
        elif not self.is_dead:
            act()

    def tell(self, news: News) -> None:
        """Put something into the inbox."""
        self.inbox.append(news)
        if len(self.inbox) == 1:
            self.on_news()

    def poll(self) -> list[News]:
        """Return what has happened since the last call."""
        news, self.inbox = self.inbox, []
        return news

    def fileno(self) -> int:
        """There is no descriptor: whoever drives the network looks into the inbox."""
        return -1

    def dial(self, address: str) -> str:
        """Begin to connect to the worker at an address; return the name of the connection."""
        return self._network.connect(self, address)

    def send(self, peer: str, message: wire.Message, runs: Sequence[PoolPages] = ()) -> None:
        """Queue a message, and pages with it."""
        end = self.ends[peer]
        if end.is_open and end.other is not None:
            self._network.carry(end, message, runs)

    def recall(self, peer: str, request: str, attempt: int) -> None:
        """Drop what is queued of an attempt: no page of it is read any more."""

        def is_recalled(parcel: Parcel) -> bool:
            message = wire.decode(parcel.frame)
            assert isinstance(message, wire.Pages), f"{message} carries no pages"
            return (parcel.end.name, message.request, message.attempt) == (peer, request, attempt)

        self.outgoing = [parcel for parcel in self.outgoing if not is_recalled(parcel)]

    def hang_up(self, peer: str, why: str) -> None:
        """Close one connection."""
        self._network.part(self.ends[peer], why)

    def figures(self) -> Mapping[str, int]:
        """Nothing is counted here."""
        return {}

    def close(self) -> None:
        """Close every connection."""
        for end in self.ends.values():
            self._network.part(end, "the worker has closed")

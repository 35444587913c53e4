"""A network that does not exist: it delays, loses, doubles and reorders messages, parts peers, and all from one seed.

Every connection is of one of two kinds, as the real links are

    push    the sender reads its pages when it puts them on the wire; they land when they arrive       (TCP)
    pull    the receiver copies them out of the sender's memory when it hears of them, and only then
            compares the checksum that was taken when they were sent                                  (shared memory)

so that pages which are used again too early are seen, or are caught, as in the real thing. A line that is slow carries
pages one after the other, and other messages overtake them. A process that is stopped neither sends nor receives until
it wakes; one that has crashed does so never more, but what it had put on the wire still arrives, and its memory can
still be pulled from.

Time is an argument; whoever drives the network calls `advance`. Nothing here depends on hashes or clocks.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from halocline.disagg import messages as wire
from halocline.disagg.actions import Key
from halocline.disagg.post import Delivered, Down, Up
from halocline.disagg.simulated import End, Memory, Parcel, SimulatedPost, digest
from halocline.schedule.events import PoolPages


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
    slow: float = 0.0
    """A line that carries pages so slowly, for some leases, that a part of the most bytes takes a good part of one."""
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
            "slow": self.slow,
            "breakdown": self.breakdown,
        }


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
        slow_bytes: int = 1,
        strike: Callable[[str, str], None],
    ) -> None:
        """`strike(kind, address)` is told of what a message has brought upon a worker: crash, stop or breakdown.

        `slow_bytes`: what a slow line carries within a lease.
        """
        self.now = 0.0
        self.faults: Counter[str] = Counter()
        self._random = random
        shares = weather.shares()
        self._kinds, self._shares = ["", *shares], [1.0 - sum(shares.values()), *shares.values()]
        self._most_faults = most_faults
        self._latency_seconds = latency_seconds
        self._lease_seconds = lease_seconds
        self._slow_bytes = slow_bytes
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
            if runs and (end.line or end.is_carrying or self.now < end.slow_until):
                end.post.outgoing.append(parcel)
                end.line.append(parcel)
                self._carry_next(end)
            elif runs and not end.is_pull:
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
        elif kind == "slow":
            end.slow_until = self.now + self._random.choice((1.0, 4.0)) * self._lease_seconds
            end.byte_seconds = self._random.choice((0.1, 0.4)) * self._lease_seconds / self._slow_bytes
        elif kind in ("crash", "stop", "breakdown"):
            victim = self._random.choice(addresses)
            self.at(self.now + self._latency(), partial(self._strike, kind, victim))
        return kind

    def _carry_next(self, end: End) -> None:
        """Let the next pages of a slow line go on the wire, and those after them when they have arrived."""
        if end.is_carrying or not end.line or end.post.is_dead:
            return
        parcel = end.line.popleft()
        if self._leaves_later(parcel, lambda: self._put_back(parcel)):
            end.is_carrying = True
            return
        if not self._leaves(parcel):
            self._carry_next(end)
            return
        end.is_carrying = True
        if end.is_pull:
            parcel.checksum = digest(end.post.memory.read(parcel.runs))
        else:
            parcel.cargo = end.post.memory.read(parcel.runs)
        slow_seconds = parcel.size_bytes * end.byte_seconds if self.now < end.slow_until else 0.0
        self.at(self.now + self._latency() + slow_seconds, partial(self._carried, parcel))

    def _put_back(self, parcel: Parcel) -> None:
        parcel.end.line.appendleft(parcel)
        parcel.end.is_carrying = False
        self._carry_next(parcel.end)

    def _carried(self, parcel: Parcel) -> None:
        self._arrive(parcel)
        parcel.end.is_carrying = False
        self._carry_next(parcel.end)

    def _leaves_later(self, parcel: Parcel, act: Callable[[], None]) -> bool:
        """Whether nothing goes on the wire now, because who sends or who drains it is stopped; then `act` goes on."""
        for end in (parcel.end, parcel.end.other):
            if end is not None and end.post.is_stopped:
                end.post.held.append(act)
                return True
        return False

    def _leaves(self, parcel: Parcel) -> bool:
        """Whether a parcel goes on the wire now: it was not recalled. It is no longer outgoing then."""
        post = parcel.end.post
        kept = [each for each in post.outgoing if each is not parcel]
        is_there, post.outgoing = len(kept) < len(post.outgoing), kept
        return is_there

    def _load(self, parcel: Parcel, rest: float) -> None:
        """Read the pages of a parcel when it goes on the wire; not if they were recalled or their reader is dead."""
        post = parcel.end.post
        if post.is_dead:
            return
        if self._leaves_later(parcel, partial(self._load, parcel, rest if post.is_stopped else 0.0)):
            return
        if not self._leaves(parcel):
            return
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

"""What one process has of a network that does not exist: its post, its ends of connections, and what waits in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from halocline.disagg import messages as wire
from halocline.disagg.actions import Key
from halocline.disagg.post import News
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


class Carrier(Protocol):
    """What a post needs of its network."""

    def connect(self, dialer: SimulatedPost, address: str) -> str:
        """Begin a connection; return its name."""
        ...

    def carry(self, end: End, message: wire.Message, runs: Sequence[PoolPages]) -> None:
        """Take a message at one end."""
        ...

    def part(self, end: End, why: str) -> None:
        """Close one end."""
        ...


@dataclass(eq=False)
class End:
    """One end of a connection."""

    post: SimulatedPost
    name: str
    """What this side calls the other one."""
    other: End | None = None
    is_open: bool = True
    is_pull: bool = False
    line: deque[Parcel] = field(default_factory=deque)
    """Pages that leave one after the other, while the line is slow and until all that came meanwhile have gone."""
    is_carrying: bool = False
    slow_until: float = 0.0
    byte_seconds: float = 0.0
    """How long a byte takes while the line is slow."""


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

    @property
    def size_bytes(self) -> int:
        """Bytes of its pages."""
        pools = self.end.post.hello.facts.pools
        return sum(len(run.pages) * pool.page_bytes for run, pool in zip(self.runs, pools, strict=True))


def digest(cargo: Cargo) -> int:
    """Return the xxh3 of all bytes of `cargo`."""
    hasher = xxhash.xxh3_64()
    for pages in cargo:
        hasher.update(np.ascontiguousarray(pages).data)
    return hasher.intdigest()


class SimulatedPost:
    """All connections of one process's life; a `halocline.disagg.post.Post`."""

    def __init__(self, network: Carrier, address: str, hello: wire.Hello, memory: Memory) -> None:
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

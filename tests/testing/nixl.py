"""The NIXL library in tests: a stand-in for its agent, whose reads end when a test says so, and real ends of links."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from halocline.disagg.arena_pages import ArenaPages, Bytes
from halocline.disagg.landings import Landings
from halocline.disagg.links import LinkPost, listen_for_links
from halocline.disagg.nixl_agent import Introduction, Ranges
from halocline.disagg.nixl_pull import NixlLinks
from halocline.disagg.post import Up
from halocline.errors import LinkError
from halocline.memory.layout import ArenaLayout
from testing.links import SECRET, End, hello, wait_for


class HeldRead:
    """A read that copies nothing until it is let go, and that may fail."""

    def __init__(self, theirs: Ranges, own: Ranges) -> None:
        self.theirs, self.own = theirs, own
        self.state = "PROC"

    def finish(self) -> None:
        """Bring the bytes."""
        for source, target, size in zip(self.theirs.addresses, self.own.addresses, self.own.sizes, strict=True):
            ctypes.memmove(int(target), int(source), int(size))
        self.state = "DONE"

    def fail(self) -> None:
        """Let the peer be lost."""
        self.state = "NIXL_ERR_REMOTE_DISCONNECT"

    def is_done(self) -> bool:
        if self.state not in ("PROC", "DONE"):
            raise LinkError(f"pages cannot be read from the peer: {self.state}")
        return self.state == "DONE"

    @property
    def is_over(self) -> bool:
        return self.state != "PROC"


class HeldAgent:
    """What `Pulled` and `Lots` need of an agent."""

    def __init__(self, finishes_at_once: bool = True) -> None:
        self.finishes_at_once, self.fails = finishes_at_once, False
        self.reads: list[HeldRead] = []
        self.registered: list[Bytes] = []
        self.parted: list[tuple[Introduction, Sequence[HeldRead]]] = []

    def register(self, memory: Bytes) -> None:
        self.registered.append(memory)

    def meet(self, body: bytes) -> Introduction:
        return msgspec.msgpack.decode(body, type=Introduction)

    def part(self, peer: Introduction, reads: Sequence[HeldRead]) -> None:
        self.parted.append((peer, reads))

    def read(self, peer: Introduction, theirs: Ranges, own: Ranges) -> HeldRead:
        del peer
        read = HeldRead(theirs, own)
        self.reads.append(read)
        if self.fails:
            read.fail()
        elif self.finishes_at_once:
            read.finish()
        return read


def nixl_end(layout: ArenaLayout, epoch: str, *, listens: bool = False, secret: bytes = SECRET) -> End:
    """Make a worker's end whose pages go by the library itself, over TCP on loopback; its arena has random bytes."""
    arena = np.random.default_rng(sum(epoch.encode())).integers(0, 256, layout.arena_bytes, np.uint8)
    own = hello(layout, epoch)
    pages = ArenaPages(arena, own.facts.pools)
    landings = Landings(pages, layout.pools)
    listener = listen_for_links("nixl", "127.0.0.1", 0, Path()) if listens else None
    nixl = NixlLinks("127.0.0.1", own.facts.pools, arena if listens else None)
    return End(layout, arena, landings, LinkPost(own, secret, pages, landings, None, listener, nixl=nixl))


@contextmanager
def nixl_joined(theirs: ArenaLayout, ours: ArenaLayout) -> Iterator[tuple[End, str, End, str]]:
    """Yield (sender, its name for the receiver, receiver, its name for the sender) of a standing link."""
    sender, receiver = nixl_end(theirs, "sender", listens=True), nixl_end(ours, "receiver")
    try:
        peer = receiver.post.dial(sender.post.address)
        wait_for(receiver, Up)
        yield sender, wait_for(sender, Up).peer, receiver, peer
    finally:
        receiver.post.close()
        sender.post.close()

"""A stand-in for the agent of the NIXL library: reads are copies within this process, and end when a test says so."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import msgspec

from halocline.disagg.arena_pages import Bytes
from halocline.disagg.nixl_agent import Introduction, Ranges
from halocline.errors import LinkError


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

"""How pages come from a peer (over the socket; out of its arena: `pulls`): into the landing, under the landing's lock.

A page that is taken over as it is goes straight where it belongs and is summed there, while the cache has it. One that
has to be cut goes through the staging buffer, and is right before it is cut. What has no landing (any more) is read
and dropped, so that the stream stays whole.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from halocline.disagg import stream
from halocline.disagg.arena_pages import checksum
from halocline.disagg.home import Counts, Home
from halocline.disagg.inbox import Beat
from halocline.disagg.landings import Landing
from halocline.disagg.messages import PoolFacts
from halocline.disagg.staging import Claim
from halocline.disagg.stretches import Stretches, unwanted
from halocline.errors import LinkError

WAIT_MS = 1000
STAGED_WAIT_MS = 100
WRONG = "the checksum of a page is wrong"
CLOSED = "the landing was closed"


@dataclass(frozen=True)
class Line:
    """What is known of a connection's other end, and where its pages go."""

    sock: socket.socket
    theirs: tuple[PoolFacts, ...]
    are_equal: tuple[bool, ...]
    """Whether pages of a pool are taken over as they are."""
    home: Home
    counts: Counts
    beat: Beat
    is_over: Callable[[], bool]

    def read_sums(self, count: int) -> list[int]:
        """Read the checksums of a group."""
        size = count * stream.SUM_BYTES
        self.counts.received += size
        return [int(each) for each in np.frombuffer(stream.receive(self.sock, size), np.uint64)]

    def count_pages(self, pool: int, count: int) -> None:
        """Note that so many pages have come."""
        size = count * self.theirs[pool].page_bytes
        self.counts.received += size
        self.counts.received_pages += size

    def verdict(
        self, landing: Landing, group: stream.Group, index: int, here: list[int | None], told: list[int]
    ) -> str:
        """Compare the checksums of what stands in a landing with what was told; note what is right."""
        if any(mine not in (None, its) for mine, its in zip(here, told, strict=True)):
            return WRONG if landing.is_open else CLOSED
        return "" if self.home.landings.confirm(landing, group.pool, index, group.pages) else CLOSED

    def cut(self, landing: Landing, pool: int, index: int, bring: Callable[[Claim], int]) -> str | None:
        """Bring a page into the staging buffer, and cut it when it is right; None: it was not wanted any more.

        `bring` fills the room and returns the checksum that was told; it waits for nobody for long.
        """
        theirs = self.theirs[pool]
        with self.home.staging.claim(theirs.page_bytes, lambda: landing.is_open and not self.is_over()) as claim:
            if claim is None:
                return None
            if bring(claim) != checksum(claim.room):
                return WRONG
            self.home.landings.write(landing, pool, theirs, index, claim.room)
        return "" if landing.is_open else CLOSED


class Source(Protocol):
    """One way on which pages come."""

    is_described: bool
    """Whether a frame of pages says where they lie."""

    def expect(self, numbers: Sequence[Sequence[int]]) -> None:
        """Be told what `take` will be asked for: where pages lie in the peer's arena, of each pool."""
        ...

    def take(self, landing: Landing | None, group: stream.Group, index: int, numbers: Sequence[int]) -> str:
        """Bring a group's pages, the first of them `index` of the request; return why not, or an empty string.

        `numbers`: where they lie in the peer's arena. Without a landing they are dropped.
        """
        ...


class FromSocket:
    """Pages follow on the socket."""

    is_described = False

    def __init__(self, line: Line) -> None:
        self._line = line
        self._poll = select.poll()
        self._poll.register(line.sock, select.POLLIN)

    def expect(self, numbers: Sequence[Sequence[int]]) -> None:
        """They come when they come."""

    def take(self, landing: Landing | None, group: stream.Group, index: int, numbers: Sequence[int]) -> str:
        """See `Source`."""
        del numbers
        pool, count = group.pool, group.pages
        if landing is None:
            wrong = self._drop(pool, count, "")
        elif self._line.are_equal[pool]:
            here = self._receive(landing, pool, self._line.home.landings.numbers(landing, pool, index, count))
            wrong = self._line.verdict(landing, group, index, here, self._line.read_sums(count))
        else:
            while landing.is_open and not self._poll.poll(WAIT_MS):
                continue  # a page that has not begun to come takes no room
            cut = self._line.cut(landing, pool, index, self._bring)
            wrong = self._drop(pool, count, CLOSED) if cut is None else cut
        self._line.count_pages(pool, count)
        return wrong

    def _receive(self, landing: Landing, pool: int, numbers: Sequence[int]) -> list[int | None]:
        """Read pages into their landing, or nowhere as soon as it is closed; return the checksums of those there."""
        own, size = self._line.home.pages, self._line.theirs[pool].page_bytes
        into, sums = Stretches(self._targets(pool, numbers)), list[int | None]()
        total = into.left_bytes
        while into.left_bytes:
            with landing.lock:
                if not landing.is_open:
                    into = Stretches(unwanted(into.left_bytes))
                has_come = self._read(into)
            if not has_come:
                self._poll.poll(WAIT_MS)
            there = (total - into.left_bytes) // size
            sums += [None if n < 0 else checksum(own.page(pool, n)) for n in numbers[len(sums) : there]]
        return sums or [None] * len(numbers)

    def _targets(self, pool: int, numbers: Sequence[int]) -> Iterator[memoryview]:
        own = self._line.home.pages
        for begin, end in own.spans(pool, numbers, stream.GROUP_BYTES):
            if numbers[begin] < 0:
                yield from unwanted((end - begin) * own.pools[pool].page_bytes)
            else:
                yield own.span(pool, numbers[begin], end - begin).data

    def _bring(self, claim: Claim) -> int:
        told = bytearray(stream.SUM_BYTES)
        into = Stretches([claim.room.data, memoryview(told)])
        while into.left_bytes:
            if claim.is_overdue:
                raise LinkError("a page of it took too long, and others waited for its room in the staging buffer")
            if not self._read(into):
                self._poll.poll(STAGED_WAIT_MS)
        self._line.counts.received += stream.SUM_BYTES
        return int.from_bytes(told, "little")

    def _drop(self, pool: int, count: int, why: str) -> str:
        into = Stretches(unwanted(count * self._line.theirs[pool].page_bytes))
        while into.left_bytes:
            if not self._read(into):
                self._poll.poll(WAIT_MS)
        self._line.read_sums(count)
        return why

    def _read(self, into: Stretches) -> bool:
        """Read what there is; return False when there is nothing yet. Raises ConnectionError at the end."""
        try:
            got = self._line.sock.recvmsg_into(into.ahead(stream.GROUP_BYTES), 0, socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            return False
        if not got:
            raise ConnectionError("the connection ended")
        into.skip(got)
        self._line.beat()
        return True

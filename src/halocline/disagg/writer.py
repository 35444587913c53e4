"""The writing half of a connection: messages before pages, and the fence of the sending side.

A page's bytes leave, and are summed, under the fence; `recall` waits for a piece at most, and what remains of a frame
that was half sent is filled up with zeros, under a checksum that fits nothing.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from halocline.disagg import messages as wire
from halocline.disagg import stream
from halocline.disagg.arena_pages import ArenaPages, checksum
from halocline.disagg.home import Counts
from halocline.disagg.stretches import Stretches, zeros
from halocline.errors import LinkError
from halocline.schedule.events import PoolPages
from halocline.units import MIB

WAIT_MS = 1000
SEND_BYTES = 256 << 10
"""So much is given to the socket at once; its pages are summed right after, while the cache has them."""
MOST_MESSAGES = 1 << 14
MOST_BYTES = 256 << 20
"""What may wait to be read by a peer; with more it is left. A burst of prompts of many requests must fit."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """A message that is packed, and the pages that go with it."""

    packed: bytes
    attempt: tuple[str, int] | None = None
    """Request and attempt that the pages belong to."""
    runs: Sequence[PoolPages] = field(default=())


class Writer:
    """What goes out over one connection. Its thread runs `run`; all else may be called from any thread."""

    def __init__(self, pages: ArenaPages, counts: Counts, fail: Callable[[str], None]) -> None:
        """`pages`: of this worker. `fail(why)` closes the connection."""
        self._pages, self._counts, self._fail = pages, counts, fail
        self._queue = threading.Condition()
        self._words: deque[Parcel] = deque()
        self._loads: deque[Parcel] = deque()
        """With pages; messages without overtake them."""
        self._queued_bytes = 0
        self._is_stopped = False
        self._attempt: tuple[str, int] | None = None
        """Of the pages that are being sent."""
        self._is_recalled = False
        self._fence = threading.RLock()
        """Guards every byte of a page that leaves."""
        self._sizes: tuple[int, ...] = ()
        self._are_described = False
        self._on_described: Callable[[], None] | None = None
        self._sock: socket.socket | None = None

    # ---- from the engine's thread

    def send(self, message: wire.Message, runs: Sequence[PoolPages]) -> None:
        """Queue a message."""
        try:
            packed = wire.encode(message)
        except LinkError as error:
            self._fail(f"a message could not be sent: {error}")
            return
        attempt = (message.request, message.attempt) if isinstance(message, wire.Pages) else None
        parcel, queue = Parcel(packed, attempt, runs), self._words if attempt is None else self._loads
        with self._queue:
            count, size = len(self._words) + len(self._loads), self._queued_bytes + len(packed)
            is_full = count >= MOST_MESSAGES or (count > 0 and size > MOST_BYTES)
            if not is_full:
                queue.append(parcel)
                self._queued_bytes = size
                self._queue.notify()
        if is_full:
            self._fail(f"the peer does not read: {count} messages, {size / MIB:.0f} MiB, wait for it")

    def recall(self, request: str, attempt: int) -> None:
        """When this returns, no page of the attempt is read any more."""
        with self._queue:
            for parcel in [each for each in self._loads if each.attempt == (request, attempt)]:
                self._loads.remove(parcel)
                self._queued_bytes -= len(parcel.packed)
            if self._attempt != (request, attempt):
                return
            self._is_recalled = True
        with self._fence:
            """Whoever takes the fence from now on knows of it; whoever had it is done."""

    def stop(self) -> None:
        """Let the thread end."""
        with self._queue:
            self._is_stopped = True
            self._queue.notify()

    # ---- the writing thread

    def run(
        self,
        sock: socket.socket,
        sizes: tuple[int, ...],
        *,
        are_described: bool,
        on_described: Callable[[], None] | None = None,
    ) -> None:
        """Send what is queued until the end.

        `sizes`: pages of each pool that make a group. Pages that are described are read by the peer where they lie,
        from `on_described` on.
        """
        self._sock, self._sizes, self._are_described = sock, sizes, are_described
        self._on_described = on_described
        try:
            while (parcel := self._next()) is not None:
                self._write(parcel)
        except (OSError, LinkError) as error:
            self._fail(f"a message could not be sent: {error}")

    def _next(self) -> Parcel | None:
        with self._queue:
            self._attempt, self._is_recalled = None, False
            while not (self._words or self._loads or self._is_stopped):
                self._queue.wait()
            if self._is_stopped:
                return None
            parcel = (self._words or self._loads).popleft()
            self._queued_bytes -= len(parcel.packed)
            self._attempt = parcel.attempt
            return parcel

    def _write(self, parcel: Parcel) -> None:
        if parcel.attempt is None:
            self._send(stream.frame(stream.MESSAGE, parcel.packed))
            return
        described: tuple[bytes, ...] = ()
        if self._are_described:
            described = tuple(np.ascontiguousarray(run.pages, np.int32).tobytes() for run in parcel.runs)
        self._send(stream.frame(stream.PAGES, stream.encode_pages(stream.PagesBody(parcel.packed, described))))
        if self._on_described is not None:
            self._on_described()
        for pool, first, count in stream.groups([len(run.pages) for run in parcel.runs], self._sizes):
            group = parcel.runs[pool].pages[first : first + count].tolist()
            sums = self._sum(pool, group) if self._are_described else self._push(pool, group)
            self._send(np.array(sums, np.uint64).tobytes())
            size = count * self._pages.pools[pool].page_bytes
            self._counts.sent += size
            self._counts.sent_pages += size

    def _sum(self, pool: int, group: Sequence[int]) -> list[int]:
        """Return the checksums of pages; of those that are recalled, whose bytes may be another's by now, none."""
        sums = []
        for number in group:
            with self._fence:
                sums.append(0 if self._is_recalled else checksum(self._pages.page(pool, number)))
        return sums

    def _push(self, pool: int, group: Sequence[int]) -> list[int]:
        """Send pages, of pages that are recalled meanwhile zeros; return their checksums."""
        sock, pages = self._live, self._pages
        spans = pages.spans(pool, group, stream.GROUP_BYTES)
        out = Stretches(pages.span(pool, group[begin], end - begin).data for begin, end in spans)
        total, poll, sums = out.left_bytes, select.poll(), list[int]()
        poll.register(sock, select.POLLOUT)
        while out.left_bytes:
            with self._fence:
                if self._is_recalled:
                    out = Stretches(zeros(out.left_bytes))
                try:
                    sent = sock.sendmsg(out.ahead(SEND_BYTES), (), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    sent = 0
                out.skip(sent)
                there = (total - out.left_bytes) // (total // len(group))
                sums += self._sum(pool, group[len(sums) : there])
            if not sent:
                poll.poll(WAIT_MS)
        return sums + self._sum(pool, group[len(sums) :])

    @property
    def _live(self) -> socket.socket:
        assert self._sock is not None, "the thread runs with a socket"
        return self._sock

    def _send(self, data: bytes) -> None:
        self._live.sendall(data)
        self._counts.sent += len(data)

"""One connection to another worker: a thread that reads and one that writes, and the fences of both directions.

Reading: pages go straight from the socket, or from the peer's mapped arena, into the landing, a piece at a time under
the landing's lock; what has no landing any more is read and dropped, so that the stream stays whole.
Writing: a page's bytes leave under this connection's fence; `recall` waits for a piece at most, and what remains of a
frame that was half sent is filled up with zeros, which no checksum can match.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from halocline.disagg import messages as wire
from halocline.disagg import stream
from halocline.disagg.actions import Key
from halocline.disagg.arena_pages import ArenaPages, Bytes, check_pages, checksum
from halocline.disagg.landings import Landing, Landings
from halocline.disagg.post import Delivered, Down, News, Up
from halocline.errors import LinkError
from halocline.schedule.events import PoolPages

HELLO_SECONDS = 10.0
HELLO_BYTES = 4 << 20
WAIT_MS = 1000
BEAT_SECONDS = 1.0
"""While a chunk of pages comes in, the connection is told to live this often."""
ZEROS = bytes(1 << 16)
SUMS_AT_ONCE = 8
"""Checksums that leave together on one host."""


@dataclass(frozen=True)
class Home:
    """What all connections of a worker share."""

    hello: wire.Hello
    secret: bytes
    pages: ArenaPages
    landings: Landings
    descriptor: int | None
    """Of the arena's memory, for reading: handed to dialers on this host."""
    tell: Callable[[News], None]


@dataclass
class Counts:
    """Bytes of one connection; each field is written by one thread."""

    sent: int = 0
    received: int = 0
    sent_pages: int = 0
    received_pages: int = 0


class Connection:
    """One connection; its threads end when it does."""

    def __init__(self, name: str, home: Home, address: str, sock: socket.socket | None = None) -> None:
        """Take a connection that was accepted (`sock`), or make one to `address`, once it is started."""
        self.name, self.counts = name, Counts()
        self.is_greeted = False
        """Whether the peer has proved the secret and said who it is."""
        self._home, self._address = home, address
        self._sock = sock
        self._side: stream.Side = "dialer" if sock is None else "listener"
        self._why = "the connection ended"
        self._is_closed = False
        self._outbox: deque[tuple[wire.Message, Sequence[PoolPages]]] = deque()
        self._fence = threading.Condition()
        """Guards the outbox, and every byte of a page that leaves."""
        self._sending: Key | None = None
        self._is_recalled = False
        self._peer: wire.Hello | None = None
        self._mapped: ArenaPages | None = None
        self._scratch: Bytes = np.empty(0, np.uint8)
        self._reader = threading.Thread(target=self._run, name=f"halocline-{name}", daemon=True)

    def start(self) -> None:
        """Begin; `Up` or `Down` follows."""
        self._reader.start()

    @property
    def is_over(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._is_closed

    # ---- from the engine's thread

    def send(self, message: wire.Message, runs: Sequence[PoolPages]) -> None:
        """Queue a message."""
        with self._fence:
            self._outbox.append((message, runs))
            self._fence.notify()

    def recall(self, request: str, attempt: int) -> None:
        """When this returns, no page of the attempt is read any more."""
        with self._fence:
            kept = [item for item in self._outbox if not (item[1] and _key("", item[0])[1:] == (request, attempt))]
            self._outbox = deque(kept)
            if self._sending is not None and self._sending[1:] == (request, attempt):
                self._is_recalled = True

    def hang_up(self, why: str) -> None:
        """Close it; the threads end soon."""
        with self._fence:
            self._why = why if not self._is_closed else self._why
            self._is_closed = True
            self._fence.notify()
            sock = self._sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it was over

    def join(self) -> None:
        """Wait for the end of the threads, after `hang_up`."""
        self._reader.join(HELLO_SECONDS + 5)

    # ---- the reading thread

    def _run(self) -> None:
        writer: threading.Thread | None = None
        try:
            self._greet()
            writer = threading.Thread(target=self._write_all, name=f"halocline-{self.name}-out", daemon=True)
            writer.start()
            while True:
                self._take(self._read_frame())
        except (OSError, LinkError, ValueError) as error:
            if not self._is_closed:
                self._why = str(error) or type(error).__name__
        finally:
            self.hang_up(self._why)
            if writer is not None:
                writer.join()
            if self._sock is not None:
                self._sock.close()
            self._home.tell(Down(self.name, self._why))

    @property
    def _live(self) -> socket.socket:
        assert self._sock is not None, "the connection was made"
        return self._sock

    def _greet(self) -> None:
        """Connect, prove, exchange hellos and, on one host, the arena; raises what keeps the two apart."""
        if self._sock is None:
            made = connect(self._address)
            with self._fence:
                self._sock = made
                if self._is_closed:
                    raise LinkError(self._why)
        sock = self._live
        until = time.monotonic() + HELLO_SECONDS
        sock.settimeout(HELLO_SECONDS)
        stream.prove(sock, self._home.secret, self._side, until)
        sock.sendall(stream.frame(stream.MESSAGE, wire.encode(self._home.hello)))
        first = stream.receive_frame(sock, HELLO_BYTES, until)
        hello = wire.decode(first.body)
        if not isinstance(hello, wire.Hello):
            raise LinkError("the peer did not say hello first")
        wire.check_peer(self._home.hello, hello, f"the worker at {self._address}")
        check_pages(hello.facts.pools)
        self._peer = hello
        self._scratch = np.empty(max(pool.page_bytes for pool in hello.facts.pools), np.uint8)
        self._exchange_arena(sock, hello)
        sock.settimeout(None)
        self.is_greeted = True
        self._home.tell(Up(self.name, hello))

    def _exchange_arena(self, sock: socket.socket, hello: wire.Hello) -> None:
        """On one host, whoever was dialed lets the other map its arena for reading."""
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return
        if self._side == "listener":
            assert self._home.descriptor is not None, "who listens on a Unix socket has its arena in shared memory"
            socket.send_fds(sock, [b"A"], [self._home.descriptor])
            return
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
        if not descriptors:
            raise LinkError("the peer did not hand over its arena")
        try:
            self._mapped = ArenaPages.mapped(descriptors[0], hello.facts.pools)
        finally:
            for descriptor in descriptors:
                socket.close(descriptor)

    def _read_frame(self) -> stream.Frame:
        frame = stream.receive_frame(self._live)
        self.counts.received += frame.wire_bytes
        return frame

    def _take(self, frame: stream.Frame) -> None:
        if frame.kind == stream.MESSAGE:
            message = wire.decode(frame.body)
            if isinstance(message, wire.Hello | wire.Pages):
                raise LinkError(f"a {type(message).__name__} came where none may come")
            self._home.tell(Delivered(self.name, message))
            return
        body = stream.decode_pages(frame.body)
        pages = wire.decode(body.message)
        assert self._peer is not None, "hello came first"
        if not isinstance(pages, wire.Pages) or len(pages.runs) != len(self._peer.facts.pools):
            raise LinkError("a frame of pages does not say which pages it brings")
        refused = self._take_pages(pages, body)
        self._home.tell(Delivered(self.name, pages, refused))

    def _take_pages(self, pages: wire.Pages, body: stream.PagesBody) -> str:
        """Bring a chunk's pages into their landing; return why they are not there, or an empty string."""
        landing = self._home.landings.find(Key(*_key(self.name, pages)))
        is_there = landing is not None and pages.chunk in landing.chunks
        writes = None if is_there else landing
        take = self._pull if self._mapped is not None else self._receive_page
        sources, beat = self._sources(pages, body), time.monotonic()
        refused = "" if is_there or landing is not None else "there is no landing for it"
        for pool, index, number, total in sources:
            # To the last page also after a fault: a stream that is left half read is of no use to anybody.
            wrong = take(writes, pool, index, number, total)
            refused = refused or (wrong if writes is not None else "")
            if time.monotonic() - beat > BEAT_SECONDS:
                # The peer's heartbeats stand behind its pages.
                beat = time.monotonic()
                self._home.tell(Delivered(self.name, wire.Heartbeat()))
        if not refused and landing is not None:
            landing.chunks.add(pages.chunk)
        return refused

    def _sources(self, pages: wire.Pages, body: stream.PagesBody) -> Iterator[tuple[int, int, int, int]]:
        """Yield (pool, index in the request, page number at the peer, checksum); the last two on one host only."""
        assert self._peer is not None, "hello came first"
        counts = [run.pages for run in pages.runs]
        numbers = [np.frombuffer(each, np.int32) for each in body.numbers]
        if self._mapped is not None and [len(each) for each in numbers] != counts:
            raise LinkError("a frame of pages does not name as many pages as it announces")
        for pool, run in enumerate(pages.runs):
            for place in range(run.pages):
                if self._mapped is None:
                    yield pool, run.first_page + place, -1, 0
                else:
                    yield pool, run.first_page + place, int(numbers[pool][place]), self._read_sum()

    def _pull(self, landing: Landing | None, pool: int, index: int, number: int, total: int) -> str:
        """Copy one page out of the peer's arena, and check it where it arrived."""
        assert self._mapped is not None, "pages are pulled from a mapped arena"
        assert self._peer is not None, "hello came first"
        if not 0 <= number < self._mapped.pages(pool):
            raise LinkError(f"the peer's pool {pool} has no page {number}")
        if landing is None:
            return ""
        page = self._mapped.page(pool, number)
        self.counts.received += len(page)
        self.counts.received_pages += len(page)
        theirs, landings = self._peer.facts.pools[pool], self._home.landings
        with landing.lock:
            target = landings.target(landing, pool, theirs, index) if landing.is_open else None
            if target is not None:
                target[:] = page
                if checksum(target) != total:
                    return "the checksum of a page is wrong"
        if target is not None:
            landings.confirm(landing, pool, index)
        else:
            # What is cut must be right before it is cut, so it is copied first.
            copy = self._scratch[: len(page)]
            copy[:] = page
            if checksum(copy) != total:
                return "the checksum of a page is wrong"
            landings.write(landing, pool, theirs, index, copy)
        return "" if landing.is_open else "the landing was closed"

    def _receive_page(self, landing: Landing | None, pool: int, index: int, number: int, total: int) -> str:
        """Read one page and its checksum from the socket."""
        del number, total
        assert self._peer is not None, "hello came first"
        theirs, landings = self._peer.facts.pools[pool], self._home.landings
        target = None
        if landing is not None:
            with landing.lock:
                target = landings.target(landing, pool, theirs, index) if landing.is_open else None
        scratch = self._scratch[: theirs.page_bytes]
        if landing is None or target is None:
            self._fill(scratch)
        else:
            self._fill_landing(landing, target, scratch)
        told = self._read_sum()
        self.counts.received += theirs.page_bytes
        self.counts.received_pages += theirs.page_bytes
        if landing is None:
            return ""
        if target is None:
            if checksum(scratch) != told:
                return "the checksum of a page is wrong"
            landings.write(landing, pool, theirs, index, scratch)
            return "" if landing.is_open else "the landing was closed"
        with landing.lock:
            if not landing.is_open:
                return "the landing was closed"
            is_right = checksum(target) == told
        if not is_right:
            return "the checksum of a page is wrong"
        landings.confirm(landing, pool, index)
        return ""

    def _read_sum(self) -> int:
        self.counts.received += stream.SUM_BYTES
        return int.from_bytes(stream.receive(self._live, stream.SUM_BYTES), "little")

    def _fill(self, target: Bytes) -> None:
        view = memoryview(target.data)
        while view:
            got = self._live.recv_into(view)
            if not got:
                raise ConnectionError("the connection ended")
            view = view[got:]

    def _fill_landing(self, landing: Landing, target: Bytes, scratch: Bytes) -> None:
        """Read a page into its landing, piece by piece; into the scratch as soon as the landing is closed."""
        poll = select.poll()
        poll.register(self._live, select.POLLIN)
        done = 0
        while done < len(target):
            poll.poll(WAIT_MS)
            with landing.lock:
                into = target if landing.is_open else scratch
                try:
                    got = self._live.recv_into(memoryview(into.data)[done:], 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
            if not got:
                raise ConnectionError("the connection ended")
            done += got

    # ---- the writing thread

    def _write_all(self) -> None:
        try:
            while True:
                with self._fence:
                    self._sending, self._is_recalled = None, False
                    while not self._outbox and not self._is_closed:
                        self._fence.wait()
                    if self._is_closed:
                        return
                    message, runs = self._outbox.popleft()
                    self._sending = Key(*_key(self.name, message)) if runs else None
                self._write(message, runs)
        except (OSError, LinkError) as error:
            self.hang_up(f"a message could not be sent: {error}")

    def _write(self, message: wire.Message, runs: Sequence[PoolPages]) -> None:
        packed = wire.encode(message)
        if not isinstance(message, wire.Pages):
            self._send_all(stream.frame(stream.MESSAGE, packed))
            return
        pages = [(pool, int(number)) for pool, run in enumerate(runs) for number in run.pages]
        if self._live.family == socket.AF_UNIX:
            self._send_described(packed, runs, pages)
            return
        self._send_all(stream.frame(stream.PAGES, stream.encode_pages(stream.PagesBody(packed))))
        for each in pages:
            self._send_page(self._home.pages.page(*each))

    def _send_described(self, packed: bytes, runs: Sequence[PoolPages], pages: list[tuple[int, int]]) -> None:
        """Say where pages lie, then their checksums, a few at a time: the peer copies while later ones are summed."""
        numbers = tuple(np.ascontiguousarray(run.pages, np.int32).tobytes() for run in runs)
        self._send_all(stream.frame(stream.PAGES, stream.encode_pages(stream.PagesBody(packed, numbers))))
        for begin in range(0, len(pages), SUMS_AT_ONCE):
            some = [self._home.pages.page(*each) for each in pages[begin : begin + SUMS_AT_ONCE]]
            self._send_all(np.array([self._sum(page) for page in some], np.uint64).tobytes())
            size = sum(map(len, some))
            self.counts.sent += size
            self.counts.sent_pages += size

    def _sum(self, page: Bytes) -> int:
        """Return the checksum of a page; of one that is recalled, whose bytes may be another's by now, none."""
        with self._fence:
            return 0 if self._is_recalled else checksum(page)

    def _send_page(self, page: Bytes) -> None:
        """Send a page and its checksum; of a page that is recalled meanwhile, zeros."""
        total = self._sum(page)
        poll = select.poll()
        poll.register(self._live, select.POLLOUT)
        done = 0
        while done < len(page):
            with self._fence:
                piece = memoryview(ZEROS)[: len(page) - done] if self._is_recalled else memoryview(page.data)[done:]
                try:
                    sent = self._live.send(piece, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    sent = 0
            if not sent:
                poll.poll(WAIT_MS)
            done += sent
        self._send_all(np.uint64(total).tobytes())
        self.counts.sent += len(page)
        self.counts.sent_pages += len(page)

    def _send_all(self, data: bytes) -> None:
        self._live.sendall(data)
        self.counts.sent += len(data)


def _key(peer: str, message: wire.Message) -> tuple[str, str, int]:
    assert isinstance(message, wire.Pages), f"a {type(message).__name__} brings no pages"
    return peer, message.request, message.attempt


def connect(address: str) -> socket.socket:
    """Connect to `tcp://host:port` or `shm:///path`; raises OSError or LinkError."""
    kind, _, rest = address.partition("://")
    if kind == "shm":
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(HELLO_SECONDS)
            sock.connect(rest)
        except BaseException:
            sock.close()
            raise
        return sock
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not port.isdecimal():
        raise LinkError(f"{address!r} is no link address; it must be tcp://HOST:PORT or shm:///PATH")
    return socket.create_connection((host.strip("[]"), int(port)), HELLO_SECONDS)

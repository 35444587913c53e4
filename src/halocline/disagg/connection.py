"""One connection to another worker, from its greeting to its end: a thread that reads (`reader`) and one that writes
(`writer`), each with the fence of its direction.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

from halocline.disagg import messages as wire
from halocline.disagg import stream
from halocline.disagg.arena_pages import ArenaPages, check_pages
from halocline.disagg.arrivals import FromSocket, Line, Source
from halocline.disagg.home import Counts, Home
from halocline.disagg.inbox import Beat
from halocline.disagg.nixl_pull import Offered, Pulled
from halocline.disagg.nixl_source import FromLibrary
from halocline.disagg.post import Down, Up
from halocline.disagg.pulls import FromArena
from halocline.disagg.reader import Reader
from halocline.disagg.writer import Writer
from halocline.errors import LinkError
from halocline.schedule.events import PoolPages

HELLO_SECONDS = 10.0
HELLO_BYTES = 4 << 20
Way = ArenaPages | Offered | Pulled | None
"""To pages, beside the socket: the peer's mapped arena, or an end of the library's."""


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
        self._ending = threading.Lock()
        self._why = "the connection ended"
        self._is_over = False
        self._writer = Writer(home.pages, self.counts, self.hang_up)
        self._way: Way = None
        self._thread = threading.Thread(target=self._run, name=f"halocline-{name}", daemon=True)

    def start(self) -> None:
        """Begin; `Up` or `Down` follows. Of strangers that leave again not all are told of, if they are many."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread for it
            self.hang_up(str(error))
            self._end(None)

    @property
    def is_over(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._is_over

    # ---- from the engine's thread

    def send(self, message: wire.Message, runs: Sequence[PoolPages]) -> None:
        """Queue a message."""
        self._writer.send(message, runs)

    def recall(self, request: str, attempt: int) -> None:
        """When this returns, no page of the attempt is read any more."""
        self._writer.recall(request, attempt)

    def hang_up(self, why: str) -> None:
        """Close it; the threads end soon."""
        with self._ending:
            self._why = why if not self._is_over else self._why
            self._is_over = True
            sock = self._sock
        self._writer.stop()
        self._home.inbox.wake()
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it was over

    def join(self) -> None:
        """Wait for the end of the threads, after `hang_up`; there may never have been any."""
        if self._thread.ident is not None:
            self._thread.join(HELLO_SECONDS + 5)

    # ---- the reading thread

    def _run(self) -> None:
        writing: threading.Thread | None = None
        try:
            hello = self._greet()
            line, way = self._line(hello), self._way
            are_described = line.sock.family == socket.AF_UNIX or way is not None
            sizes = stream.group_sizes(line.theirs, line.are_equal, are_described=are_described)
            writing = threading.Thread(
                target=lambda: self._writer.run(
                    line.sock,
                    sizes,
                    are_described=are_described,
                    on_described=way.described if isinstance(way, Offered) else None,
                ),
                name=f"halocline-{self.name}-out",
                daemon=True,
            )
            writing.start()
            self.is_greeted = True
            self._home.inbox.tell(Up(self.name, hello))
            Reader(self.name, line, source_of(line, way), sizes).run()
        except (OSError, LinkError, ValueError, RuntimeError) as error:
            self.hang_up(str(error) or type(error).__name__)
        finally:
            self._end(writing)

    def _end(self, writing: threading.Thread | None) -> None:
        self.hang_up(self._why)
        if writing is not None and writing.ident is not None:
            writing.join()
        if isinstance(self._way, Offered | Pulled):
            self._way.close()
        self._way = None  # or who is told of the end would still have the peer's arena mapped
        if self._sock is not None:
            self._sock.close()
        self._home.inbox.tell(Down(self.name, self._why), is_heard=self.is_greeted or self._side == "dialer")

    @property
    def _live(self) -> socket.socket:
        assert self._sock is not None, "the connection was made"
        return self._sock

    def _line(self, hello: wire.Hello) -> Line:
        """Return what pages from this peer need; raises LinkError where they could never be cut."""
        home, theirs = self._home, hello.facts.pools
        are_equal = stream.equal_pools(home.pages.pools, theirs)
        largest = max((pool.page_bytes for pool, same in zip(theirs, are_equal, strict=True) if not same), default=0)
        if largest > home.staging.quota_bytes:
            raise LinkError(
                f"its pages have to be cut here, and one of {largest} bytes does not fit the staging buffer of "
                f"{home.staging.quota_bytes}; raise staging_bytes"
            )
        return Line(
            self._live, theirs, are_equal, home, self.counts, Beat(self.name, home.inbox), lambda: self._is_over
        )

    def _greet(self) -> wire.Hello:
        """Connect, prove, exchange hellos and ways to the arena; raises what keeps the two apart."""
        if self._sock is None:
            made = connect(self._address)
            with self._ending:
                self._sock = made
                if self._is_over:
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
        self._way = self._arrange(sock, hello, until)
        sock.settimeout(None)
        return hello

    def _arrange(self, sock: socket.socket, hello: wire.Hello, until: float) -> Way:
        """Let the dialer read the arena of whoever was dialed, where it can; else pages go over the socket."""
        if sock.family == socket.AF_UNIX:
            return self._exchange_arena(sock, hello)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nixl, secret = self._home.nixl, self._home.secret
        if self._side == "listener":
            return None if nixl is None else nixl.offer(sock, secret)
        if not self._address.startswith("nixl:"):
            return None
        if nixl is None:
            raise LinkError("its pages go by NIXL; start this worker with --link-kind nixl, too")
        return nixl.pull(sock, secret, hello.facts.pools, lambda: self._is_over, until)

    def _exchange_arena(self, sock: socket.socket, hello: wire.Hello) -> ArenaPages | None:
        """On one host, whoever was dialed lets the other map its arena for reading."""
        if self._side == "listener":
            assert self._home.descriptor is not None, "who listens on a Unix socket has its arena in shared memory"
            socket.send_fds(sock, [b"A"], [self._home.descriptor])
            return None
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
        if not descriptors:
            raise LinkError("the peer did not hand over its arena")
        try:
            return ArenaPages.mapped(descriptors[0], hello.facts.pools)
        finally:
            for descriptor in descriptors:
                socket.close(descriptor)


def source_of(line: Line, way: Way) -> Source:
    """Return how pages come."""
    if isinstance(way, Pulled):
        return FromLibrary(line, way)
    return FromArena(line, way) if isinstance(way, ArenaPages) else FromSocket(line)


def connect(address: str) -> socket.socket:
    """Connect to `tcp://host:port`, `nixl://host:port` or `shm:///path`; raises OSError or LinkError."""
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
    if kind not in ("tcp", "nixl") or not port.isdecimal():
        raise LinkError(f"{address!r} is no link address; it must be tcp://HOST:PORT, nixl://HOST:PORT or shm:///PATH")
    return socket.create_connection((host.strip("[]"), int(port)), HELLO_SECONDS)

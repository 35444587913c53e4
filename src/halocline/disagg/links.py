"""The real `Post`: connections over TCP or, on one host, over a Unix socket beside shared memory."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import count
from pathlib import Path

from halocline.disagg.arena_pages import ArenaPages
from halocline.disagg.connection import Connection
from halocline.disagg.helper import Helper
from halocline.disagg.home import Counts, Home
from halocline.disagg.inbox import Inbox
from halocline.disagg.landings import Landings
from halocline.disagg.messages import Hello, Message
from halocline.disagg.nixl_pull import NixlLinks
from halocline.disagg.post import Down, News
from halocline.disagg.staging import Staging
from halocline.errors import ConfigError
from halocline.schedule.events import PoolPages

BACKLOG = 64
MOST_STRANGERS = 32
"""Connections that have not proved the secret yet; beyond, the oldest is left for the newest."""
MOST_ACCEPTED = 256
"""Connections that were accepted and stand, strangers included; beyond, no more is."""
PAUSE_SECONDS = 0.1
STAGING_BYTES = 64 << 20
SOCKET_NAME = "link.sock"
FIGURES = ("sent_bytes", "received_bytes", "sent_page_bytes", "received_page_bytes")


class LinkPost:
    """All connections of one worker. Not for several threads, but for what its own threads tell."""

    def __init__(
        self,
        hello: Hello,
        secret: bytes,
        pages: ArenaPages,
        landings: Landings,
        descriptor: int | None = None,
        listener: socket.socket | None = None,
        staging_bytes: int = STAGING_BYTES,
        nixl: NixlLinks | None = None,
    ) -> None:
        """`listener`: where other workers dial; None: this one dials only.

        `descriptor`: the arena's memory, open for reading, for dialers on this host; a Unix listener needs it.
        """
        self._listener = listener
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._connections: dict[str, Connection] = {}
        self._ended = Counts()
        self._inbox = Inbox()
        self._staging = Staging(staging_bytes)
        self._helper = Helper()
        self._is_closed = False
        self._home = Home(hello, secret, pages, landings, descriptor, self._staging, self._helper, self._inbox, nixl)
        self._accepting: threading.Thread | None = None
        if listener is not None:
            self._accepting = threading.Thread(target=self._accept_all, name="halocline-links", daemon=True)
            self._accepting.start()

    @property
    def address(self) -> str:
        """Where other workers dial; empty where they cannot."""
        if self._listener is None:
            return ""
        if self._listener.family == socket.AF_UNIX:
            return f"shm://{self._listener.getsockname()}"
        host, port = self._listener.getsockname()[:2]
        kind = "tcp" if self._home.nixl is None else "nixl"
        return f"{kind}://[{host}]:{port}" if ":" in host else f"{kind}://{host}:{port}"

    def poll(self) -> list[News]:
        """Return what has happened since the last call."""
        news = self._inbox.take()
        for each in news:
            if isinstance(each, Down):
                self._forget(each.peer)
        return news

    def fileno(self) -> int:
        """Return the eventfd that is readable when `poll` has something."""
        return self._inbox.fileno()

    def dial(self, address: str) -> str:
        """Begin to connect; return the name of the connection."""
        return self._add(address, None).name

    def send(self, peer: str, message: Message, runs: Sequence[PoolPages] = ()) -> None:
        """Queue a message; a peer that is down gets nothing."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.send(message, runs)

    def recall(self, peer: str, request: str, attempt: int) -> None:
        """When this returns, no page of the attempt is read for the peer any more."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.recall(request, attempt)

    def hang_up(self, peer: str, why: str) -> None:
        """Close one connection."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.hang_up(why)

    def figures(self) -> Mapping[str, int]:
        """Return bytes since the start, and what is staged now."""
        with self._lock:
            every = [self._ended, *(each.counts for each in self._connections.values())]
        counts = dict(zip(FIGURES, map(sum, zip(*map(astuple, every), strict=True)), strict=True))
        return counts | {"staged_bytes": self._staging.staged_bytes, "staging_bytes": self._staging.quota_bytes}

    def close(self) -> None:
        """Close everything; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            if self._listener.family == socket.AF_UNIX:
                with contextlib.suppress(OSError):
                    os.unlink(self._listener.getsockname())
        if self._accepting is not None and self._listener is not None:
            self._accepting.join()  # before connections are counted: it may be about to add one
            self._listener.close()
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.hang_up("this worker ends")
        for connection in connections:
            connection.join()
        if self._home.nixl is not None:
            self._home.nixl.close()
        self._helper.close()
        self._inbox.close()

    def _accept_all(self) -> None:
        assert self._listener is not None, "there is somebody to accept from"
        accepted: list[Connection] = []
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                # Out of descriptors, or the dialer has gone again: others will come.
                if not self._is_closed:
                    time.sleep(PAUSE_SECONDS)
                continue
            for each in accepted:
                if each.is_over and not each.is_greeted:
                    self._forget(each.name)  # nobody was told of it
            accepted = [each for each in accepted if not each.is_over]
            if self._make_room(accepted):
                accepted.append(self._add("", sock))
            else:
                sock.close()

    @staticmethod
    def _make_room(accepted: list[Connection]) -> bool:
        """Leave the oldest stranger where there are too many; return whether one more connection may stand."""
        strangers = [each for each in accepted if not each.is_greeted]
        is_full = len(accepted) >= MOST_ACCEPTED
        if strangers and (is_full or len(strangers) >= MOST_STRANGERS):
            strangers[0].hang_up("too many connections whose peers have not said who they are")
            return True
        return not is_full

    def _add(self, address: str, sock: socket.socket | None) -> Connection:
        name = f"peer-{next(self._numbers)}"
        with self._lock:
            connection = self._connections[name] = Connection(name, self._home, address or name, sock)
        connection.start()  # only now: whoever hears that it is up may send at once
        return connection

    def _forget(self, name: str) -> None:
        with self._lock:
            connection = self._connections.pop(name, None)
            if connection is not None:
                pairs = zip(astuple(self._ended), astuple(connection.counts), strict=True)
                self._ended = Counts(*map(sum, pairs))


def listen_for_links(kind: str, host: str, port: int, folder: Path) -> socket.socket:
    """Return a listening socket for links of a kind; raises ConfigError when it cannot be had."""
    try:
        if kind == "shm":
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(folder / SOCKET_NAME))
            listener.listen(BACKLOG)
            return listener
        return socket.create_server((host, port), backlog=BACKLOG, family=_family(host))
    except OSError as error:
        where = str(folder) if kind == "shm" else f"{host}:{port}"
        raise ConfigError([f"cannot listen for links on {where}: {error.strerror or error}"]) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET

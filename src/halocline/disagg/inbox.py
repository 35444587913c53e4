"""What connections tell the engine: one queue, and each connection may fill only so much of it.

A connection whose share is full reads nothing more until the engine has taken its news, so a peer that says more than
is heard waits in its own socket. That a connection stands or is lost is always told.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable

from halocline.disagg.messages import Heartbeat
from halocline.disagg.post import Delivered, Down, News, Up

MOST_MESSAGES = 1024
MOST_BYTES = 16 << 20
"""Of one connection, as long as they came on the wire. A single message may be longer, when no other waits."""

MOST_STRANGERS = 64
BEAT_SECONDS = 1.0
"""While pages come in, the connection is told to live this often: the peer's heartbeats stand behind its pages."""


class Inbox:
    """The queue; its descriptor is readable when there is something in it."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._changed = threading.Condition()
        self._news: list[News] = []
        self._messages: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._strangers = 0
        """Of whom was told since the last `take` that they have left."""
        self._is_closed = False

    def fileno(self) -> int:
        """Return the descriptor of an eventfd."""
        return self._event

    def tell(self, news: Up | Down, *, is_heard: bool = True) -> None:
        """Put something into the queue, however full it is; of strangers, who come and go, only so much."""
        with self._changed:
            self._strangers += not is_heard
            if is_heard or self._strangers <= MOST_STRANGERS:
                self._put(news)

    def deliver(self, news: Delivered, size: int, is_over: Callable[[], bool]) -> None:
        """Put a message of `size` bytes into the queue as soon as the connection's share has room for it.

        What a connection says that is over meanwhile is dropped.
        """
        with self._changed:
            while not self._has_room(news.peer, size):
                if is_over():
                    return
                self._changed.wait()
            self._messages[news.peer] += 1
            self._bytes[news.peer] += size
            self._put(news)

    def remind(self, news: Delivered) -> None:
        """Put a small message into the queue unless the connection already has something there."""
        with self._changed:
            if not self._messages[news.peer]:
                self._messages[news.peer] += 1
                self._put(news)

    def wake(self) -> None:
        """Let connections look whether they are over."""
        with self._changed:
            self._changed.notify_all()

    def take(self) -> list[News]:
        """Return all that has been told since the last call."""
        with self._changed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)
            news, self._news = self._news, []
            self._strangers = 0
            self._messages.clear()
            self._bytes.clear()
            self._changed.notify_all()
        return news

    def close(self) -> None:
        """Close the descriptor; nobody tells anything any more."""
        with self._changed:
            self._is_closed = True
            os.close(self._event)

    def _has_room(self, peer: str, size: int) -> bool:
        count = self._messages[peer]
        return not count or (count < MOST_MESSAGES and self._bytes[peer] + size <= MOST_BYTES)

    def _put(self, news: News) -> None:
        if not self._is_closed:
            self._news.append(news)
            os.eventfd_write(self._event, 1)


class Beat:
    """Of one connection: to be called when something of a chunk of pages has come."""

    def __init__(self, peer: str, inbox: Inbox) -> None:
        self._peer, self._inbox = peer, inbox
        self.begin()

    def begin(self) -> None:
        """Note that a chunk begins."""
        self._told = time.monotonic()

    def __call__(self) -> None:
        """Tell the engine that the peer lives, unless it was told so a moment ago."""
        if time.monotonic() - self._told > BEAT_SECONDS:
            self._told = time.monotonic()
            self._inbox.remind(Delivered(self._peer, Heartbeat()))

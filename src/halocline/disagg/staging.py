"""One buffer for all pages that wait to be cut into pages of another length, and the quota on them.

A page is claimed room for before its first byte is taken from its socket or from the peer's arena, so the quota is
never exceeded; who gets no room yet reads nothing, and its sender waits. Room is given in the order in which it was
asked for, so a large page is not passed over for ever; within the buffer it lies where the first gap is large enough:
pages leave in any order, and the same few bytes, which the cache has, are used again and again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from halocline.disagg.arena_pages import Bytes

LOOK_SECONDS = 0.05
"""Who waits for room looks this often whether its page is still wanted."""
HOLD_SECONDS = 2.0
"""A page that takes longer to come loses its connection when others wait for its room."""


class Claim:
    """Room for one page."""

    def __init__(self, staging: Staging, room: Bytes) -> None:
        """`room`: shape (page bytes,)."""
        self.room = room
        self._staging = staging
        self._until = time.monotonic() + HOLD_SECONDS

    @property
    def is_overdue(self) -> bool:
        """Whether others wait for room that this page has held for too long."""
        return self._staging.is_awaited and time.monotonic() > self._until


class Staging:
    """The buffer of one worker. Every method may be called from any thread."""

    def __init__(self, quota_bytes: int) -> None:
        """The buffer is allocated when the first page wants to be cut; most workers never do."""
        self.quota_bytes = quota_bytes
        self._buffer: Bytes | None = None
        self._changed = threading.Condition()
        self._taken: list[tuple[int, int]] = []
        """Room that is given away, (begin, end), in order of place."""
        self._waiting: deque[object] = deque()
        self.most_bytes = 0
        """The most that was ever staged at once."""

    @property
    def staged_bytes(self) -> int:
        """Bytes that are given away now."""
        with self._changed:
            return self._used()

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for room."""
        return bool(self._waiting)

    @contextmanager
    def claim(self, size: int, is_wanted: Callable[[], bool]) -> Iterator[Claim | None]:
        """Give room for `size` bytes as soon as there is some; None when the page is no longer wanted before that."""
        assert size <= self.quota_bytes, f"a page of {size} bytes exceeds the quota of {self.quota_bytes}"
        place = self._wait(size, is_wanted)
        if place is None:
            yield None
            return
        assert self._buffer is not None, "there is a buffer since the first room was given"
        try:
            yield Claim(self, self._buffer[place[0] : place[1]])
        finally:
            with self._changed:
                self._taken.remove(place)
                self._changed.notify_all()

    def _wait(self, size: int, is_wanted: Callable[[], bool]) -> tuple[int, int] | None:
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                while True:
                    if not is_wanted():
                        return None
                    place = self._gap(size) if self._waiting[0] is turn else None
                    if place is not None:
                        return self._take(place)
                    self._changed.wait(LOOK_SECONDS)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def _take(self, place: tuple[int, int]) -> tuple[int, int]:
        if self._buffer is None:
            self._buffer = np.empty(self.quota_bytes, np.uint8)
        self._taken = sorted([*self._taken, place])
        self.most_bytes = max(self.most_bytes, self._used())
        return place

    def _gap(self, size: int) -> tuple[int, int] | None:
        begin = 0
        for taken, end in [*self._taken, (self.quota_bytes, 0)]:
            if taken - begin >= size:
                return begin, begin + size
            begin = end
        return None

    def _used(self) -> int:
        return sum(end - begin for begin, end in self._taken)

"""The one way to other workers: what a link must do, and what comes from it. The real links and the simulated network
implement `Post`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from halocline.disagg.messages import Hello, Message
from halocline.schedule.events import PoolPages


@dataclass(frozen=True, slots=True)
class Up:
    """A connection stands, and the peer has said who it is."""

    peer: str
    """Name of the connection; never used again."""
    hello: Hello


@dataclass(frozen=True, slots=True)
class Down:
    """A connection is lost, or could not be made. Nothing more comes from it."""

    peer: str
    why: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message came. `Pages` are delivered when all their bytes stand verified in their landing, or `refused`."""

    peer: str
    message: Message
    refused: str = ""
    """Why the pages do not stand in a landing; empty when they do, and for all other messages."""


News = Up | Down | Delivered


class Post(Protocol):
    """All connections of one worker. No call blocks; what happens meanwhile is told by `poll`, in order."""

    def poll(self) -> Sequence[News]:
        """Return what has happened since the last call."""
        ...

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `poll` has something."""
        ...

    def dial(self, address: str) -> str:
        """Begin to connect to the worker at an address; return the name of the connection. `Up` or `Down` follows."""
        ...

    def send(self, peer: str, message: Message, runs: Sequence[PoolPages] = ()) -> None:
        """Queue a message; with `Pages` go whole pages of this worker's arena, one `PoolPages` per pool.

        Messages without pages overtake those with pages that are still queued: what renews the leases of some requests
        must not stand behind all the pages of another. A peer that is down gets nothing; one that does not read, and
        for which too much waits, is left.
        """
        ...

    def recall(self, peer: str, request: str, attempt: int) -> None:
        """The fence of the sending side: when this returns, no page that was given to `send` for it is read any more.

        What is still queued is dropped; what is half sent arrives broken.
        """
        ...

    def hang_up(self, peer: str, why: str) -> None:
        """Close one connection; its peer name is over."""
        ...

    def figures(self) -> Mapping[str, int]:
        """Return counts since the start: sent_bytes, received_bytes, sent_page_bytes, received_page_bytes; and of now:
        staged_bytes, staging_bytes (their quota).
        """
        ...

    def close(self) -> None:
        """Close everything; a second call does nothing."""
        ...

"""What all connections of a worker share, and what each of them counts."""

from __future__ import annotations

from dataclasses import dataclass

from halocline.disagg import messages as wire
from halocline.disagg.arena_pages import ArenaPages
from halocline.disagg.helper import Helper
from halocline.disagg.inbox import Inbox
from halocline.disagg.landings import Landings
from halocline.disagg.nixl_pull import NixlLinks
from halocline.disagg.staging import Staging


@dataclass(frozen=True)
class Home:
    """What all connections of a worker share."""

    hello: wire.Hello
    secret: bytes
    pages: ArenaPages
    landings: Landings
    descriptor: int | None
    """Of the arena's memory, for reading: handed to dialers on this host."""
    staging: Staging
    helper: Helper
    inbox: Inbox
    nixl: NixlLinks | None = None
    """Where pages go by the NIXL library."""


@dataclass
class Counts:
    """Bytes of one connection; each field is written by one thread."""

    sent: int = 0
    received: int = 0
    sent_pages: int = 0
    received_pages: int = 0

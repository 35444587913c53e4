"""What the machines want done, in the order in which it must be done: plain data that the exchange carries out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from halocline.disagg.messages import ToReceiver, ToSender
from halocline.schedule.events import Event, PoolPages


class Key(NamedTuple):
    """One attempt of one request over one connection: what pages on their way belong to."""

    peer: str
    """Name of the connection. It is never used again, so what comes from a former life of the peer has another one."""
    request: str
    """The receiving side's id of the request."""
    attempt: int


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """Say something to a peer; with `Pages` go pages of this worker's arena."""

    peer: str
    message: ToSender | ToReceiver
    runs: Sequence[PoolPages] = ()


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the own scheduler."""

    event: Event


@dataclass(frozen=True, slots=True, eq=False)
class OpenLanding:
    """From now on the peer's pages may be written where they belong."""

    key: Key
    start_tokens: int
    fill_tokens: int
    pools: tuple[PoolPages, ...]


@dataclass(frozen=True, slots=True)
class CloseLanding:
    """No writer may be in the landing when this is done, nor come later: the receiving side's fence."""

    key: Key


@dataclass(frozen=True, slots=True)
class Recall:
    """No page of the attempt may be read for the peer when this is done, nor later: the sending side's fence."""

    key: Key


@dataclass(frozen=True, slots=True)
class Dial:
    """Make a connection to the worker at an address."""

    address: str


Action = Send | Tell | OpenLanding | CloseLanding | Recall | Dial

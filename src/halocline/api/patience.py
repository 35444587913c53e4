"""How long a client may take to send a request: an open connection costs a file descriptor, and these are few.

    connected ---- head ---- body ----|  answered ...  |---- the next head ---- body ----|  ...
    |<---------- at most N s -------->|                |<------- at most N s ----------->|

Uvicorn itself closes a connection that was answered once and asks for nothing more, but not one that never asks, or
stops in the middle of a request.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 60.0
"""From the first moment, or from the last answer on, to the last byte of a request."""


class PatientProtocol(H11Protocol):
    """One connection: closed when its client takes longer than `REQUEST_SECONDS` to send a request."""

    _timer: asyncio.TimerHandle | None = None
    _begun = 0
    """Requests whose heads have come."""
    _awaited = 0
    """The number of the request that the timer is for."""
    _latest: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._look()

    def handle_events(self) -> None:
        """Take what has come; called for each part that comes, and when an answer is complete."""
        super().handle_events()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _look(self) -> None:
        # A timer runs on while the same request is awaited: a client that sends a byte a minute would stay for ever.
        if self.cycle is not self._latest:
            self._latest = self.cycle
            self._begun += 1
        has_asked = self.cycle is not None and not self.cycle.response_complete
        if self.transport.is_closing():
            self._stop_waiting()
        elif self.conn.their_state is h11.SEND_BODY:
            self._wait_for(self._begun)
        elif self.conn.their_state is h11.IDLE and not has_asked:
            self._wait_for(self._begun + 1)
        else:
            self._stop_waiting()

    def _wait_for(self, number: int) -> None:
        if self._timer is not None and number != self._awaited:
            self._stop_waiting()
        if self._timer is None:
            self._awaited = number
            self._timer = self.loop.call_later(REQUEST_SECONDS, self._hang_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        # Not `close`, which waits until the client has read what it was sent before.
        self._timer = None
        self.transport.abort()

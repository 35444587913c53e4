"""How long a client may take to send a request: an open connection costs a file descriptor, and these are few.

    connected ---- head ---- body ----|  answered ...  |---- the next head ---- body ----|  ...
    |<---------- at most N s -------->|                |<------- at most N s ----------->|

Uvicorn itself closes a connection that was answered once and asks for nothing more, but not one that never asks, or
stops in the middle of a request.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 60.0
"""From the first moment, or from the first byte of a later request, to its last byte."""


class PatientProtocol(H11Protocol):
    """One connection: closed when its client takes longer than `REQUEST_SECONDS` to send a request."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Take what came; a request that is complete is waited for no longer."""
        super().data_received(data)
        if self._is_incomplete:
            self._wait()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _is_incomplete(self) -> bool:
        has_begun = self.cycle is not None and not self.cycle.response_complete
        return self.conn.their_state is h11.SEND_BODY or (self.conn.their_state is h11.IDLE and not has_begun)

    def _wait(self) -> None:
        # Not anew with each byte: a client that sends one a minute would stay for ever.
        if self._timer is None:
            self._timer = self.loop.call_later(REQUEST_SECONDS, self._hang_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        self._timer = None
        if self._is_incomplete:
            self.transport.close()

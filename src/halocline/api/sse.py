"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed its connection; nobody reads the answer."""


def event(body: dict[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventStream(Response):
    """Sends events as they come; closes their source at once when the client goes away, also between two events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None], headers: dict[str, str]) -> None:
        self._events = events
        self._close = close
        self.status_code = 200
        self.background = None
        # Proxies that buffer would hold tokens back.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        try:
            with contextlib.suppress(ClientGoneError, OSError):
                await unless_gone(receive, self._send(send))
        finally:
            await self._events.aclose()
            # A generator that was never begun does not run its own `finally`.
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for each in self._events:
            await send({"type": "http.response.body", "body": each, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it and raise ClientGoneError when the client goes away before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

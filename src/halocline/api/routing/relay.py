"""Passes one request on to workers until one of them answers it, and the answer on to the client.

Nothing is collected that the client could already have: bytes go through one piece at a time, and the next piece is
read when the client has taken the last one. When the client goes away, the worker's connection is closed at once, which
ends the request there.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Literal

import httpx
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from halocline.api.errors import SERVER, ApiError
from halocline.api.routing.book import Pick
from halocline.api.routing.desk import Desk
from halocline.api.routing.hold import MOST_HELD_BYTES, Hold
from halocline.api.routing.order import Order
from halocline.api.routing.probe import TOKEN_HEADER
from halocline.api.routing.retry import Attempts, Fault, fault_of_answer, fault_of_event
from halocline.api.sse import DONE, ClientGoneError, event, unless_gone

logger = logging.getLogger(__name__)

PREFILL_HEADER = "x-halocline-prefill"
CLIENT_GONE = 499
_BACK_NAMES = """
content-type content-length content-encoding cache-control x-accel-buffering x-request-id x-halocline-warning
retry-after www-authenticate
"""
PASSED_BACK = frozenset(_BACK_NAMES.split())
"""Headers of a worker's answer that its client gets."""
RETRY_STATUSES = (429, 503)


class Relay(Response):
    """One request on its way; as a response it writes whatever comes of it."""

    def __init__(self, desk: Desk, order: Order, request_id: str) -> None:
        self._desk, self._order, self._id = desk, order, request_id
        self._scope: asyncio.Timeout | None = None
        self._cut: tuple[Literal["lost", "stopping"], str] | None = None
        self._began_at = asyncio.get_running_loop().time()
        self._status: int | None = None
        """Of the answer, once its head was sent."""
        self._has_ended = False
        self._hold: Hold | None = None
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        self._desk.relays.add(self)
        try:
            with suppress(OSError):
                await unless_gone(receive, self._run(send))
        except ClientGoneError:
            self._status = CLIENT_GONE
        finally:
            self._desk.relays.discard(self)
            self._desk.metrics.responded(self._order.route, self._status or CLIENT_GONE)

    def cut(self, why: Literal["lost", "stopping"], words: str) -> None:
        """End the attempt that is under way: nothing more will come of it."""
        if self._cut is None:
            self._cut = (why, words)
            if self._scope is not None:
                self._scope.reschedule(0)

    async def _run(self, send: Send) -> None:
        try:
            await self._try_all(send)
        except ApiError as error:
            await self._tell(send, error)

    async def _try_all(self, send: Send) -> None:
        """Try workers until one answers; raises ApiError when none does."""
        attempts = Attempts(self._desk.settings.attempts)
        while True:
            pick = self._desk.pick(self, self._order, attempts)
            try:
                fault = await self._attempt(pick, send)
            finally:
                self._desk.end(pick)
            if fault is None:
                return
            attempts.failed(fault, pick.decode.name, pick.prefill.name if pick.prefill else None)
            self._desk.suspect(pick, fault)
            self._desk.metrics.failed(fault.kind)
            logger.warning(
                "event=attempt_failed request=%s attempt=%d decode=%s prefill=%s kind=%s words=%r",
                self._id,
                len(attempts.faults),
                pick.decode.url,
                pick.prefill.url if pick.prefill else "",
                fault.kind,
                fault.words,
            )

    async def _attempt(self, pick: Pick, send: Send) -> Fault | None:
        """Pass the request on; return why it can be tried elsewhere, or None when the client has its answer."""
        self._cut, self._hold = None, None
        try:
            async with asyncio.timeout(None) as self._scope:
                async with self._desk.client.stream(
                    self._order.method,
                    pick.decode.url + self._order.path,
                    content=self._order.body,
                    headers=self._headers_for(pick),
                ) as answer:
                    return await self._pass_on(answer, pick, send)
        except TimeoutError:
            if self._cut is None:
                raise
            why, words = self._cut
            if why == "stopping" and self._status is None:
                raise ApiError(503, words, type=SERVER, code="router_stopping", headers={"retry-after": "1"}) from None
            fault = Fault("lost", words)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            fault = Fault("unreachable", f"no connection: {str(error) or type(error).__name__}")
        except httpx.HTTPError as error:
            fault = Fault("broken", f"the connection broke: {str(error) or type(error).__name__}")
        finally:
            self._scope = None
        if self._status is None:
            return fault
        self._desk.suspect(pick, fault)
        await self._break_off(send, fault)
        return None

    def _headers_for(self, pick: Pick) -> dict[str, str]:
        headers = dict(self._order.headers)
        headers["accept-encoding"] = "identity"
        if pick.prefill is not None:
            assert pick.prefill.report is not None, "only a worker that has reported is picked"
            headers[PREFILL_HEADER] = pick.prefill.report.link_address
            headers[TOKEN_HEADER] = self._desk.link_token
        return headers

    async def _pass_on(self, answer: httpx.Response, pick: Pick, send: Send) -> Fault | None:
        is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        if is_stream and answer.status_code == 200:
            return await self._pass_events(answer, pick, send)
        return await self._pass_whole(answer, pick, send)

    async def _pass_events(self, answer: httpx.Response, pick: Pick, send: Send) -> Fault | None:
        self._hold = hold = Hold()
        async for data in answer.aiter_raw():
            ready = hold.feed(data)
            if hold.error is not None:
                fault = fault_of_event(hold.error.code, hold.error.message)
                if fault is not None:
                    return fault
                ready = hold.let_go()
            if ready:
                if self._status is None:
                    self._desk.computed(pick)
                await self._send(send, answer, ready)
        await self._send(send, answer, hold.end(), is_last=True)
        return None

    async def _pass_whole(self, answer: httpx.Response, pick: Pick, send: Send) -> Fault | None:
        """Pass on an answer that is no stream: held as a whole while it is small, so that it can be tried again."""
        held = bytearray()
        async for data in answer.aiter_raw():
            held += data
            if self._status is not None or len(held) > MOST_HELD_BYTES:
                await self._send(send, answer, bytes(held))
                held.clear()
        if self._status is None and answer.status_code in RETRY_STATUSES:
            code, words = _error_of(bytes(held))
            fault = fault_of_answer(answer.status_code, code, words)
            if fault is not None:
                return fault
        self._desk.computed(pick)
        await self._send(send, answer, bytes(held), is_last=True)
        return None

    async def _send(self, send: Send, answer: httpx.Response, data: bytes, *, is_last: bool = False) -> None:
        if self._status is None:
            # Before the first byte: from here on nothing can be tried again.
            self._status = answer.status_code
            self._desk.metrics.began(asyncio.get_running_loop().time() - self._began_at)
            headers = [(name, value) for name, value in answer.headers.raw if name.lower().decode() in PASSED_BACK]
            headers = [(name.lower(), value) for name, value in headers]
            if not any(name == b"x-request-id" for name, _ in headers):
                headers.append((b"x-request-id", self._id.encode()))
            await send({"type": "http.response.start", "status": self._status, "headers": headers})
        if data or is_last:
            self._has_ended = is_last
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _break_off(self, send: Send, fault: Fault) -> None:
        """End an answer of which the client has a part: a stream with an error event, anything else by a cut."""
        logger.warning("event=broken_answer request=%s words=%r", self._id, fault.words)
        self._desk.metrics.broke_off()
        if self._has_ended or self._hold is None or self._hold.is_torn:
            return
        code = "router_stopping" if self._cut is not None and self._cut[0] == "stopping" else "worker_lost"
        error = ApiError(503, f"the answer ends here: {fault.words}", type=SERVER, code=code)
        await send({"type": "http.response.body", "body": event(error.body()) + DONE, "more_body": False})

    async def _tell(self, send: Send, error: ApiError) -> None:
        self._status = error.status
        headers = {"content-type": "application/json", "x-request-id": self._id, **error.headers}
        body = msgspec.json.encode(error.body())
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        raw.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": error.status, "headers": raw})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class _Told(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _ToldBody(msgspec.Struct):
    error: _Told


def _error_of(body: bytes) -> tuple[str | None, str]:
    """Return code and message of an error in OpenAI's shape; (None, "") when it is none."""
    try:
        error = msgspec.json.decode(body, type=_ToldBody).error
    except msgspec.MsgspecError:
        return None, ""
    return error.code, error.message

"""The routes of a router: those of a server, passed on to workers, and its own /health and /metrics."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from halocline.api.body import read_body
from halocline.api.errors import ApiError, api_error, error_response
from halocline.api.keys import check_key
from halocline.api.routing.desk import Desk
from halocline.api.routing.order import NO_LOAD, Order, load_of
from halocline.api.routing.relay import CLIENT_GONE, Relay
from halocline.units import KIB, format_bytes

logger = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_HEADER_BYTES = 32 * KIB
MOST_BODIES = 256
"""So many requests may be sending their bodies at once: 2 GiB when all are as long as they may be."""
PASSED_ON = frozenset(["accept", "authorization", "content-type", "traceparent", "tracestate", "user-agent"])
"""Headers of a client that a worker gets. Nothing else passes, so no client can name a link or a token."""

Endpoint = Callable[[Request, str], Awaitable[Response]]


def create_router_app(desk: Desk) -> FastAPI:
    """Return the ASGI application that passes requests on to the workers of `desk`."""
    app = FastAPI(title="Halocline router", openapi_url=None, redirect_slashes=False)
    routes = Routes(desk)
    app.add_api_route("/v1/completions", routes.guard("completions", routes.prompt), methods=["POST"])
    app.add_api_route("/v1/chat/completions", routes.guard("chat", routes.prompt), methods=["POST"])
    app.add_api_route("/v1/models", routes.guard("models", routes.plain), methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", routes.guard("one_model", routes.plain), methods=["GET"])
    app.add_api_route("/health", routes.health, methods=["GET"])
    app.add_api_route("/metrics", routes.metrics, methods=["GET"])
    app.add_exception_handler(HTTPException, routes.no_route)
    return app


class Routes:
    """The endpoints of one router."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        key = desk.settings.api_key
        self._api_key = None if key is None else key.encode()
        self._reading = 0

    def guard(self, route: str, endpoint: Callable[[Request, str, str], Awaitable[Response]]) -> Callable[..., object]:
        """Return the endpoint behind key check and limits, with its errors in OpenAI's shape."""

        async def guarded(request: Request) -> Response:
            request_id = f"route-{uuid.uuid4().hex}"
            try:
                _check_headers(request)
                check_key(request, self._api_key)
                self._desk.check_room()
                return await endpoint(request, route, request_id)
            except ClientDisconnect:
                response = Response(status_code=CLIENT_GONE)
            except Exception as error:
                told = api_error(error)
                response = error_response(told)
                logger.info(
                    "event=refused request=%s route=%s status=%d code=%s", request_id, route, told.status, told.code
                )
            response.headers.setdefault("x-request-id", request_id)
            self._desk.metrics.responded(route, response.status_code)
            return response

        return guarded

    async def prompt(self, request: Request, route: str, request_id: str) -> Response:
        """POST /v1/completions, /v1/chat/completions."""
        body = await self._read(request)
        # Others may have come while this one was sending.
        self._desk.check_room()
        order = Order(route, "POST", request.url.path, self._headers(request), body, load_of(body), True)
        return Relay(self._desk, order, request_id)

    async def plain(self, request: Request, route: str, request_id: str) -> Response:
        """GET /v1/models, /v1/models/{name}: any decode worker knows."""
        path = request.scope["raw_path"].decode("latin-1")
        return Relay(self._desk, Order(route, "GET", path, self._headers(request), b"", NO_LOAD, False), request_id)

    async def _read(self, request: Request) -> bytes:
        if self._reading >= MOST_BODIES:
            raise ApiError(
                429,
                f"{MOST_BODIES} requests are being read; try again",
                type="rate_limit_error",
                code="overloaded",
                headers={"retry-after": "1"},
            )
        self._reading += 1
        try:
            return await read_body(request)
        finally:
            self._reading -= 1

    def _headers(self, request: Request) -> tuple[tuple[str, str], ...]:
        headers = {name: value for name, value in request.headers.items() if name in PASSED_ON}
        if self._desk.settings.worker_api_key is not None:
            headers["authorization"] = f"Bearer {self._desk.settings.worker_api_key}"
        return tuple(headers.items())

    async def health(self) -> Response:
        """GET /health: 200 while a decode worker takes requests; the body names the dead."""
        status, body = self._desk.health()
        return Response(msgspec.json.encode(body), status, media_type="application/json")

    async def metrics(self) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(self._desk.metrics.render(), media_type=METRICS_TYPE)

    async def no_route(self, request: Request, error: Exception) -> Response:
        """Answer for an unknown path or method in the same shape as all errors."""
        assert isinstance(error, HTTPException)
        self._desk.metrics.responded("other", error.status_code)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(ApiError(error.status_code, message, code="not_found", headers=dict(error.headers or {})))


def _check_headers(request: Request) -> None:
    size = sum(len(name) + len(value) for name, value in request.headers.raw)
    if size > MOST_HEADER_BYTES:
        limit = format_bytes(MOST_HEADER_BYTES)
        raise ApiError(431, f"the headers have {size} bytes; the limit is {limit}", code="headers_too_large")

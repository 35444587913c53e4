"""How errors reach a client: OpenAI's shape, and one table from exceptions to HTTP status.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.responses import Response

from halocline.errors import EngineDeadError, FailedError, LostError, OverloadedError, RequestError, TooLargeError

logger = logging.getLogger(__name__)

INVALID, SERVER, BUSY = "invalid_request_error", "server_error", "rate_limit_error"


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers = headers or {}
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


TABLE: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (TooLargeError, 400, INVALID, "context_length_exceeded"),
    (RequestError, 400, INVALID, None),
    (OverloadedError, 429, BUSY, "overloaded"),
    (EngineDeadError, 503, SERVER, "engine_unavailable"),
    (LostError, 503, SERVER, LostError.code),
    (FailedError, 500, SERVER, "request_failed"),
)
"""Exception, status, type, code (None: the exception's own). The first that matches counts."""


def api_error(error: Exception) -> ApiError:
    """Return what a client is told of `error`; of an unexpected one only that it happened, the log has the rest."""
    if isinstance(error, ApiError):
        return error
    for kind, status, type_, code in TABLE:
        if isinstance(error, kind):
            param = error.param if isinstance(error, RequestError) else None
            own = error.code if isinstance(error, RequestError) else None
            headers = {"retry-after": "1"} if status in (429, 503) else None
            return ApiError(status, str(error), type=type_, param=param, code=own or code, headers=headers)
    logger.error("event=internal_error error=%r", error, exc_info=error)
    return ApiError(500, "an internal error; the server's log has the details", type=SERVER, code="internal_error")


def error_response(error: Exception) -> Response:
    """Return the HTTP answer for `error`."""
    told = api_error(error)
    return Response(msgspec.json.encode(told.body()), told.status, headers=told.headers, media_type="application/json")

"""The key that clients send as a bearer token."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from halocline.api.errors import ApiError


def check_key(request: Request, key: bytes | None) -> None:
    """Raise the 401 that a request without the right key gets; None: nobody needs one."""
    if key is None:
        return
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    # Headers are bytes; Starlette shows each as one character.
    if scheme.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode("latin-1"), key):
        raise ApiError(
            401,
            "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

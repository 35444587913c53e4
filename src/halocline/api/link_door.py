"""Who may say that another worker computes a prompt: only who shows the secret that workers and router share.

The header names an address that this server would dial. A client that could set it could make the server open
connections to wherever it likes, so without the right secret the answer is 403, whatever the address is.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from halocline.api.errors import ApiError

PREFILL_HEADER = "x-halocline-prefill"
TOKEN_HEADER = "x-halocline-link-token"
KINDS = ("tcp://", "nixl://", "shm:///")
LONGEST_ADDRESS = 300
"""Characters."""


class LinkDoor:
    """Checks the two headers of one server."""

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    def prefill_at(self, headers: Mapping[str, str]) -> str:
        """Return the link address that a request names, or an empty string; raises ApiError 403 or 400."""
        address = headers.get(PREFILL_HEADER, "")
        if not address and TOKEN_HEADER not in headers:
            return ""
        self.check(headers)
        if address and (not address.startswith(KINDS) or len(address) > LONGEST_ADDRESS or not address.isascii()):
            words = f"{PREFILL_HEADER} must be tcp://HOST:PORT, nixl://HOST:PORT or shm:///PATH"
            raise ApiError(400, words, code="invalid_link_address")
        return address

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise ApiError 403 unless the headers show the secret of the group that this server belongs to."""
        if self._token is None:
            raise ApiError(
                403,
                "this server belongs to no group of workers; start it with --link-token to let a router ask it",
                code="link_token",
            )
        # Headers are bytes; Starlette shows each as one character.
        if not hmac.compare_digest(headers.get(TOKEN_HEADER, "").encode("latin-1"), self._token):
            raise ApiError(403, "this is for the router of a group; its secret is missing or wrong", code="link_token")

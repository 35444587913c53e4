"""The tokens of one sequence on their way from the engine's reports to whoever reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from halocline.engine.messages import TokenReport
from halocline.errors import FailedError
from halocline.schedule.events import FinishReason

UNREAD_TOKENS = 4096
"""A reader that falls further behind is cut off: what it has not read must be kept in memory."""


class TokenStream:
    """An async iterator of batches of tokens: everything that has come since the last batch.

    A slow reader gets larger batches and stops nobody else; one that falls `limit` tokens behind gets FailedError.
    """

    def __init__(self, request_id: str, cancel: Callable[[str, FinishReason], None], limit: int) -> None:
        self.request_id = request_id
        self.max_tokens = 0
        """The limit that applies; known once accepted."""
        self.clipped = False
        self.cached_tokens: int | None = None
        """Tokens of the prompt that the prefix cache had; known once the engine computes the sequence."""
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cancel = cancel
        self._limit = limit
        self._unread: list[TokenReport] = []
        self._error: Exception | None = None
        self._ended = False
        self._wake = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether the engine will say nothing more of this sequence."""
        return self._ended

    def accept(self, max_tokens: int, clipped: bool) -> None:
        """Note that the engine will run the sequence."""
        self.max_tokens, self.clipped = max_tokens, clipped
        if not self.accepted.done():
            self.accepted.set_result(None)

    def push(self, report: TokenReport) -> None:
        """Take one token in."""
        if self._ended:
            return
        self._unread.append(report)
        self._ended = report.finish_reason is not None
        self._wake.set()
        if not self._ended and len(self._unread) > self._limit:
            self._cancel(self.request_id, "abort")
            self._unread.clear()
            self.fail(FailedError(f"the reader fell {self._limit} tokens behind, so the request was aborted"))

    def fail(self, error: Exception) -> None:
        """End the sequence with an error, after the tokens that came before it."""
        if self._ended:
            return
        self._ended, self._error = True, error
        if not self.accepted.done():
            self.accepted.set_exception(error)
            # Whoever waited may be gone; an unread future must not become a warning.
            self.accepted.exception()
        self._wake.set()

    def close(self, reason: FinishReason = "abort") -> None:
        """Stop the sequence if it still runs; a second call does nothing."""
        if not self._ended:
            self._ended = True
            self._unread.clear()
            self._cancel(self.request_id, reason)
            if not self.accepted.done():
                self.accepted.cancel()
            self._wake.set()

    async def begun(self) -> None:
        """Wait for the first token, or for the end; raises the error that ends a sequence without any token."""
        while not self._unread and not self._ended:
            self._wake.clear()
            await self._wake.wait()
        if not self._unread and self._error is not None:
            raise self._error

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> list[TokenReport]:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        batch, self._unread = self._unread, []
        return batch

"""One number for all that a scheduler decided: equal runs have equal digests, on any machine and under any hash seed.

Into it go, step by step: who computes which positions, the moves, the page on which each segment ends in each pool, the
arena's counts of held, cached and free pages (every admission, eviction and release shows there), and who ended how.
Nothing of time: a run that decides the same at other times has the same digest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from halocline.sim.outline import Outline


class Digest:
    """The hash of a decision trace."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._ids: list[str] = []

    def step(self, plan: Outline, pages: Sequence[int]) -> None:
        """Take in a plan and the counts of the arena under it."""
        ids = [segment.request_id for segment in plan.segments]
        if ids != self._ids:  # who decodes changes seldom
            self._ids = ids
            self._hash.update("\n".join(ids).encode())
        parts: list[Any] = [array("q", (plan.step, *pages)), plan.query_starts, plan.starts, *plan.ends]
        if plan.moves:
            parts.append(
                array("q", (number for move in plan.moves for number in (move.pool, move.source, move.target)))
            )
        self._hash.update(b"".join(parts))

    def end(self, request_id: str, how: str) -> None:
        """Take in that a request ended."""
        self._hash.update(f"{request_id} {how};".encode())

    def hex(self) -> str:
        """Return the digest of all that was taken in so far."""
        return self._hash.hexdigest()

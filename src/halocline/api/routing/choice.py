"""Which decode worker and which prefill worker a request goes to: two functions of what is known of the candidates.

Decode: a worker with room (nobody waits there, and what the request may need is free) is preferred to one without. Of
those with room, the one with most free bytes; of those without, the one with the shortest queue. A worker that has seen
the prompt's beginning is preferred to that one only while it is not much more loaded than it: half the free bytes, or
twice the queue and two.

Prefill: a prompt's bytes are the measure of its work. A worker's cost is what it has still to compute and what it would
have to compute of this prompt; the cheapest is taken. So a worker that has the prompt's beginning is preferred as long
as waiting for it costs less than computing the beginning elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STICKY_FREE_PARTS = 2
"""A worker with the beginning needs at least one of so many parts of the free bytes of the freest."""
STICKY_QUEUE_TIMES, STICKY_QUEUE_MORE = 2, 2


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """What is known of a decode worker that lives, with respect to one request."""

    name: str
    free_bytes: int
    """What a new request could have, less what was sent there since the worker said so; negative when overdrawn."""
    need_bytes: int
    """What this request may need there, roughly."""
    waiting: int
    """Requests that waited there when the worker last said so."""
    recent: int
    """Requests sent there since."""
    in_flight: int
    matched_bytes: int
    """Bytes of the prompt's beginning that it has seen."""

    @property
    def has_room(self) -> bool:
        """Whether the request would start at once."""
        return self.waiting == 0 and self.need_bytes <= self.free_bytes

    @property
    def queue(self) -> int:
        """Requests that would stand before this one, at most."""
        return self.waiting + self.recent


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """What is known of a prefill worker that lives, with respect to one request."""

    name: str
    outstanding_bytes: int
    """Bytes of prompts that it has still to compute, as far as this router knows."""
    in_flight: int
    matched_bytes: int


def choose_decode(candidates: Sequence[DecodeCandidate]) -> DecodeCandidate | None:
    """Return where the request goes; None when there is no candidate."""
    roomy = [each for each in candidates if each.has_room]
    if roomy:
        most_bytes = max(each.free_bytes for each in roomy)
        allowed = [each for each in roomy if each.free_bytes * STICKY_FREE_PARTS >= most_bytes]
        return min(allowed, key=lambda each: (-each.matched_bytes, -each.free_bytes, each.in_flight, each.name))
    if not candidates:
        return None
    shortest = min(each.queue for each in candidates)
    allowed = [each for each in candidates if each.queue <= STICKY_QUEUE_TIMES * shortest + STICKY_QUEUE_MORE]
    return min(allowed, key=lambda each: (-each.matched_bytes, each.queue, -each.free_bytes, each.in_flight, each.name))


def choose_prefill(candidates: Sequence[PrefillCandidate], prompt_bytes: int) -> PrefillCandidate | None:
    """Return who computes the prompt; None when there is no candidate."""

    def cost(each: PrefillCandidate) -> tuple[int, int, str]:
        assert 0 <= each.matched_bytes <= prompt_bytes, f"{each.matched_bytes} of {prompt_bytes} bytes matched"
        return each.outstanding_bytes + prompt_bytes - each.matched_bytes, each.in_flight, each.name

    return min(candidates, key=cost, default=None)

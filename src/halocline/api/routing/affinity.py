"""Which worker has seen the beginning of a prompt: marks of prompts, and what each worker was sent.

A prompt is taken as it stands in the request's body, text, token ids or messages, with the cache salt before it: two
bodies that begin alike have tokens that begin alike. Marks are digests of the beginnings at fixed lengths, close
together where prompts are short and within an eighth where they are long (bytes):

    256 512 768 ... 2048 2304 2560 ... 4096 4608 5120 ...

So of n shared bytes, 256 or more, at least the lesser of 8 n / 9 and n - 255 are found; a prompt of 8 MiB has N marks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

STEP_BYTES = 256
"""Distance of the first marks; every mark is a multiple of it."""
GROWTH = 8
"""From `GROWTH * STEP_BYTES` on, the distance is this part of the length."""
DIGEST_BYTES = 8
MOST_MARKS = 1 << 16
"""So many marks are remembered of each worker; those not used for longest are forgotten."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """A prompt as affinity sees it."""

    prompt_bytes: int
    marks: tuple[tuple[int, bytes], ...]
    """(length in bytes, digest of the prompt so far), ascending."""


def mark_lengths(total_bytes: int) -> Iterator[int]:
    """Yield the lengths at which a prompt of `total_bytes` has marks."""
    length = STEP_BYTES
    while length <= total_bytes:
        yield length
        length += max(STEP_BYTES, length // GROWTH // STEP_BYTES * STEP_BYTES)


def beginning(prompt: bytes, salt: bytes = b"") -> Beginning:
    """Return the marks of a prompt; prompts of different salts share none."""
    digest = blake2b(len(salt).to_bytes(4, "big") + salt, digest_size=DIGEST_BYTES)
    view, marks, done = memoryview(prompt), [], 0
    for length in mark_lengths(len(prompt)):
        digest.update(view[done:length])
        marks.append((length, digest.digest()))
        done = length
    return Beginning(len(prompt), tuple(marks))


class Seen:
    """The beginnings that one worker was sent, the latest `most` marks of them."""

    def __init__(self, most: int = MOST_MARKS) -> None:
        assert most > 0, f"a memory of {most} marks holds nothing"
        self._most = most
        self._marks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._marks)

    def matched_bytes(self, prompt: Beginning) -> int:
        """Return the longest marked length of `prompt` that this worker was sent."""
        return next((length for length, digest in reversed(prompt.marks) if digest in self._marks), 0)

    def note(self, prompt: Beginning) -> None:
        """Remember `prompt`; its shorter marks outlive its longer ones."""
        for _, digest in reversed(prompt.marks):
            self._marks[digest] = None
            self._marks.move_to_end(digest)
        while len(self._marks) > self._most:
            self._marks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: a restarted worker has an empty cache."""
        self._marks.clear()

"""What a router reads of a request: enough to choose workers, and no more; the worker checks it.

A body that cannot be read here goes to a worker all the same, which says what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from halocline.api.routing.affinity import beginning
from halocline.api.routing.book import Load

BYTES_PER_TOKEN = 4
UNKNOWN_OUTPUT_TOKENS = 256
MOST_OUTPUT_TOKENS = 4096
"""Answers are rarely as long as their limit."""
MOST_CHOICES = 128

NO_LOAD = Load(beginning(b""), 0)


@dataclass(frozen=True, slots=True)
class Order:
    """One request to be passed on."""

    route: str
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    load: Load
    wants_prefill: bool
    """Whether it has a prompt that another worker can compute."""


class _Asked(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    cache_salt: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None


_decoder = msgspec.json.Decoder(_Asked)


def load_of(body: bytes) -> Load:
    """Return what a body tells of the work it asks for."""
    try:
        asked = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return NO_LOAD
    prompt = bytes(asked.messages) or bytes(asked.prompt)
    most = asked.max_completion_tokens if asked.max_tokens is None else asked.max_tokens
    output_tokens = UNKNOWN_OUTPUT_TOKENS if most is None else min(max(0, most), MOST_OUTPUT_TOKENS)
    choices = min(max(1, asked.n or 1), MOST_CHOICES)
    return Load(
        beginning(prompt, (asked.cache_salt or "").encode(errors="replace")),
        len(prompt) // BYTES_PER_TOKEN + output_tokens * choices,
    )

"""Which positions a layer must still hold: the one fact in which the kinds of layers differ.

With `position` = index of the next token to compute, and W, A in tokens:

    Full            0 ................................. position     every position
    Sliding(W)              position-W+1 .............. position     W positions, the token itself included
    Chunked(A)                floor(position/A)*A ..... position     restarts at every multiple of A
    State                                                            one state of constant size, no positions
"""

from __future__ import annotations

from dataclasses import dataclass

NEVER = 2**62
"""A position that no request reaches: what `last_reader` answers where nothing ever leaves."""


@dataclass(frozen=True, slots=True)
class Full:
    """Every position is kept for the whole life of the request."""

    def first_needed(self, position: int) -> int:
        """Return the first position that a token computed at `position` sees."""
        del position
        return 0

    def last_reader(self, position: int) -> int:
        """Return the last position whose token still sees `position`: the inverse of `first_needed`."""
        del position
        return NEVER


@dataclass(frozen=True, slots=True)
class Sliding:
    """Only the last `window_tokens` positions are kept, the one being computed included."""

    window_tokens: int

    def __post_init__(self) -> None:
        assert self.window_tokens >= 1, f"a window holds at least one token, not {self.window_tokens}"

    def first_needed(self, position: int) -> int:
        """Return the first position that a token computed at `position` sees."""
        return max(0, position - self.window_tokens + 1)

    def last_reader(self, position: int) -> int:
        """Return the last position whose token still sees `position`: the inverse of `first_needed`."""
        return position + self.window_tokens - 1


@dataclass(frozen=True, slots=True)
class Chunked:
    """Local attention that restarts at every multiple of `chunk_tokens`."""

    chunk_tokens: int

    def __post_init__(self) -> None:
        assert self.chunk_tokens >= 1, f"a chunk holds at least one token, not {self.chunk_tokens}"

    def first_needed(self, position: int) -> int:
        """Return the first position that a token computed at `position` sees."""
        return position // self.chunk_tokens * self.chunk_tokens

    def last_reader(self, position: int) -> int:
        """Return the last position whose token still sees `position`: the inverse of `first_needed`."""
        return position // self.chunk_tokens * self.chunk_tokens + self.chunk_tokens - 1


@dataclass(frozen=True, slots=True)
class State:
    """One state of constant size; no positions, so the question of the first one does not arise."""


Positional = Full | Sliding | Chunked
Retention = Full | Sliding | Chunked | State


def describe(retention: Retention) -> str:
    """Name a retention as logs, metrics and reports print it: `full`, `sliding-512`, `chunked-8192`, `state`."""
    match retention:
        case Full():
            return "full"
        case Sliding(window_tokens):
            return f"sliding-{window_tokens}"
        case Chunked(chunk_tokens):
            return f"chunked-{chunk_tokens}"
        case State():
            return "state"

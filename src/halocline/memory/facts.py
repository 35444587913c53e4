"""The record of capacity facts: what log, command line and API print about an arena, from one source.

A frozen record and its text. How the numbers are found is the business of `halocline.memory.sizing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halocline.units import format_bytes

LimitedBy = Literal["model", "arena", "setting"]

_LIMIT_TEXT = {
    "model": "the model's own limit",
    "arena": "the longest that fits the arena",
    "setting": "as set",
}


@dataclass(frozen=True, slots=True)
class ModelLength:
    """The longest prompt plus output that is served, and what made it so."""

    tokens: int
    limited_by: LimitedBy

    @property
    def reason(self) -> str:
        """Say in words which limit it is."""
        return _LIMIT_TEXT[self.limited_by]


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """One pool as the arena cuts it."""

    name: str
    layers: int
    page_tokens: int
    page_bytes: int
    """Bytes that the layers use of a page."""
    stride_bytes: int
    """Bytes that a page takes."""
    pages_per_slab: int
    cap_slabs: int | None
    """Most slabs of a static split; None in a shared arena."""

    @property
    def padding_bytes(self) -> int:
        """Bytes of every page that no layer uses."""
        return self.stride_bytes - self.page_bytes

    def line(self) -> str:
        """Return one line of text for the capacity block."""
        positions = f"{self.page_tokens} positions" if self.name != "state" else "one state"
        share = "" if self.cap_slabs is None else f", at most {self.cap_slabs} slabs"
        return (
            f"{self.name}: {self.layers} layers, page {format_bytes(self.stride_bytes)} ({positions}), "
            f"{self.pages_per_slab} per slab, padding {format_bytes(self.padding_bytes)} "
            f"({self.padding_bytes / self.stride_bytes:.2%}){share}"
        )


@dataclass(frozen=True, slots=True)
class ConcurrencyFacts:
    """How many requests of one length the same bytes hold at once."""

    prompt_tokens: int
    output_tokens: int
    requests: int
    """Under the policy that is set."""
    static_requests: int
    """Under a static split (`CapacityFacts.static_ratio`) of the same arena."""
    uniform_requests: int
    """In a cache that keeps every layer at full length."""


@dataclass(frozen=True, slots=True)
class CapacityFacts:
    """Everything that is known about capacity before the first request; bytes unless named otherwise."""

    budget_bytes: int
    arena_bytes: int
    slab_bytes: int
    slabs: int
    remainder_bytes: int
    """Bytes of the budget that make no whole slab."""
    granule_tokens: int
    pools: tuple[PoolFacts, ...]
    longest_request_tokens: int
    """The longest prompt plus output that an empty arena holds beside the floor, whatever the split of the two."""
    max_model_len: ModelLength
    static_ratio: float
    concurrency: tuple[ConcurrencyFacts, ...]

    def lines(self) -> list[str]:
        """Return the capacity block that is printed at start, one line of text each."""
        return [
            self.size_line(),
            *(f"  pool {pool.line()}" for pool in self.pools),
            self.length_line(),
            *self._table(),
        ]

    def size_line(self) -> str:
        """Return the line about the arena's size."""
        return (
            f"arena {format_bytes(self.arena_bytes)} = {self.slabs} slabs of {format_bytes(self.slab_bytes)}"
            f" (budget {format_bytes(self.budget_bytes)}, remainder {format_bytes(self.remainder_bytes)})"
        )

    def length_line(self) -> str:
        """Return the line about the longest request."""
        return (
            f"longest request {self.longest_request_tokens} tokens; "
            f"max_model_len {self.max_model_len.tokens} ({self.max_model_len.reason})"
        )

    def _table(self) -> list[str]:
        if not self.concurrency:
            return []
        # The names of the policies, as plan and replay have them; which split is set is not known here.
        ours = "shared" if all(pool.cap_slabs is None for pool in self.pools) else "as set"
        heads = ("requests at once, prompt + output", ours, f"static:{self.static_ratio:g}", "full")
        rows = [
            (f"{row.prompt_tokens} + {row.output_tokens}", row.requests, row.static_requests, row.uniform_requests)
            for row in self.concurrency
        ]
        return [f"{name:<34} {held:>8} {static:>11} {full:>9}" for name, held, static, full in (heads, *rows)]

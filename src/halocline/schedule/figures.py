"""What the scheduler has counted: the one source of every figure about requests."""

from __future__ import annotations

from dataclasses import dataclass

from halocline.memory.figures import ArenaFigures


@dataclass(slots=True)
class Totals:
    """Counts since the start. Written by the scheduler only; `SchedulerFigures` is what others see."""

    arrived: int = 0
    """Requests that were taken; those refused at the door are `rejected`."""
    rejected: int = 0
    admitted: int = 0
    """Admissions, those after a retraction included."""
    finished: int = 0
    """Requests that ended with `stop` or `length`."""
    aborted: int = 0
    failed: int = 0
    retractions: int = 0
    extensions: int = 0
    """Grants raised because a request outgrew its estimate."""
    steps: int = 0
    """Steps applied."""
    moves: int = 0
    """Pages moved."""
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    """Of these, the ones that a retraction had thrown away."""
    output_tokens: int = 0
    peak_running: int = 0
    """The most requests that held memory at once."""


@dataclass(frozen=True, slots=True)
class SchedulerFigures:
    """A snapshot: requests by state now, counts since the start, and the arena's bytes."""

    waiting: int
    prefilling: int
    decoding: int
    retracted: int
    totals: Totals
    """A copy: it does not change afterwards."""
    arena: ArenaFigures

    @property
    def running(self) -> int:
        """Requests that hold a slot and memory."""
        return self.prefilling + self.decoding

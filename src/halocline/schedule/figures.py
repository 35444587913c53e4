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
class TierFigures:
    """What the prefix cache's second level has done since the start, and what it has now."""

    hit_tokens: int
    """Of the prefix cache's hits, those that came from the host: the device alone would have had to compute them."""
    lookups: dict[str, int]
    """Admissions by what was said of the host: see `halocline.cache.tier.Verdict`."""
    loads: int
    loaded_bytes: int
    written: int
    """Boundaries that were written back."""
    written_bytes: int
    refused: int
    """Boundaries that were not written back, because grants filled the host arena."""
    nodes: int
    cached_bytes: int
    """Bytes of its pages that no load locks now: they can be evicted."""


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """What the prefix cache has done since the start, and what it has now."""

    looked_up_tokens: int
    """Prompt tokens of all first admissions."""
    hit_tokens: int
    """Of these, the ones that did not have to be computed."""
    lookups: dict[str, int]
    """Admissions by the reason why the cached prefix was not longer: see `halocline.cache.match.Reason`."""
    shortened: int
    """Admissions at a shorter boundary than the longest, because the longest would have taken too much memory."""
    resumed_tokens: int
    """Tokens of retracted requests that came back without computing them again."""
    waited: int
    """Requests that waited for a prefix that another one was computing."""
    evicted_pages: tuple[int, ...]
    """Cached pages that died for others, per pool."""
    nodes: int
    """Nodes of the tree now."""
    cached_bytes: int
    """Bytes of pages that nobody locks now: they can be evicted."""
    tier: TierFigures | None = None
    """None without a host arena."""


@dataclass(frozen=True, slots=True)
class HostFigures:
    """What the host arena holds now, and what retracted requests have done with it since the start."""

    arena: ArenaFigures
    """Running bytes are those of retracted requests, locked and cached ones the prefix cache's."""
    copies: int
    """Requests that wait with a copy."""
    offloaded: int
    """Retractions that left a copy."""
    restored: int
    """Returns from a copy, without computing again."""
    refused: int
    """Retractions whose copy would have been worth it and did not fit beside other copies."""
    dropped: int
    """Copies that were freed unread: their requests ended, found more in the prefix cache, or nothing was trusted."""
    offloaded_bytes: int
    loaded_bytes: int
    offloaded_tokens: int = 0
    """Positions that copies have spared, as they were made."""
    restored_tokens: int = 0
    """Those of the copies that were returned from."""


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
    cache: CacheFigures | None = None
    """None where the prefix cache is off."""
    host: HostFigures | None = None
    """None without a host arena."""
    absent: int = 0
    """Of those that wait or were retracted, the ones that have no word of another worker yet."""
    receiving: int = 0
    sending: int = 0

    @property
    def running(self) -> int:
        """Requests that hold a slot and memory."""
        return self.prefilling + self.decoding + self.receiving + self.sending

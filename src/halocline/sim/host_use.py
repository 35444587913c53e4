"""What a replay's host arena held and did: written down while the run goes, told at its end. Only where there is one.

    copies of retracted requests      held by grants                retracted
    the prefix cache's second level   evictable, or locked while    cached
                                      a load reads it

As for the device, a row of counts stands for every interval, weighted with its seconds: free slabs, retracted pages per
pool, cached pages per pool. The counts of copies and loads are the scheduler's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halocline.memory.host import HostArena
from halocline.schedule.figures import SchedulerFigures
from halocline.sim.series import Thinned

_FREE, _RETRACTED = 0, 1


@dataclass(frozen=True, slots=True)
class Copied:
    """Pages that went one way between device and host, for one purpose, since the start."""

    times: int
    """Requests, or boundaries of the prefix cache."""
    bytes: int
    tokens: int | None = None
    """Positions that need not be computed again; None where nobody knows whether they ever would have been."""


@dataclass(frozen=True, slots=True)
class HostSeries:
    """The host arena over time: as `Series` of the device. What is left of its slabs are holes."""

    time_seconds: tuple[float, ...]
    interval_seconds: tuple[float, ...]
    retracted_bytes: dict[str, tuple[float, ...]]
    """By pool."""
    cached_bytes: dict[str, tuple[float, ...]]
    """By pool; those that a load reads included."""
    hole_bytes: tuple[float, ...]
    free_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class HostUse:
    """What a run made of its host arena. Means are over the whole run."""

    quota_bytes: int
    bytes: int
    """Bytes of all slabs: the quota less what makes no whole slab."""
    held_share: float
    """Retracted and cached pages, as a share of all slabs' bytes."""
    peak_bytes: int
    """The most bytes of such pages at once."""
    retracted_bytes: dict[str, float]
    """By pool."""
    cached_bytes: dict[str, float]
    """By pool."""
    offloaded: Copied
    """Retractions that left a copy."""
    restored: Copied
    """Returns from a copy."""
    refused: int
    """Retractions whose copy was worth it and did not fit beside other copies."""
    dropped: int
    """Copies that were freed unread."""
    written: Copied
    """Boundaries of the prefix cache that the device gave up."""
    loaded: Copied
    """Requests that came in with what the host had of their prompts."""
    write_refused: int
    """Boundaries that were not written, because copies of requests filled the arena."""
    device_hit_rate: float
    """Prompt tokens of first admissions that the device had, over those looked up."""
    host_hit_rate: float
    """Those that only the host had, over the same; both together are the run's hit rate."""
    series: HostSeries


class HostRecord:
    """Sums of one run's host arena."""

    def __init__(self, host: HostArena) -> None:
        self._host = host
        self._layout = host.arena.layout
        self._cached = _RETRACTED + len(self._layout.pools)
        self._strides = np.array([pool.stride_bytes for pool in self._layout.pools], np.float64)
        columns = self._cached + len(self._layout.pools)
        self._sum, self._seconds = np.zeros(columns), 0.0
        self._series = Thinned(columns)
        self._peak_bytes = 0

    def interval(self, start: float, seconds: float) -> None:
        """Take what the arena holds now as that of the next `seconds`."""
        arena = self._host.arena
        budget = arena.budget
        locked = [one + other for one, other in zip(budget.locked, budget.transfer, strict=True)]
        retracted = [held - less for held, less in zip(budget.held, locked, strict=True)]
        cached = [pages + more for pages, more in zip(budget.cached, locked, strict=True)]
        self._peak_bytes = max(self._peak_bytes, self._host.bytes_of(retracted) + self._host.bytes_of(cached))
        if seconds:
            row = np.array((len(arena.stock.free), *retracted, *cached)) * seconds
            self._sum += row
            self._seconds += seconds
            self._series.add(start, seconds, row)

    def use(self, figures: SchedulerFigures) -> HostUse:
        """Return what came of it, with the counts of the scheduler at the end."""
        copies, cache = figures.host, figures.cache
        assert copies is not None, "there is a host arena, and the scheduler has no figures of it"
        tier = None if cache is None else cache.tier
        looked_up = 0 if cache is None else cache.looked_up_tokens
        hits, from_host = (0, 0) if cache is None or tier is None else (cache.hit_tokens, tier.hit_tokens)
        means = self._sum / self._seconds if self._seconds else self._sum
        retracted, cached = self._by_pool(means, _RETRACTED), self._by_pool(means, self._cached)
        total = self._layout.arena_bytes
        return HostUse(
            quota_bytes=self._host.quota_bytes,
            bytes=total,
            held_share=(sum(retracted.values()) + sum(cached.values())) / total,
            peak_bytes=self._peak_bytes,
            retracted_bytes=retracted,
            cached_bytes=cached,
            offloaded=Copied(copies.offloaded, copies.offloaded_bytes, copies.offloaded_tokens),
            restored=Copied(copies.restored, copies.loaded_bytes, copies.restored_tokens),
            refused=copies.refused,
            dropped=copies.dropped,
            written=Copied(0, 0) if tier is None else Copied(tier.written, tier.written_bytes),
            loaded=Copied(0, 0, 0) if tier is None else Copied(tier.loads, tier.loaded_bytes, from_host),
            write_refused=0 if tier is None else tier.refused,
            device_hit_rate=(hits - from_host) / looked_up if looked_up else 0.0,
            host_hit_rate=from_host / looked_up if looked_up else 0.0,
            series=self._over_time(),
        )

    def _by_pool(self, row: np.ndarray, at: int) -> dict[str, float]:
        pages = row[at : at + len(self._strides)] * self._strides
        return {pool.name: float(size) for pool, size in zip(self._layout.pools, pages, strict=True)}

    def _over_time(self) -> HostSeries:
        means = self._series.means()

        def pages(first: int) -> dict[str, tuple[float, ...]]:
            sizes = means[:, first : first + len(self._strides)] * self._strides
            return {pool.name: tuple(sizes[:, at].tolist()) for at, pool in enumerate(self._layout.pools)}

        free = means[:, _FREE] * self._layout.slab_bytes
        live = (means[:, _RETRACTED : self._cached] + means[:, self._cached :]) @ self._strides
        return HostSeries(
            tuple(self._series.starts.tolist()),
            tuple(self._series.seconds.tolist()),
            pages(_RETRACTED),
            pages(self._cached),
            tuple((self._layout.arena_bytes - free - live).tolist()),
            tuple(free.tolist()),
        )

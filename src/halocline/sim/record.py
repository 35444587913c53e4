"""What a run writes down of itself while it goes: sums, and a few numbers per finished request. Memory stays flat.

The driver tells of every interval of simulated time (a step, a leap, or idleness) with one row of counts:

    running | waiting | free slabs | held pages per pool | cached pages per pool | waiting by reason | bytes of holes

Rows are weighted with the interval's seconds and summed by phase: inside the middle of the run or not (see
`halocline.sim.outcome`), while somebody waits for memory or not. All of them are counts, so that bytes and shares are
found at the end, once. Holes alone are bytes from the start: what is left of an arena when all else is taken away is a
whole number in every row, and would be a rounding error, even one below 0, if it were left of sums.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from operator import mul

import numpy as np
from numpy.typing import NDArray

from halocline.memory.layout import ArenaLayout
from halocline.sim.outcome import REASONS, ArenaUse, Concurrency, Goodput, Latency, Loop, RequestCounts, Series
from halocline.sim.series import Thinned

CDF_POINTS = 200
RUNNING, WAITING, FREE, HELD = 0, 1, 2, 3
MEMORY_REASONS = frozenset({"memory", "senior-short"})
PRESSING_REASONS = MEMORY_REASONS | {"slots"}
_AT = {code: at for at, code in enumerate(REASONS)}
NOBODY = (0.0,) * len(REASONS)


@dataclass(slots=True)
class _Phase:
    """Rows weighted with seconds, summed, and the seconds."""

    sums: NDArray[np.float64]
    seconds: float = 0.0

    def means(self) -> NDArray[np.float64]:
        return self.sums / self.seconds if self.seconds else self.sums


class Recorder:
    """Sums and samples of one run."""

    def __init__(self, layout: ArenaLayout, loop: Loop, ttft_limit_seconds: float, tpot_limit_seconds: float) -> None:
        self._layout = layout
        self.loop = loop
        self._limits = ttft_limit_seconds, tpot_limit_seconds
        pools = len(layout.pools)
        self._cached = HELD + pools
        self._reasons = HELD + 2 * pools
        self._holes = self._reasons + len(REASONS)
        columns = self._holes + 1
        self._strides = [pool.stride_bytes for pool in layout.pools] * 2
        self._phases = {
            (middle, short): _Phase(np.zeros(columns)) for middle in (False, True) for short in (False, True)
        }
        self._series = Thinned(columns)
        self._pressed_at: float | None = None
        self._drained_at: float | None = None
        self._end = 0.0
        self._ttft, self._tpot, self._e2e = array("d"), array("d"), array("d")
        self._good = 0
        self._good_in_middle = 0
        self.peak_running = 0
        self.counts = dict.fromkeys(("finished", "rejected", "failed", "aborted"), 0)

    # --- while the run goes

    def interval(self, start: float, seconds: float, counts: Sequence[float], waiting: float, reason: str) -> None:
        """Take in an interval: `counts` are running, waiting, free slabs, held and cached pages.

        `reason` is the code of the most senior waiting request's, "" when nobody waits; `waiting` stand under it.
        """
        self.peak_running = max(self.peak_running, int(counts[RUNNING]))
        if self._pressed_at is None and reason in PRESSING_REASONS:
            self._pressed_at = start
        self._end = start + seconds
        if not seconds:
            return
        row = np.array((*counts, *NOBODY, self._hole_bytes(counts)))
        if reason:
            row[self._reasons + _AT[reason]] = waiting
        row *= seconds
        phase = self._phases[self._in_middle, reason in MEMORY_REASONS]
        phase.sums += row
        phase.seconds += seconds
        self._series.add(start, seconds, row)

    def _hole_bytes(self, counts: Sequence[float]) -> float:
        live_bytes: float = sum(map(mul, counts[HELD:], self._strides))
        return self._layout.arena_bytes - counts[FREE] * self._layout.slab_bytes - live_bytes

    @property
    def _in_middle(self) -> bool:
        return self._pressed_at is not None and self._drained_at is None

    def drained(self, now: float) -> None:
        """Be told that the workload has no more to hand over."""
        if self._drained_at is None:
            self._drained_at = now

    def ended(self, how: str) -> None:
        """Count a request that ended as `rejected`, `failed` or `aborted`."""
        self.counts[how] += 1

    def finished(self, arrived: float, first: float, last: float, output_tokens: int) -> None:
        """Count a request that finished: when it arrived, and when its first and its last token came."""
        assert arrived <= first <= last, f"arrived at {arrived}, first token at {first}, last at {last}"
        self.counts["finished"] += 1
        ttft = first - arrived
        tpot = (last - first) / (output_tokens - 1) if output_tokens > 1 else 0.0
        self._ttft.append(ttft)
        self._e2e.append(last - arrived)
        if output_tokens > 1:
            self._tpot.append(tpot)
        if ttft <= self._limits[0] and tpot <= self._limits[1]:
            self._good += 1
            self._good_in_middle += self._in_middle

    # --- afterwards

    @property
    def seconds(self) -> float:
        """The end of the last interval."""
        return self._end

    @property
    def middle(self) -> tuple[float, float]:
        """From when to when means are taken: see `halocline.sim.outcome`."""
        if self._has_middle:
            assert self._pressed_at is not None, "a middle began without pressure"
            return self._pressed_at, self._end if self._drained_at is None else self._drained_at
        return 0.0, self._end

    @property
    def _has_middle(self) -> bool:
        return self.loop == "saturated" and self._sum(middle=True).seconds > 0

    def _sum(self, *, middle: bool | None = None, short: bool | None = None) -> _Phase:
        """Return the sums over the phases that are asked for: None means both."""
        total = _Phase(np.zeros_like(self._phases[False, False].sums))
        for (in_middle, is_short), phase in self._phases.items():
            if middle in (None, in_middle) and short in (None, is_short):
                total.sums += phase.sums
                total.seconds += phase.seconds
        return total

    def _means(self) -> NDArray[np.float64]:
        """Return the mean row over the middle."""
        return self._sum(middle=True).means() if self._has_middle else self._sum().means()

    def _means_while_short(self) -> NDArray[np.float64] | None:
        """Return the mean row over the time in which memory was short; None when it never was."""
        short = self._sum(short=True)
        return short.means() if short.seconds else None

    def requests(self, arrived: int) -> RequestCounts:
        """Return how requests ended, of `arrived`."""
        return RequestCounts(arrived, **self.counts)

    def concurrency(self) -> Concurrency:
        """Return how many ran at once."""
        mean, short = self._means()[RUNNING], self._means_while_short()
        return Concurrency(float(mean), self.peak_running, None if short is None else float(short[RUNNING]))

    def goodput(self, arrived: int) -> Goodput:
        """Return who was served well, of `arrived`."""
        counts = self.counts
        asked = arrived - counts["aborted"]
        first, last = self.middle
        good = self._good_in_middle if self._has_middle else self._good
        within = percentile(self._ttft, 0.95) <= self._limits[0] and percentile(self._tpot, 0.95) <= self._limits[1]
        return Goodput(
            self._good / asked if asked else 0.0,
            good / (last - first) if last > first else 0.0,
            *self._limits,
            is_met=within and not counts["rejected"] + counts["failed"],
        )

    def latencies(self) -> tuple[Latency, Latency, Latency]:
        """Return TTFT, TPOT and end-to-end times of those that finished."""
        return latency(self._ttft), latency(self._tpot), latency(self._e2e)

    def arena(self) -> ArenaUse:
        """Return where the bytes were."""
        means, layout = self._means(), self._layout
        held, cached = self._bytes(means, HELD), self._bytes(means, self._cached)
        live = means[HELD : self._cached] + means[self._cached : self._reasons]
        padding = float(live @ np.array([pool.padding_bytes for pool in layout.pools]))
        total, short = layout.arena_bytes, self._means_while_short()
        return ArenaUse(
            bytes=total,
            held_share=sum(held.values()) / total,
            cached_share=sum(cached.values()) / total,
            holes_share=float(means[self._holes]) / total,
            free_share=float(means[FREE]) / layout.slabs,
            waste_share=padding / total,
            held_share_while_waiting=None if short is None else sum(self._bytes(short, HELD).values()) / total,
            held_bytes=held,
            cached_bytes=cached,
        )

    def _bytes(self, row: NDArray[np.float64], at: int) -> dict[str, float]:
        pools = self._layout.pools
        return {pool.name: float(pages) * pool.stride_bytes for pages, pool in zip(row[at:], pools, strict=False)}

    def waiting_seconds(self) -> dict[str, float]:
        """Return request-seconds of waiting by reason code; codes that never stood are left out."""
        sums = self._sum().sums[self._reasons : self._holes]
        return {code: float(total) for code, total in zip(REASONS, sums, strict=True) if total}

    def series(self) -> Series:
        """Return the run over time."""
        means, layout = self._series.means(), self._layout

        def pages(first: int) -> dict[str, tuple[float, ...]]:
            return {
                pool.name: tuple((means[:, first + at] * pool.stride_bytes).tolist())
                for at, pool in enumerate(layout.pools)
            }

        return Series(
            tuple(self._series.starts.tolist()),
            tuple(self._series.seconds.tolist()),
            tuple(means[:, RUNNING].tolist()),
            tuple(means[:, WAITING].tolist()),
            pages(HELD),
            pages(self._cached),
            tuple((means[:, FREE] * layout.slab_bytes).tolist()),
            tuple(means[:, self._holes].tolist()),
            {code: tuple(means[:, self._reasons + _AT[code]].tolist()) for code in self.waiting_seconds()},
        )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of `values` that at least `share` of them do not exceed; 0 when there are none."""
    return float(np.sort(values)[ceil(share * len(values)) - 1]) if len(values) else 0.0


def latency(values: Sequence[float]) -> Latency:
    """Return the distribution of `values`, in seconds."""
    if not len(values):
        return Latency(0.0, 0.0, 0.0, 0.0, 0.0, ())
    ordered = np.sort(values)
    count = len(ordered)
    ranks = np.unique(np.ceil(np.linspace(0, count, min(count, CDF_POINTS) + 1)[1:]).astype(int))
    cdf = tuple((float(ordered[rank - 1]), float(rank / count)) for rank in ranks)
    p50, p90, p95, p99 = (float(ordered[ceil(share * count) - 1]) for share in (0.5, 0.9, 0.95, 0.99))
    return Latency(p50, p90, p95, p99, float(ordered.mean()), cdf)

"""How many requests wait and run over time, as their clients see it: integrals, and a row of means for the report."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from halocline.sim.scrape import ArenaLook
from halocline.sim.series import Thinned

RUNNING, WAITING, FREE, HOLES, POOLS = 0, 1, 2, 3, 4


@dataclass(slots=True)
class Integrals:
    """Over some stretch of time: its seconds, and request-seconds of running and waiting."""

    seconds: float = 0.0
    running: float = 0.0
    waiting: float = 0.0

    def add(self, seconds: float, running: int, waiting: int) -> None:
        """Add a stretch in which nothing changed."""
        self.seconds += seconds
        self.running += seconds * running
        self.waiting += seconds * waiting


class Gauge:
    """Counts of now, and their integrals: over the run and over the middle.

    The middle is the time between `press` and `drain`. The server's arena, where it shows one, is taken as it was at
    the last look.
    """

    def __init__(self, pools: tuple[str, ...] = ()) -> None:
        self.pools = pools
        self.running = self.waiting = self.peak_running = 0
        self.run, self.middle = Integrals(), Integrals()
        self.series = Thinned(POOLS + 2 * len(pools))
        self.pressed_at, self.drained_at = inf, inf
        self._changed_at = self._sampled_at = 0.0
        self._last = Integrals()
        """Since the last sample."""
        self._look: ArenaLook | None = None

    def change(self, now: float, *, running: int = 0, waiting: int = 0) -> None:
        """Let so many more (or fewer) run and wait from `now` on."""
        self._advance(now)
        self.running += running
        self.waiting += waiting
        assert self.running >= 0, f"{self.running} requests run"
        assert self.waiting >= 0, f"{self.waiting} requests wait"
        self.peak_running = max(self.peak_running, self.running)

    def press(self, now: float) -> None:
        """Let the middle begin, unless it has."""
        self._advance(now)
        self.pressed_at = min(self.pressed_at, now)

    def drain(self, now: float) -> None:
        """Let the middle end, unless it has."""
        self._advance(now)
        self.drained_at = min(self.drained_at, now)

    def look(self, look: ArenaLook | None) -> None:
        """Take the server's arena to be as it was seen."""
        self._look = look

    def sample(self, now: float) -> None:
        """Close an interval of the series."""
        self._advance(now)
        seconds = now - self._sampled_at
        if seconds <= 0:
            return
        row = [self._last.running, self._last.waiting]
        if self._look is not None:
            look = self._look
            held = [look.held.get(pool, 0.0) for pool in self.pools]
            cached = [look.cached.get(pool, 0.0) for pool in self.pools]
            row += [seconds * value for value in (look.free, look.holes, *held, *cached)]
        else:
            row += [0.0] * (2 + 2 * len(self.pools))
        self.series.add(self._sampled_at, seconds, np.array(row))
        self._sampled_at, self._last = now, Integrals()

    def _advance(self, now: float) -> None:
        seconds, self._changed_at = now - self._changed_at, now
        for each in (self.run, self._last):
            each.add(seconds, self.running, self.waiting)
        if self.pressed_at < inf and self.drained_at == inf:
            self.middle.add(seconds, self.running, self.waiting)

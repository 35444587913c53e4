"""A row of figures over time, in at most a thousand intervals however long the run: what is kept are integrals.

    added    |v1 dt1|v2 dt2|v3 dt3|v4 dt4| ...            one interval each, until there are POINTS of them
    thinned  |v1 dt1 + v2 dt2|v3 dt3 + v4 dt4| ...         neighbours become one, and new ones are filled as long

So the sum of all integrals stays what it was, to rounding, and a value that is shown is a mean weighted with time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

POINTS = 1000
Row = NDArray[np.float64]


class Thinned:
    """Integrals of `columns` figures over consecutive intervals."""

    def __init__(self, columns: int, points: int = POINTS) -> None:
        assert points % 2 == 0, f"{points} intervals cannot be joined in pairs"
        self._points = points
        self._sums = np.zeros((points, columns))
        self._starts = np.zeros(points)
        self._seconds = [0.0] * points
        self._count = 0
        self._width_seconds = 0.0

    def add(self, start_seconds: float, seconds: float, integrals: Row) -> None:
        """Take in an interval and the integrals of all columns over it; intervals come in order of time."""
        last = self._count - 1
        if last < 0 or self._seconds[last] >= self._width_seconds:
            if self._count == self._points:
                self._thin()
            last = self._count
            self._count += 1
            self._starts[last], self._seconds[last], self._sums[last] = start_seconds, 0.0, 0.0
        self._seconds[last] += seconds
        self._sums[last] += integrals

    def _thin(self) -> None:
        half = self._points // 2
        self._sums[:half] = self._sums[0::2] + self._sums[1::2]
        self._starts[:half] = self._starts[0::2]
        self._seconds[:half] = [a + b for a, b in zip(self._seconds[0::2], self._seconds[1::2], strict=True)]
        self._count = half
        self._width_seconds = sum(self._seconds[:half]) / half

    @property
    def starts(self) -> NDArray[np.float64]:
        """Return when each interval begins, in seconds."""
        return self._starts[: self._count]

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Return how long each interval lasts."""
        return np.array(self._seconds[: self._count])

    def means(self) -> NDArray[np.float64]:
        """Return the mean of each column over each interval, shape (intervals, columns)."""
        return self._sums[: self._count] / np.maximum(self.seconds, 1e-300)[:, None]

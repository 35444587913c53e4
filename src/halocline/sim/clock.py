"""What happens when, beside steps: arrivals, and clients that go away. A heap under a clock that nobody waits for."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

Kind = Literal["arrive", "abort"]
_ORDER: dict[Kind, int] = {"arrive": 0, "abort": 1}


class Agenda:
    """Events to come, in order of time; at one time arrivals before aborts, and each in the order of being noted."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, int, Kind, int]] = []
        self._noted = 0
        self._cancelled: set[tuple[Kind, int]] = set()

    def note(self, seconds: float, kind: Kind, job: int) -> None:
        """Let `kind` happen to the job of that number at `seconds`; each kind at most once to a job."""
        heapq.heappush(self._events, (seconds, _ORDER[kind], self._noted, kind, job))
        self._noted += 1

    def cancel(self, kind: Kind, job: int) -> None:
        """Let an event that was noted and is still to come not happen."""
        self._cancelled.add((kind, job))

    @property
    def next_seconds(self) -> float | None:
        """When the next event is; None when there is none."""
        self._skip()
        return self._events[0][0] if self._events else None

    def due(self, now: float) -> Iterator[tuple[float, Kind, int]]:
        """Yield what is due at `now`, in order, each once: (seconds, kind, job)."""
        while True:
            self._skip()
            if not self._events or self._events[0][0] > now:
                return
            seconds, _, _, kind, job = heapq.heappop(self._events)
            yield seconds, kind, job

    def _skip(self) -> None:
        while self._cancelled and self._events and self._events[0][3:] in self._cancelled:
            self._cancelled.remove(heapq.heappop(self._events)[3:])

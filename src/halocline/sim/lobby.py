"""Who has arrived and is not with the scheduler yet: arrivals in time, sessions, clients that lose patience.

    agenda --due--> held back, in order of (priority, arrival) --next--> the scheduler
                       `--drop (its client went away)

A later turn of a session arrives `think_seconds` after the turn before has ended, however that ended, and never before
its own time. Prompts stay runs here: thousands may be held back.
"""

from __future__ import annotations

import heapq

from halocline.sim.clock import Agenda
from halocline.sim.workload import Job, Workload


class Lobby:
    """The jobs of one run that the scheduler has not seen."""

    def __init__(self, workload: Workload, *, saturated: bool = False, time_scale: float = 1.0) -> None:
        """`saturated` lets everything arrive at once; else times are the workload's over `time_scale`."""
        self._jobs = workload.jobs
        self._saturated = saturated
        self._time_scale = time_scale
        self._agenda = Agenda()
        self._followers: dict[str, list[int]] = {}
        self._queue: list[tuple[int, int, int, float]] = []
        """A heap of (priority, order of arrival, number, seconds of arrival); some of them may have gone."""
        self._held_back: set[int] = set()
        self._impatient = {job.id: number for number, job in enumerate(self._jobs) if job.abort_seconds is not None}
        self.arrived = 0
        self.left = len(self._jobs)
        """Jobs that are still to come or to be handed over."""
        for number, job in enumerate(self._jobs):
            if job.after is None:
                self._agenda.note(self._earliest(job), "arrive", number)
            else:
                self._followers.setdefault(job.after, []).append(number)

    def __len__(self) -> int:
        """Return how many are held back."""
        return len(self._held_back)

    @property
    def next_seconds(self) -> float | None:
        """When the next event is; None when there is none."""
        return self._agenda.next_seconds

    def let_in(self, now: float) -> list[Job]:
        """Let everyone in who has arrived by `now`; return those whose clients go away now, before their end."""
        leaving = []
        for seconds, kind, number in self._agenda.due(now):
            job = self._jobs[number]
            if kind == "abort":
                leaving.append(job)
                del self._impatient[job.id]
                continue
            heapq.heappush(self._queue, (job.priority, self.arrived, number, seconds))
            self._held_back.add(number)
            self.arrived += 1
            if not self._saturated:
                self._watch(number, seconds)
        return leaving

    def next(self, now: float) -> tuple[Job, float]:
        """Hand the first one over; return it and when it arrived. Somebody must be held back."""
        while True:
            _, _, number, seconds = heapq.heappop(self._queue)
            if number in self._held_back:
                break
        self._held_back.remove(number)
        self.left -= 1
        if self._saturated:
            seconds = now
            self._watch(number, now)
        return self._jobs[number], seconds

    def drop(self, job: Job) -> None:
        """Let a held-back job go because its client did."""
        self._held_back.remove(next(number for number in self._held_back if self._jobs[number] is job))
        self.left -= 1

    def ended(self, job: Job, now: float) -> None:
        """Forget that the client of `job` may go away, and let those arrive in due time who wait for its end."""
        impatient = self._impatient.pop(job.id, None)
        if impatient is not None:
            self._agenda.cancel("abort", impatient)
        for number in self._followers.pop(job.id, ()):
            follower = self._jobs[number]
            self._agenda.note(max(now + follower.think_seconds, self._earliest(follower)), "arrive", number)

    def _earliest(self, job: Job) -> float:
        return 0.0 if self._saturated else job.arrive_seconds / self._time_scale

    def _watch(self, number: int, seconds: float) -> None:
        patience = self._jobs[number].abort_seconds
        if patience is not None:
            self._agenda.note(seconds + patience, "abort", number)

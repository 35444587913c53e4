"""How concurrency follows traffic that flips from one kind to another: what is measured, step by step.

The queue is saturated and served in order: jobs of one side, then of the other, in turns. A turn's jobs are as many as
its side would serve in `seconds` alone. Nobody overtakes, so each flip has three moments:

    begins    the first step with a request of the new turn
    free      the first step in which requests of earlier turns hold at most 5 % of the arena, by their live pages: from
              here on the bytes of a steady state are there for the new turn to take
    back      the first step from there on in which at least 95 % of the steady number of requests runs

The steady number is that of a run of the side's traffic alone, same jobs in the same order, at the same place of the
queue: the mean of the requests that ran there while the same job was the newest. (Its mean over the whole run would
compare a stretch of long prompts with one of short ones.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean

from halocline.memory.demand import span
from halocline.memory.layout import ArenaLayout
from halocline.sim.driver import MOST_WAITING
from halocline.sim.generators import flip
from halocline.sim.outcome import Outcome, SegmentRecord, StepRecord
from halocline.sim.policies import policy_named
from halocline.sim.setup import Setup
from halocline.sim.simulation import simulate
from halocline.sim.workload import Workload

OLD_SHARE = 0.05
BACK_SHARE = 0.95
ALL_STEPS = (0, 2**31)


@dataclass(frozen=True)
class Flip:
    """One change of traffic. Moments are indices of steps."""

    side: str
    """Whose turn begins: `a` or `b`."""
    begins: int
    free: int
    back: int | None
    """None: not before the turn ended."""
    steady: float
    """Requests that run at `free` in the run of this side alone."""
    running: int
    """Requests that run at `free`."""
    lowest_held_share: float
    """The least that the arena's pages of running requests were from `begins` to the turn's end, over all its bytes."""
    mean_over_steady: float
    """Running requests over the steady number, mean from `free` to the turn's end."""

    @property
    def steps_to_free(self) -> int:
        """Steps until the bytes were free."""
        return self.free - self.begins

    @property
    def steps_to_back(self) -> int | None:
        """Steps from there until concurrency was back."""
        return None if self.back is None else self.back - self.free


@dataclass(frozen=True)
class Flipping:
    """A run of traffic that flips."""

    outcome: Outcome
    flips: tuple[Flip, ...]
    steady: dict[str, float]


def alone(setup: Setup, workload: Workload) -> Outcome:
    """Return a saturated run with a record of every step."""
    return simulate(setup, workload, saturated=True, window=ALL_STEPS)


def paced(setup: Setup, workload: Workload) -> Workload:
    """Return the jobs evenly apart, as many a second as are served when they are alone: a turn is one of service."""
    outcome = simulate(setup, workload, saturated=True)
    drained = outcome.middle_seconds[1]
    assert drained < outcome.seconds, "the queue never pressed: there are too few jobs"
    apart = drained / (len(workload.jobs) - MOST_WAITING - outcome.concurrency.mean)
    return replace(
        workload, jobs=tuple(replace(job, arrive_seconds=at * apart) for at, job in enumerate(workload.jobs))
    )


def whole_turns(workload: Workload, seconds: float, turns: int) -> Workload:
    """Return the jobs of so many turns."""
    return replace(workload, jobs=tuple(job for job in workload.jobs if job.arrive_seconds < turns * seconds))


class Traffic:
    """Two sides in turns, and what runs at once of each when it is alone."""

    def __init__(self, setup: Setup, one: Workload, other: Workload, seconds: float) -> None:
        """Let `one` (side a) and `other` (side b) take turns of `seconds`, both paced by `setup`.

        Turns that are not whole are left out. The last one drains, so it gives no flip.
        """
        turns = int(min(workload.span_seconds for workload in (one, other)) / seconds)
        self.mixed = flip(*(whole_turns(workload, seconds, turns) for workload in (one, other)), seconds)
        sides = {side: tuple(job for job in self.mixed.jobs if job.id[0] == side) for side in "ab"}
        self._places = {job.id: at for jobs in sides.values() for at, job in enumerate(jobs)}
        self._turns = _turns(self.mixed)
        self.steady: dict[str, float] = {}
        """Mean concurrency of each side alone."""
        self._at_place: dict[str, list[float]] = {}
        for side, jobs in sides.items():
            outcome = alone(setup, Workload(side, self.mixed.source, jobs))
            self.steady[side] = outcome.concurrency.mean
            self._at_place[side] = _running_by_newest(outcome.window, self._places, len(jobs))

    def run(self, setup: Setup) -> Flipping:
        """Let the traffic through `setup`, which may have another policy than the steady runs had."""
        outcome = alone(setup, self.mixed)
        layout = policy_named(setup.policy).lay_out(setup.shape.layers, setup.kv_bytes, setup.page_tokens)
        flips = _flips(outcome.window, layout, self._turns, self._places, self._at_place)
        return Flipping(outcome, flips, self.steady)


def _turns(mixed: Workload) -> dict[str, int]:
    """Return the number of each job's turn."""
    turns, turn = {mixed.jobs[0].id: 0}, 0
    for before, job in pairwise(mixed.jobs):
        turn += job.id[0] != before.id[0]
        turns[job.id] = turn
    return turns


def _running_by_newest(records: Sequence[StepRecord], places: dict[str, int], count: int) -> list[float]:
    """Return for each place of the queue how many ran while the job there was the newest to have entered."""
    found: list[list[int]] = [[] for _ in range(count)]
    newest = 0
    for record in records:
        newest = max(newest, *(places[segment.request_id] for segment in record.segments))
        found[newest].append(record.running)
    means = [mean(values) if values else 0.0 for values in found]
    for at, value in enumerate(means):  # several entered in one step: the last of them was the newest
        means[at] = value or next((later for later in means[at:] if later), 0.0)
    return means


def _flips(
    records: Sequence[StepRecord],
    layout: ArenaLayout,
    turns: dict[str, int],
    places: dict[str, int],
    at_place: dict[str, list[float]],
) -> tuple[Flip, ...]:
    newest_turn, begins = 0, [0]
    ratios: list[float] = []
    for at, record in enumerate(records):
        turn = max(newest_turn, *(turns[segment.request_id] for segment in record.segments))
        begins += [at] * (turn - newest_turn)
        newest_turn = turn
        newest = max((s.request_id for s in record.segments), key=lambda name: (turns[name], places[name]))
        ratios.append(record.running / at_place[newest[0]][places[newest]])
    # The last turn drains: it has no end.
    return tuple(
        _flip(records, layout, turns, turn, steps, ratios) for turn, steps in enumerate(pairwise(begins[1:]), start=1)
    )


def _flip(
    records: Sequence[StepRecord],
    layout: ArenaLayout,
    turns: dict[str, int],
    turn: int,
    steps: tuple[int, int],
    ratios: Sequence[float],
) -> Flip:
    begin, end = steps

    def old_bytes(record: StepRecord) -> int:
        return sum(live_bytes(layout, s) for s in record.segments if turns[s.request_id] < turn)

    free = next((at for at in range(begin, end) if old_bytes(records[at]) <= OLD_SHARE * layout.arena_bytes), None)
    assert free is not None, f"turn {turn} ends at step {end} before the bytes of earlier ones are free: make it longer"
    back = next((at for at in range(free, end) if ratios[at] >= BACK_SHARE), None)
    held = [sum(records[at].held_bytes.values()) / layout.arena_bytes for at in range(begin, end)]
    side = next(s.request_id[0] for s in records[begin].segments if turns[s.request_id] == turn)
    running = records[free].running
    return Flip(side, begin, free, back, running / ratios[free], running, min(held), mean(ratios[free:end]))


def live_bytes(layout: ArenaLayout, segment: SegmentRecord) -> int:
    """Return the bytes of the pages that a segment reads or writes."""
    total = 0
    for pool in layout.pools:
        first, last = span(pool, segment.start, segment.start + segment.tokens)
        total += (last - first) * pool.stride_bytes
    return total

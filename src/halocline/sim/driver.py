"""The loop of a replay: jobs in, the shipped scheduler's steps, times by the cost model, a record out.

    lobby --hand over--> scheduler --plan--> backend --result--> scheduler --updates--> record

* The clock jumps from step end to step end, and over idleness to the next arrival. What arrives or goes away during a
  step is handed over at its end, as the engine's loop does; latencies count from the arrival all the same.
* At most `MOST_WAITING` requests wait in the scheduler; the others are held back in the lobby, in order, and their
  prompts are not expanded yet. Where all priorities are equal nothing is decided otherwise by that, because nobody
  overtakes (a step that could admit more than so many at once admits the rest in the next one); where they are not,
  nobody is held back.
* In a saturated run everything arrives at the start, and a request's times count from its being handed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from halocline.errors import InvariantError
from halocline.params import SamplingParams
from halocline.schedule.events import Abort, Arrive, Failed, NewToken, Rejected, Update
from halocline.sim.backend import ReplayBackend, Stopwatch
from halocline.sim.digest import Digest
from halocline.sim.host_use import HostRecord
from halocline.sim.lobby import Lobby
from halocline.sim.outcome import SegmentRecord, StepRecord
from halocline.sim.outline import Outline
from halocline.sim.record import Recorder
from halocline.sim.setup import STOP_ID, Setup, World
from halocline.sim.workload import Job, Workload

MOST_WAITING = 64


@dataclass(frozen=True, slots=True)
class Mode:
    """How a workload is let through a setup."""

    saturated: bool = False
    time_scale: float = 1.0
    audit_every: int = 0
    window: tuple[int, int] = (0, 0)
    """Steps of which records are kept: from the first to before the last."""


class _Live:
    """A request that the scheduler has."""

    __slots__ = ("arrived", "first", "job")

    def __init__(self, job: Job, arrived: float) -> None:
        self.job = job
        self.arrived = arrived
        self.first = math.nan


class Driver:
    """One run of one workload: `turn` until it says that nothing is left."""

    def __init__(
        self, setup: Setup, world: World, workload: Workload, stopwatch: Stopwatch, record: Recorder, mode: Mode
    ) -> None:
        self.host = None if world.host is None else HostRecord(world.host)
        """What the host arena holds, where there is one."""
        self._setup = setup
        self._scheduler = world.scheduler
        self._arena = world.arena
        self._strides = [pool.stride_bytes for pool in world.arena.layout.pools]
        self._stopwatch = stopwatch
        self._record = record
        self._mode = mode
        self._backend = ReplayBackend()
        self._lobby = Lobby(workload, saturated=mode.saturated, time_scale=mode.time_scale)
        one_line = len({job.priority for job in workload.jobs}) <= 1
        self._most_waiting = MOST_WAITING if one_line else len(workload.jobs)
        self._live: dict[str, _Live] = {}
        self._step_seconds = 0.0
        """What the last step took, per token of a decode: how a leap is kept from passing the next arrival."""
        self.now = 0.0
        self.moved_bytes = 0
        self.prompt_tokens = 0
        self.ended = 0
        self.first_rejection: str | None = None
        """Whose it was, and its words."""
        self.digest = Digest()
        self.window: list[StepRecord] = []

    @property
    def arrived(self) -> int:
        """Jobs that have arrived so far."""
        return self._lobby.arrived

    @property
    def waiting(self) -> int:
        """Who waits: in an open loop those who are held back too, in a saturated one they have not come yet."""
        return self._scheduler.waiting + (0 if self._mode.saturated else len(self._lobby))

    def turn(self) -> bool:
        """Hand over who has arrived, then compute one step or wait for the next event; return whether any was left."""
        for job in self._lobby.let_in(self.now):
            self._leave(job)
        self._hand_over()
        # Prompts that take no time are computed while decodes stand still: they would gain tokens by every prompt.
        plan = self._scheduler.plan(self.now, 0) if self._setup.instant_prefill else None
        plan = plan or self._scheduler.plan(self.now, self._leap())
        if plan is not None:
            assert isinstance(plan, Outline), "a replay reads outlines; its scheduler writes something else"
            self._step(plan)
            return True
        updates = self._scheduler.take_updates()
        if updates:  # planning failed somebody who could not go on alone: whoever is left may go on now
            self._take(updates)
            return True
        return self._wait()

    # --- who comes and goes

    def _hand_over(self) -> None:
        lobby, scheduler = self._lobby, self._scheduler
        while len(lobby) and scheduler.waiting < self._most_waiting:
            job, arrived = lobby.next(self.now)
            if lobby.left == 0:
                self._record.drained(self.now)
            self._live[job.id] = _Live(job, arrived)
            self.prompt_tokens += job.prompt_tokens
            self._backend.expect(job.id, job.output_id)
            limit: int | None = job.output_tokens
            if not self._setup.known_lengths:
                limit = None
                self._backend.expect_stop(job.id, job.prompt_tokens + job.output_tokens - 1, STOP_ID)
            params = SamplingParams(temperature=0.0, max_tokens=limit)
            self._take(scheduler.handle(Arrive(job.id, job.tokens(), params, self._setup.seed, job.priority)))

    def _leave(self, job: Job) -> None:
        """Let the client of `job` go away, from the scheduler or from the lobby."""
        if job.id in self._live:
            self._take(self._scheduler.handle(Abort(job.id)))
            return
        self._lobby.drop(job)
        if self._lobby.left == 0:
            self._record.drained(self.now)
        self._end(job, "aborted")

    def _end(self, job: Job, how: str) -> None:
        self.ended += 1
        self.digest.end(job.id, how)
        self._lobby.ended(job, self.now)
        if how != "finished":
            self._record.ended(how)

    def _take(self, updates: Iterable[Update]) -> list[str]:
        """Look for ends among the updates, tokens in between are of no interest; return who ended."""
        ended = []
        for update in updates:
            if isinstance(update, NewToken):
                if update.finish_reason is None:
                    continue
                how = "aborted" if update.finish_reason == "abort" else "finished"
            elif isinstance(update, Rejected):
                how = "rejected"
                self.first_rejection = self.first_rejection or f"{update.request_id}: {update.message}"
                self.prompt_tokens -= self._live[update.request_id].job.prompt_tokens
            elif isinstance(update, Failed):
                how = "failed"
            else:
                continue
            live = self._live.pop(update.request_id)
            self._backend.forget(update.request_id)
            if how == "finished":
                self._record.finished(live.arrived, live.first, self.now, live.job.output_tokens)
            self._end(live.job, how)
            ended.append(update.request_id)
        return ended

    # --- steps

    def _leap(self) -> int:
        """Return how many tokens a decode may compute under one plan: not past the next event, if it could come in."""
        most, event = self._setup.leap_tokens, self._lobby.next_seconds
        if most == 1 or event is None or self._scheduler.waiting or not self._step_seconds:
            return most
        return max(1, min(most, math.ceil((event - self.now) / self._step_seconds)))

    def _step(self, plan: Outline) -> None:
        seconds = self._stopwatch.seconds(plan)
        reason = self._note(seconds, plan)
        self._step_seconds = seconds / plan.decode_tokens
        record = self._record_of(plan, seconds, reason) if self._is_in_window(plan.step) else None
        self.moved_bytes += sum(self._strides[move.pool] for move in plan.moves)
        updates = self._scheduler.apply(self._backend.run(plan))
        self.now += seconds
        for segment in plan.segments[plan.decodes :]:  # a first token comes from a chunk
            if segment.samples:
                live = self._live[segment.request_id]
                if math.isnan(live.first):
                    live.first = self.now
        ended = self._take(updates)
        if record is not None:
            self.window.append(replace(record, ended=tuple(ended)))
        if self._mode.audit_every and (plan.step + 1) % self._mode.audit_every == 0:
            self.audit()

    def _note(self, seconds: float, plan: Outline | None) -> str:
        """Record the present state as that of the next `seconds`; return why the head of the queue waits."""
        budget, head, waiting = self._arena.budget, self._scheduler.head_reason(), self.waiting
        reason = "" if head is None else head.code
        pages = (len(self._arena.stock.free), *budget.held, *budget.cached)
        self._record.interval(self.now, seconds, (self._scheduler.running, waiting, *pages), waiting, reason)
        if self.host is not None:
            self.host.interval(self.now, seconds)
        if plan is not None:
            self.digest.step(plan, pages)
        return reason

    def _wait(self) -> bool:
        """Let time pass until the next event; return whether there is one."""
        event = self._lobby.next_seconds
        if event is not None:
            self._note(event - self.now, None)
            self.now = event
        elif self._scheduler.has_work:
            waiting = ", ".join(f"{name}: {why.code}, {why.detail}" for name, why in self._scheduler.reasons().items())
            raise InvariantError([f"L10: work is left and nothing can be computed at {self.now} s: {waiting}"])
        return event is not None

    def audit(self) -> None:
        """Recount everything; raises InvariantError with what is wrong."""
        found = self._scheduler.audit()
        if found:
            step = self._scheduler.totals.steps
            raise InvariantError([f"after step {step}: {each.law}: {each.message}" for each in found])

    # --- the window of steps that was asked for

    def _is_in_window(self, step: int) -> bool:
        return self._mode.window[0] <= step < self._mode.window[1]

    def _record_of(self, plan: Outline, seconds: float, reason: str) -> StepRecord:
        budget = self._arena.budget

        def in_bytes(pages: list[int]) -> dict[str, int]:
            return {
                name: count * stride for name, count, stride in zip(budget.names, pages, self._strides, strict=True)
            }

        return StepRecord(
            step=plan.step,
            start_seconds=self.now,
            seconds=seconds,
            segments=tuple(SegmentRecord(s.request_id, s.start, s.tokens, s.prompt_tokens) for s in plan.segments),
            running=self._scheduler.running,
            waiting=self.waiting,
            reason=reason,
            moves=len(plan.moves),
            held_bytes=in_bytes(budget.held),
            cached_bytes=in_bytes(budget.cached),
            ended=(),
        )

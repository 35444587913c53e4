"""The step loop: events in, plan, run, apply, updates out. One thread, no sockets, no text.

A defect in scheduler or backend fails the requests concerned and is counted; it never ends the process, because every
other client's request would end with it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from halocline.engine.health import ProgressWatch
from halocline.engine.messages import LinkFacts, ModelFacts
from halocline.memory.audit import Violation
from halocline.memory.facts import CapacityFacts
from halocline.schedule.events import Abort, Arrive, Event, Failed, NewToken, Reason, Rejected, Sent, Update
from halocline.schedule.figures import SchedulerFigures
from halocline.step import Backend, StepPlan, StepResult

logger = logging.getLogger(__name__)

AuditRule = Literal["idle", "every", "off"]
KEPT_VIOLATIONS = 16
PATIENCE_DEFECTS = 3
"""So many defects in a row, without a good step between, and everything that runs is failed: a scheduler that is
broken for one request alone would otherwise repeat its defect for ever."""


class ExchangeLike(Protocol):
    """What the loop needs of `disagg.exchange.Exchange`: everything that joins this engine with other workers.

    It stands around the scheduler: what peers say becomes events, what the scheduler says to peers is taken out of its
    updates. None of its calls blocks. Its file descriptor wakes the loop.
    """

    def assign(self, request_id: str, address: str) -> None:
        """Say where the prompt of a request is computed; before the turn in which it arrives."""
        ...

    def before(self, events: Sequence[Event], now: float) -> list[Event]:
        """Return what the scheduler is to hear in this turn: the events given and those of peers."""
        ...

    def after(self, updates: Sequence[Update], now: float) -> list[Update]:
        """Tell peers what concerns them; return the updates that the front end must hear."""
        ...

    def fileno(self) -> int: ...
    def figures(self) -> Any:
        """Return a dataclass with the fields of `engine.messages.TransferFigures`."""
        ...

    def close(self) -> None: ...


class SchedulerLike(Protocol):
    """What the loop needs of `schedule.scheduler.Scheduler`."""

    def handle(self, event: Event) -> Sequence[Update]: ...
    def plan(self, now: float) -> StepPlan | None: ...
    def apply(self, result: StepResult) -> Sequence[Update]: ...
    def fail_step(self, message: str) -> Sequence[Update]: ...
    def take_updates(self) -> Sequence[Update]: ...
    def reasons(self) -> Mapping[str, Reason]: ...
    def figures(self) -> SchedulerFigures: ...
    def audit(self) -> Sequence[Violation]: ...
    @property
    def has_work(self) -> bool: ...


@dataclass(frozen=True)
class EngineParts:
    """What a builder returns: everything that an engine process runs, and what it tells its front end."""

    scheduler: SchedulerLike
    backend: Backend
    model: ModelFacts
    capacity: CapacityFacts | None = None
    exchange: ExchangeLike | None = None
    """The way to other workers; None for an engine that works alone."""
    link: LinkFacts | None = None
    """What it is to them."""


class EngineCore:
    """Turns the crank of one scheduler and one backend."""

    def __init__(
        self,
        scheduler: SchedulerLike,
        backend: Backend,
        *,
        audit: AuditRule = "idle",
        exchange: ExchangeLike | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._backend = backend
        self._audit_rule = audit
        self._exchange = exchange
        self._clock = clock
        self._live: dict[str, None] = {}
        self._defects_in_row = 0
        self._rested = True
        self._last_found: tuple[str, ...] = ()
        self.steps = 0
        """Plans carried out, failed ones included."""
        self.watch = ProgressWatch(clock())
        self.violations: deque[str] = deque(maxlen=KEPT_VIOLATIONS)
        self.counters = {"defects": 0, "violations": 0, "audits": 0, "prompt_tokens": 0}
        self.rejections: dict[str, int] = {}
        """Requests refused at the door, by code."""

    @property
    def scheduler(self) -> SchedulerLike:
        """The scheduler, for figures."""
        return self._scheduler

    @property
    def exchange(self) -> ExchangeLike | None:
        """The way to other workers, for figures and for waking up."""
        return self._exchange

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return self._scheduler.has_work

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the requests that have neither finished nor failed."""
        return tuple(self._live)

    def turn(self, events: Iterable[Event] = ()) -> list[Update]:
        """Take in `events` and what peers say, compute at most one step, and return what the front end must hear."""
        events = self._before(list(events))
        updates = [update for event in events for update in self._handle(event)]
        plan = self._plan(updates)
        if plan is not None:
            updates += self._compute(plan)
        self._note(updates, computed=plan is not None and self._defects_in_row == 0)
        updates = self._after(updates)
        self._audit_when_due(worked=plan is not None or bool(events))
        return updates

    def assign(self, request_id: str, address: str) -> None:
        """Have the prompt of a request that arrives in the next turn computed by the worker at `address`."""
        if self._exchange is not None:
            self._exchange.assign(request_id, address)

    def _before(self, events: list[Event]) -> list[Event]:
        if self._exchange is None:
            return events
        try:
            return self._exchange.before(events, self._clock())
        except Exception as error:
            self._defect("exchange", error)
            return events

    def _after(self, updates: list[Update]) -> list[Update]:
        if self._exchange is None:
            return updates
        try:
            return self._exchange.after(updates, self._clock())
        except Exception as error:
            self._defect("exchange", error)
            return updates

    def _handle(self, event: Event) -> Sequence[Update]:
        if isinstance(event, Arrive):
            self._live[event.request_id] = None
            self.counters["prompt_tokens"] += len(event.prompt)
        try:
            return self._scheduler.handle(event)
        except Exception as error:
            self._defect("handle", error)
            return (Failed(event.request_id, _words(error)),)

    def _plan(self, updates: list[Update]) -> StepPlan | None:
        try:
            plan = self._scheduler.plan(self._clock())
            if plan is None:
                # Planning may have failed a request that cannot go on alone.
                updates += self._scheduler.take_updates()
        except Exception as error:
            self._defect("plan", error)
            updates += self._fail(error)
            return None
        return plan

    def _compute(self, plan: StepPlan) -> Sequence[Update]:
        self.steps += 1
        try:
            updates = self._scheduler.apply(self._backend.run(plan))
        except Exception as error:
            self._defect("step", error)
            return self._fail(error)
        self._defects_in_row = 0
        return updates

    def _fail(self, error: Exception) -> Sequence[Update]:
        """Fail what the broken step concerned; everything, when it is the last of many defects in a row."""
        try:
            updates = list(self._scheduler.fail_step(_words(error)))
        except Exception as second:
            self._defect("fail_step", second)
            updates = []
        if self._defects_in_row >= PATIENCE_DEFECTS:
            ended = {update.request_id for update in updates}
            updates += self._give_up([each for each in self._live if each not in ended], _words(error))
        return updates

    def _give_up(self, request_ids: list[str], message: str) -> list[Update]:
        for request_id in request_ids:
            try:
                self._scheduler.handle(Abort(request_id))
            except Exception as error:
                self._defect("abort", error)
        return [Failed(request_id, message) for request_id in request_ids]

    def _defect(self, where: str, error: Exception) -> None:
        self._defects_in_row += 1
        self.counters["defects"] += 1
        logger.error("event=defect where=%s error=%r", where, error, exc_info=error)

    def _note(self, updates: Iterable[Update], *, computed: bool) -> None:
        ended = False
        for update in updates:
            if isinstance(update, Rejected):
                self.rejections[update.code] = self.rejections.get(update.code, 0) + 1
            if is_last(update):
                ended = True
                self._live.pop(update.request_id, None)
        self.watch.note(self._clock(), progressed=computed or ended, has_work=self.has_work)

    def _audit_when_due(self, *, worked: bool) -> None:
        """Recount as the rule says; at idle only in a turn that brought nothing, so that no request waits for it."""
        if worked:
            self._rested = False
        at_rest = not worked and not self._rested and not self.has_work
        self._rested = self._rested or at_rest
        due = {"every": worked, "idle": at_rest, "off": False}
        if due[self._audit_rule]:
            self.audit()

    def audit(self) -> tuple[str, ...]:
        """Recount everything; report what is wrong in log and figures, and never raise."""
        self.counters["audits"] += 1
        try:
            found = tuple(f"{each.law}: {each.message}" for each in self._scheduler.audit())
        except Exception as error:
            self._defect("audit", error)
            found = (f"the audit itself failed: {_words(error)}",)
        # A violation that stands is found by every recount; it is one fault, told and counted once.
        fresh = [violation for violation in found if violation not in self._last_found]
        self._last_found = found
        for violation in fresh:
            logger.error("event=violation violation=%r", violation)
        self.violations.extend(fresh)
        self.counters["violations"] += len(fresh)
        return found

    def close(self) -> None:
        """Leave the other workers and free the backend."""
        if self._exchange is not None:
            self._exchange.close()
        self._backend.close()


def is_last(update: Update) -> bool:
    """Whether nothing more will be said of the update's request."""
    return isinstance(update, (Rejected, Failed, Sent)) or (
        isinstance(update, NewToken) and update.finish_reason is not None
    )


def _words(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 500 else text[:497] + "..."

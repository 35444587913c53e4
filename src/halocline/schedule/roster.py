"""Who is where: every unfinished request stands in one of three lines, and moves between them here only.

    waiting   new and retracted requests       hold nothing
    prefilling, decoding                       hold a request slot and memory

Memory is given back in one place, `_leave`, whatever the reason for leaving.
"""

from __future__ import annotations

from halocline.schedule.events import Admitted, Failed, Update
from halocline.schedule.figures import Totals
from halocline.schedule.holding import Holding
from halocline.schedule.queue import Line
from halocline.schedule.request import Request, State
from halocline.schedule.sharing import Sharing


class Roster:
    """The unfinished requests. The only writer of their states and of the lines."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self.live: dict[str, Request] = {}
        self.waiting = Line()
        self.prefilling = Line()
        self.decoding = Line()
        self.totals = Totals()
        self.outbox: list[Update] = []
        """Updates that nobody has been told yet."""
        self._line = {
            State.WAITING: self.waiting,
            State.RETRACTED: self.waiting,
            State.PREFILLING: self.prefilling,
            State.DECODING: self.decoding,
        }

    @property
    def running(self) -> int:
        """Request slots in use."""
        return len(self.prefilling) + len(self.decoding)

    def line_of(self, state: State) -> Line:
        """Return the line in which requests of an unfinished `state` stand."""
        return self._line[state]

    def most_senior(self) -> Request | None:
        """Return the most senior unfinished request."""
        heads = [line.first() for line in (self.waiting, self.prefilling, self.decoding)]
        return min((head for head in heads if head is not None), key=lambda head: head.key, default=None)

    def juniors_of(self, asker: Request) -> list[Request]:
        """Return the running requests strictly junior to `asker`."""
        return self.prefilling.juniors(asker) + self.decoding.juniors(asker)

    def holdings(self) -> list[Holding]:
        """Return what all running requests hold."""
        running = (*self.prefilling, *self.decoding)
        return [request.holding for request in running if request.holding is not None]

    def enter(self, request: Request) -> None:
        """Let a new request wait."""
        self.live[request.id] = request
        self.waiting.add(request)

    def admit(self, request: Request, holding: Holding, start: int) -> None:
        """Give a waiting request its slot and its grant; computing goes on at `start`."""
        self.waiting.remove(request)
        request.holding = holding
        request.computed = start
        request.resumed_at = len(request.history)
        request.move(State.PREFILLING, self.totals.steps)
        self.prefilling.add(request)
        self.totals.admitted += 1
        self.totals.peak_running = max(self.totals.peak_running, self.running)
        if request.retractions == 0:
            self.outbox.append(Admitted(request.id, start))

    def start_decoding(self, request: Request) -> None:
        """Move a request on whose whole history has been computed and sampled from."""
        self.prefilling.remove(request)
        request.move(State.DECODING, self.totals.steps)
        self.decoding.add(request)

    def retract(self, request: Request, *, keep: bool = True) -> None:
        """Give all pages up; the request comes back with its old seniority and computes what is not cached by then."""
        self._leave(request, keep=keep)
        request.high_water = max(request.high_water, request.computed)
        request.move(State.RETRACTED, self.totals.steps)
        request.computed = 0
        request.retractions += 1
        self.waiting.add(request)
        self.totals.retractions += 1

    def end(self, request: Request, state: State = State.FINISHED) -> None:
        """Let a request go for good. What a failed one computed last is not kept for others."""
        self._leave(request, keep=state is not State.FAILED)
        request.move(state, self.totals.steps)
        del self.live[request.id]

    def fail(self, request: Request, message: str) -> None:
        """End a request in an error and say so."""
        self.end(request, State.FAILED)
        self.tell_failed(request, message)

    def tell_failed(self, request: Request, message: str) -> None:
        """Say that a request failed, which ends now or in the same act."""
        self.totals.failed += 1
        self.outbox.append(Failed(request.id, message))

    def take_updates(self) -> tuple[Update, ...]:
        """Return what nobody has been told yet, once."""
        updates = tuple(self.outbox)
        self.outbox.clear()
        return updates

    def _leave(self, request: Request, *, keep: bool) -> None:
        self._line[request.state].remove(request)
        if request.holding is not None:
            self._sharing.leave(request, request.holding, keep=keep)
            request.holding = None

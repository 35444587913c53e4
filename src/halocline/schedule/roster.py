"""Who is where: every unfinished request stands in one line, and moves between them here only.

    waiting   new and retracted requests                   hold nothing
    absent    the same, without another worker's word      hold nothing, and keep nobody behind them waiting
    prefilling, decoding, receiving, sending               hold a request slot and memory

Memory is given back in one place, `_leave`, whatever the reason for leaving.
"""

from __future__ import annotations

from halocline.schedule.events import Admitted, Failed, Update
from halocline.schedule.figures import Totals
from halocline.schedule.holding import Holding
from halocline.schedule.offload import HostDesk
from halocline.schedule.queue import Line
from halocline.schedule.request import Request, State
from halocline.schedule.sharing import Sharing
from halocline.step import Sampled


class Roster:
    """The unfinished requests. The only writer of their states and of the lines."""

    def __init__(self, sharing: Sharing, desk: HostDesk) -> None:
        self._sharing = sharing
        self._desk = desk
        self.live: dict[str, Request] = {}
        self.waiting = Line()
        self.prefilling = Line()
        self.decoding = Line()
        self.absent = Line()
        self.receiving = Line()
        self.sending = Line()
        self.totals = Totals()
        self.outbox: list[Update] = []
        """Updates that nobody has been told yet."""
        self._line = {
            State.WAITING: self.waiting,
            State.RETRACTED: self.waiting,
            State.PREFILLING: self.prefilling,
            State.DECODING: self.decoding,
            State.RECEIVING: self.receiving,
            State.SENDING: self.sending,
        }

    @property
    def running(self) -> int:
        """Request slots in use."""
        return len(self.prefilling) + len(self.decoding) + len(self.receiving) + len(self.sending)

    def line_of(self, request: Request) -> Line:
        """Return the line in which an unfinished request stands."""
        line = self._line[request.state]
        return line if request.is_called or line is not self.waiting else self.absent

    def most_senior(self) -> Request | None:
        """Return the most senior unfinished request but those that wait for another worker's word."""
        lines = (self.waiting, self.prefilling, self.decoding, self.receiving, self.sending)
        heads = [line.first() for line in lines]
        return min((head for head in heads if head is not None), key=lambda head: head.key, default=None)

    def juniors_of(self, asker: Request) -> list[Request]:
        """Return the running requests strictly junior to `asker` that can be retracted: no transfers."""
        return self.prefilling.juniors(asker) + self.decoding.juniors(asker)

    def holdings(self) -> list[Holding]:
        """Return what all running requests hold."""
        running = (*self.prefilling, *self.decoding, *self.receiving, *self.sending)
        return [request.holding for request in running if request.holding is not None]

    def enter(self, request: Request) -> None:
        """Let a new request wait."""
        self.live[request.id] = request
        self.line_of(request).add(request)

    def call(self, request: Request) -> None:
        """Let a waiting request be admitted from now on: another worker has given its word."""
        self.line_of(request).remove(request)
        request.is_called = True
        self.waiting.add(request)

    def recall(self, request: Request) -> None:
        """Let a waiting request not be admitted any more: the word was taken back."""
        self.line_of(request).remove(request)
        request.is_called = False
        self.absent.add(request)

    def admit(self, request: Request, holding: Holding, start: int) -> None:
        """Give a waiting request its slot and its grant; computing goes on at `start`, here or elsewhere."""
        self.waiting.remove(request)
        request.holding = holding
        request.computed = start
        request.resumed_at = len(request.history)
        request.move(State.RECEIVING if request.route == "receive" else State.PREFILLING, self.totals.steps)
        self.line_of(request).add(request)
        self.totals.admitted += 1
        self.totals.peak_running = max(self.totals.peak_running, self.running)
        if not request.is_announced:
            request.is_announced = True
            self.outbox.append(Admitted(request.id, start))

    def start_decoding(self, request: Request) -> None:
        """Move a request on whose whole history has been computed and sampled from."""
        self.prefilling.remove(request)
        request.move(State.DECODING, self.totals.steps)
        self.decoding.add(request)

    def start_sending(self, request: Request, first: Sampled) -> None:
        """Move a request on that was computed for another worker, up to its first token."""
        self.prefilling.remove(request)
        request.first = first
        request.move(State.SENDING, self.totals.steps)
        self.sending.add(request)

    def land(self, request: Request) -> None:
        """Move a request on whose whole prompt has been received: from here on it is like all others."""
        self.receiving.remove(request)
        self._end_landing(request)
        request.route = "here"
        request.computed = len(request.history)
        request.move(State.DECODING, self.totals.steps)
        self.decoding.add(request)

    def give_back(self, request: Request, *, is_retraction: bool = False) -> None:
        """End an attempt at a transfer: all pages are given up, and the request waits for the next one."""
        self._leave(request, keep=True)
        request.high_water = max(request.high_water, request.computed)
        request.retractions += is_retraction
        self.totals.retractions += is_retraction
        request.move(State.RETRACTED if request.retractions else State.WAITING, self.totals.steps)
        request.computed = 0
        request.is_called = False
        self.absent.add(request)

    def retract(self, request: Request, *, keep: bool = True, offload: bool = False) -> None:
        """Give all pages up; the request comes back with its old seniority and computes what is not kept by then.

        With `offload`, while a step is planned only, they are copied to the host arena where that is cheaper.
        """
        if offload:
            self._desk.offload(request)
        self._leave(request, keep=keep)
        request.high_water = max(request.high_water, request.computed)
        request.move(State.RETRACTED, self.totals.steps)
        request.computed = 0
        request.retractions += 1
        self.waiting.add(request)
        self.totals.retractions += 1

    def end(self, request: Request, state: State = State.FINISHED) -> None:
        """Let a request go for good. What a failed one computed last is not kept for others."""
        self._desk.drop(request.id)
        self._leave(request, keep=state is not State.FAILED)
        request.move(state, self.totals.steps)
        del self.live[request.id]

    def fail(self, request: Request, message: str, code: str = "failed") -> None:
        """End a request in an error and say so."""
        self.end(request, State.FAILED)
        self.tell_failed(request, message, code)

    def tell_failed(self, request: Request, message: str, code: str = "failed") -> None:
        """Say that a request failed, which ends now or in the same act."""
        self.totals.failed += 1
        self.outbox.append(Failed(request.id, message, code))

    def take_updates(self) -> tuple[Update, ...]:
        """Return what nobody has been told yet, once."""
        updates = tuple(self.outbox)
        self.outbox.clear()
        return updates

    def _leave(self, request: Request, *, keep: bool) -> None:
        self.line_of(request).remove(request)
        self._end_landing(request)
        if request.holding is not None:
            self._sharing.leave(request, request.holding, keep=keep)
            request.holding = None

    def _end_landing(self, request: Request) -> None:
        landing, request.landing = request.landing, None
        if landing is not None:
            self._sharing.unpin(landing.pin)

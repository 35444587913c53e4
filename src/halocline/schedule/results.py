"""What a step's result means for its requests: tokens, ends, and memory that comes free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from halocline.schedule.admission import OutputLengths
from halocline.schedule.chunk import Chunk
from halocline.schedule.events import FinishReason, NewToken
from halocline.schedule.request import Request, State
from halocline.schedule.roster import Roster
from halocline.schedule.sharing import Sharing
from halocline.step import Sampled, StepResult

Tokens: TypeAlias = dict[str, Sampled]
Failures: TypeAlias = dict[str, str]


class Results:
    """Advances requests by what was computed. Only here do positions count as computed."""

    def __init__(self, sharing: Sharing, roster: Roster, lengths: OutputLengths) -> None:
        self._sharing = sharing
        self._roster = roster
        self._lengths = lengths
        self._moved: list[Request] = []
        """Whose windows slide, or whose chunk is done."""
        self._ended: list[tuple[Request, State]] = []

    def take(
        self, decodes: Sequence[Request], chunks: Sequence[Chunk], result: StepResult, decode_tokens: int = 1
    ) -> None:
        """Apply `result` to the requests of its plan, whose decodes computed `decode_tokens` each.

        Those that ended meanwhile are passed over.

        Memory comes last, of all requests at once: who goes on gives up what it no longer reads before anybody leaves,
        so that pages which both read find their room with whoever goes on.
        """
        sampled = {got.request_id: got for got in result.sampled}
        failures = {failure.request_id: failure.message for failure in result.failures}
        totals, outbox = self._roster.totals, self._roster.outbox
        before = len(outbox) - totals.failed
        try:
            if decode_tokens == 1:
                self._take_decodes(decodes, sampled, failures)
            for request in decodes if decode_tokens > 1 else ():
                self._take_leap(request, decode_tokens, sampled, failures)
            for chunk in chunks:
                self._take_chunk(chunk, sampled, failures)
        finally:  # also when a result breaks half way: whoever was told that it ended must end
            self._settle()
        totals.output_tokens += len(outbox) - totals.failed - before  # every update is a token or a failure

    def _take_decodes(self, decodes: Sequence[Request], sampled: Tokens, failures: Failures) -> None:
        """Append each decode's token. The hot loop: who neither ends nor slides a page costs a microsecond."""
        tell, decoding = self._roster.outbox.append, State.DECODING
        for request in decodes:
            got, holding = sampled.get(request.id), request.holding
            if got is None or holding is None or request.state is not decoding:
                self._no_token(request, failures)
                continue
            request.computed += 1
            history, token = request.history, got.token_id
            if len(history) + 1 >= request.end or token in request.stops:
                self._receive(request, got)
            else:
                history.append(token)
                tell(NewToken(request.id, token, got.logprobs))
            if request.computed >= holding.slide_at:
                self._moved.append(request)

    def _take_leap(self, request: Request, tokens: int, sampled: Tokens, failures: Failures) -> None:
        """Append the tokens of one leap up to its stop token; it never reaches further than the length allows."""
        got, holding = sampled.get(request.id), request.holding
        if got is None or holding is None or request.state is not State.DECODING:
            self._no_token(request, failures)
            return
        history = request.history
        taken = (got.token_id, *got.further_ids)
        stops = request.stops if len(history) >= request.stops_from else ()  # the same for the whole leap
        stopped = next((at for at, token in enumerate(taken, 1) if token in stops), tokens)
        if len(taken) > tokens or len(taken) < stopped:
            self._no_token(request, {request.id: f"the backend returned {len(taken)} tokens of a leap of {tokens}"})
            return
        history += taken[: stopped - 1]
        self._roster.outbox += [NewToken(request.id, token) for token in taken[: stopped - 1]]
        request.computed += stopped
        self._receive(request, Sampled(request.id, taken[stopped - 1]))
        if request.computed >= holding.slide_at:
            self._moved.append(request)

    def _take_chunk(self, chunk: Chunk, sampled: Tokens, failures: Failures) -> None:
        request = chunk.request
        if request.state is not State.PREFILLING:
            return  # aborted, or revoked by the worker it was computed for
        if request.id in failures:
            self._no_token(request, failures)
            return
        self._roster.totals.recomputed_tokens += max(0, min(chunk.end, request.high_water) - chunk.start)
        got, samples = sampled.get(request.id), chunk.end == request.resumed_at
        if samples and got is None:
            self._no_token(request, failures)
            return
        request.computed = chunk.end
        self._moved.append(request)
        if samples and got is not None:
            if request.route == "send":
                self._roster.start_sending(request, got)
                return
            self._roster.start_decoding(request)
            self._receive(request, got)

    def take_first(self, request: Request, got: Sampled) -> None:
        """Take the first token of a request whose prompt another worker has computed, and that decodes from now on."""
        self._moved.append(request)
        try:
            self._receive(request, got)
        finally:
            self._settle()
        self._roster.totals.output_tokens += 1

    def _receive(self, request: Request, got: Sampled) -> None:
        """Append a token; if it was the last one, the request ends when the step has been settled."""
        history, token = request.history, got.token_id
        finish: FinishReason | None = None
        if token in request.stops and len(history) >= request.stops_from:
            finish = "stop"
        elif len(history) + 1 >= request.end:
            finish = "length"
        history.append(token)
        self._roster.outbox.append(NewToken(request.id, token, got.logprobs, finish))
        if finish is not None:
            self.count_finished(request)
            self._ended.append((request, State.FINISHED))

    def _settle(self) -> None:
        """Let everyone who goes on give up what left its windows, then let those go who have finished.

        Who failed goes first: its chunk still fills the room with which it would pay for a page that others pass.
        """
        moved, ended = self._moved, self._ended
        self._moved, self._ended = [], []
        ended.sort(key=lambda end: end[1] is not State.FAILED)
        failed = sum(state is State.FAILED for _, state in ended)
        for request, state in ended[:failed]:
            self._roster.end(request, state)
        try:
            self._sharing.settle(moved)
        finally:
            for request, state in ended[failed:]:
                self._roster.end(request, state)

    def _no_token(self, request: Request, failures: Failures) -> None:
        if not request.is_ended:  # an aborted request is of no interest any more
            why = failures.get(request.id, "the backend returned no token for this request")
            self._roster.tell_failed(request, why)
            self._ended.append((request, State.FAILED))

    def count_finished(self, request: Request) -> None:
        """Count a request that came to its natural end, and remember how long its output was."""
        self._roster.totals.finished += 1
        self._lengths.record(request.max_tokens, max(1, request.output_tokens))

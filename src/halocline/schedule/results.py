"""What a step's result means for its requests: tokens, ends, and memory that comes free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from halocline.schedule.admission import OutputLengths
from halocline.schedule.chunk import Chunk
from halocline.schedule.events import FinishReason, NewToken
from halocline.schedule.holding import Holding, Keeper
from halocline.schedule.request import Request, State
from halocline.schedule.roster import Roster
from halocline.step import Sampled, StepResult

Tokens: TypeAlias = dict[str, Sampled]
Failures: TypeAlias = dict[str, str]


class Results:
    """Advances requests by what was computed. Only here do positions count as computed."""

    def __init__(self, keeper: Keeper, roster: Roster, lengths: OutputLengths) -> None:
        self._keeper = keeper
        self._roster = roster
        self._lengths = lengths

    def take(self, decodes: Sequence[Request], chunks: Sequence[Chunk], result: StepResult) -> None:
        """Apply `result` to the requests of its plan; those that ended meanwhile are passed over."""
        sampled = {got.request_id: got for got in result.sampled}
        failures = {failure.request_id: failure.message for failure in result.failures}
        totals, outbox = self._roster.totals, self._roster.outbox
        before = len(outbox) - totals.failed
        self._take_decodes(decodes, sampled, failures)
        for chunk in chunks:
            self._take_chunk(chunk, sampled, failures)
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
                continue
            history.append(token)
            tell(NewToken(request.id, token, got.logprobs))
            if request.computed >= holding.slide_at:
                self._slide(request, holding)

    def _take_chunk(self, chunk: Chunk, sampled: Tokens, failures: Failures) -> None:
        request, holding = chunk.request, chunk.request.holding
        if holding is None or request.id in failures:
            self._no_token(request, failures)
            return
        self._roster.totals.recomputed_tokens += max(0, min(chunk.end, request.high_water) - chunk.start)
        request.computed = chunk.end
        if chunk.end < request.resumed_at:
            self._settle(request)
            return
        got = sampled.get(request.id)
        if got is None:
            self._no_token(request, failures)
            return
        self._roster.start_decoding(request)
        self._receive(request, got)
        self._settle(request)

    def _receive(self, request: Request, got: Sampled) -> None:
        """Append a token; end the request if it was the last one, else let its windows slide."""
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
            self._roster.end(request)
        elif request.holding is not None and request.computed >= request.holding.slide_at:
            self._slide(request, request.holding)

    def _slide(self, request: Request, holding: Holding) -> None:
        """Give up what left the windows of a decode; near the end of its life its price falls, too."""
        self._keeper.slide(holding, request.computed)
        if self._keeper.may_fall(request.end, request.computed):
            self._keeper.reprice(holding, request.resumed_at, request.end, request.computed)

    def _settle(self, request: Request) -> None:
        """After a chunk: give up what left the windows before anything else is priced, then lower the grant."""
        if request.holding is not None:
            self._keeper.slide(request.holding, request.computed)
            self._keeper.reprice(request.holding, request.resumed_at, request.end, request.computed)

    def _no_token(self, request: Request, failures: Failures) -> None:
        if not request.is_ended:  # an aborted request is of no interest any more
            self._roster.fail(request, failures.get(request.id, "the backend returned no token for this request"))

    def count_finished(self, request: Request) -> None:
        """Count a request that came to its natural end, and remember how long its output was."""
        self._roster.totals.finished += 1
        self._lengths.record(request.max_tokens, max(1, request.output_tokens))

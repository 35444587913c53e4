"""From messages to events and from updates to reports: the scheduler's own data never leaves its process."""

from __future__ import annotations

from collections.abc import Iterable

from halocline.cache.keys import Namespace
from halocline.engine.messages import (
    AcceptedReport,
    AdmittedReport,
    Cancel,
    Command,
    FailedReport,
    Logprobs,
    RejectedReport,
    SequenceReport,
    Submit,
    TokenReport,
)
from halocline.schedule.events import (
    Abort,
    Accepted,
    Admitted,
    Arrive,
    Event,
    Failed,
    NewToken,
    Rejected,
    Route,
    Update,
)
from halocline.step import TokenLogprobs


def event_of(command: Command) -> Event:
    """Return the event that a command is for the scheduler."""
    match command:
        case Submit(request_id, prompt, params, seed, priority, cache_salt, prefill_at):
            # One engine has one model and no adapters, so the salt is all that tells prefixes apart.
            route: Route = "receive" if prefill_at else "here"
            return Arrive(request_id, prompt, params, seed, priority, Namespace(salt=cache_salt), route)
        case Cancel(request_id, reason):
            return Abort(request_id, reason)
    raise AssertionError(f"{command!r} is no event")


def reports_of(updates: Iterable[Update]) -> tuple[SequenceReport, ...]:
    """Return what the front end is told of `updates`, in the same order."""
    return tuple(map(_report_of, updates))


def _report_of(update: Update) -> SequenceReport:
    match update:
        case NewToken(request_id, token_id, logprobs, finish_reason):
            return TokenReport(request_id, token_id, _logprobs_of(logprobs), finish_reason)
        case Accepted(request_id, max_tokens, clipped):
            return AcceptedReport(request_id, max_tokens, clipped)
        case Admitted(request_id, cached_tokens):
            return AdmittedReport(request_id, cached_tokens)
        case Rejected(request_id, message, param, code):
            return RejectedReport(request_id, message, param, code)
        case Failed(request_id, message, code):
            return FailedReport(request_id, message, code)
    raise AssertionError(f"{update!r} is for another worker, and was not taken out before the front end")


def _logprobs_of(logprobs: TokenLogprobs | None) -> Logprobs | None:
    return None if logprobs is None else Logprobs(logprobs.token_logprob, logprobs.rank, logprobs.top)

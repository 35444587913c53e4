"""What the scheduler is told, and what it answers.

Events go in through `Scheduler.handle`, updates come out of `handle` and `apply`. Both are plain data, so a run is a
list of events and a decision trace is a list of updates and plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from halocline.cache.keys import EVERYBODY, Namespace
from halocline.params import SamplingParams
from halocline.step import TokenLogprobs

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Arrive:
    """A new request. Ids are the engine's own and never reused."""

    request_id: str
    prompt: tuple[int, ...]
    """Token ids; checked by `handle`, which refuses an empty or impossible one."""
    params: SamplingParams
    """`n` is ignored here: whoever submits makes n requests of it."""
    seed: int
    """Seed of the sampling noise, resolved."""
    priority: int = 0
    """Lower is more senior; equal priorities are served in order of arrival."""
    namespace: Namespace = EVERYBODY
    """Whose cached prefixes it may use, and who may use its own: all that changes KV besides the tokens."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The client has gone, or has enough (`reason` "stop": a stop string was found in its text)."""

    request_id: str
    reason: FinishReason = "abort"


Event = Arrive | Abort


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is valid and waits; `max_tokens` is the limit that will apply to it."""

    request_id: str
    max_tokens: int
    clipped: bool = False
    """Whether the client asked for more and `clip_max_tokens` lowered it."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request can never run; nothing of it is kept."""

    request_id: str
    message: str
    param: str | None = None
    code: str = "invalid_request"
    """`context_length_exceeded` when it is too long, else `invalid_request` or `overloaded`."""


class Admitted(msgspec.Struct, frozen=True, gc=False):
    """The request began to compute. Told once, at its first admission: a return after a retraction is no news."""

    request_id: str
    cached_tokens: int
    """Tokens of its prompt that need no computing, because the prefix cache had them."""


class NewToken(msgspec.Struct, frozen=True, gc=False):
    """One more output token; with a finish reason it is the last one (or, on abort, there is no token).

    A struct and not a dataclass because hundreds of them are made in every step.
    """

    request_id: str
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended in an error."""

    request_id: str
    message: str


Update = Accepted | Rejected | Admitted | NewToken | Failed


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a request does not run now. `code` is one of the words below, `detail` has the numbers.

    slots         max_running_requests are running
    memory        its resident demand does not fit beside what is granted; `detail` gives the shortfall in pages
    senior-short  a more senior request was refused an extension or its return; juniors get nothing new meanwhile
    step-room     it fits, but this step's token budget or step room is used up
    queue         someone more senior waits before it
    prefix        another request computes more of its prefix than is cached; it waits for that, a few steps at most
    delay         it waits for a fuller batch of prefills while others decode, as the operator's delay says
    """

    code: Literal["slots", "memory", "senior-short", "step-room", "queue", "prefix", "delay"]
    detail: str

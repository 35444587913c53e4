"""What the scheduler is told, and what it answers.

Events go in through `Scheduler.handle`, updates come out of `handle` and `apply`. Both are plain data, so a run is a
list of events and a decision trace is a list of updates and plans.

**Transfers.** A prompt may be computed by another worker. Both sides run this scheduler: the one that will decode takes
the request with `route="receive"`, the one that computes the prompt with `route="send"`. An *attempt* is one try to get
a prompt computed elsewhere; attempts of a request are numbered upwards by whoever speaks with the other worker.

    receive     Offered --> [admitted, pages committed, pinned, moves done] --> LandingReady ... Landed --> decodes
                                                        RevokeWanted --> Lost     Lost: waits for the next Offered
    send        PeerAccepted --> [admitted, an ordinary prefill] --> PagesReady ... PeerTook, ..., Computed
                                 PeerRevoked: waits for the next PeerAccepted       PeerReleased --> Sent

An event of an unknown request, or of an attempt that is not the present one, does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from halocline.cache.keys import EVERYBODY, Namespace
from halocline.params import SamplingParams
from halocline.step import TokenLogprobs

FinishReason = Literal["stop", "length", "abort"]
Route = Literal["here", "receive", "send"]
"""Where a prompt is computed and where its answer is: all of it here; the prompt elsewhere (`receive`); the prompt here
and the answer elsewhere (`send`), so that one token is sampled and no update tells it but `Computed`."""


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
    route: Route = "here"
    """`receive` and `send` requests hold nothing until they are offered, or accepted, by the other worker, and block
    nobody behind them meanwhile. A `send` request is checked and priced for one output token, whatever `params` say."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The client has gone, or has enough (`reason` "stop": a stop string was found in its text).

    Ends the request in every state. Whoever forwards it has closed the request's landing first, if there is one: its
    pages are free when `handle` returns. Pages that a sender's reader still reads stay pinned until `PeerTook`; abort
    what is sent with `PeerReleased` instead, which ends these pins too.
    """

    request_id: str
    reason: FinishReason = "abort"


@dataclass(frozen=True, slots=True)
class Offered:
    """Receive: another worker will compute the prompt as soon as it is accepted. From now on it may be admitted.

    An attempt is taken when it is above every one that was offered or lost before.
    """

    request_id: str
    attempt: int
    gives_way: bool = False
    """Whether its landing gives way to prompts that are computed here for others: of two workers that compute for each
    other, the landings of one do. See `halocline.schedule.courtesy`."""


@dataclass(frozen=True, slots=True)
class Landed:
    """Receive: all KV of the prompt stands in the pages of the landing, which nobody writes any more.

    The request goes on as after a prefill of its own: `token_id` is its first output token and is told as a `NewToken`.
    """

    request_id: str
    attempt: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    is_cut: bool = False
    """Whether positions of a window's first page that the first decode does not read may not have come: the other
    worker's pages are smaller. Such a page is never given to the prefix cache."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Receive: the attempt is over, and its landing is closed: its pages are given back in this call.

    Not final, the request waits for the next `Offered` with its old seniority; final, it fails with the code
    `prefill_lost`. Also the answer to `RevokeWanted`, and how an offer that was not taken up yet is withdrawn.
    """

    request_id: str
    attempt: int
    message: str
    is_final: bool


@dataclass(frozen=True, slots=True)
class PeerAccepted:
    """Send: the other worker has room for the request and holds its first `start_tokens` positions already.

    From now on it may be admitted. `start_tokens` is a multiple of this arena's granule: pages below it are not told.
    """

    request_id: str
    attempt: int
    start_tokens: int


@dataclass(frozen=True, slots=True)
class PeerRevoked:
    """Send: the attempt is over. Whoever read its pages has stopped before this is told: all its pins end.

    What was computed goes to the prefix cache, and the request waits with its old seniority for `PeerAccepted` of a
    higher attempt.
    """

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class PeerTook:
    """Send: the pages of this chunk have arrived; they need not stay where they are any longer."""

    request_id: str
    attempt: int
    chunk: int


@dataclass(frozen=True, slots=True)
class PeerReleased:
    """Send: the other worker needs nothing more of it. All its pins end, whether taken or not, and the request ends.

    After `Computed` its last update is `Sent`; before that (the other side gave up) it ends as aborted, without an
    update. Also how a lease ends on this side.
    """

    request_id: str
    attempt: int


TransferEvent = Offered | Landed | Lost | PeerAccepted | PeerRevoked | PeerTook | PeerReleased
Event = Arrive | Abort | TransferEvent


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
    code: str = "failed"
    """`prefill_lost` when the worker that was to compute the prompt was lost: another one may be tried."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolPages:
    """A run of a request's pages in one pool, with their page numbers in the arena, which stay so while pinned."""

    first_page: int
    """Index within the request of the first page: it holds the positions from `first_page * page_tokens` on."""
    pages: NDArray[np.int32]
    """Page numbers, shape (pages,); of a state pool one page, or none."""


@dataclass(frozen=True, slots=True, eq=False)
class LandingReady:
    """Receive: the pages into which the prompt's KV is to be written are committed and pinned, and nothing that this
    worker computes or moves touches them. Tell the other worker that it is accepted.

    `pools` (one per pool) are exactly the pages that must arrive: full pages from `start_tokens` on, of windows what
    the first decode reads and is not in this worker's cache, and the state. Valid until the next `Landed`, `Lost` or
    `Abort` of the request is handled.
    """

    request_id: str
    attempt: int
    start_tokens: int
    pools: tuple[PoolPages, ...]


@dataclass(frozen=True, slots=True)
class RevokeWanted:
    """Receive: a more senior request is short of memory, or the landing gives way. Close it, tell the other worker,
    answer with `Lost(..., is_final=False)`. Told once per attempt; if it lands before it is closed, that counts."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True, eq=False)
class PagesReady:
    """Send: one more piece of the prompt is computed, and these pages are pinned until `PeerTook` of this chunk.

    Chunks of an attempt are numbered from 0, without gaps. Full pages come from the accepted start on, each once, when
    all its positions are computed; window pages only where the first decode will read them; states and what fills no
    whole page come with the last chunk. `pools` has one entry per pool, some of them empty.
    """

    request_id: str
    attempt: int
    chunk: int
    computed_tokens: int
    """Positions of the prompt that are computed so far."""
    left_tokens: int
    """Those that are not; 0 with the last chunk, which `Computed` follows."""
    pools: tuple[PoolPages, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """Send: the whole prompt is computed, `chunks` pieces of it have been told, and this is the first output token."""

    request_id: str
    attempt: int
    chunks: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """Send: the request ended well, after `PeerReleased`; the last that is told of it."""

    request_id: str


TransferUpdate = LandingReady | RevokeWanted | PagesReady | Computed | Sent
Update = Accepted | Rejected | Admitted | NewToken | Failed | TransferUpdate


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
    transfer      another worker has yet to offer to compute it, or to accept it, or its pages are on their way
    """

    code: Literal["slots", "memory", "senior-short", "step-room", "queue", "prefix", "delay", "transfer"]
    detail: str

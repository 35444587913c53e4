"""One request: what is known of it, and the states it passes through.

    waiting --admit--> prefilling --first token--> decoding --last token--> finished
                           |  ^                        |
                           |  '--admit--- retracted <--'        (pages dropped; comes back by recomputing)
                           '----------------^

A prompt that another worker computes, and one that is computed for another worker (`route`), go other ways:

    waiting --admit--> receiving --all pages landed--> decoding        or back to waiting when the attempt is lost
    waiting --admit--> prefilling --last chunk--> sending --released--> finished                or when it is revoked

Every unfinished state also leads to `finished` (an abort) and to `failed`. The scheduler is the only writer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from halocline.cache.keys import Key
from halocline.errors import InvariantError
from halocline.memory.grant import Handles, Pin
from halocline.schedule.events import Arrive
from halocline.schedule.holding import Holding
from halocline.step import Sampled


class State(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    RECEIVING = "receiving"
    SENDING = "sending"
    RETRACTED = "retracted"
    FINISHED = "finished"
    FAILED = "failed"


ENDS = frozenset({State.FINISHED, State.FAILED})
TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILLING, State.RECEIVING}) | ENDS,
    State.PREFILLING: frozenset({State.DECODING, State.SENDING, State.RETRACTED, State.WAITING}) | ENDS,
    State.DECODING: frozenset({State.RETRACTED}) | ENDS,
    State.RETRACTED: frozenset({State.PREFILLING, State.RECEIVING}) | ENDS,
    State.RECEIVING: frozenset({State.DECODING, State.RETRACTED, State.WAITING}) | ENDS,
    State.SENDING: frozenset({State.RETRACTED, State.WAITING}) | ENDS,
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
}
"""The one table of allowed transitions."""

STORY_LINES = 16
"""How many transitions a request remembers for an error report; bounded, because retractions are not."""


@dataclass(slots=True, eq=False)
class Landing:
    """Pages of a receiving request into which another worker's KV is written. Written by `Receiving` only."""

    start_tokens: int
    """What this worker has of the prompt already."""
    first_page: tuple[int, ...]
    """Per pool: the index within the request of the first page that lands."""
    handles: tuple[Handles, ...]
    """Per pool."""
    pin: Pin
    """Of the whole table."""
    is_told: bool = False
    """Whether the other worker may have been told, so that somebody may be writing."""
    is_revoked: bool = False
    """Whether it was asked back for a more senior request."""


class Request:
    """What the scheduler knows of one request. All counts are in tokens; a position is an index into `history`."""

    __slots__ = (
        "arrival",
        "attempt",
        "computed",
        "end",
        "first",
        "high_water",
        "history",
        "holding",
        "id",
        "is_announced",
        "is_called",
        "key",
        "landing",
        "namespace",
        "params",
        "prefix",
        "prompt_tokens",
        "resumed_at",
        "retractions",
        "route",
        "seed",
        "state",
        "stops",
        "stops_from",
        "story",
        "waits",
    )

    def __init__(self, event: Arrive, arrival: int, max_tokens: int, eos: frozenset[int]) -> None:
        """Make the waiting request of a checked arrival; `max_tokens` is the limit that applies to it."""
        params = event.params
        self.id = event.request_id
        self.params = params
        self.seed = event.seed
        self.arrival = arrival
        self.key = (event.priority, arrival)
        """Seniority: total, because arrivals are numbered, and kept for life. Smaller is more senior."""
        self.history = list(event.prompt)
        """Prompt and output so far. The last output token is known but not computed while decoding."""
        self.prompt_tokens = len(event.prompt)
        self.end = self.prompt_tokens + max_tokens
        """Length of `history` at which the request ends for its length."""
        self.stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        self.stops_from = self.prompt_tokens + params.min_tokens
        """Length of `history` from which on a stop token ends the request."""
        self.state = State.WAITING
        self.computed = 0
        """Positions whose KV is held, and those that a window already let go. Moves only in `apply`."""
        self.high_water = 0
        """The most positions ever computed: what is computed again below it was lost to a retraction."""
        self.holding: Holding | None = None
        self.namespace = event.namespace
        self.prefix: Key | None = None
        """Its history as the prefix cache reads it, as far as that was asked for. Written by `Prefixes` only."""
        self.resumed_at = self.prompt_tokens
        """Length of `history` at the last admission: what the prefill has to compute."""
        self.retractions = 0
        self.is_announced = False
        """Whether its first admission was told."""
        self.route = event.route
        """Where its prompt is computed and its answer given. What has landed goes on as `here`."""
        self.is_called = event.route == "here"
        """Whether it may be admitted: another worker's word that it needs is there."""
        self.attempt = -1
        """The present or last attempt at a transfer."""
        self.landing: Landing | None = None
        """While it receives, and its pages are committed."""
        self.first: Sampled | None = None
        """The first output token of a prompt that was computed for another worker, until it is passed on."""
        self.waits = 0
        """Steps that it has waited for a prefix which another request computes."""
        self.story: deque[str] = deque([f"arrived with {self.prompt_tokens} prompt tokens"], maxlen=STORY_LINES)

    def move(self, state: State, step: int) -> None:
        """Enter `state`; a transition that the table lacks raises InvariantError with the request's story."""
        if state not in TRANSITIONS[self.state]:
            told = ", ".join(self.story)
            raise InvariantError([f"request {self.id} cannot go from {self.state.value} to {state.value}: {told}"])
        self.state = state
        self.story.append(f"step {step}: {state.value} at {self.computed} of {len(self.history)} tokens")

    @property
    def max_tokens(self) -> int:
        """The most output tokens, all told."""
        return self.end - self.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.history) - self.prompt_tokens

    @property
    def is_running(self) -> bool:
        """Whether it holds a request slot and memory."""
        return self.holding is not None

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state in ENDS

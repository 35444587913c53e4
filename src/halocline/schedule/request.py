"""One request: what is known of it, and the states it passes through.

    waiting --admit--> prefilling --first token--> decoding --last token--> finished
                           |  ^                        |
                           |  '--admit--- retracted <--'        (pages dropped; comes back by recomputing)
                           '----------------^

Every unfinished state also leads to `finished` (an abort) and to `failed`. The scheduler is the only writer.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from halocline.cache.keys import Key
from halocline.errors import InvariantError
from halocline.schedule.events import Arrive
from halocline.schedule.holding import Holding


class State(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    RETRACTED = "retracted"
    FINISHED = "finished"
    FAILED = "failed"


ENDS = frozenset({State.FINISHED, State.FAILED})
TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILLING}) | ENDS,
    State.PREFILLING: frozenset({State.DECODING, State.RETRACTED}) | ENDS,
    State.DECODING: frozenset({State.RETRACTED}) | ENDS,
    State.RETRACTED: frozenset({State.PREFILLING}) | ENDS,
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
}
"""The one table of allowed transitions."""

STORY_LINES = 16
"""How many transitions a request remembers for an error report; bounded, because retractions are not."""


class Request:
    """What the scheduler knows of one request. All counts are in tokens; a position is an index into `history`."""

    __slots__ = (
        "arrival",
        "computed",
        "end",
        "high_water",
        "history",
        "holding",
        "id",
        "key",
        "namespace",
        "params",
        "prefix",
        "prompt_tokens",
        "resumed_at",
        "retractions",
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

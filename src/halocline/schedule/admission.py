"""Who may come in at all, and with how large a grant.

At arrival a request is checked against the model and an *empty* arena: what passes can always be served in the end.
When its turn comes it is priced for the arena as it is. Nothing that a client wrote is believed before it is checked.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from halocline.memory.arena import Arena
from halocline.memory.budget import Budget
from halocline.memory.demand import Demand, resident
from halocline.schedule.events import Arrive, Rejected
from halocline.schedule.packing import unsigned
from halocline.schedule.request import Request
from halocline.schedule.rules import Rules
from halocline.schedule.sharing import Entrance, Sharing
from halocline.units import ceil_div

OBSERVED_REQUESTS = 1024
"""How many finished requests of a class are remembered."""
FEWEST_OBSERVED = 32
"""Below this many, an estimate would be noise."""
UNOBSERVED_TOKENS = 1024
"""The most that is granted for an output of a class that has too few observations."""


class OutputLengths:
    """How long outputs turned out, per class of requests (max_tokens rounded up to a power of four: ADR 12).

    Estimates follow what was observed and nothing else: with a timer in them they would make retractions periodic.
    """

    def __init__(self, quantile: float) -> None:
        as_written = Fraction(str(quantile))  # in binary, 0.07 of 100 is more than 7
        self._upper, self._lower = as_written.numerator, as_written.denominator
        self._recent: dict[int, deque[int]] = {}
        self._sorted: dict[int, list[int]] = {}
        self.recorded = 0
        """How many were ever recorded: estimates stay as they are while this does."""

    @staticmethod
    def class_of(max_tokens: int) -> int:
        """Return `max_tokens` rounded up to a power of four.

        In narrower classes the quantile lies above the limit of most members, and hardly anything is expected.
        """
        return 1 << 2 * ceil_div((max_tokens - 1).bit_length(), 2)

    def record(self, max_tokens: int, output_tokens: int) -> None:
        """Remember one finished request, and forget the oldest beyond the last 1,024 of its class."""
        self.recorded += 1
        kind = self.class_of(max_tokens)
        recent = self._recent.setdefault(kind, deque())
        ordered = self._sorted.setdefault(kind, [])
        if len(recent) == OBSERVED_REQUESTS:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(output_tokens)
        insort(ordered, output_tokens)

    def estimate(self, max_tokens: int) -> int:
        """Return the output tokens to grant at admission, from 1 to `max_tokens`.

        The quantile q of n observations is the smallest one that at least q * n of them do not exceed.
        """
        ordered = self._sorted.get(self.class_of(max_tokens), [])
        if len(ordered) < FEWEST_OBSERVED:
            return min(max_tokens, UNOBSERVED_TOKENS)
        covered = ceil_div(self._upper * len(ordered), self._lower)  # 0.9 of 32 is reached by the 29th
        return min(max_tokens, max(1, ordered[covered - 1]))

    def estimate_further(self, max_tokens: int, output_tokens: int) -> int:
        """Return the further tokens to grant to an output that has outgrown its estimate at `output_tokens`.

        Up to the longest observed one of its class, and never to less than twice what there is: so nobody is retracted
        for this more often than an output can be doubled.
        """
        ordered = self._sorted.get(self.class_of(max_tokens), [])
        longest = ordered[-1] if ordered else 0
        return max(longest - output_tokens, output_tokens, 1)


def packed_ids(tokens: Sequence[int]) -> NDArray[np.uint32] | None:
    """Return `tokens` in 32 bits each; None where one of them is no whole number, or a flag.

    Raises OverflowError where one of them is negative or too large. Packing refuses what is no number, a sum with a
    number of another kind is of that kind, and a flag can only be a 0 or a 1: to look at the type of each of 12,000
    tokens takes twice as long as all of that.
    """
    try:
        packed = unsigned(tokens)
        whole = type(sum(tokens)) is int
    except TypeError:
        return None
    small = (packed <= 1).nonzero()[0].tolist()
    return packed if whole and not any(type(tokens[at]) is bool for at in small) else None


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms a request was taken."""

    max_tokens: int
    clipped: bool
    packed: bytes
    """The prompt in 4 bytes a token, as the prefix cache reads it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """How a request would enter now: where computing starts, and what it asks for from there on."""

    entrance: Entrance
    """Where computing starts."""
    demand: Demand
    """The whole price: what cached pages cover of it is known when they are locked."""

    @property
    def start(self) -> int:
        """The first position to compute."""
        return self.entrance.start


class Gate:
    """Checks arrivals and prices candidates, always with the arena's own predicate."""

    def __init__(self, arena: Arena, rules: Rules, floor: Demand, sharing: Sharing) -> None:
        self._arena = arena
        self._rules = rules
        self._floor = floor
        self._sharing = sharing
        quantile = 1.0 if rules.admission[0] == "guaranteed" else rules.admission[1]
        self.lengths = OutputLengths(quantile)

    def check(self, event: Arrive) -> Terms | Rejected:
        """Say on which terms the request is taken, or why it never can be."""
        packed = self._packed(event)
        if isinstance(packed, Rejected):
            return packed
        prompt_tokens, asked = len(event.prompt), event.params.max_tokens
        if event.route == "send":
            asked = 1
        largest = self.largest_output(prompt_tokens)
        if largest < 1:
            return self._too_large(event, 1, largest)
        if asked is None:
            limit = largest
            if self._rules.is_guaranteed:
                limit = min(largest, max(self._rules.default_max_tokens, event.params.min_tokens))
            if event.params.min_tokens > limit and not self._rules.clip_max_tokens:
                return self._too_large(event, event.params.min_tokens, largest)
            return Terms(limit, clipped=False, packed=packed)
        if asked > largest and not self._rules.clip_max_tokens:
            return self._too_large(event, asked, largest)
        return Terms(min(asked, largest), clipped=asked > largest, packed=packed)

    def largest_output(self, prompt_tokens: int) -> int:
        """Return the most output tokens with which such a prompt fits the model and an empty arena; below 1: none."""
        most = self._rules.max_model_len - prompt_tokens
        if most < 1 or self._fits_empty(prompt_tokens, most):
            return most
        low, high = 0, most  # low fits (or is nothing at all), high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits_empty(prompt_tokens, middle) else (low, middle)
        return low

    def shortest_refusal(self) -> str | None:
        """Return why even one prompt token with one output token does not fit this empty arena, None when it does."""
        if self._fits_empty(1, 1):
            return None
        return self._arithmetic(self._price(1, 1))

    def candidate(self, request: Request) -> Candidate:
        """Price `request` for admission now, from the longest cached boundary on that it could live with.

        Hot may cost more than cold: a boundary whose whole life, whatever part of it is granted now, does not fit an
        empty arena beside the floor would never be admitted, so the next shorter one is asked, down to 0.
        """
        prompt_tokens = len(request.history)
        left = request.end - prompt_tokens

        def fits_alone(start: int, beside: Demand) -> bool:
            demand = self._price(prompt_tokens, left, start)
            return self._arena.fits_empty(demand.plus(beside).plus(self._floor))

        return self.priced(request, self._sharing.entrance(request, fits_alone))

    def priced(self, request: Request, entrance: Entrance) -> Candidate:
        """Price `request` from `entrance` on: with its whole life, or as much of it as is granted at admission."""
        return Candidate(entrance, self._price(len(request.history), self._further(request), entrance.start))

    def _further(self, request: Request) -> int:
        """Return how many further output tokens a grant counts at this admission.

        Who was retracted comes back with all that its client allowed. Where no client named a limit, that would be the
        whole arena, and everybody else would have to leave: then with as much as an output was ever seen to need.
        """
        left = request.end - len(request.history)
        if self._rules.is_guaranteed or request.params.ignore_eos:
            return left
        if not request.retractions and request.route == "receive":
            return min(left, 1 + self._rules.decode_reserve_tokens)
        if not request.retractions:
            return min(left, self.lengths.estimate(request.max_tokens))
        if request.params.max_tokens is not None:
            return left
        return min(left, self.lengths.estimate_further(request.max_tokens, request.output_tokens))

    def _fits_empty(self, prompt_tokens: int, max_tokens: int) -> bool:
        return self._arena.fits_empty(self._price(prompt_tokens, max_tokens).plus(self._floor))

    def _price(self, prompt_tokens: int, max_tokens: int, start: int = 0) -> Demand:
        return resident(self._arena.layout, prompt_tokens, max_tokens, start, self._rules.lookahead_tokens)

    def _packed(self, event: Arrive) -> bytes | Rejected:
        """Find what is wrong with the fields themselves; return the prompt, packed, where nothing is."""
        prompt, name = event.prompt, event.request_id
        if not prompt:
            return Rejected(name, "the prompt is empty; send at least one token", "prompt")
        try:
            packed = packed_ids(prompt)
        except OverflowError:  # as hardly ever: negative, or of more than 32 bits
            packed = None
        lowest, highest = 0, 0
        if packed is not None:
            lowest, highest = int(packed.min()), int(packed.max())
        elif set(map(type, prompt)) == {int}:
            lowest, highest = min(prompt), max(prompt)
        else:
            return Rejected(name, "the prompt must be a list of whole numbers (token ids)", "prompt")
        for token in (lowest, highest):
            if not 0 <= token < self._rules.vocab_size:
                known = f"the model's are 0 to {self._rules.vocab_size - 1}"
                return Rejected(name, f"the prompt holds token id {token}; {known}", "prompt")
        beyond = max(event.params.stop_token_ids, default=0)
        if beyond >= self._rules.vocab_size:
            known = f"the model's are 0 to {self._rules.vocab_size - 1}"
            return Rejected(name, f"stop_token_ids holds token id {beyond}; {known}", "stop_token_ids")
        if type(event.priority) is not int:
            return Rejected(name, f"priority is {event.priority!r}; it must be a whole number", "priority")
        assert packed is not None, f"{name}: token ids below {self._rules.vocab_size} take more than 32 bits"
        return packed.tobytes()

    def _too_large(self, event: Arrive, asked: int, largest: int) -> Rejected:
        """Write the refusal with its arithmetic and the largest output that would do."""
        prompt_tokens, limit = len(event.prompt), self._rules.max_model_len
        total = prompt_tokens + asked
        if total > limit:
            why = f"that is {total} tokens, and max_model_len is {limit}"
        else:
            why = self._arithmetic(self._price(prompt_tokens, asked))
        if largest < 1:
            message = (
                f"a prompt of {prompt_tokens} tokens with {asked} to generate is too long: {why}; shorten the prompt"
            )
            return Rejected(event.request_id, message, "prompt", "context_length_exceeded")
        field = "max_tokens" if event.params.max_tokens is not None else "min_tokens"
        message = f"{prompt_tokens} prompt tokens + {asked} to generate is too much: {why}; at most {largest} would do"
        return Rejected(event.request_id, message, field, "context_length_exceeded")

    def _arithmetic(self, demand: Demand) -> str:
        """Say in numbers why `demand` does not fit beside the floor in an empty arena."""
        layout = self._arena.layout
        parts = ", ".join(
            f"{pages} + {spare} pages of {pool.name}"
            for pages, spare, pool in zip(demand, self._floor, layout.pools, strict=True)
        )
        slabs = Budget(layout).slabs_needed(demand.plus(self._floor))
        why = f"that needs {parts} (its own + the floor), {slabs} slabs where the arena has {layout.slabs}"
        return why + self._caps_note(demand)

    def _caps_note(self, demand: Demand) -> str:
        """Name the pools whose static share is too small, where the arena is split."""
        layout = self._arena.layout
        notes = []
        for pages, spare, pool, cap in zip(demand, self._floor, layout.pools, self._arena.budget.caps, strict=True):
            if cap < layout.slabs and pages + spare > cap * pool.pages_per_slab:
                notes.append(f"the static share of {pool.name} is {cap * pool.pages_per_slab} pages")
        return f"; {', '.join(notes)}" if notes else ""

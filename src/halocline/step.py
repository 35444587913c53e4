"""THE WAIST: the frozen data by which scheduler and model meet, and nothing else.

    Scheduler.plan(now) -> StepPlan -> Backend.run(plan) -> StepResult -> Scheduler.apply(result)

A step's work is packed: the tokens of all its segments stand in one row, without padding.

    token_ids        | decode a | decode b | chunk of c, 5 tokens        |
    positions        |   812    |   97     | 64   65   66   67   68      |
    query_starts     0          1          2                             7

The plan's arrays belong to the plan: the scheduler never changes them after `plan` returned.

A **leap** is a decode of several tokens in one step, for a backend that can loop by itself (the simulator; a decode
loop on a device): `Scheduler.plan(now, decode_tokens=k)`, never without being asked. Only the first of its rows is
known; the backend samples from each row the token of the next one, which stands as -1 in the plan:

    token_ids        | decode a, a leap of 4 | decode b, a leap of 4 |          sampled: 4 tokens of a, 4 of b
    positions        |  812  813  814  815   |  97   98   99   100   |
    token_ids        |   17   -1   -1   -1   |   5   -1   -1    -1   |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from halocline.memory.grant import Move as Move  # noqa: PLC0414 - part of the waist, made by the arena
from halocline.memory.host import HostCopies, HostWork
from halocline.params import SamplingParams


class Segment(msgspec.Struct, frozen=True, gc=False):
    """One request's tokens in this step: positions [start, start + tokens).

    A struct and not a dataclass because hundreds of them are made in every step, and a frozen dataclass takes 1 us.
    """

    request_id: str
    start: int
    """Position of the segment's first token."""
    tokens: int
    """How many tokens are computed: 1 for a decode, or those of a leap; a chunk otherwise."""
    samples: bool
    """Whether the segment reaches the end of what is known, so that a next token must be sampled from it."""
    params: SamplingParams
    seed: int
    """Seed of the sampling noise: resolved, also where the client gave none."""
    history: Sequence[int]
    """Prompt and output so far. A live view: read inside `run` only, never kept."""
    prompt_tokens: int
    """How many tokens of `history` are the client's prompt; the rest is output."""
    forbids_stop: bool
    """Whether end-of-sequence and stop tokens must not be sampled yet (min_tokens); in a leap, for all its tokens."""

    @property
    def is_leap(self) -> bool:
        """Whether the backend generates what all rows but the first compute. Ask before tokens are known, in `run`.

        Nobody who leaps asked for log-probabilities.
        """
        return self.start + self.tokens > len(self.history)


@dataclass(frozen=True, slots=True)
class PoolTables:
    """The page tables of all segments in one pool, packed.

    Segment i uses `pages[page_starts[i] : page_starts[i + 1]]`; the first of them holds the positions from
    `first_page[i] * page_tokens` on. They cover every position that the segment reads and those that it writes.
    A state pool gives each segment its one state's page.
    """

    pages: NDArray[np.int32]
    """Page numbers after the moves, shape (total pages,)."""
    page_starts: NDArray[np.int32]
    """Shape (segments + 1,)."""
    first_page: NDArray[np.int32]
    """Index of the first listed page in its request, shape (segments,)."""
    write_from: NDArray[np.int32]
    """Position from which on a segment writes into this pool, shape (segments,). Positions of the segment below it are
    computed and read, but their pages belong to the prefix cache and must not be written: others read them now."""


class Copy(msgspec.Struct, frozen=True, gc=False):
    """Copy page `source` of state pool `pool` onto page `target`: page numbers, as after the step's moves."""

    pool: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the backend must do, in this order: offloads, moves, loads, copies, one packed forward, saves, sampling."""

    step: int
    moves: tuple[Move, ...]
    segments: tuple[Segment, ...]
    """Decodes first, then prefill chunks."""
    token_ids: NDArray[np.int64]
    """Shape (T,); -1 in the rows of a leap that the backend generates."""
    positions: NDArray[np.int64]
    """Shape (T,)."""
    query_starts: NDArray[np.int32]
    """Shape (segments + 1,); segment i owns rows [query_starts[i], query_starts[i + 1])."""
    tables: tuple[PoolTables, ...]
    """One per pool, in the order of `ArenaLayout.pools`."""
    copies: tuple[Copy, ...] = ()
    """Before the forward: checkpoints of the prefix cache become working states. Targets are distinct, and no source is
    a target."""
    saves: tuple[Copy, ...] = ()
    """After the forward: working states, as they are after their segment, become checkpoints."""
    offloads: tuple[HostWork, ...] = ()
    """Before all else, one after another in this order: device pages are copied to the host arena, pages inside it
    move. Device pages are numbered as before the step's moves."""
    loads: tuple[HostCopies, ...] = ()
    """After the moves, before the copies: host pages become device pages. Host pages are numbered as after all
    offloads, device pages as after the moves."""

    @property
    def has_work(self) -> bool:
        """Whether anything is to be done. A plan without segments is carried out without a forward: it has moves, say,
        because pages are to be pinned that another worker will write."""
        return bool(self.segments or self.moves or self.copies or self.saves or self.offloads or self.loads)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one output position, before temperature and filters (after penalties)."""

    token_logprob: float
    rank: int
    """1 for the most probable token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most probable ones, best first."""


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """The token sampled for one segment, or the tokens of a leap."""

    request_id: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    further_ids: tuple[int, ...] = ()
    """Of a leap of k tokens, the k - 1 after `token_id`; fewer only where the last one is a stop token. What stands
    after a stop token is dropped."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request whose computation failed, and why, in words for its client."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan: one `Sampled` for every segment with `samples`, in the plan's order, or its `Failure`."""

    step: int
    sampled: tuple[Sampled, ...]
    failures: tuple[Failure, ...] = ()


class Backend(Protocol):
    """What computes a step: the model on a device, a fake in tests, a cost model in the simulator."""

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out `plan`. A fault of one request is a `Failure`; an exception fails every request of the plan."""
        ...

    def close(self) -> None:
        """Free what the backend holds; a second call does nothing."""
        ...

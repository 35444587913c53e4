"""What a replay reads of a step, and nothing beyond: a device that is a formula reads no tokens and no tables.

    a plan for a model       every token id, every position, every page of every request: 30,000 numbers a step
    its outline              who computes from where to where, and the page on which each of them ends

It is written while the plan is made, as all of a plan is: nothing of it is looked up later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halocline.memory.arena import Arena
from halocline.schedule.chunk import Chunk
from halocline.schedule.packing import holdings_of, query_starts_of, segments_of
from halocline.schedule.request import Request
from halocline.step import Move, StepPlan

NO_IDS: NDArray[np.int64] = np.empty(0, np.int64)
NO_IDS.flags.writeable = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline(StepPlan):
    """A plan without `token_ids`, `positions` and `tables`."""

    decodes: int
    """How many segments are decodes; they stand first."""
    decode_tokens: int
    """How many tokens each of them computes: more than one in a leap."""
    starts: NDArray[np.int64]
    """The first position of each segment, shape (segments,)."""
    ends: tuple[NDArray[np.int32], ...]
    """Per pool: the page on which each segment ends, after the moves."""


class Sketcher:
    """Writes outlines: a `halocline.schedule.packing.Packer`."""

    reads_places = False

    def pack(
        self,
        arena: Arena,
        step: int,
        moves: tuple[Move, ...],
        decodes: Sequence[Request],
        chunks: Sequence[Chunk],
        decode_tokens: int = 1,
    ) -> Outline:
        """Return the outline of a step."""
        count, leap = len(decodes), decode_tokens
        starts = [request.computed for request in decodes] + [chunk.start for chunk in chunks]
        holdings = holdings_of(decodes, chunks)
        ends = tuple(
            arena.physical(pool, np.array([holding.handles[pool].item(-1) for holding in holdings], np.int64))
            for pool in range(len(arena.pools))
        )
        return Outline(
            step,
            moves,
            segments_of(decodes, chunks, leap),
            token_ids=NO_IDS,
            positions=NO_IDS,
            query_starts=query_starts_of(decodes, chunks, leap),
            tables=(),
            decodes=count,
            decode_tokens=leap,
            starts=np.array(starts, np.int64),
            ends=ends,
        )

"""Writes the step down: requests, positions and page numbers packed into a StepPlan's arrays.

Who puts the parts together chooses the packer, because not every backend reads all of it. Decodes are the many and are
packed in bulk: one list per column, one concatenation per pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from halocline.memory.arena import Arena
from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Full, Retention
from halocline.schedule.chunk import Chunk
from halocline.schedule.holding import Holding
from halocline.schedule.request import Request
from halocline.step import Move, PoolTables, Segment, StepPlan

NOWHERE: NDArray[np.int32] = np.empty(0, dtype=np.int32)
UNKNOWN = -1
"""Stands where a leap computes a token that is yet to be sampled."""


class Packer(Protocol):
    """Writes plans down. What it leaves out is not there later either: no plan looks anything up by itself."""

    reads_places: bool
    """Whether it reads `Holding.places`."""

    def pack(
        self,
        arena: Arena,
        step: int,
        moves: tuple[Move, ...],
        decodes: Sequence[Request],
        chunks: Sequence[Chunk],
        decode_tokens: int = 1,
    ) -> StepPlan:
        """Return the plan of a step that computes `decode_tokens` of each of `decodes`, then `chunks`.

        Their pages are committed, and numbered as after `moves`.
        """
        ...


class Tables:
    """All that a model's runner reads: every token, every position, every page."""

    reads_places = True

    def pack(
        self,
        arena: Arena,
        step: int,
        moves: tuple[Move, ...],
        decodes: Sequence[Request],
        chunks: Sequence[Chunk],
        decode_tokens: int = 1,
    ) -> StepPlan:
        """Return the plan of a step with all that it computes and reads."""
        count, leap = len(decodes), decode_tokens
        row = count * leap
        query_starts = query_starts_of(decodes, chunks, leap)
        token_ids = np.empty(query_starts[-1], dtype=np.int64)
        positions = np.empty(query_starts[-1], dtype=np.int64)
        token_ids[:row:leap] = [request.history[-1] for request in decodes]
        positions[:row:leap] = [request.computed for request in decodes]
        for ahead in range(1, leap):
            token_ids[ahead:row:leap] = UNKNOWN
            positions[ahead:row:leap] = positions[:row:leap] + ahead
        for chunk in chunks:
            token_ids[row : row + chunk.tokens] = unsigned(chunk.request.history[chunk.start : chunk.end])
            positions[row : row + chunk.tokens] = np.arange(chunk.start, chunk.end)
            row += chunk.tokens
        segments = segments_of(decodes, chunks, leap)
        tables = _tables(arena.layout, holdings_of(decodes, chunks), len(chunks))
        return StepPlan(step, moves, segments, token_ids, positions, query_starts, tables)


def segments_of(decodes: Sequence[Request], chunks: Sequence[Chunk], decode_tokens: int) -> tuple[Segment, ...]:
    """Return who computes which positions: decodes first."""
    segments = [
        Segment(
            r.id,
            r.computed,
            decode_tokens,
            True,
            r.params,
            r.seed,
            r.history,
            r.prompt_tokens,
            len(r.history) < r.stops_from,
        )
        for r in decodes
    ]
    segments += map(_chunk_segment, chunks)
    return tuple(segments)


def query_starts_of(decodes: Sequence[Request], chunks: Sequence[Chunk], decode_tokens: int) -> NDArray[np.int32]:
    """Return where each segment's tokens begin in a step, and where the last one's end, shape (segments + 1,)."""
    counts = [decode_tokens] * len(decodes) + [chunk.tokens for chunk in chunks]
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def holdings_of(decodes: Sequence[Request], chunks: Sequence[Chunk]) -> list[Holding]:
    """Return what they hold, in the order of their segments."""
    holdings = [request.holding for request in decodes] + [chunk.request.holding for chunk in chunks]
    return [holding for holding in holdings if holding is not None]


def unsigned(tokens: Sequence[int]) -> NDArray[np.uint32]:
    """Return `tokens` as an array. Raises OverflowError where one is negative or takes more than 32 bits."""
    # A prompt of 12,000 tokens takes 65 us, and three times as long where NumPy reads the list itself.
    return np.frombuffer(array("I", tokens), dtype=np.uint32)


def _chunk_segment(chunk: Chunk) -> Segment:
    request = chunk.request
    samples = chunk.end == len(request.history)
    return Segment(
        request.id,
        chunk.start,
        chunk.tokens,
        samples,
        request.params,
        request.seed,
        request.history,
        request.prompt_tokens,
        len(request.history) < request.stops_from,
    )


def _tables(layout: ArenaLayout, holdings: Sequence[Holding], chunked: int) -> tuple[PoolTables, ...]:
    """Pack the page numbers of all segments, after the step's moves. Nothing is shared with the holdings."""
    tables = []
    for pool, retention in enumerate(of_pool.retention for of_pool in layout.pools):
        places = [holding.places[pool] for holding in holdings]
        tables.append(
            PoolTables(
                np.concatenate(places) if places else NOWHERE.copy(),
                _starts(list(map(len, places))),
                _first_pages(holdings, pool),
                _write_from(holdings, chunked, retention),
            )
        )
    return tuple(tables)


def _write_from(holdings: Sequence[Holding], chunked: int, retention: Retention) -> NDArray[np.int32]:
    """Return from which position on each segment writes.

    Only the full pages of the prefix cache may reach beyond where a request has come: it computes those positions for
    its windows' sake and writes them there only. A decode (the first `len(holdings) - chunked`) is past all of them.
    """
    write_from = np.zeros(len(holdings), dtype=np.int32)
    if isinstance(retention, Full):
        for index in range(len(holdings) - chunked, len(holdings)):
            lock = holdings[index].lock
            write_from[index] = lock.full_tokens if lock is not None else 0
    return write_from


def _starts(counts: list[int]) -> NDArray[np.int32]:
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.array(counts, dtype=np.int32).cumsum(out=starts[1:])
    return starts


def _first_pages(holdings: Sequence[Holding], pool: int) -> NDArray[np.int32]:
    return np.array([holding.first_page[pool] for holding in holdings], dtype=np.int32)

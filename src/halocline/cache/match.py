"""How far a prompt can be resumed: the longest boundary b at which every pool has what position b will read.

    full        pages of [0, b)                            every node has them, so the keys decide
    sliding     the last W - 1 positions before b          held pages, no tombstone among them (L7)
    chunked     from floor(b / A) * A to b                 the same
    state       a checkpoint exactly at b                  only at a node's end

At least one token is left to compute: b <= L - 1, so a prompt of 64 tokens that is wholly cached resumes at 48 with
G = 16, and one of 65 at 64. Worked example: P = G = 16, W = 40. At b = 96 positions 57 ... 95 are read, pages 3, 4 and
5; if page 3 is a tombstone, b = 96 is void, and so is b = 80 (pages 2, 3, 4), but b = 48 may stand (pages 0, 1, 2).

Boundaries are multiples of G and look back only, so some pages are read at none: those that leave the window before
their granule is whole. With W = 9, P = 4, G = 16 the boundary 16 reads positions 8 ... 15, every later one less of
them: pages 0 and 1 of each granule are of no use to anybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from halocline.cache.keys import Key
from halocline.cache.node import TOMBSTONE, Node, Shape, gather
from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Full, Retention, Sliding, State

Reason = Literal["whole", "too short", "not keyed", "window gone", "state missing", "limited"]


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree has of a prompt. Stale after the next change of the tree: `lock` looks again."""

    key: Key
    boundary_tokens: int
    """Where computing can start: a multiple of G, at most L - 1."""
    full_tokens: int
    """How far the keys agree and full pages are held: where another request's branch is revealed."""
    reason: Reason
    """Why the boundary is not longer: `whole` when it reaches the last granule that may be skipped, `not keyed` when it
    reaches as far as the keys do; `window gone` and `state missing` when it falls behind them."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The nodes that agree with a key, the last one perhaps in part, and the granules that agree."""

    path: list[Node]
    granules: int


class Resume:
    """The question at which boundaries of a walk every pool can resume."""

    def __init__(self, layout: ArenaLayout, shape: Shape) -> None:
        self._layout = layout
        self._shape = shape
        self._windows = [
            number for number, pool in enumerate(layout.pools) if not isinstance(pool.retention, Full | State)
        ]
        self._positional = {
            number: (pool.retention, pool.page_tokens)
            for number, pool in enumerate(layout.pools)
            if not isinstance(pool.retention, State)
        }
        # A boundary that the window reaches back over: it reads all of its granule. Chunks begin at some boundaries.
        self._reads_all = [
            isinstance(pool.retention, Sliding) and pool.retention.window_tokens > shape.granule_tokens
            for pool in layout.pools
        ]

    def first_page(self, pool: int, boundary_tokens: int) -> int:
        """Return the first page of a positional `pool` that position `boundary_tokens` reads."""
        retention, page_tokens = self._positional[pool]
        return retention.first_needed(boundary_tokens) // page_tokens

    def reads_all(self, pool: int) -> bool:
        """Whether every page of a window `pool` is read at some boundary: that of its own granule."""
        return self._reads_all[pool]

    def ever_read(self, pool: int, first: int, last: int) -> NDArray[np.bool_]:
        """Return which of the pages [first, last) of a window `pool` some boundary reads.

        The first boundary after a page is its granule's end, and the first position that is read only rises with the
        boundary: what that one does not read, none does.
        """
        per_granule, layout = self._shape.pages_per_granule[pool], self._layout.pools[pool]
        pages = np.arange(first, last)
        ends = (pages // per_granule + 1) * self._shape.granule_tokens
        read: NDArray[np.bool_] = pages >= _starts(layout.retention, ends) // layout.page_tokens
        return read

    def missing(self, walk: Walk, granules: int) -> Reason | None:
        """Return what keeps a request from resuming after `granules`; None when nothing does."""
        if granules == 0:
            return None
        for pool in self._windows:
            last = granules * self._shape.pages_per_granule[pool]
            first = self.first_page(pool, granules * self._shape.granule_tokens)
            if (gather(walk.path, self._shape, pool, first, last) == TOMBSTONE).any():
                return "window gone"
        for pool in self._shape.states:
            if not any(node.end == granules and node.pages[pool][0] != TOMBSTONE for node in walk.path):
                return "state missing"
        return None

    def boundaries(self, walk: Walk, most: int) -> Iterator[int]:
        """Yield the granules after which a request can resume, longest first, `most` at most; 0 is always the last."""
        if most and self.missing(walk, most) is None:
            yield most
        able = np.ones(most, np.bool_)  # by granule boundary 0 ... most - 1
        for pool in self._windows:
            able &= self._windows_whole(walk, pool, most)
        if self._shape.states:
            ends = {
                node.end for node in walk.path if all(node.pages[pool][0] != TOMBSTONE for pool in self._shape.states)
            }
            able &= np.isin(np.arange(most), list(ends))
        able[:1] = False
        yield from np.flatnonzero(able)[::-1].tolist()
        yield 0

    def _has_states(self, node: Node) -> bool:
        return all(node.pages[pool][0] != TOMBSTONE for pool in self._shape.states)

    def _windows_whole(self, walk: Walk, pool: int, most: int) -> NDArray[np.bool_]:
        # A window is whole where no tombstone stands between its first page and its boundary: a difference of counts.
        per_granule, layout = self._shape.pages_per_granule[pool], self._layout.pools[pool]
        gone = np.zeros(most * per_granule + 1, np.int64)
        np.cumsum(gather(walk.path, self._shape, pool, 0, most * per_granule) == TOMBSTONE, out=gone[1:])
        ends = np.arange(most) * self._shape.granule_tokens
        starts = _starts(layout.retention, ends)
        whole: NDArray[np.bool_] = gone[ends // layout.page_tokens] == gone[starts // layout.page_tokens]
        return whole


def _starts(retention: Retention, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    # The first positions that are read at boundaries `ends` of a window pool: `first_needed` of many at once.
    if isinstance(retention, Sliding):
        return np.maximum(0, ends - retention.window_tokens + 1)
    assert not isinstance(retention, Full | State)
    return ends // retention.chunk_tokens * retention.chunk_tokens


def match(resume: Resume, shape: Shape, key: Key, walk: Walk, limit_tokens: int | None) -> Match:
    """Return the longest boundary that `walk` allows, at most `limit_tokens`, and why it is not longer."""
    most = max(0, key.tokens - 1) // shape.granule_tokens
    allowed = most if limit_tokens is None else min(most, limit_tokens // shape.granule_tokens)
    reach = min(walk.granules, allowed)
    boundary = next(resume.boundaries(walk, reach))
    tokens = shape.granule_tokens
    return Match(
        key, boundary * tokens, walk.granules * tokens, _reason(resume, walk, boundary, (reach, allowed, most))
    )


def _reason(resume: Resume, walk: Walk, boundary: int, borders: tuple[int, int, int]) -> Reason:
    reach, allowed, most = borders
    if boundary < reach:
        return resume.missing(walk, reach) or "window gone"
    if most == 0:
        return "too short"
    if reach < allowed:
        return "not keyed"
    return "whole" if allowed == most else "limited"

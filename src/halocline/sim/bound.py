"""The most that any scheduler could hold at once: a FIFO queue served by arithmetic, without scheduler or arena.

Everything that costs a real scheduler concurrency is taken away; what is left is the memory itself:

* the queue is saturated and served in order: the next request enters as soon as what it holds *now* fits;
* its prompt is computed in no time: it enters with all prompt positions but the last, which it computes at once;
* a running request holds exactly its live pages: of each pool those from the first position that it still sees to the
  position that it computes, and nothing for what comes later;
* every running request computes one position per step, and every position yields one token of its output;
* when this growth overflows, the youngest is swapped out at no cost, loses nothing, and comes back before anyone new.

A page counts the bytes that its layers use, and pages need no slabs: padding and partly used slabs are losses of the
arena, not of the bound. Under caps (a static split) each pool has no more than the pages of its slabs besides.

    prompt L, output m        computes L - 1 ... L + m - 2, one a step, so it runs m steps
    computing x holds         pages first_needed(x) // P ... x // P of each pool

Greedy and in order, it is no proof of an optimum: who looks ahead could admit a little more evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halocline.memory.layout import ArenaLayout, PoolLayout
from halocline.memory.retention import NEVER, Chunked, Full, Sliding, State
from halocline.memory.sizing import Caps

Ints = NDArray[np.int64]

MOST_STEPS_AT_ONCE = 64
"""Steps looked at in one go: until one of the running ends, or something overflows or fits, nothing is decided."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What the arithmetic makes of a queue."""

    concurrency: float
    """Mean of the running requests, from the first step in which the next one did not fit until the last entered."""
    held_share: float
    """Mean of their live bytes over the budget, over the same steps."""
    peak: int
    """The most that ran at once."""
    steps: int
    """All steps, to the last output."""
    finished: int
    rejected: int
    """Requests that do not fit an empty arena; the queue goes on without them."""
    swaps: int
    """How often growth overflowed and the youngest was swapped out."""


def fifo_bound(layout: ArenaLayout, lengths: Sequence[tuple[int, int]], caps: Caps | None = None) -> Bound:
    """Serve requests of (prompt, output) tokens, each at least 1, in order, in the arena's bytes.

    `caps` are slabs per pool (as `static_caps` gives them): a limit of each pool's pages beside that of all bytes.
    """
    queue = _Queue(layout, lengths, caps)
    while queue.step_until_change():
        pass
    return queue.bound()


def live_pages(pool: PoolLayout, position: Ints) -> Ints:
    """Return the pages of `pool` that a request holds while it computes `position`, element by element."""
    size = pool.page_tokens
    match pool.retention:
        case Full():
            return np.asarray(position // size + 1)
        case Sliding(window_tokens):
            return np.asarray(position // size - np.maximum(position - window_tokens + 1, 0) // size + 1)
        case Chunked(chunk_tokens):
            return np.asarray(position // size - position // chunk_tokens * chunk_tokens // size + 1)
        case State():
            return np.ones_like(position)


def _longest_reach(pool: PoolLayout) -> int:
    """Return pages of `pool` that no request exceeds, however long it is: its reach and one page that it straddles."""
    match pool.retention:
        case Full():
            return NEVER
        case Sliding(tokens) | Chunked(tokens):
            return tokens // pool.page_tokens + 2
        case State():
            return 1


class _Queue:
    """The running requests, always those before `head` that have not ended: the youngest is the last of them."""

    def __init__(self, layout: ArenaLayout, lengths: Sequence[tuple[int, int]], caps: Caps | None) -> None:
        self._pools = layout.pools
        rows = [[pool.page_bytes for pool in layout.pools]]
        limits = [layout.budget_bytes]
        for index, (pool, slabs) in enumerate(zip(layout.pools, caps or (), strict=caps is not None)):
            if slabs is not None:
                rows.append([int(index == other) for other in range(len(layout.pools))])
                limits.append(slabs * pool.pages_per_slab)
        self._weights: Ints = np.array(rows, dtype=np.int64)  # the first limit is that of all bytes
        self._limits: Ints = np.array(limits, dtype=np.int64)
        table = np.array(lengths, dtype=np.int64).reshape(-1, 2)
        fits = self._fit_alone(table)
        self.rejected = int((~fits).sum())
        table = table[fits]
        self._at, self._end = table[:, 0] - 1, table.sum(axis=1) - 1  # the next position to compute, the first beyond
        self._head = 0  # the next to enter or to come back
        self._fresh = 0  # the first that never ran
        self._is_full = False
        self._running: Ints = np.empty(0, dtype=np.int64)
        self._steps = self._swaps = self._finished = self._peak = 0
        self._spans: list[tuple[int, int, float]] = []  # (steps, running, held share summed over them) while saturated

    def _uses(self, positions: Ints) -> Ints:
        """Return what requests at `positions` take of each limit: (limits, *positions.shape)."""
        pages = np.stack([live_pages(pool, positions) for pool in self._pools])
        uses: Ints = np.tensordot(self._weights, pages, axes=1)
        return uses

    def _use(self, requests: Ints) -> Ints:
        """Return what `requests` take of each limit together, where they are now."""
        use: Ints = self._uses(self._at[requests]).sum(axis=1)
        return use

    def _fit_alone(self, lengths: Ints) -> NDArray[np.bool_]:
        """Return which requests fit an empty arena at every position that they compute."""
        ends = lengths.sum(axis=1)
        most = np.stack([np.minimum(ends // pool.page_tokens + 1, _longest_reach(pool)) for pool in self._pools])
        fits: NDArray[np.bool_] = (self._weights @ most <= self._limits[:, None]).all(axis=0)
        for doubtful in np.flatnonzero(~fits):
            prompt, output = lengths[doubtful]
            uses = self._uses(np.arange(prompt - 1, prompt + output - 1))
            fits[doubtful] = bool((uses <= self._limits[:, None]).all())
        return fits

    def step_until_change(self) -> bool:
        """Let requests in, then compute steps until there is something to decide; False when all have ended."""
        use = self._use(self._running)
        while bool((use > self._limits).any()):
            use = use - self._swap_out()
        candidate = self._enter(use)
        self._is_full |= candidate is not None
        if not len(self._running):
            return False
        positions = self._at[self._running]
        most = min(MOST_STEPS_AT_ONCE, int((self._end[self._running] - positions).min()))
        ahead = self._uses(positions[:, None] + np.arange(most)).sum(axis=1)  # (limits, steps)
        decides = (ahead > self._limits[:, None]).any(axis=0)
        if candidate is not None:
            decides |= (ahead + candidate[:, None] <= self._limits[:, None]).all(axis=0)
        decides[0] = False  # that is settled: whoever fits has entered
        steps = int(decides.argmax()) or most
        self._advance(steps, ahead[:, :steps])
        return True

    def _swap_out(self) -> Ints:
        youngest = self._running[-1:]
        self._head, self._running = int(youngest[0]), self._running[:-1]
        self._swaps += 1
        return self._use(youngest)

    def _enter(self, use: Ints) -> Ints | None:
        """Let the next ones in while they fit; return what the first that does not fit would take."""
        while self._head < len(self._at):
            if self._at[self._head] < self._end[self._head]:
                takes = self._use(np.array([self._head]))
                if bool((use + takes > self._limits).any()):
                    return takes
                use = use + takes
                self._running = np.append(self._running, self._head)
            self._head += 1
            self._fresh = max(self._fresh, self._head)
        return None

    def _advance(self, steps: int, uses: Ints) -> None:
        self._steps += steps
        self._peak = max(self._peak, len(self._running))
        if self._is_full and self._fresh < len(self._at):
            held = float(uses[0].sum()) / float(self._limits[0])
            self._spans.append((steps, len(self._running), held))
        self._at[self._running] += steps
        left = self._at[self._running] < self._end[self._running]
        self._finished += int((~left).sum())
        self._running = self._running[left]

    def bound(self) -> Bound:
        """Return the record; means are 0.0 where the queue never pressed."""
        measured = sum(steps for steps, _, _ in self._spans) or 1
        running = sum(steps * count for steps, count, _ in self._spans) / measured
        held = sum(share for _, _, share in self._spans) / measured
        return Bound(running, held, self._peak, self._steps, self._finished, self.rejected, self._swaps)

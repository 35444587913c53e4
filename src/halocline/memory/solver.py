"""The layout solver: one slab size that every pool cuts into whole pages with little loss.

The task in numbers: pools need pages of c_1, c_2, ... bytes; choose slab_bytes S and whole pages_per_slab k_p with
stride S / k_p >= c_p, a multiple of `unit` bytes (64 and every element size). Where S is a common multiple of all page
sizes nothing is padded, but a slab may be long, and each pool leaves on average part of one slab unused; so the solver
weighs, as shares of the arena:

    padding       (stride - c_p) / stride, the mean over the pools: which of them will hold the bytes is not known
    slab loss     one partly used slab per pool; in arenas of few slabs also the remainder below one slab
    straddling    positions of a page that a window or a request's end leaves unused; grows with page_tokens
    overhead      page tables and scattered reads; grows as pages get shorter

    Gemma 3 27B, 16-token pages:  26 x 1.25 MiB = 5 x 6.5 MiB = 32.5 MiB
    slab  |f|f|f|f|f|f|f|f|f|f|f|f|f|f|f|f|f|f|f|f|f|f|f|f|f|f|      as full pages
          |    s    |    s    |    s    |    s    |    s    |       as sliding pages

The search takes the pool with the longest page as anchor, tries 1 to 64 of its pages, and for the others the page
counts that come nearest; common multiples within reach are among them. Pure arithmetic on numbers, no layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, lcm

from halocline.memory.retention import Chunked, Full, Retention, Sliding, State
from halocline.units import ceil_div, ceil_to

SOLVER_PAGE_TOKENS = (1, 2, 4, 8, 16, 32, 64)
TYPICAL_TOKENS = 2048
"""Length of the request by which pools are weighed: long enough that windows are full, short enough that they count."""
PADDING_LIMIT = 0.01
"""A pool may pad more than this only where nothing else leaves enough slabs."""

_PADDING_PENALTY = 0.2
_PADDING_SLOPE = 10
_OVERHEAD_TOKENS = 0.3  # a page of P positions costs as much as P + 0.3: measured attention is about 2 % off at 16
_UNEQUAL_PENALTY = 0.005  # unequal pages coarsen the granule, so they must win something
_ANCHOR_PAGES = 64
_TRIALS = 80_000  # slabs to look at in all: a few tenths of a second
_FEW_SLABS = 64
_NEAR_COUNTS = 24


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What the solver must know of a pool."""

    retention: Retention
    page_bytes: Callable[[int], int]
    """Bytes of a page of so many positions."""
    choices: tuple[int, ...]
    """The page_tokens to choose from; (1,) for a state pool."""

    def typical_bytes(self) -> int:
        """Return the bytes that a request of TYPICAL_TOKENS needs here, page ends left out."""
        return _reach(self.retention) * self.page_bytes(1)

    def page_cost(self, page_tokens: int) -> float:
        """Return the share of the pool's bytes lost to straddling and short pages."""
        if isinstance(self.retention, State):
            return 0.0
        held_tokens = _most_pages(self.retention, page_tokens) * page_tokens
        return 1 - _reach(self.retention) / held_tokens + _OVERHEAD_TOKENS / page_tokens


@dataclass(frozen=True, slots=True)
class Cut:
    """A solution: the slab, and per pool the page length and the pages per slab."""

    slab_bytes: int
    page_tokens: tuple[int, ...]
    pages_per_slab: tuple[int, ...]
    loss: float
    """What the choice was judged by: the sum of the shares named above."""


def best_cut(pools: Sequence[PoolShape], budget_bytes: int, unit: int) -> Cut | None:
    """Return the cut with the least loss in `budget_bytes`, or None when no cut leaves one slab for each pool."""
    total = sum(pool.typical_bytes() for pool in pools)
    weights = [pool.typical_bytes() / total for pool in pools]
    best: Cut | None = None
    for base, tokens in _page_lengths(pools, weights):
        if best is not None and base >= best.loss:
            break  # the rest costs more even without any padding
        pages = [ceil_to(pool.page_bytes(length), unit) for pool, length in zip(pools, tokens, strict=True)]
        exact = [pool.page_bytes(length) for pool, length in zip(pools, tokens, strict=True)]
        for slab_bytes, counts in _slabs(pages, budget_bytes, unit):
            loss = base + _slab_loss(slab_bytes, len(pools), budget_bytes)
            if best is not None and loss >= best.loss:
                continue
            loss += _padding_loss(slab_bytes, counts, exact)
            if best is None or loss < best.loss:
                best = Cut(slab_bytes, tokens, counts, loss)
    return best


def smallest_slab_bytes(pools: Sequence[PoolShape], unit: int) -> int:
    """Return the shortest slab that holds one page of each pool in turn, with the shortest pages allowed."""
    return max(ceil_to(pool.page_bytes(pool.choices[0]), unit) for pool in pools)


def _reach(retention: Retention) -> int:
    """Return the positions that a request of TYPICAL_TOKENS needs (for a state: the one state)."""
    match retention:
        case Full():
            return TYPICAL_TOKENS
        case Sliding(window_tokens):
            return min(TYPICAL_TOKENS, window_tokens)
        case Chunked(chunk_tokens):
            return min(TYPICAL_TOKENS, chunk_tokens)
        case State():
            return 1


def _most_pages(retention: Sliding | Chunked | Full, page_tokens: int) -> float:
    """Return the pages that hold `_reach`: the worst alignment of a window, half a page over at a request's end."""
    reach = _reach(retention)
    match retention:
        case Full():
            return reach / page_tokens + (page_tokens - 1) / (2 * page_tokens)
        case Sliding():
            return ceil_div(reach - 1, page_tokens) + 1
        case Chunked():
            return ceil_div(reach + page_tokens - gcd(reach, page_tokens), page_tokens)


def _page_lengths(pools: Sequence[PoolShape], weights: Sequence[float]) -> list[tuple[float, tuple[int, ...]]]:
    """Return the combinations of page lengths worth trying with their cost, cheapest first.

    All combinations for a few; beyond that the cheapest and those of one length, which serve the smallest arenas.
    """
    ranked = []
    for tokens in product(*(pool.choices for pool in pools)):
        cost = sum(w * pool.page_cost(t) for w, pool, t in zip(weights, pools, tokens, strict=True))
        positional = {t for pool, t in zip(pools, tokens, strict=True) if not isinstance(pool.retention, State)}
        ranked.append((cost + _UNEQUAL_PENALTY * (len(positional) > 1), len(positional) <= 1, tokens))
    ranked.sort()
    affordable = max(4, _TRIALS // (_ANCHOR_PAGES * _breadth(len(pools)) ** (len(pools) - 1)))
    return [(cost, tokens) for place, (cost, equal, tokens) in enumerate(ranked) if equal or place < affordable]


def _breadth(pools: int) -> int:
    """Return how many page counts to try for each pool beside the anchor."""
    return 6 if pools <= 3 else max(2, 8 - pools)


def _slabs(pages: Sequence[int], budget_bytes: int, unit: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (slab_bytes, pages_per_slab) for page sizes in bytes (multiples of `unit`), at least one slab per pool."""
    longest_slab = budget_bytes // len(pages)
    anchor = max(range(len(pages)), key=pages.__getitem__)
    breadth = _breadth(len(pages))
    for anchor_pages in range(1, min(_ANCHOR_PAGES, longest_slab // pages[anchor]) + 1):
        target = anchor_pages * pages[anchor]
        for counts in _counts(pages, anchor, target, breadth):
            # The slab must be divisible into each count of pages of whole units: a multiple of their common multiple.
            slab = ceil_to(max(n * size for n, size in zip(counts, pages, strict=True)), unit * lcm(*counts))
            if slab <= longest_slab:
                yield slab, counts


def _counts(pages: Sequence[int], anchor: int, target: int, breadth: int) -> list[tuple[int, ...]]:
    """Return page counts that fill about `target` bytes in every pool and have a small common multiple.

    Pool by pool, the counts from one more than fit down to three percent less are candidates; kept are the nearest two
    and those with the smallest common multiple with the counts so far: a large one would round the slab up by much.
    """
    found: list[tuple[tuple[int, ...], int]] = [((), target // pages[anchor])]
    for index, size in enumerate(pages):
        if index == anchor:
            found = [((*counts, target // size), multiple) for counts, multiple in found]
            continue
        near = target // size
        fewest = max(1, near - min(_NEAR_COUNTS, near // 32))
        found = [
            ((*counts, count), lcm(multiple, count))
            for counts, multiple in found
            for count in _kept(range(near + 1, fewest - 1, -1), multiple, breadth)
        ]
    return [counts for counts, _ in found]


def _kept(counts: range, multiple: int, breadth: int) -> Iterable[int]:
    if len(counts) <= breadth:
        return counts
    return {*counts[:2], *sorted(counts, key=lambda count: count // gcd(count, multiple))[: breadth - 2]}


def _slab_loss(slab_bytes: int, pools: int, budget_bytes: int) -> float:
    # With many slabs the remainder is noise: counting it would let the layout jump with every byte of the budget.
    remainder = budget_bytes % slab_bytes if budget_bytes < _FEW_SLABS * slab_bytes else 0
    return (pools * slab_bytes + remainder) / budget_bytes


def _padding_loss(slab_bytes: int, counts: Sequence[int], page_bytes: Sequence[int]) -> float:
    shares = [1 - count * size / slab_bytes for count, size in zip(counts, page_bytes, strict=True)]
    excess = max(shares) - PADDING_LIMIT
    return sum(shares) / len(shares) + (_PADDING_PENALTY + _PADDING_SLOPE * excess if excess > 0 else 0)

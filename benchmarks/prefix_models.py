"""What `prefix_reuse.py` sets beside the real cache: simple policies in a model that knows bytes, but no arena.

All are one LRU over pieces, and differ in what a piece is and what is kept. Pieces of one request are touched from its
end to its beginning, so that a prefix outlives what hangs on it. What an output leaves is not kept: nobody can hit it.

    bound       full pages of whole blocks; windows cost nothing and are always there. No cache of this kind does better
    one lru     full and window pages of every block that is computed, alike
    tails       full pages, and window pages of exactly the last W positions before each prompt's end. The end of a
                prompt lies within a block, and who comes back resumes at the block's beginning, whose window begins
                earlier: mostly its first pages are missing. That is what a branch slack is for
    whole tails the same with W positions before the last whole block: what only one who knows the blocks can keep

A hit needs the full pages of all blocks before the boundary and the window pages of the last W - 1 positions before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

BLOCK_TOKENS = 512
WINDOW_TOKENS = 1024
PAGE_TOKENS = 16
PAGES = BLOCK_TOKENS // PAGE_TOKENS
WINDOW_BLOCKS = WINDOW_TOKENS // BLOCK_TOKENS

Piece = tuple[str, int, int]
"""Kind, block, page in the block (0 where the piece is a whole block)."""


@dataclass(frozen=True)
class Request:
    """One prompt of a trace."""

    tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    @property
    def whole(self) -> tuple[int, ...]:
        """The blocks that the prompt fills."""
        return self.blocks[: self.tokens // BLOCK_TOKENS]


@dataclass
class Lru:
    """Pieces with their bytes, least recently touched first."""

    limit: int
    full_bytes: int
    """Of one block."""
    window_bytes: int
    """Of one block."""
    held: OrderedDict[Piece, int] = field(default_factory=OrderedDict)
    used: int = 0

    def touch(self, pieces: Iterable[tuple[Piece, int]]) -> None:
        """Hold `pieces` as the most recent ones, the last one most."""
        for piece, size in pieces:
            if piece in self.held:
                self.held.move_to_end(piece)
            else:
                self.held[piece] = size
                self.used += size

    def shrink(self) -> None:
        """Drop the least recent pieces until the rest fits."""
        while self.used > self.limit:
            self.used -= self.held.popitem(last=False)[1]


Policy = Callable[[Lru, Request, int], int]
"""Touches what one request reads and leaves; returns the blocks that it hits, of those whose full pages are held."""


def bound(cache: Lru, request: Request, reach: int) -> int:
    """Keep full pages only, as if windows cost nothing."""
    cache.touch(_full(cache, request.whole))
    return reach


def one_lru(cache: Lru, request: Request, reach: int) -> int:
    """Keep whatever is computed or read, full and window pages alike."""
    ids = request.whole
    hit = next(at for at in range(reach, -1, -1) if all(("w", b, 0) in cache.held for b in _window(ids, at)))
    for at in range(len(ids) - 1, -1, -1):
        if at >= hit - WINDOW_BLOCKS:
            cache.touch([(("w", ids[at], 0), cache.window_bytes)])
        cache.touch([(("f", ids[at], 0), cache.full_bytes)])
    return hit


def tails(cache: Lru, request: Request, reach: int) -> int:
    """Keep full pages, and the windows of exactly W positions before the ends of prompts."""
    return _tails(cache, request, reach, request.tokens)


def whole_tails(cache: Lru, request: Request, reach: int) -> int:
    """Keep full pages, and the windows before the last whole blocks of prompts."""
    return _tails(cache, request, reach, len(request.whole) * BLOCK_TOKENS)


def _tails(cache: Lru, request: Request, reach: int, end: int) -> int:
    ids = request.whole
    hit = next(at for at in range(reach, -1, -1) if all(p in cache.held for p in _pages(ids, at * BLOCK_TOKENS)))
    size = cache.window_bytes // PAGES
    cache.touch((page, size) for page in [*_pages(ids, hit * BLOCK_TOKENS), *_pages(ids, end)])
    cache.touch(_full(cache, ids))
    return hit


def _full(cache: Lru, ids: Sequence[int]) -> Iterator[tuple[Piece, int]]:
    return ((("f", block, 0), cache.full_bytes) for block in reversed(ids))


def _window(ids: Sequence[int], boundary: int) -> Sequence[int]:
    return ids[max(0, boundary - WINDOW_BLOCKS) : boundary]


def _pages(ids: Sequence[int], end_tokens: int) -> Iterator[Piece]:
    # The window pages that position `end_tokens` reads, as far as they are in whole blocks.
    first = max(0, end_tokens - WINDOW_TOKENS + 1) // PAGE_TOKENS
    last = min(len(ids) * PAGES, -(-end_tokens // PAGE_TOKENS))
    return (("w", ids[page // PAGES], page % PAGES) for page in range(first, last))


def hit_rate(trace: Iterable[Request], policy: Policy, kv_bytes: int, full_bytes: int, window_bytes: int) -> float:
    """Return the share of prompt tokens that `policy` saves with `kv_bytes`; sizes are those of a block's pages."""
    cache, hits, total = Lru(kv_bytes, full_bytes, window_bytes), 0, 0
    for request in trace:
        ids, most = request.whole, (request.tokens - 1) // BLOCK_TOKENS
        reach = next((at for at, block in enumerate(ids) if ("f", block, 0) not in cache.held), len(ids))
        hits += policy(cache, request, min(reach, most)) * BLOCK_TOKENS
        total += request.tokens
        cache.shrink()
    return hits / total


def ideal(trace: Iterable[Request]) -> float:
    """Return the share of prompt tokens that a cache without end saves."""
    return hit_rate(trace, bound, 1 << 62, 1, 1)

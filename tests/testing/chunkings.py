"""An independent runner of one request: it holds page numbers one by one and knows no price.

It follows the rules in words: a page is held from the step that first touches it until no later token can see any of
its positions; what is out of the window is given up before the next chunk; a decode takes the pages of the tokens that
it computes; the KV of the last generated token is never written; a last chunk of one token is a decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from halocline.memory.retention import Chunked, Full, Retention, Sliding


def chunkings(tokens: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to cut `tokens` into chunks: 2 ** (tokens - 1) of them."""
    if tokens == 0:
        yield ()
    for first in range(1, tokens + 1):
        for rest in chunkings(tokens - first):
            yield (first, *rest)


def sees(retention: Retention, query: int, position: int) -> bool:
    """Whether the token at `query` reads the KV of `position`, written from the definition of each kind."""
    match retention:
        case Full():
            return position <= query
        case Sliding(window_tokens):
            return query - window_tokens < position <= query
        case Chunked(chunk_tokens):
            return position <= query and position // chunk_tokens == query // chunk_tokens
        case _:
            raise AssertionError("a state has no positions")


@dataclass
class Holding:
    """Pages held at one moment of a run."""

    computed: int
    """Tokens computed when the pages are counted, before the step that may be running."""
    pages: int


@dataclass
class Run:
    """What one way of chunking held: at boundaries and in decode steps, and while chunks ran."""

    resident: list[Holding] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, tokens, pages held while that chunk ran)."""


def run(
    retention: Retention, page_tokens: int, chunks: tuple[int, ...], new_tokens: int, lookahead_tokens: int = 0
) -> Run:
    """Run a request whose prompt is cut into `chunks` to its end, one accepted token per decode."""
    prompt_tokens = sum(chunks)
    last = prompt_tokens + new_tokens - 2  # the last position whose KV is ever written
    held: set[int] = set()
    seen = Run()
    computed = 0

    def give_up() -> None:
        for page in list(held):
            positions = range(page * page_tokens, min((page + 1) * page_tokens, computed))
            if not any(sees(retention, computed, position) for position in positions):
                held.discard(page)

    def touch(first: int, final: int) -> None:
        held.update(position // page_tokens for position in range(first, final + 1))

    for index, tokens in enumerate(chunks):
        if index == len(chunks) - 1 and tokens == 1:
            break
        touch(computed, computed + tokens - 1)
        seen.steps.append((computed, tokens, len(held)))
        computed += tokens
        give_up()
        if computed <= last:
            seen.resident.append(Holding(computed, len(held)))
    while computed <= last:
        touch(computed, min(computed + lookahead_tokens, last))
        seen.resident.append(Holding(computed, len(held)))
        computed += 1
        give_up()
    return seen


def most_held(
    retention: Retention, page_tokens: int, prompt_tokens: int, new_tokens: int, lookahead_tokens: int = 0
) -> dict[int, int]:
    """Return, for every boundary, the most pages that any way of chunking what is left holds from there on."""
    total_tokens = prompt_tokens + new_tokens - 1
    most = dict.fromkeys(range(total_tokens), 0)
    for chunks in chunkings(prompt_tokens):
        holdings = run(retention, page_tokens, chunks, new_tokens, lookahead_tokens).resident
        peak = 0
        for holding in reversed(holdings):
            peak = max(peak, holding.pages)
            most[holding.computed] = max(most[holding.computed], peak)
        most[0] = max(most[0], peak)
    return most

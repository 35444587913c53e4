"""How many pages one pool of a request holds: every term of the two prices, derived once.

Notation: P page_tokens, W window_tokens, A chunk_tokens of local attention, L prompt_tokens, m max_new_tokens,
k lookahead_tokens, s a boundary (the number of computed tokens, so the next position to compute is s).

    T = L + m - 1      positions that are ever computed: the last generated token's KV is never written
    decode at s        L - 1 <= s <= T - 1: computes s ... min(s + k, T - 1); a last chunk of one token is one too
    prefill at s       1 <= s < L: a boundary between two chunks; the next page is taken by the chunk, not held before

What is held, as runs of positions:

    decode at s        first_needed(s) ... min(s + k, T - 1)     the window and the pages of the next tokens
    prefill at s       first_needed(s) ... s - 1                 what the next chunk will still read

A resident price is the exact maximum of both over the boundaries from `computed_tokens` on (law L9): the caps of the
design, `ceil((W + k - 1) / P) + 1` and `ceil((A + P - gcd(A, P)) / P)`, are reached only when the life that is left
is long enough to pass a worst alignment, so near its end the price is lower than min(cap, ceil(T / P)).
"""

from __future__ import annotations

from math import gcd

from halocline.memory.retention import Chunked, Full, Retention, Sliding, State
from halocline.units import ceil_div


def pages_between(first: int, last: int, page_tokens: int) -> int:
    """Return the pages that positions first ... last (both included) touch; 0 when last < first."""
    return last // page_tokens - first // page_tokens + 1 if last >= first else 0


def longest_run(run: int, low: int, high: int, page_tokens: int) -> int:
    """Return the most pages of `run` positions that end at e, over low <= e <= high; runs are cut off at position 0.

    A run is [max(0, e - run + 1), e]. Cut off (e < run - 1), it has e // P + 1 pages, which grows with e. A whole one
    with run - 1 = q * P + t, 1 <= t <= P, begins t - (e mod P) positions or more before e's page on top of q whole
    pages: q + 2 pages when e mod P < t, else q + 1. A range of ends has an e with e mod P < t when its first end is
    one, or when it passes a multiple of P. (run = 1 gives q = -1, t = P: always one page.)
    """
    if run <= 0 or high < low:
        return 0
    if high < run:
        return high // page_tokens + 1
    low = max(low, run - 1)
    full_pages = (run - 2) // page_tokens  # q
    beyond = run - 1 - full_pages * page_tokens  # t
    straddles = low % page_tokens < beyond or high // page_tokens > low // page_tokens
    return full_pages + 1 + straddles


def sliding_resident(
    page_tokens: int, window_tokens: int, prompt_tokens: int, total_tokens: int, boundary: int, lookahead_tokens: int
) -> int:
    """Return the most pages of a sliding pool from `boundary` on.

    Decodes at s >= lo = max(boundary, L - 1) hold [max(0, s - W + 1), min(s + k, T - 1)]: while s + k <= T - 1 that is
    a run of W + k positions ending at s + k, so `longest_run` over the ends lo + k ... T - 1; later ends stay at T - 1
    and starts only rise, so nothing new is reached. When even lo + k > T - 1, the first decode holds the most.
    Prefill boundaries s hold the run of W - 1 positions that ends at s - 1.

    Two cases need no look at all this, because the bounds of every run are reached: T <= W, where the last decode holds
    all T, and P or more different ends of a whole run of W + k positions, among which is one at the worst alignment.
    """
    last = total_tokens - 1
    if last < window_tokens:
        return last // page_tokens + 1
    run = window_tokens + lookahead_tokens
    first_end = last - page_tokens + 1  # of P ends, the last of which is `last`
    first_run, ahead = run - 1, lookahead_tokens  # the first whole run ends there
    if first_run <= first_end and prompt_tokens - 1 + ahead <= first_end and boundary + ahead <= first_end:
        return (run - 2) // page_tokens + 2
    first_decode = max(boundary, prompt_tokens - 1)
    if first_decode + lookahead_tokens <= last:
        decode = longest_run(window_tokens + lookahead_tokens, first_decode + lookahead_tokens, last, page_tokens)
    else:
        decode = pages_between(max(0, first_decode - window_tokens + 1), last, page_tokens)
    if boundary >= prompt_tokens - 1:
        return decode
    prefill = longest_run(window_tokens - 1, max(boundary, 1) - 1, prompt_tokens - 2, page_tokens)
    return max(decode, prefill)


def chunked_resident(
    page_tokens: int, chunk_tokens: int, prompt_tokens: int, total_tokens: int, boundary: int, lookahead_tokens: int
) -> int:
    """Return the most pages of a chunked(A) pool from `boundary` on.

    A decode at s holds [floor(s / A) * A, min(s + k, T - 1)], a prefill boundary [floor(s / A) * A, s - 1]. Within one
    local chunk both only grow with s, so the last s of each local chunk holds the most: `_chunk_peak` looks at these.
    """
    last = total_tokens - 1
    first_decode = max(boundary, prompt_tokens - 1)
    decode = _chunk_peak(page_tokens, chunk_tokens, (first_decode, last), lookahead_tokens, last)
    if boundary >= prompt_tokens - 1:
        return decode
    # A prefill boundary s holds what ends at s - 1: the same run with a lookahead of -1.
    prefill = _chunk_peak(page_tokens, chunk_tokens, (max(boundary, 1), prompt_tokens - 1), -1, last)
    return max(decode, prefill)


def _chunk_peak(page_tokens: int, chunk_tokens: int, boundaries: tuple[int, int], ahead: int, last: int) -> int:
    """Return the most pages of [floor(s / A) * A, min(s + ahead, last)] over the boundaries s from low to high.

    Local chunks differ in where they begin in a page, which repeats after P / gcd(A, P) of them, and in whether they
    are cut (at `high` or at `last`). A later one that begins like an earlier one holds no more: it is of the same
    length or cut. So the first of each alignment are enough, in O(P) at most and mostly one.
    """
    low, high = boundaries
    if high < low:
        return 0
    first_chunk, last_chunk = low // chunk_tokens, high // chunk_tokens
    alignments = page_tokens // gcd(page_tokens, chunk_tokens)
    peak = 0
    for chunk in range(first_chunk, min(first_chunk + alignments, last_chunk + 1)):
        start = chunk * chunk_tokens
        boundary = min(high, start + chunk_tokens - 1)
        peak = max(peak, pages_between(start, min(boundary + ahead, last), page_tokens))
    return peak


def pool_resident(retention: Retention, page_tokens: int, life: tuple[int, int, int], lookahead_tokens: int) -> int:
    """Return the resident price of one pool in pages; `life` is (L, T, boundary)."""
    prompt_tokens, total_tokens, boundary = life
    match retention:
        case Full():
            return ceil_div(total_tokens, page_tokens)  # nothing is given up: the last decode holds all
        case Sliding():  # its window is not taken out by the pattern, which would double the time of all this
            window = retention.window_tokens
            return sliding_resident(page_tokens, window, prompt_tokens, total_tokens, boundary, lookahead_tokens)
        case Chunked(chunk_tokens):
            return chunked_resident(page_tokens, chunk_tokens, prompt_tokens, total_tokens, boundary, lookahead_tokens)
        case State():
            return 1  # one working state from the first step to the last, however many tokens (checkpoints are extra)

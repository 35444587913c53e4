"""Workloads with the statistics of two public traces, for everybody who does not have the traces.

`mooncake_like` follows the Mooncake conversation trace (FAST'25; 12,031 requests in 59 minutes): batches every three
seconds, prompts from 900 to 126,000 tokens with a long tail, one 512-token block that all share, and conversations that
go on after minutes. A later turn is the earlier prompt's whole blocks, the earlier output, and new text. What is hit in
an infinite prefix cache: 37 % of the prompt tokens, 90 % of them up to an earlier prompt's last whole block.

`azure_like` follows the Azure conversation trace of 2023 (Splitwise, ISCA'24; 19,366 requests in 58 minutes): single
arrivals whose rate drifts, and outputs whose length depends on the prompt's: a chat answer is long where the prompt has
1,000 to 1,200 tokens, and short where it has 4,000. Nothing is known there about shared prefixes, so nothing is shared.

The tables are quantiles of the traces at the probabilities in QUANTILES; between them the logarithm is interpolated.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from halocline.sim.readers import MOONCAKE_BLOCK_TOKENS, Row, jobs_of_rows
from halocline.sim.workload import Workload

MOONCAKE_REQUESTS = 12_031
AZURE_REQUESTS = 19_366

QUANTILES = np.array(
    (0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1)
)
Table = Sequence[float]

# ---- Mooncake conversation

BATCH_SECONDS = 3.0
BATCH_REQUESTS = 10.2
LONGEST_PROMPT = 126_195
FIRST_PROMPTS = (891, 894, 895, 897, 905, 943, 1092, 1756, 3913, 5264, 7418, 10770, 15871, 19436, 25559, 38493, 67125, 89867, 111632, 121160, 126195)  # fmt: skip # noqa: E501
OUTPUTS = (1, 3, 3, 10, 24, 46, 100, 213, 291, 350, 399, 447, 504, 543, 597, 698, 891, 1118, 1567, 2000, 2000)
THINK_SECONDS = (5, 14, 18, 30, 42, 51, 59, 75, 96, 125, 165, 228, 321, 390, 479, 608, 1013, 1471, 1924, 2668, 3030)
NEW_TOKENS = (-1197, -68, -55, -10, 4, 6, 8, 12, 17, 28, 59, 208, 802, 2800, 4303, 7036, 11871, 16855, 22372, 37651, 91467)  # fmt: skip # noqa: E501
"""A later prompt's length less the earlier prompt's and output's; negative where part of an answer was left out."""
GOES_ON = (0.32, 0.40, 0.55, 0.61, 0.68, 0.71, 0.76, 0.80, 0.89)
"""How often a conversation goes on after its first, second ... turn; the last figure holds from there on."""
GOES_ON_BY_LENGTH = ((1024, 0.0), (4096, 1.25), (8192, 1.05), (LONGEST_PROMPT + 1, 0.85))
"""The factor on it for prompts shorter than that: who has less than two whole blocks leaves no trace of going on."""
BRANCHES = 0.083
"""Share of first prompts that begin like some earlier one up to the middle of it: an edited or a shared document."""
BRANCH_BLOCKS = (2, 2, 2, 2, 2, 2, 3, 3, 4, 6, 8, 11, 16, 19, 25, 39, 67, 79, 145, 145, 145)
BRANCH_TOKENS = (10, 545, 776, 975, 2651, 4205, 5160, 7365, 8608, 9786, 11191, 13922, 16094, 17411, 19950, 26605, 31575, 40156, 46767, 75321, 94968)  # fmt: skip # noqa: E501
REPEATS = 0.0144
"""Share of first prompts that are an earlier one once more."""
LOOKS_BACK = 400
"""How many earlier prompts are looked through for one that is long enough."""

# ---- Azure conversation

AZURE_RATES = (4.82, 4.74, 5.19, 5.20, 6.28, 7.46, 7.43, 6.13, 5.67, 4.75, 4.32, 4.20)
"""Arrivals per second in each five minutes, over and over."""
AZURE_RATE_SECONDS = 300.0
AZURE_SHAPE = 0.94
"""Shape of the gamma distribution of the gaps: nearly a Poisson process, once the rate is known."""
AZURE_PROMPTS = (2, 29, 91, 181, 207, 372, 387, 403, 703, 1020, 1071, 1130, 1315, 1876, 2734, 4083, 4098, 4142, 4831, 6179, 14050)  # fmt: skip # noqa: E501
AZURE_OUTPUTS = (
    (250, (11, 12, 12, 14, 52, 70, 84, 108, 131, 154, 164, 179, 194, 211, 217, 217, 244, 274, 331, 1000, 1000)),
    (500, (7, 18, 18, 51, 62, 70, 77, 84, 89, 93, 97, 103, 111, 119, 130, 145, 163, 181, 200, 375, 739)),
    (1000, (10, 33, 40, 47, 68, 81, 88, 102, 124, 383, 395, 403, 417, 427, 441, 475, 558, 600, 612, 703, 921)),
    (1100, (30, 57, 81, 366, 378, 385, 390, 396, 398, 406, 413, 420, 431, 446, 483, 550, 616, 656, 915, 970, 1000)),
    (1200, (28, 43, 49, 86, 373, 379, 387, 395, 397, 405, 414, 423, 434, 450, 500, 571, 627, 667, 919, 992, 1000)),
    (1500, (26, 41, 44, 52, 68, 83, 99, 138, 156, 178, 201, 241, 396, 402, 415, 440, 520, 593, 645, 929, 954)),
    (3000, (15, 29, 34, 43, 49, 52, 58, 70, 79, 87, 96, 107, 121, 130, 143, 159, 186, 203, 283, 527, 594)),
    (20000, (17, 26, 27, 30, 35, 38, 40, 45, 50, 57, 66, 76, 98, 111, 130, 154, 197, 240, 370, 681, 757)),
)
"""Output lengths by prompt length: the table for prompts shorter than that."""


def mooncake_like(requests: int = MOONCAKE_REQUESTS, seed: int = 0) -> Workload:
    """Return so many requests with the statistics of the Mooncake conversation trace."""
    source = f"mooncake-like:requests={requests},seed={seed}"
    rows = _Conversations(np.random.default_rng(seed)).rows(requests)
    return Workload("mooncake-like", source, jobs_of_rows(rows, MOONCAKE_BLOCK_TOKENS))


def azure_like(requests: int = AZURE_REQUESTS, seed: int = 0) -> Workload:
    """Return so many requests with the statistics of the Azure conversation trace of 2023."""
    random = np.random.default_rng(seed)
    gaps = random.gamma(AZURE_SHAPE, 1 / AZURE_SHAPE, requests)
    chances = random.random((2, requests))
    prompts = [_drawn(AZURE_PROMPTS, chance) for chance in chances[0]]
    rows, now = list[Row](), 0.0
    for number, (gap, prompt_tokens, chance) in enumerate(zip(gaps, prompts, chances[1], strict=True), 1):
        now += float(gap) / AZURE_RATES[int(now / AZURE_RATE_SECONDS) % len(AZURE_RATES)]
        outputs = next(table for below, table in AZURE_OUTPUTS if prompt_tokens < below)
        rows.append(Row(f"line {number + 1}", now, prompt_tokens, _drawn(outputs, chance), ()))
    return Workload("azure-like", f"azure-like:requests={requests},seed={seed}", jobs_of_rows(rows, 1))


class _Conversations:
    """Conversations that begin, go on after a while, branch and end, batch by batch."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._rows: list[Row] = []
        self._times: list[float] = []
        self._due: list[tuple[float, int, int]] = []
        """(seconds, row, its turn) of conversations that go on."""
        self._blocks = 1
        """Block 0 begins every prompt."""

    def rows(self, requests: int) -> list[Row]:
        """Return the first rows; a row's name is its line in a file of them."""
        now = 0.0
        while len(self._rows) < requests:
            for _ in range(max(1, int(self._random.poisson(BATCH_REQUESTS)))):
                self._next(now)
            now += BATCH_SECONDS
        return self._rows[:requests]

    def _next(self, now: float) -> None:
        turn = 1
        if self._due and self._due[0][0] <= now:
            _, before, turn = heapq.heappop(self._due)
            blocks, tokens = self._later_turn(self._rows[before])
        else:
            blocks, tokens = self._first_turn(now)
        output_tokens = _drawn(OUTPUTS, self._random.random())
        self._rows.append(Row(f"line {len(self._rows) + 1}", now, tokens, output_tokens, blocks))
        self._times.append(now)
        chance = GOES_ON[min(turn, len(GOES_ON)) - 1] * next(by for below, by in GOES_ON_BY_LENGTH if tokens < below)
        if self._random.random() < chance:
            think = _drawn(THINK_SECONDS, self._random.random())
            heapq.heappush(self._due, (now + think, len(self._rows) - 1, turn + 1))

    def _later_turn(self, before: Row) -> tuple[tuple[int, ...], int]:
        """Return blocks and length of a prompt that holds an earlier one, its output, and more."""
        more = float(np.interp(self._random.random(), QUANTILES, NEW_TOKENS))
        whole = before.prompt_tokens // MOONCAKE_BLOCK_TOKENS
        tokens = before.prompt_tokens + before.output_tokens + round(more)
        tokens = min(max(tokens, whole * MOONCAKE_BLOCK_TOKENS + 1), LONGEST_PROMPT)
        return self._filled(before.blocks[:whole], tokens), tokens

    def _first_turn(self, now: float) -> tuple[tuple[int, ...], int]:
        kind = self._random.random()
        if kind < REPEATS and self._rows:
            same = self._rows[self._earlier(now)]
            return same.blocks, same.prompt_tokens
        if kind < REPEATS + BRANCHES and self._rows:
            shared = round(_drawn(BRANCH_BLOCKS, self._random.random()))
            latest = self._earlier(now)
            for row in self._rows[latest : max(-1, latest - LOOKS_BACK) : -1] if latest else ():
                if row.prompt_tokens // MOONCAKE_BLOCK_TOKENS > shared:
                    more = _drawn(BRANCH_TOKENS, self._random.random())
                    tokens = min(shared * MOONCAKE_BLOCK_TOKENS + more, LONGEST_PROMPT)
                    return self._filled(row.blocks[:shared], tokens), tokens
        tokens = _drawn(FIRST_PROMPTS, self._random.random())
        return self._filled((0,), tokens), tokens

    def _earlier(self, now: float) -> int:
        """Return a row from about as long ago as conversations pause."""
        think = _drawn(THINK_SECONDS, self._random.random())
        return max(0, bisect_right(self._times, now - think) - 1)

    def _filled(self, shared: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Return `shared` and fresh blocks, as many as `tokens` take."""
        fresh = -(-tokens // MOONCAKE_BLOCK_TOKENS) - len(shared)
        self._blocks += fresh
        return (*shared, *range(self._blocks - fresh, self._blocks))


def _drawn(table: Table, chance: float) -> int:
    """Return the whole number that a share of `chance` of a table's distribution does not exceed."""
    return max(1, round(float(np.exp(np.interp(chance, QUANTILES, _logarithms(tuple(table)))))))


@lru_cache
def _logarithms(table: tuple[float, ...]) -> NDArray[np.float64]:
    return np.log(table)

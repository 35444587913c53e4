"""A closed loop of streaming clients against an OpenAI-compatible URL, and what they saw.

Each client sends its next request when the last one has ended.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

from halocline.replay import Answer, LoadError, ask, first_model, open_client

__all__ = ["Answer", "Load", "LoadError", "LoadReport", "first_model", "random_prompt", "run_load"]


@dataclass(frozen=True, slots=True)
class Load:
    """What to send: `requests` prompts of `prompt_tokens` random tokens, `concurrency` at a time."""

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    seed: int = 0
    stagger_seconds: float = 0.0
    """Clients start this far apart."""


@dataclass(slots=True)
class LoadReport:
    """All answers of one run and how long it took."""

    seconds: float
    answers: list[Answer] = field(default_factory=list)

    @property
    def output_tokens_per_second(self) -> float:
        """Generated tokens per second, over the whole run."""
        return sum(answer.output_tokens for answer in self.answers) / self.seconds

    @property
    def total_tokens_per_second(self) -> float:
        """Prompt and generated tokens per second, over the whole run."""
        return sum(answer.output_tokens + answer.prompt_tokens for answer in self.answers) / self.seconds

    def percentile(self, value: Callable[[Answer], float], percent: float) -> float:
        """Return the nearest-rank percentile of a value over the answers; 0 when there are none."""
        ordered = sorted(map(value, self.answers))
        return ordered[max(0, ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0


def random_prompt(seed: int, tokens: int) -> list[int]:
    """Return `tokens` token ids that every vocabulary has, above the usual special ones."""
    return random.Random(seed).choices(range(20, 120), k=tokens)


async def run_load(url: str, model: str, load: Load, api_key: str | None = None) -> LoadReport:
    """Send `load` to the server at `url`; raises LoadError with the server's words when a request fails."""
    waiting = iter(range(load.requests))
    report = LoadReport(0.0)
    start = time.perf_counter()
    async with open_client(url, api_key, load.concurrency) as client:

        async def work(index: int) -> None:
            await asyncio.sleep(index * load.stagger_seconds)
            for number in waiting:
                prompt = random_prompt(load.seed + number, load.prompt_tokens)
                report.answers.append(await ask(client, model, prompt, load.output_tokens))

        clients = [asyncio.ensure_future(work(index)) for index in range(load.concurrency)]
        try:
            await asyncio.gather(*clients)
        finally:
            for each in clients:
                each.cancel()
    report.seconds = time.perf_counter() - start
    return report

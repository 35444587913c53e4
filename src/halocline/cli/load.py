"""A closed loop of streaming clients against an OpenAI-compatible URL, and what they saw.

Each client sends its next request when the last one has ended. Times are taken where a client takes them: from
sending the request to reading a piece of the answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from math import ceil

import httpx

from halocline.errors import ConfigError, FailedError


class LoadError(FailedError):
    """The server under load answered with an error, or no longer."""


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
class Answer:
    """What one client saw of one request; times in seconds."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def token_seconds(self) -> float:
        """Seconds per token after the first."""
        return (self.total_seconds - self.first_token_seconds) / max(1, self.output_tokens - 1)


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
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.concurrency)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    start = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, headers=headers) as client:

        async def work(index: int) -> None:
            await asyncio.sleep(index * load.stagger_seconds)
            for number in waiting:
                prompt = random_prompt(load.seed + number, load.prompt_tokens)
                report.answers.append(await _one(client, model, prompt, load.output_tokens))

        clients = [asyncio.ensure_future(work(index)) for index in range(load.concurrency)]
        try:
            await asyncio.gather(*clients)
        finally:
            for each in clients:
                each.cancel()
    report.seconds = time.perf_counter() - start
    return report


async def first_model(url: str, api_key: str | None = None) -> str:
    """Return the name of the model that the server at `url` serves; raises ConfigError when nobody answers."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30, headers=headers) as client:
            response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ConfigError([f"no server answers at {url}: {error or type(error).__name__}"]) from error
    if response.status_code != 200:
        raise ConfigError([f"{url}/v1/models answered {response.status_code}: {response.text[:200]}"])
    return str(response.json()["data"][0]["id"])


async def _one(client: httpx.AsyncClient, model: str, prompt: Sequence[int], output_tokens: int) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer()
    start = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise LoadError(f"a request was answered {response.status_code}: {(await response.aread()).decode()}")
            async for event in _events(response):
                if event["choices"] and not answer.first_token_seconds:
                    answer.first_token_seconds = time.perf_counter() - start
                if event.get("usage"):
                    answer.prompt_tokens = event["usage"]["prompt_tokens"]
                    answer.output_tokens = event["usage"]["completion_tokens"]
    except httpx.HTTPError as error:
        raise LoadError(f"the connection broke: {error or type(error).__name__}") from error
    answer.total_seconds = time.perf_counter() - start
    return answer


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, object]]:
    """Yield the JSON events of a stream; an error event ends it with LoadError."""
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise LoadError(f"a request failed in mid-stream: {event['error']}")
        yield event

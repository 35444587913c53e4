"""One streaming client of an OpenAI-compatible server: sends a request and takes the times where a client takes them.

Times run from sending the request to reading a piece of the answer. `bench` and `replay --server` ask through here.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from halocline.errors import ConfigError, FailedError
from halocline.units import parse_server

WORDS_OF_SERVER = 300
"""So many characters of a server's complaint are passed on."""


class LoadError(FailedError):
    """The server under load answered with an error, or no longer. `status` is its HTTP status, 0 without one."""

    def __init__(self, message: str, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


@dataclass(slots=True)
class Answer:
    """What one client saw of one request; times in seconds since it was sent."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    cached_tokens: int | None = None
    """Prompt tokens that the server says it did not compute; None: it does not say."""
    token_ids: list[int] = field(default_factory=list)
    """What was generated, where it was asked for and the server tells."""
    pieces: int = 0
    """Events that brought a part of the answer; a piece is usually one token."""

    @property
    def token_seconds(self) -> float:
        """Seconds per token after the first."""
        return (self.total_seconds - self.first_token_seconds) / max(1, self.output_tokens - 1)


def open_client(url: str, api_key: str | None = None, connections: int | None = None) -> httpx.AsyncClient:
    """Return a client of the server at `url` that waits as long as the server does; keeps `connections` open."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=connections)
    return httpx.AsyncClient(base_url=base_of(url), timeout=None, limits=limits, headers=headers)


def base_of(url: str) -> str:
    """Return `url` without the `/v1` that other programs want at its end.

    Raises ConfigError where it says of no server how to reach it: httpx would find out in the middle of the work, and
    of a port that cannot be only by an OverflowError.
    """
    try:
        parse_server(url)
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL) as error:
        message = f"{url!r} is no server's address; write a URL such as http://127.0.0.1:8000"
        raise ConfigError([message]) from error
    return url.rstrip("/").removesuffix("/v1")


async def first_model(url: str, api_key: str | None = None) -> str:
    """Return the name of the model that the server at `url` serves; raises ConfigError when nobody answers."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(base_url=base_of(url), timeout=30, headers=headers) as client:
            response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ConfigError([f"no server answers at {url}: {str(error) or type(error).__name__}"]) from error
    if response.status_code != 200:
        raise ConfigError([f"{url}/v1/models answered {response.status_code}: {response.text[:WORDS_OF_SERVER]}"])
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError([f"{url}/v1/models names no model: {response.text[:WORDS_OF_SERVER]}"]) from error


async def ask(
    client: httpx.AsyncClient,
    model: str,
    prompt: Sequence[int] | str,
    output_tokens: int,
    answer: Answer | None = None,
    on_first: Callable[[], None] = lambda: None,
    *,
    wants_ids: bool = False,
) -> Answer:
    """Send one greedy completion of exactly `output_tokens` and read it to its end.

    `answer` is filled as the pieces come, so that who is cancelled still has what was seen; `on_first` is called at the
    first piece; `wants_ids` asks the server for the tokens of its answer. Raises LoadError with the server's words when
    the request fails.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if wants_ids:
        body["return_token_ids"] = True
    answer = Answer() if answer is None else answer
    start = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                words = (await response.aread()).decode(errors="replace")
                raise LoadError(f"a request was answered {response.status_code}: {words}", response.status_code)
            async for event in _events(response):
                if _note(answer, event, time.perf_counter() - start):
                    on_first()
    except httpx.HTTPError as error:
        raise LoadError(f"the connection broke: {str(error) or type(error).__name__}") from error
    answer.total_seconds = time.perf_counter() - start
    if not answer.output_tokens and answer.first_token_seconds:
        answer.output_tokens = answer.pieces  # the server gives no usage
    return answer


def _note(answer: Answer, event: dict[str, Any], seconds: float) -> bool:
    """Write down one event of a stream; return whether it brought the first piece of the answer."""
    is_first = bool(event.get("choices")) and not answer.first_token_seconds
    if event.get("choices"):
        answer.pieces += 1
        answer.token_ids += event["choices"][0].get("token_ids") or ()
        answer.first_token_seconds = answer.first_token_seconds or seconds
    if usage := event.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.output_tokens = usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return is_first


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON events of a stream; an error event ends it with LoadError."""
    async for line in response.aiter_lines():
        if not line.startswith("data:") or line.removeprefix("data:").strip() == "[DONE]":
            continue
        try:
            event = json.loads(line.removeprefix("data:"))
        except ValueError as error:
            raise LoadError(f"the stream holds what is no JSON: {line[:WORDS_OF_SERVER]}") from error
        if "error" in event:
            raise LoadError(f"a request failed in mid-stream: {event['error']}")
        yield event

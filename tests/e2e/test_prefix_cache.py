"""Law L11 for the prefix cache with real weights: the same greedy tokens with it and without (float32, up to ties).

Questions with one stem, all at once, in an arena so small that cached pages are evicted and requests retracted; then
once more, when the cache is hot. A server without a cache and with room for everything says what is right, and how far
its two best tokens lie apart.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from halocline.cli.watch import RETRACTIONS, needed_bytes, until_idle
from halocline.config import Config
from halocline.serve import running_server
from testing.reference import Reference, compare

MAX_TOKENS = 24
SHORT_ANSWERS = 33
"""Enough that the engine trusts what it saw (32), of the same class of max_tokens as the questions."""
STEM = (
    "A halocline is the line between two waters that share one basin. In the caves of Yucatan divers see it as a "
    "shimmer, where fresh water lies on salt water. It moves with rain and tide, and no wall holds it. Where a river "
    "meets the sea, the salt water creeps upstream below the fresh.\n\n"
    "Q: Which water lies above?\nA: The fresh one.\n\nQ: What holds the line?\nA: Nothing; it moves.\n\nQ: "
)
QUESTIONS = (
    "Where do divers see it?",
    "What moves it?",
    "Which water is heavier, and why?",
    "Why does the salt water creep upstream?",
    "What does it look like?",
    "How many waters share the basin?",
    "What happens when it rains for a week?",
    "Is there a wall between them? Explain in one sentence what there is instead.",
)


def config(prefix_cache: str, kv_bytes: str) -> Config:
    return Config(
        model="gemma3-270m",
        dtype="float32",
        port=0,
        kv_bytes=kv_bytes,
        admission="expected:0.05",
        prefix_cache=prefix_cache,
        step_tokens=128,
        max_model_len=256,
        max_running_requests=40,
        log_level="warning",
        audit="every",
        # One thread does not wait for another that has no core: the same time on a busy machine as on an idle one.
        threads=1,
    )


async def ask(client: httpx.AsyncClient, prompt: str, **wishes: object) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True, **wishes}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def all_at_once(url: str, **wishes: object) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        return list(await asyncio.gather(*(ask(client, f"{STEM}{each}\nA:", **wishes) for each in QUESTIONS)))


async def teach(url: str) -> None:
    """Let the engine see short answers, so that it grants little and must retract."""
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        await asyncio.gather(*(ask(client, "The", stop=[" ", "\n", "."]) for _ in range(SHORT_ANSWERS)))


def ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def cached(answers: list[dict[str, Any]]) -> int:
    return sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)


def reference(answer: dict[str, Any]) -> Reference:
    """Return an answer with log-probabilities as the reference of others: the gaps are those of its logits."""
    best = [sorted(each.values(), reverse=True) for each in answer["choices"][0]["logprobs"]["top_logprobs"]]
    return Reference([], ids(answer), [each[0] - each[1] if len(each) > 1 else 0.0 for each in best])


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_real_model_says_the_same_with_a_prefix_cache_and_without() -> None:
    with running_server(config("off", "128MiB")) as server:
        plain = asyncio.run(all_at_once(server.url, logprobs=2))
    assert cached(plain) == 0
    with running_server(config("on", "12MiB")) as server:
        asyncio.run(teach(server.url))
        cold = asyncio.run(all_at_once(server.url))
        hot = asyncio.run(all_at_once(server.url))
        figures = asyncio.run(until_idle(server.url))
    assert server.process.returncode == 0, list(server.lines)
    for answers in (cold, hot):
        verdicts = [compare(reference(right), ids(answer)) for right, answer in zip(plain, answers, strict=True)]
        assert "different" not in verdicts, verdicts
    evicted = sum(value for name, value in figures.items() if name.startswith("halocline_evicted_pages_total"))
    print(
        f"\n{figures[RETRACTIONS]:.0f} retractions, {evicted:.0f} pages evicted, "
        f"{cached(cold)} tokens cached when cold and {cached(hot)} when hot"
    )
    assert evicted > 0, "nothing was evicted: nothing was tested"
    assert figures[RETRACTIONS] > 0, "nothing was retracted: nothing was tested"
    assert cached(hot) > 0, "nothing was found: nothing was tested"
    assert needed_bytes(figures) == 0, "bytes are still needed after the last answer"
    assert figures["halocline_violations_total"] == 0

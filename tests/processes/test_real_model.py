"""The same with Gemma 3 270M: 50 prompts in two processes, over shared memory and over TCP, against `generate`'s tokens
as one process of ours has them, and not one page more on the wire than the decode worker lacks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from halocline.config import Config
from testing.pair import Client, check_bytes, page_exact_bytes, pair
from testing.server import LiveServer

pytestmark = pytest.mark.e2e

WINDOW = 512
TOKENS = 12
PROMPTS = 50


def prompts() -> list[list[int]]:
    """Half of them short, some longer than the window and than a step; every fifth begins as the one before it."""
    draw = random.Random(7)
    found: list[list[int]] = []
    for number in range(PROMPTS):
        length = (20, 100, 300, 700, 60)[number % 5]
        prompt = [2, *(draw.randrange(1000, 200_000) for _ in range(length))]
        found.append(found[-1] + prompt[1:] if number % 5 == 4 else prompt)
    return found


@pytest.mark.parametrize("link_kind", ["shm", "tcp"])
@pytest.mark.timeout(900)
def test_50_prompts_have_the_tokens_of_one_process(link_kind: str) -> None:
    base = Config(dtype="float32", kv_bytes="256MiB", log_level="error", lease_seconds=60.0, link_kind=link_kind)
    with pair(replace(base, threads=1), decode={}) as (prefill, decode):
        asking = Client(prefill, decode)
        with asking.http:
            exact = 0
            for prompt in prompts():
                alone = _alone(asking, prefill, prompt)
                tokens, usage = asking.ask(prompt, TOKENS, ignore_eos=True)
                assert tokens == alone
                start = usage["prompt_tokens_details"]["cached_tokens"]
                exact += page_exact_bytes(decode, len(prompt), start, WINDOW)
            check_bytes(prefill, decode, exact)


def _alone(asking: Client, server: LiveServer, prompt: list[int]) -> list[int]:
    """Ask one worker for all of it: each is a complete engine."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = asking.http.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens

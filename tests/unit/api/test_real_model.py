"""The whole server on a real tiny model with sliding windows, in an arena too small for what is asked of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from halocline.compose import prepare
from halocline.config import Config
from halocline.model.chat import chat_template
from testing.models import reference_tokens, save_tiny, tiny_model, tiny_prompt, tiny_tokenizer
from testing.server import LiveServer, live_server

PROMPTS = [tiny_prompt(length, seed=length) for length in (3, 11, 12, 13, 30, 45, 60)]
TOKENS = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = save_tiny(tmp_path_factory.mktemp("tiny"), "gemma3")
    config = Config(
        model=str(folder),
        served_model_name="tiny",
        dtype="float64",
        kv_bytes="160KiB",
        step_tokens=48,
        max_running_requests=16,
        audit="every",
        log_level="error",
    )
    prepared = prepare(config, quiet=True)
    with live_server(spec=prepared.spec, chat=chat_template(tiny_tokenizer())) as live:
        yield live


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """What transformers' own `generate` continues each prompt with, by the prompt's length."""
    model = tiny_model("gemma3")
    return {len(prompt): reference_tokens(model, prompt, TOKENS) for prompt in PROMPTS}


async def test_many_clients_at_once_each_get_the_reference_text(
    server: LiveServer, expected: dict[int, list[int]]
) -> None:
    tokenizer = tiny_tokenizer()

    async def ask(client: openai.AsyncOpenAI, prompt: list[int]) -> str:
        stream = await client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        prompts = PROMPTS * 4
        texts = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
    for prompt, text in zip(prompts, texts, strict=True):
        whole = tokenizer.decode(expected[len(prompt)], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        # Only a character that was cut in half at the end may be missing.
        assert whole.startswith(text), f"prompt of {len(prompt)} tokens"
        assert set(whole[len(text) :]) <= {"\ufffd"}
    server.wait_idle()
    figures = server.snapshot.figures
    assert figures is not None
    assert figures.totals.peak_running < len(prompts), "the arena was too large for this test to mean anything"
    assert server.snapshot.violations == ()


def test_the_capacity_record_comes_through_the_hello(server: LiveServer) -> None:
    capacity = server.client.hello.capacity
    assert capacity is not None
    assert [pool.name for pool in capacity.pools] == ["full", "sliding-12"]
    assert capacity.arena_bytes <= 160 * 1024


def test_a_seeded_answer_repeats_whatever_else_runs(server: LiveServer) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

        def ask(n: int) -> list[str]:
            answer = client.completions.create(
                model="tiny", prompt=PROMPTS[2], max_tokens=16, temperature=1.0, seed=11, n=n
            )
            return [choice.text for choice in answer.choices]

        alone, together = ask(1), ask(8)
    assert together[0] == alone[0]
    assert len(set(together)) > 1, "completion i has seed + i"


async def test_random_disconnects_leave_nothing_in_the_arena(server: LiveServer) -> None:
    chance = random.Random(3)
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

        async def ask() -> None:
            stream = await client.completions.create(
                model="tiny", prompt=tiny_prompt(chance.randint(1, 70), seed=1), max_tokens=40, stream=True
            )
            leaves_after = chance.choice([1, 3, 8, 1000])
            async for _ in stream:
                leaves_after -= 1
                if leaves_after == 0:
                    break
            await stream.close()

        await asyncio.gather(*(ask() for _ in range(40)))
    server.wait_idle()
    assert server.snapshot.violations == ()


def test_a_prompt_longer_than_anything_that_fits_is_refused_with_the_arithmetic(server: LiveServer) -> None:
    limit = server.client.model.max_model_len
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt=[5] * (limit + 1))
        assert caught.value.code == "context_length_exceeded"
        assert str(limit) in str(caught.value)
        assert client.completions.create(model="tiny", prompt=[5] * (limit - 1)).usage is not None

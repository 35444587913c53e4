"""The official client, sync and async, against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from testing.server import LiveServer


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60.0) as made:
        yield made


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=100, temperature=0.5, seed=1)
    assert answer.choices[0].text == "Hé 😀 abc"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert answer._request_id == answer.id


def test_a_streamed_completion(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="fake", prompt="abc", stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "Hé 😀 abc"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 3


def test_completions_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="abc", logprobs=1, n=2)
    assert len(answer.choices) == 2
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens[0] == "H"


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        max_completion_tokens=3,
        logprobs=True,
        top_logprobs=1,
    )
    assert answer.choices[0].message.content == "Hé"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert content[0].top_logprobs[0].token == "H"


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "u"}], stream=True)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hé 😀 [user]u\n[assistant]"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_list_of_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_errors_arrive_as_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="a", max_tokens=10_000)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="fake", prompt="please FAIL")


def test_an_error_in_mid_stream_is_raised(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="fake", prompt=["good", "please FAIL"], stream=True)
    with pytest.raises(openai.APIError, match="logits"):
        list(stream)


async def test_the_async_client_with_many_at_once(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

        async def ask(i: int) -> str:
            stream = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": str(i)}], stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*map(ask, range(40)))
        assert answers == [f"Hé 😀 [user]{i}\n[assistant]" for i in range(40)]
        whole = await client.completions.create(model="fake", prompt="abc")
        assert whole.choices[0].text == "Hé 😀 abc"


async def test_a_stream_that_is_left_early_frees_its_memory(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        stream = await client.completions.create(
            model="fake", prompt="a", stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()

"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from testing.engine import fake_chat
from testing.server import events, live_server

HELLO = [{"role": "user", "content": "hi"}]
TEXT = "Hé 😀 [user]hi\n[assistant]"


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json={"messages": HELLO} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_chat_completion_has_the_shape_that_clients_expect(http: httpx.Client) -> None:
    answer = chat(http, model="fake")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"]["prompt_tokens"] == len("[user]hi\n[assistant]")


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(http: httpx.Client) -> None:
    chunks = events(http, "/v1/chat/completions", messages=HELLO, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["total_tokens"] > 0
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_content_may_be_text_parts_and_a_developer_is_the_system(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts, "name": "Ann"}]
    text = chat(http, messages=messages)["choices"][0]["message"]["content"]
    assert text == "Hé 😀 [system]be brief\n[user]ab\n[assistant]"


def test_logprobs_have_tokens_bytes_and_the_best_alternatives(http: httpx.Client) -> None:
    choice = chat(http, logprobs=True, top_logprobs=2, max_tokens=3)["choices"][0]
    first, second, third = choice["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("H", [0x48], -0.5)
    assert [each["logprob"] for each in first["top_logprobs"]] == [-0.5, -2.68]
    assert bytes(second["bytes"] + third["bytes"]).decode() == "é"


def test_logprobs_without_alternatives(http: httpx.Client) -> None:
    content = chat(http, logprobs=True, max_tokens=1)["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_work(http: httpx.Client, name: str) -> None:
    answer = chat(http, **{name: 1})
    assert answer["usage"]["completion_tokens"] == 1


def test_a_model_without_template_gets_the_plain_one_with_a_warning() -> None:
    with live_server(reply="ok", chat=fake_chat(is_fallback=True)) as server:
        response = httpx.post(server.url + "/v1/chat/completions", json={"messages": HELLO})
    assert response.status_code == 200
    assert "no chat template" in response.headers["x-halocline-warning"]


def test_a_model_with_a_template_gets_no_warning(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={"messages": HELLO})
    assert "x-halocline-warning" not in response.headers

"""What a client may get wrong: each is one clear error in OpenAI's shape, and the server is none the worse for it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from typing import Any

import httpx
import pytest

from halocline.api.body import MAX_BODY_BYTES
from testing.engine import fake_chat
from testing.server import LiveServer, live_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "missing"),
        ({"prompt": 3}, "prompt", "is a number"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [""]}, "prompt", "empty"),
        ({"prompt": ["a", 3]}, "prompt", "token id"),
        ({"prompt": [1, "a"]}, "prompt", "token id"),
        ({"prompt": [1, True]}, "prompt", "token id"),
        ({"prompt": [1.5]}, "prompt", "token id"),
        ({"prompt": [259]}, "prompt", "0 to 258"),
        ({"prompt": [-1]}, "prompt", "0 to 258"),
        ({"prompt": [10**30]}, "prompt", "0 to 258"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "from 1"),
        ({"prompt": "a", "max_tokens": -5}, "max_tokens", "from 1"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "whole number"),
        ({"prompt": "a", "max_tokens": "9"}, "max_tokens", "whole number"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens", "whole number"),
        ({"prompt": "a", "max_tokens": 10**12}, "max_tokens", "from 1"),
        ({"prompt": "a", "temperature": -1}, "temperature", "from 0"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "number"),
        ({"prompt": "a", "top_p": 0}, "top_p", "above 0"),
        ({"prompt": "a", "top_k": -7}, "top_k", "-1"),
        ({"prompt": "a", "n": 0}, "n", "from 1"),
        ({"prompt": ["a"] * 9, "n": 128}, "prompt", "more than 1024"),
        ({"prompt": "a", "stop": 3}, "stop", "array of strings"),
        ({"prompt": "a", "stop": [""]}, "stop", "not empty"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop", "at most 16"),
        ({"prompt": "a", "stop": {"x": 1}}, "stop", "is an object"),
        ({"prompt": "a", "stop": ["b", "x" * 1025]}, "stop", "1025 characters; at most 1024"),
        ({"prompt": "a", "stop_token_ids": list(range(1025))}, "stop_token_ids", "1025 tokens; at most 1024"),
        ({"prompt": "a", "stop_token_ids": "12"}, "stop_token_ids", "array"),
        ({"prompt": "a", "seed": 1.5}, "seed", "whole number"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "20"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "whole number"),
        ({"prompt": "a", "echo": 1}, "echo", "true or false"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo", "not supported"),
        ({"prompt": "a", "stream": "yes"}, "stream", "true or false"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "together with stream"),
        ({"prompt": "a", "stream": True, "stream_options": []}, "stream_options", "an object"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
        ({"prompt": "a", "model": 7}, "model", "a string"),
        ({"prompt": "a", "best_of": 2}, "best_of", "not supported"),
        ({"prompt": "a", "suffix": "z"}, "suffix", "not supported"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"prompt": "a", "max_token": 5}, "max_token", "did you mean 'max_tokens'"),
        ({"prompt": "a", "guided_json": {}}, "guided_json", "unknown field"),
        ({"prompt": "a", "messages": []}, "messages", "unknown field"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(
    http: httpx.Client, body: dict[str, Any], param: str, words: str
) -> None:
    error = refused(http.post(COMPLETIONS, json=body), 400)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": None}, "messages", "missing"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": "hi"}, "messages", "an array"),
        ({"messages": ["hi"]}, "messages[0]", "an object"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "must be one of"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role", "must be one of"),
        ({"messages": [{"tool_call_id": "1", "role": "tool", "content": ""}]}, "messages[0].role", "must be one of"),
        ({"messages": [*HI, {"role": "user"}]}, "messages[1].content", "is null"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "is a number"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "a string"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "not supp",
        ),
        ({"messages": [{"role": "user", "content": "", "colour": "red"}]}, "messages[0].colour", "unknown field"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "not supported"),
        ({"functions": [{}]}, "functions", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"audio": {"voice": "x"}}, "audio", "not supported"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"prompt": "a"}, "prompt", "unknown field"),
        ({"logprobs": 1}, "logprobs", "true or false"),
        ({"top_logprobs": 3}, "top_logprobs", "together with logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"max_completion_tokens": True}, "max_completion_tokens", "at least 1"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(http: httpx.Client, body: dict[str, Any], param: str, words: str) -> None:
    error = refused(http.post(CHAT, json={"messages": HI} | body), 400)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": False},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"temperature": None, "stop": None, "tools": None, "logit_bias": {}, "max_tokens": None, "stream": None},
        {"n": 1, "top_k": -1, "min_p": 0.5, "repetition_penalty": 1.1, "presence_penalty": -2, "seed": -3},
    ],
)
def test_fields_that_ask_for_nothing_new_are_taken(http: httpx.Client, body: dict[str, Any]) -> None:
    assert http.post(CHAT, json={"messages": HI} | body).status_code == 200


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "a",}', "not valid JSON"),
        (b"[1]", "must be a JSON object, not an array"),
        (b'"a"', "not a string"),
        (b'{"prompt": "\xff\xfe"}', "not UTF-8: byte 12 is 0xff"),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' stands twice"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "stop": "\\udfff"}', "surrogate"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_body_that_cannot_be_read_says_why(http: httpx.Client, raw: bytes, words: str) -> None:
    error = refused(http.post(COMPLETIONS, content=raw), 400)
    assert words in error["message"]


def test_a_number_beyond_all_bounds_is_refused(http: httpx.Client) -> None:
    error = refused(http.post(COMPLETIONS, content=b'{"prompt": "a", "temperature": 1e999}'), 400)
    assert error["param"] == "temperature"


def test_a_body_of_ten_million_bytes_is_refused_with_the_limit(http: httpx.Client) -> None:
    error = refused(http.post(COMPLETIONS, content=b'{"prompt": "' + b"a" * 10_000_000 + b'"}'), 413)
    assert str(MAX_BODY_BYTES) in error["message"]
    assert error["code"] == "body_too_large"


def test_a_body_sent_in_parts_is_counted_too(http: httpx.Client) -> None:
    error = refused(http.post(COMPLETIONS, content=(b"a" * 1_000_000 for _ in range(10))), 413)
    assert "10000000 bytes" in error["message"]


def test_a_declared_length_beyond_reason_is_refused_unread(server: LiveServer) -> None:
    with socket.create_connection(server.server.address, timeout=60.0) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n{")
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"1000000000000 bytes" in answer


def test_a_prompt_that_is_too_long_is_refused_with_the_arithmetic(http: httpx.Client) -> None:
    error = refused(http.post(COMPLETIONS, json={"prompt": "a" * 3000}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "3000 prompt tokens" in error["message"]
    assert "2048" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_text_that_no_tokenizer_could_make_short_enough_is_refused_before_it_is_tokenized(
    http: httpx.Client, server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(server.front, "_off_loop", None)
    text = "a" * 4_000_000
    body = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    error = refused(http.post(path, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("prompt" if path == COMPLETIONS else "messages")
    assert "4000000 characters has at least 800000 tokens" in error["message"]


async def test_many_long_prompts_at_once_are_tokenized_side_by_side(server: LiveServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as http:
        bodies = [{"prompt": "aé" * (3000 + i)} for i in range(20)]
        answers = await asyncio.gather(*(http.post(COMPLETIONS, json=body) for body in bodies))
    for i, answer in enumerate(answers):
        assert f"{3 * (3000 + i)} prompt tokens" in refused(answer, 400)["message"]


def test_messages_that_are_too_long_are_refused_under_their_own_name(http: httpx.Client) -> None:
    error = refused(http.post(CHAT, json={"messages": [{"role": "user", "content": "a" * 3000}]}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_more_messages_than_tokens_fit_are_refused_before_a_template_writes_them(
    http: httpx.Client, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.front, "_off_loop", None)
    error = refused(http.post(CHAT, json={"messages": [{"role": "user", "content": ""}] * 2049}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "2049 messages" in error["message"]


def test_many_empty_messages_are_written_beside_the_event_loop(server: LiveServer, http: httpx.Client) -> None:
    """Their texts are short; what a template writes around them is not."""
    threads: list[str] = []
    chat = server.front._chat

    class Watched:
        tokenizer, is_fallback = chat.tokenizer, chat.is_fallback

        def encode(self, messages: Any) -> list[int]:
            threads.append(threading.current_thread().name)
            return chat.encode(messages)

    server.front._chat = Watched()
    try:
        for count in (1, 500):
            http.post(CHAT, json={"messages": [{"role": "user", "content": ""}] * count, "max_tokens": 1})
    finally:
        server.front._chat = chat
    one, many = threads
    assert one == "live-server", "a short one is not worth a thread"
    assert many != one


@pytest.mark.parametrize("stream", [False, True])
def test_a_max_tokens_that_cannot_fit_is_refused_before_a_stream_begins(http: httpx.Client, stream: bool) -> None:
    response = http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2048, "stream": stream})
    error = refused(response, 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")


def test_one_prompt_of_several_that_cannot_run_ends_all(http: httpx.Client, server: LiveServer) -> None:
    error = refused(http.post(COMPLETIONS, json={"prompt": ["fine", "a" * 3000]}), 400)
    assert error["code"] == "context_length_exceeded"
    server.wait_idle()


def test_a_refused_request_has_an_id_under_which_the_log_knows_it(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="halocline.api")
    ids = [http.post(path, json={"model": "gpt-9"}).headers["x-request-id"] for path in (COMPLETIONS, CHAT)]
    assert ids[0] != ids[1]
    for each in ids:
        assert [f"request={each} " in line for line in caplog.messages].count(True) == 1
    assert http.get("/v1/models").headers["x-request-id"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_unknown_model_is_not_found(http: httpx.Client, path: str) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": HI}
    error = refused(http.post(path, json=body | {"model": "gpt-9"}), 404)
    assert error["code"] == "model_not_found"
    assert "'fake'" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", f"{COMPLETIONS}/", 404),
        ("GET", COMPLETIONS, 405),
        ("POST", "/v1/responses", 404),
        ("DELETE", "/health", 405),
    ],
)
def test_an_unknown_route_has_the_same_error_shape(http: httpx.Client, method: str, path: str, status: int) -> None:
    error = refused(http.request(method, path), status)
    assert path in error["message"]


def test_a_template_that_refuses_the_messages_is_the_clients_error() -> None:
    chat = fake_chat(template="{{ raise_exception('roles must alternate') }}")
    with live_server(chat=chat) as server:
        error = refused(httpx.post(server.url + CHAT, json={"messages": HI}), 400)
    assert "roles must alternate" in error["message"]


def test_a_defect_is_told_without_its_inside_and_the_server_lives() -> None:
    with live_server() as server:

        async def broken(text: str) -> tuple[int, ...]:
            raise KeyError("/secret/path")

        server.front.encode = broken  # type: ignore[method-assign]
        error = refused(httpx.post(server.url + COMPLETIONS, json={"prompt": "a"}), 500)
        assert "secret" not in json.dumps(error)
        assert httpx.get(server.url + "/health").status_code == 200


def test_a_full_queue_is_429_with_a_time_to_wait() -> None:
    with live_server(slots=1, waiting=1, step_seconds=0.005) as server, httpx.Client(base_url=server.url) as http:
        body = {"prompt": "a", "ignore_eos": True, "max_tokens": 2000, "stream": True}
        with http.stream("POST", COMPLETIONS, json=body), http.stream("POST", COMPLETIONS, json=body):
            response = http.post(COMPLETIONS, json={"prompt": "a"})
            error = refused(response, 429)
            assert error["code"] == "overloaded"
            assert response.headers["retry-after"] == "1"
        server.wait_idle()


class TestKey:
    def test_without_the_key_nothing_is_answered_but_health_and_metrics(self) -> None:
        with live_server(api_key="open sesame é") as server, httpx.Client(base_url=server.url) as http:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "open sesame é".encode()}):
                error = refused(http.post(COMPLETIONS, json={"prompt": "a"}, headers=headers), 401)
                assert error["code"] == "invalid_api_key"
                refused(http.get("/v1/models", headers=headers), 401)
            assert http.get("/health").status_code == 200
            assert http.get("/metrics").status_code == 200
            right = {"authorization": b"Bearer open sesame \xc3\xa9"}
            assert http.get("/v1/models", headers=right).status_code == 200

"""Whatever JSON a client sends, it is taken or refused as the client's error: never an exception of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halocline.api.body import parse_object
from halocline.api.errors import ApiError, api_error
from halocline.api.fields import FIELDS
from halocline.api.requests import ChatOrder, CompletionOrder, read_chat, read_completion
from halocline.errors import (
    ConfigError,
    EngineDeadError,
    FailedError,
    OverloadedError,
    ParameterError,
    RequestError,
    TooLargeError,
)

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.just(10**30),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["user", "system", "text", "none"]),
)
KEYS = st.sampled_from(["role", "content", "type", "text", "include_usage", "name", "tool_calls", "x"])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)
BODIES = st.dictionaries(st.sampled_from([field.name for field in FIELDS]), VALUES, max_size=5)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": VALUES}), max_size=2
)


@settings(max_examples=150)
@given(body=BODIES, prompt=VALUES | st.just("hi"))
def test_any_body_of_a_completion_is_an_order_or_the_clients_error(body: dict[str, Any], prompt: object) -> None:
    try:
        order = read_completion(body | {"prompt": prompt}, 259)
    except (ApiError, RequestError) as error:
        told = api_error(error)
        assert told.status == 400
        assert told.message
        assert told.param
        return
    assert isinstance(order, CompletionOrder)
    assert all(isinstance(each, str) or all(0 <= token < 259 for token in each) for each in order.prompts)


@settings(max_examples=150)
@given(body=BODIES, messages=MESSAGES)
def test_any_body_of_a_chat_is_an_order_or_the_clients_error(body: dict[str, Any], messages: object) -> None:
    try:
        order = read_chat(body | {"messages": messages})
    except (ApiError, RequestError) as error:
        told = api_error(error)
        assert told.status == 400
        return
    assert isinstance(order, ChatOrder)
    assert all(set(message) == {"role", "content"} for message in order.messages)


@given(raw=st.binary(max_size=60))
def test_any_bytes_are_an_object_or_the_clients_error(raw: bytes) -> None:
    try:
        parsed: object = parse_object(raw)
    except ApiError as error:
        parsed = error.status
    assert isinstance(parsed, dict) or parsed == 400


@given(body=st.dictionaries(st.text(max_size=4), VALUES, max_size=4))
def test_good_json_is_read_as_it_is(body: dict[str, Any]) -> None:
    try:
        raw = json.dumps(body, allow_nan=False).encode()
    except ValueError:
        return
    assert parse_object(raw) == json.loads(raw)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (TooLargeError("no", "prompt"), 400, "invalid_request_error", "context_length_exceeded"),
        (ParameterError("no", "top_p"), 400, "invalid_request_error", None),
        (RequestError("no", "x", "own"), 400, "invalid_request_error", "own"),
        (OverloadedError("no"), 429, "rate_limit_error", "overloaded"),
        (EngineDeadError("no"), 503, "server_error", "engine_unavailable"),
        (FailedError("no"), 500, "server_error", "request_failed"),
        (ConfigError(["no"]), 500, "server_error", "internal_error"),
        (KeyError("no"), 500, "server_error", "internal_error"),
    ],
)
def test_each_error_has_its_status(error: Exception, status: int, kind: str, code: str | None) -> None:
    told = api_error(error)
    assert (told.status, told.type, told.code) == (status, kind, code)
    assert (told.message == "no") == (code != "internal_error")

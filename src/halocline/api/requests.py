"""From a checked JSON object to what is to be generated: prompts or messages, sampling, and the form of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halocline.api.body import json_type
from halocline.api.errors import ApiError
from halocline.api.fields import check_names
from halocline.params import SamplingParams, checked_salt

MAX_CHOICES = 1024
"""Most completions of one HTTP request: prompts times n."""
SAMPLING = (
    "n", "max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "seed", "temperature", "top_p", "top_k",
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
"""Fields that mean for SamplingParams what they mean here; it checks their types and ranges."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MESSAGE_FIELDS = ("role", "content", "name", "refusal", "annotations", "audio", "tool_calls", "function_call")

Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """What both endpoints ask for."""

    params: SamplingParams
    model: str | None
    stream: bool
    include_usage: bool
    token_ids: bool
    cache_salt: str
    """Whose cached prefixes may be used; "" for a client that named none."""


@dataclass(frozen=True)
class CompletionOrder(Order):
    """A body of /v1/completions."""

    prompts: tuple[Prompt, ...]
    echo: bool


@dataclass(frozen=True)
class ChatOrder(Order):
    """A body of /v1/chat/completions."""

    messages: tuple[dict[str, str], ...]


def read_completion(body: Mapping[str, Any], vocab_size: int) -> CompletionOrder:
    """Check a body of /v1/completions; raises ApiError or ParameterError."""
    fields = check_names(body, "completions")
    params = SamplingParams(**_sampling(fields), logprobs=fields.get("logprobs"))
    prompts = _prompts(fields.get("prompt"), vocab_size)
    echo = _flag(fields, "echo")
    if echo and params.logprobs is not None:
        raise ApiError(
            400, "echo together with logprobs is not supported: prompts get no log-probabilities", param="echo"
        )
    if len(prompts) * params.n > MAX_CHOICES:
        raise ApiError(
            400, f"{len(prompts)} prompts times n = {params.n} are more than {MAX_CHOICES} completions", param="prompt"
        )
    return CompletionOrder(params, *_form(fields), prompts, echo)


def read_chat(body: Mapping[str, Any]) -> ChatOrder:
    """Check a body of /v1/chat/completions; raises ApiError or ParameterError."""
    fields = check_names(body, "chat")
    sampling = _sampling(fields)
    newer = fields.get("max_completion_tokens")
    if newer is not None:
        if sampling.get("max_tokens", newer) != newer:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; send one", param="max_completion_tokens")
        _whole(fields, "max_completion_tokens")
        sampling["max_tokens"] = newer
    params = SamplingParams(**sampling, logprobs=_chat_logprobs(fields))
    return ChatOrder(params, *_form(fields), _messages(fields.get("messages")))


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    # A list in place of a string is what SamplingParams would take for the characters of one.
    for name in ("stop", "stop_token_ids"):
        if name in fields and not isinstance(fields[name], (list, str) if name == "stop" else list):
            raise _wrong(name, fields[name], "an array" if name != "stop" else "a string or an array of strings")
    return {name: fields[name] for name in SAMPLING if name in fields}


def _form(fields: Mapping[str, Any]) -> tuple[str | None, bool, bool, bool, str]:
    """Return (model, stream, include_usage, token_ids, cache_salt)."""
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise _wrong("model", model, "a string")
    stream = _flag(fields, "stream")
    options = fields.get("stream_options", {})
    if not isinstance(options, dict):
        raise _wrong("stream_options", options, "an object")
    if options and not stream:
        raise ApiError(400, "stream_options is only allowed together with stream", param="stream_options")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise ApiError(400, f"unknown field 'stream_options.{name}'", param=f"stream_options.{name}")
    include_usage = _flag(options, "include_usage", "stream_options.include_usage")
    salt = fields.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise _wrong("cache_salt", salt, "a string")
    return model, stream, include_usage, _flag(fields, "return_token_ids"), checked_salt(salt)


def _flag(fields: Mapping[str, Any], name: str, param: str | None = None) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(param or name, value, "true or false")
    return bool(value)


def _whole(fields: Mapping[str, Any], name: str) -> None:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ApiError(400, f"{name} is {value!r}; it must be a whole number of at least 1", param=name)


def _chat_logprobs(fields: Mapping[str, Any]) -> int | None:
    wanted = _flag(fields, "logprobs")
    top = fields.get("top_logprobs")
    if top is None:
        return 0 if wanted else None
    if not wanted:
        raise ApiError(400, "top_logprobs is only allowed together with logprobs: true", param="top_logprobs")
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= 20:
        raise ApiError(400, f"top_logprobs is {top!r}; it must be a whole number from 0 to 20", param="top_logprobs")
    return top


def _prompts(value: object, vocab_size: int) -> tuple[Prompt, ...]:
    if value is None:
        raise ApiError(400, "prompt is missing", param="prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise _wrong("prompt", value, "a string, an array of strings, token ids, or arrays of token ids")
    if not value:
        raise ApiError(400, "prompt is an empty array", param="prompt")
    if all(isinstance(each, str) for each in value):
        return tuple(value)
    if all(isinstance(each, list) for each in value):
        return tuple(_token_ids(each, vocab_size) for each in value)
    return (_token_ids(value, vocab_size),)


def _token_ids(value: list[Any], vocab_size: int) -> tuple[int, ...]:
    for each in value:
        if isinstance(each, bool) or not isinstance(each, int):
            raise _wrong("prompt", each, "a token id (or every element a string, or every element an array)")
        if not 0 <= each < vocab_size:
            raise ApiError(400, f"prompt holds token id {each}; ids go from 0 to {vocab_size - 1}", param="prompt")
    return tuple(value)


def _messages(value: object) -> tuple[dict[str, str], ...]:
    if value is None:
        raise ApiError(400, "messages is missing", param="messages")
    if not isinstance(value, list):
        raise _wrong("messages", value, "an array")
    if not value:
        raise ApiError(400, "messages is an empty array", param="messages")
    return tuple(_message(each, f"messages[{i}]") for i, each in enumerate(value))


def _message(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    role = value.get("role")  # first: a tool's message has fields of its own
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}", param=f"{where}.role")
    for name, content in value.items():
        if name not in MESSAGE_FIELDS:
            raise ApiError(400, f"unknown field '{where}.{name}'", param=f"{where}.{name}", code="unknown_field")
        if name not in ("role", "content", "name") and content not in (None, [], ""):
            raise ApiError(400, f"'{where}.{name}' is not supported", param=f"{where}.{name}", code="unsupported_field")
    return {"role": ROLES[role], "content": _content(value.get("content"), f"{where}.content")}


def _content(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(where, value, "a string or an array of text parts")
    return "".join(_part(each, f"{where}[{i}]") for i, each in enumerate(value))


def _part(value: object, where: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise _wrong(where, value, 'an object such as {"type": "text", "text": "..."}')
    if value["type"] != "text":
        raise ApiError(
            400, f"{where} has type {value['type']!r}; only text is supported", param=where, code="unsupported_field"
        )
    text = value.get("text")
    if not isinstance(text, str):
        raise _wrong(f"{where}.text", text, "a string")
    return text


def _wrong(param: str, value: object, expected: str) -> ApiError:
    return ApiError(400, f"{param} is {json_type(value)}; it must be {expected}", param=param, code="wrong_type")

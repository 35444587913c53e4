"""Prompts in their spellings, and completions as they grow."""

from __future__ import annotations

from typing import Any

import pytest

from halocline.engine.messages import Logprobs, TextDelta
from halocline.errors import ParameterError
from halocline.outputs import empty_completion, grow, is_one_prompt, one_for_each, read_message, read_prompt, salt_of
from halocline.params import SamplingParams


def text_of(token_id: int) -> tuple[str, bytes | None]:
    return f"<{token_id}>", None


@pytest.mark.parametrize(
    ("prompts", "is_one"),
    [
        ("text", True),
        ([1, 2], True),
        ({"prompt": "x"}, True),
        (["a", "b"], False),
        ([[1], [2]], False),
        ([], False),
        ([{"prompt": "x"}], False),
    ],
)
def test_one_prompt_is_told_from_many(prompts: Any, is_one: bool) -> None:
    assert is_one_prompt(prompts) is is_one


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("text", ("text", None)),
        ([5, 6], (None, [5, 6])),
        ((5, 6), (None, [5, 6])),
        ({"prompt": "text"}, ("text", None)),
        ({"prompt_token_ids": [5]}, (None, [5])),
        ({"prompt": "five", "prompt_token_ids": [5]}, ("five", [5])),
    ],
)
def test_a_prompt_is_read_in_all_its_spellings(prompt: Any, read: Any) -> None:
    assert read_prompt(prompt) == read


@pytest.mark.parametrize("prompt", [["a", 1], [1.5], [True], [None]])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ParameterError, match="a prompt must be") as caught:
        read_prompt(prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "salt"),
    [
        ("text", ""),
        ([5, 6], ""),
        ({"prompt": "text"}, ""),
        ({"prompt": "text", "cache_salt": "mine"}, "mine"),
        ({"prompt_token_ids": [5], "cache_salt": None}, ""),
    ],
)
def test_a_prompt_may_have_a_cache_salt(prompt: Any, salt: str) -> None:
    assert salt_of(prompt) == salt
    assert read_prompt(prompt)


@pytest.mark.parametrize("salt", [7, "", "s" * 300])
def test_a_salt_that_cannot_be_used_is_refused_by_name(salt: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        salt_of({"prompt": "text", "cache_salt": salt})
    assert caught.value.param == "cache_salt"


def test_parameters_are_one_for_all_or_one_for_each() -> None:
    one, two = SamplingParams(seed=1), SamplingParams(seed=2)
    assert one_for_each(None, 2) == [SamplingParams(), SamplingParams()]
    assert one_for_each(one, 2) == [one, one]
    assert one_for_each([one, two], 2) == [one, two]
    with pytest.raises(ParameterError, match="1 sampling_params for 2 prompts"):
        one_for_each([one], 2)


def test_a_completion_grows_by_text_and_tokens() -> None:
    output = empty_completion(0, SamplingParams())
    grow(output, TextDelta(text="He", tokens=(), token_ids=(10, 11)), text_of)
    grow(output, TextDelta(text="y", tokens=(), token_ids=(12,), finish_reason="stop", stop_reason="."), text_of)
    assert (output.text, output.token_ids) == ("Hey", [10, 11, 12])
    assert (output.finish_reason, output.stop_reason) == ("stop", ".")
    assert output.logprobs is None


def test_log_probabilities_hold_the_taken_token_and_the_best_ones() -> None:
    output = empty_completion(0, SamplingParams(logprobs=2))
    found = Logprobs(-3.0, 7, ((1, -0.5), (2, -1.5)))
    grow(output, TextDelta(text="nine", tokens=(), token_ids=(9,), logprobs=(found,)), text_of)
    assert output.logprobs is not None
    (place,) = output.logprobs
    assert {token_id: (each.logprob, each.rank, each.decoded_token) for token_id, each in place.items()} == {
        9: (-3.0, 7, "<9>"),
        1: (-0.5, 1, "<1>"),
        2: (-1.5, 2, "<2>"),
    }


def test_a_taken_token_among_the_best_stands_once() -> None:
    output = empty_completion(0, SamplingParams(logprobs=1))
    found = Logprobs(-0.5, 1, ((1, -0.5),))
    grow(output, TextDelta(text="a", tokens=(), token_ids=(1,), logprobs=(found,)), text_of)
    assert output.logprobs is not None
    assert [list(place) for place in output.logprobs] == [[1]]


def test_a_messages_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_message({"role": "user", "content": parts}) == {"role": "user", "content": "ab"}
    assert read_message({"role": "user", "content": "ab", "name": "Ann"}) == {
        "role": "user",
        "content": "ab",
        "name": "Ann",
    }


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"content": "hi"},
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": ["hi"]},
        "hi",
    ],
)
def test_what_is_no_message_is_refused(message: Any) -> None:
    with pytest.raises(ParameterError, match="a message must be"):
        read_message(message)

"""SamplingParams: a wrong field raises with its name and range."""

from __future__ import annotations

import msgspec
import pytest

from halocline.errors import ParameterError, RequestError
from halocline.params import (
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SamplingParams,
    checked_salt,
)


def test_the_defaults_sample_from_the_whole_distribution() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, None)
    assert not params.is_greedy


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", (0, MAX_N + 1, 1.5, True, "1")),
        ("temperature", (-0.1, 100.5, float("nan"), "hot", None)),
        ("top_p", (0, -1, 1.01)),
        ("top_k", (-2, 0.5)),
        ("min_p", (-0.1, 1.1)),
        ("max_tokens", (0, -1, 1.0, 2**31, 10**5000)),
        ("min_tokens", (-1, None)),
        ("ignore_eos", (1, "yes", None)),
        ("stop", (("",), (1,), ("x",) * (MAX_STOP_STRINGS + 1), "x" * (MAX_STOP_CHARACTERS + 1), "\ud800")),
        ("stop_token_ids", ((-1,), ("a",), (1,) * (MAX_STOP_TOKENS + 1))),
        ("seed", (2**63, 0.5)),
        ("presence_penalty", (-2.1, 2.1)),
        ("frequency_penalty", (-2.1, 2.1)),
        ("repetition_penalty", (0, -1)),
        ("logprobs", (-1, MAX_LOGPROBS + 1)),
    ],
)
def test_a_wrong_field_raises_with_its_name(field: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(ParameterError, match=field) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field
        assert isinstance(caught.value, RequestError)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "params",
    [
        {"n": MAX_N},
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 1},
        {"max_tokens": 1, "min_tokens": 1},
        {"logprobs": 0},
        {"stop": "one", "stop_token_ids": [0, 5]},
        {"stop": ["x" * MAX_STOP_CHARACTERS] * MAX_STOP_STRINGS, "stop_token_ids": [7] * MAX_STOP_TOKENS},
    ],
)
def test_the_borders_of_the_ranges_are_allowed(params: dict[str, object]) -> None:
    SamplingParams(**params)  # type: ignore[arg-type]


def test_more_least_than_most_tokens_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"min_tokens is 9 but max_tokens is 8"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_stops_are_stored_as_tuples_so_that_params_are_values() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1,))
    assert params == SamplingParams(stop=("a", "b"), stop_token_ids=(1,))
    assert hash(params) == hash(SamplingParams(stop=("a", "b"), stop_token_ids=(1,)))
    assert SamplingParams(stop="a").stop == ("a",)  # type: ignore[arg-type]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_params_survive_the_way_to_another_process() -> None:
    params = SamplingParams(temperature=0.5, stop=("x",), seed=7, logprobs=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("salt", ["x", "é" * 256, "\U0001f600", " "])
def test_a_cache_salt_is_taken_as_it_is(salt: str) -> None:
    assert checked_salt(salt) == salt


def test_no_cache_salt_is_the_empty_one_which_nobody_can_send() -> None:
    assert checked_salt(None) == ""
    with pytest.raises(ParameterError, match="1 to 256"):
        checked_salt("")


@pytest.mark.parametrize("salt", ["secret" * 43, 1234567, b"secret", ["secret"], True, "secret \ud800"])
def test_a_cache_salt_that_cannot_be_used_is_refused_without_being_quoted(salt: object) -> None:
    with pytest.raises(ParameterError, match="cache_salt") as caught:
        checked_salt(salt)
    assert caught.value.param == "cache_salt"
    assert "secret" not in str(caught.value)
    assert "1234567" not in str(caught.value)

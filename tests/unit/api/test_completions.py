"""/v1/completions: prompts of every form, streams, stops, log-probabilities, usage."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from testing.engine import ids_of
from testing.server import events


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_completion_has_the_shape_that_clients_expect(http: httpx.Client) -> None:
    answer = complete(http, model="fake", prompt="abc")
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "fake"
    assert answer["choices"] == [{"index": 0, "text": "Hé 😀 abc", "logprobs": None, "finish_reason": "stop"}]
    made = len("Hé 😀 abc".encode()) + 1
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": made,
        "total_tokens": 3 + made,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a", ["Hé 😀 a"]),
        (["a", "b"], ["Hé 😀 a", "Hé 😀 b"]),
        (ids_of("xy"), ["Hé 😀 xy"]),
        ([ids_of("x"), ids_of("y")], ["Hé 😀 x", "Hé 😀 y"]),
    ],
)
def test_prompts_may_be_strings_or_token_ids_one_or_many(http: httpx.Client, prompt: object, texts: list[str]) -> None:
    answer = complete(http, prompt=prompt)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


def test_n_completions_of_each_prompt_stand_together(http: httpx.Client) -> None:
    answer = complete(http, prompt=["a", "b"], n=3)
    assert [choice["text"][-1] for choice in answer["choices"]] == ["a"] * 3 + ["b"] * 3
    assert answer["usage"]["prompt_tokens"] == 2, "a prompt counts once, however many completions it gets"


def test_a_stream_gives_the_same_text_in_pieces(http: httpx.Client) -> None:
    chunks = events(http, prompt="abc")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hé 😀 abc"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert all("\ufffd" not in chunk["choices"][0]["text"] for chunk in chunks), "half a character was sent"


def test_a_stream_ends_with_the_usage_if_asked(http: httpx.Client) -> None:
    chunks = events(http, prompt="abc", stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == complete(http, prompt="abc")["usage"]


def test_a_stream_of_several_choices_keeps_them_apart(http: httpx.Client) -> None:
    texts = dict.fromkeys(range(4), "")
    for chunk in events(http, prompt=["a", "b"], n=2):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == ["Hé 😀 a", "Hé 😀 a", "Hé 😀 b", "Hé 😀 b"]


def test_max_tokens_ends_with_length_and_never_in_half_a_character(http: httpx.Client) -> None:
    answer = complete(http, prompt="abc", max_tokens=6)
    assert answer["choices"][0]["text"] == "Hé "
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_is_not_shown_in_any_part(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": "abcdef", "stop": ["cde", "zz"]}
    if stream:
        choices = [chunk["choices"][0] for chunk in events(http, **body)]
        text, reason = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
    else:
        choice = complete(http, **body)["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    assert (text, reason) == ("Hé 😀 ab", "stop")


def test_a_stop_ends_the_work_of_the_engine(http: httpx.Client, server: Any) -> None:
    answer = complete(http, prompt="x", stop="😀 x", ignore_eos=True, max_tokens=2000)
    assert answer["choices"][0]["text"] == "Hé "
    server.wait_idle()


def test_ignoring_the_end_of_sequence_goes_on_to_max_tokens(http: httpx.Client) -> None:
    answer = complete(http, prompt="abc", max_tokens=50, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 50
    assert answer["choices"][0]["finish_reason"] == "length"


def test_logprobs_come_in_parallel_lists_and_cover_exactly_the_text(http: httpx.Client) -> None:
    choice = complete(http, prompt="abcdef", logprobs=2, stop="de", echo=False)["choices"][0]
    table = choice["logprobs"]
    lengths = {name: len(values) for name, values in table.items()}
    assert set(lengths) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert set(lengths.values()) == {len("Hé 😀 abc".encode())}, "no token of the stop string is listed"
    assert table["token_logprobs"][0] == -0.5
    assert table["top_logprobs"][0]["H"] == -0.5
    # The text is "Hé 😀 abc"; a character of several tokens stands in one place.
    assert table["text_offset"] == [0, 1, 1, 2, 3, 3, 3, 3, 4, 5, 6, 7]


def test_streamed_logprobs_are_the_same(http: httpx.Client) -> None:
    whole = complete(http, prompt="abcdef", logprobs=1)["choices"][0]["logprobs"]
    streamed: dict[str, list[Any]] = {name: [] for name in whole}
    for chunk in events(http, prompt="abcdef", logprobs=1):
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed[name] += values
    assert streamed == whole


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_if_asked_and_all_of_them(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": "abcdef", "stop": "cd", "return_token_ids": True}
    answers = events(http, **body) if stream else [complete(http, **body)]
    ids = [token for answer in answers for choice in answer["choices"] for token in choice["token_ids"]]
    assert ids == ids_of("Hé 😀 abcd")


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_text(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": ["ab", "cd"], "echo": True, "max_tokens": 1}
    texts = {0: "", 1: ""}
    for answer in events(http, **body) if stream else [complete(http, **body)]:
        for choice in answer["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "abH", 1: "cdH"}


def test_a_failure_of_the_computation_is_a_server_error(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "please FAIL"})
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "the logits are not numbers",
        "type": "server_error",
        "param": None,
        "code": "request_failed",
    }


def test_a_failure_in_mid_stream_is_an_event_before_the_end(http: httpx.Client) -> None:
    chunks = events(http, prompt=["fine", "please FAIL"])
    assert chunks[-1]["error"]["code"] == "request_failed"


def test_the_answer_names_its_request(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "a"})
    assert response.headers["x-request-id"] == response.json()["id"]

"""OpenAI-style JSON lines as workloads."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path

import pytest

from halocline.errors import ConfigError
from halocline.sim.readers import read_workload
from halocline.sim.workload import Job, Workload

SYSTEM = {"role": "system", "content": "You are a helpful assistant. " * 30}


def read(folder: Path, *lines: object, **options: object) -> Workload:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return read_workload(path, **options)  # type: ignore[arg-type]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def shared(one: Job, other: Job) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.tokens(), other.tokens(), strict=False)))


def test_a_batch_file_gives_one_job_a_line_all_at_second_zero(tmp_path: Path) -> None:
    lines = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [SYSTEM, user(f"question {number}")], "max_tokens": 100 + number},
        }
        for number in range(3)
    ]
    made = read(tmp_path, *lines)
    assert [(job.id, job.arrive_seconds, job.output_tokens) for job in made.jobs] == [
        ("request-0", 0.0, 100),
        ("request-1", 0.0, 101),
        ("request-2", 0.0, 102),
    ]
    outputs = {job.output_id for job in made.jobs}
    assert len(outputs) == 3
    assert not outputs & {content for job in made.jobs for content, _ in job.prompt}


def test_equal_leading_messages_are_an_equal_prefix_and_different_ones_are_not(tmp_path: Path) -> None:
    other = {"role": "system", "content": "X" + str(SYSTEM["content"])[1:]}
    lines = [
        {"messages": messages, "max_tokens": 5} for messages in ([SYSTEM, user("a")], [SYSTEM, user("b")], [other])
    ]
    first, second, third = read(tmp_path, *lines).jobs
    system_tokens = 4 + 3 * 64 + 26  # the role, and 870 characters in pieces of 256
    assert shared(first, second) == system_tokens + 4  # and the role of the user
    assert shared(first, third) == 4
    assert first.prompt_tokens == system_tokens + 4 + 1


def test_texts_that_begin_alike_share_whole_pieces(tmp_path: Path) -> None:
    text = "".join(f"{number:04} " for number in range(200))
    first, second = read(tmp_path, *({"prompt": text[:700] + end, "max_tokens": 1} for end in ("yes" * 40, "no"))).jobs
    assert shared(first, second) == 2 * 64


def test_a_counting_function_tells_how_many_tokens_a_text_has(tmp_path: Path) -> None:
    line = {"prompt": "one two three", "max_tokens": 4}
    assert read(tmp_path, line, count=lambda text: len(text.split())).jobs[0].prompt_tokens == 3
    assert read(tmp_path, line).jobs[0].prompt_tokens == 4


def test_lengths_alone_are_enough_and_token_ids_are_compared(tmp_path: Path) -> None:
    lengths = [{"created": 1700000000 + at, "prompt_tokens": 50, "completion_tokens": 7} for at in (0, 2)]
    first, second = read(tmp_path, *lengths).jobs
    assert (first.prompt_tokens, first.output_tokens, second.arrive_seconds) == (50, 7, 2.0)
    assert shared(first, second) == 0
    ids = list(range(100))
    lines = [{"timestamp": 0, "prompt": [*ids, end], "max_tokens": 1} for end in (1, 2)]
    first, second = read(tmp_path, *lines).jobs
    assert (first.prompt_tokens, shared(first, second)) == (101, 64)


def test_the_length_that_a_line_gives_holds_and_beginnings_stay_shared(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "body": {"messages": [SYSTEM, user(text)], "max_tokens": 9}, "usage": {"prompt_tokens": told}}
        for text, told in (("a" * 600, 900), ("b" * 600, 300), ("c", 100))
    ]
    first, second, third = read(tmp_path, *lines).jobs
    assert [job.prompt_tokens for job in (first, second, third)] == [900, 300, 100]
    assert shared(first, second) == 4 + 3 * 64 + 26 + 4
    assert shared(first, third) == 100


def test_an_answer_that_comes_back_in_a_later_prompt_is_the_outputs_run(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "Forty-two, as I said."}
    asked = [SYSTEM, user("What is it?")]
    lines = [
        {
            "timestamp": "2025-01-01T00:00:00Z",
            "request": {"messages": asked, "max_tokens": 500},
            "response": {"choices": [{"message": answer}], "usage": {"prompt_tokens": 230, "completion_tokens": 11}},
        },
        {
            "timestamp": "2025-01-01T00:01:00Z",
            "request": {"messages": [*asked, answer, user("Why?")], "max_tokens": 20},
        },
    ]
    first, second = read(tmp_path, *lines).jobs
    assert first.output_tokens == 11
    assert (first.output_id, 11) in second.prompt
    assert second.arrive_seconds == 60.0
    assert shared(first, second) == sum(
        tokens for _, tokens in second.prompt[: second.prompt.index((first.output_id, 11))]
    )


def test_tools_and_images_are_part_of_the_prompt(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = {"role": "user", "content": [{"type": "text", "text": "See:"}, image]}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    plain, more = read(
        tmp_path, {"messages": [parts], "max_tokens": 1}, {"messages": [parts, call], "tools": tools, "max_tokens": 1}
    ).jobs
    assert plain.prompt_tokens == 4 + 1 + 256
    assert more.prompt_tokens > plain.prompt_tokens + 4
    assert shared(plain, more) == 0


WRONG = {
    "no output": ([{"prompt": "hi"}], "line 1: how long the output is, is not said; give `completion_tokens`"),
    "no prompt": ([{"max_tokens": 3}], "line 1: there is no prompt; give `messages` or `prompt`"),
    "empty": ([{"prompt": "", "max_tokens": 3}], "line 1: there is no prompt"),
    "no messages": ([{"messages": [], "max_tokens": 3}], "line 1: there is no prompt"),
    "odd message": ([{"messages": ["hi"], "max_tokens": 3}], "line 1: a message is 'hi'; write an object with role"),
    "many prompts": (
        [{"prompt": ["a", "b"], "max_tokens": 3}],
        "line 1: prompt is .*; write a text or a list of token",
    ),
    "half a name": (
        [{"custom_id": "\ud800", "prompt": "a", "max_tokens": 3}],
        r"line 1: this has half a character \(\\ud800 to \\udfff alone\): '.*'; mend it",
    ),
    "half a word": ([{"prompt": "a"}, {"prompt": "a \udc00", "max_tokens": 3}], "line 2: this has half a character"),
    "negative": ([{"prompt": "a", "max_tokens": -3}], "line 1: max_tokens is -3; it must be at least 1"),
    "nan": ([{"prompt": "a", "max_tokens": 3, "timestamp": float("nan")}], "line 1: timestamp is nan; write seconds"),
    "milliseconds": (
        [{"prompt": "a", "max_tokens": 3, "timestamp": 1.7e12}],
        r"line 1: timestamp is 17.*; write seconds \(milliseconds must be divided by 1,000\)",
    ),
    "some times": (
        [{"prompt": "a", "max_tokens": 3, "timestamp": 1}, {"prompt": "a", "max_tokens": 3}],
        "line 2: some lines have a time and some have none",
    ),
    "twice": (
        [{"custom_id": "x", "prompt": "a", "max_tokens": 3}, {"custom_id": "x", "prompt": "a", "max_tokens": 3}],
        "line 2: custom_id 'x' was used before",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_line_that_cannot_be_replayed_is_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    lines, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, *lines)


def test_characters_that_json_writes_in_halves_are_whole(tmp_path: Path) -> None:
    (job,) = read(tmp_path, {"custom_id": "\U0001f30a", "prompt": "a", "max_tokens": 3}).jobs
    assert job.id == "\U0001f30a"


def test_the_same_words_of_another_role_are_another_text(tmp_path: Path) -> None:
    said = [{"messages": [SYSTEM | {"role": role}], "max_tokens": 1} for role in ("system", "user", "system")]
    first, second, third = read(tmp_path, *said).jobs
    assert shared(first, second) == 0
    assert first.prompt == third.prompt

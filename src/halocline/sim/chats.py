"""OpenAI-style JSON lines: requests with messages or prompts, or only their lengths, with or without times.

One request per line. What is looked for, and where:

    time      `timestamp`, else `created`, else `created_at`: seconds, or an ISO 8601 date and time. In a file without
              any, such as a batch file, all arrive at second 0 (replay it saturated); all lines have one, or none
    request   `body` (batch files, logs of a proxy), else `request`, else the line itself
    prompt    `messages` with `tools`, else `prompt`: a text or token ids
    lengths   `prompt_tokens` and `completion_tokens` in `usage` of the line, of `response` or of `response.body`, or on
              the line itself, also as `input_tokens` and `output_tokens`; else `max_tokens` or `max_completion_tokens`
    name      `custom_id`, else `line N`

Without a tokenizer the text becomes runs like this: every message is 4 tokens of its role (what a chat template puts
around it) and its content, a text cut every 256 characters. Each piece is a run; its content id belongs to the piece's
text, and its tokens are counted by `count` (about a quarter of its characters). So equal leading messages are an equal
prefix, to the last whole piece also inside a message. Parts that are no text (images) are 256 tokens, equal where their
JSON is. Tools stand before the messages. Token ids become pieces of 64. If the line says how many tokens the prompt
has, the last run is made longer or runs are cut off its end, so that it has as many: beginnings stay as they are.

An answer in the line (`response.body.choices[0].message`, or `choices[0].message` of the line) is remembered: where a
later line has that same message in its prompt, it is the output's run, as it is in a multi-turn conversation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from halocline.errors import ConfigError
from halocline.sim.fields import Fault, Faults, lines_of, object_of, quoted, seconds_of, tokens_of
from halocline.sim.workload import Job, Run, Workload, joined

Count = Callable[[str], int]
"""How many tokens a text has."""
Object = dict[str, object]

PIECE_CHARACTERS = 256
PIECE_TOKENS = 64
ROLE_TOKENS = 4
PART_TOKENS = 256
TIMES = ("timestamp", "created", "created_at")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def about_tokens(text: str) -> int:
    """Return about how many tokens a text has: one per four characters, at least one."""
    return max(1, -(-len(text) // 4))


@dataclass
class _Contents:
    """Content ids in order of first appearance, and the answers seen so far."""

    count: Count
    ids: dict[object, int] = field(default_factory=dict)
    answers: dict[str, Run] = field(default_factory=dict)

    def id_of(self, content: object) -> int:
        return self.ids.setdefault(content, len(self.ids))

    def text(self, text: str) -> list[Run]:
        pieces = [text[at : at + PIECE_CHARACTERS] for at in range(0, len(text), PIECE_CHARACTERS)]
        return [(self.id_of(piece), max(1, self.count(piece))) for piece in pieces]

    def message(self, message: object) -> list[Run]:
        if not isinstance(message, dict):
            raise Fault(f"a message is {quoted(message)}; write an object with role and content")
        known = self.answers.get(_said(message))
        if known is not None:
            return [known]
        runs = [(self.id_of(("role", str(message.get("role")))), ROLE_TOKENS)]
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            runs += self._part(part)
        extra = {key: message[key] for key in ("tool_calls", "function_call", "tool_call_id") if message.get(key)}
        return runs + (self.text(_canonical(extra)) if extra else [])

    def _part(self, part: object) -> list[Run]:
        if part is None:
            return []
        if isinstance(part, str):
            return self.text(part)
        text = part.get("text") if isinstance(part, dict) else None
        return self.text(text) if isinstance(text, str) else [(self.id_of(("part", _canonical(part))), PART_TOKENS)]

    def prompt(self, prompt: object) -> list[Run]:
        if isinstance(prompt, str):
            return self.text(prompt)
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            pieces = [tuple(prompt[at : at + PIECE_TOKENS]) for at in range(0, len(prompt), PIECE_TOKENS)]
            return [(self.id_of(piece), len(piece)) for piece in pieces]
        raise Fault(f"prompt is {quoted(prompt)}; write a text or a list of token ids, one request per line")


@dataclass(frozen=True)
class _Request:
    """What one line says."""

    name: str
    seconds: float | None
    prompt: tuple[Run, ...]
    output_tokens: int
    output_id: int


def read_chats(path: str | Path, count: Count = about_tokens) -> Workload:
    """Read OpenAI-style JSON lines. Raises ConfigError with file, line, what was found and what to do."""
    path = Path(path)
    contents, faults, requests = _Contents(count), Faults(path), list[_Request]()
    names: set[str] = set()
    for number, text in lines_of(path):
        try:
            request = _request(f"line {number}", object_of(text), contents)
            if request.name in names:
                raise Fault(f"custom_id {quoted(request.name)} was used before; make it unique or leave it out")
            if requests and (request.seconds is None) != (requests[0].seconds is None):
                raise Fault("some lines have a time and some have none; give every line a `timestamp`, or none")
            names.add(request.name)
            requests.append(request)
        except Fault as fault:
            faults.add(number, fault)
    faults.raise_any()
    if not requests:
        raise ConfigError([f"{path} is empty; a workload has one request per line"])
    requests.sort(key=lambda request: request.seconds or 0.0)
    start = requests[0].seconds or 0.0
    jobs = [Job(r.name, (r.seconds or start) - start, r.prompt, r.output_tokens, r.output_id) for r in requests]
    return Workload(path.stem, str(path), tuple(jobs))


def _request(line: str, value: Object, contents: _Contents) -> _Request:
    body = _object(value, "body") or _object(value, "request") or value
    answer = _object(_object(value, "response"), "body") or _object(value, "response") or value
    usage = _object(answer, "usage") or _object(value, "usage") or value
    said = _message_of(answer)
    output_tokens = _output_tokens(usage, body, said, contents.count)
    prompt = _prompt(usage, body, contents, line)
    output_id = contents.id_of(("output", line))
    if said is not None:
        contents.answers.setdefault(_said(said), (output_id, output_tokens))
    name = value.get("custom_id", line)
    when = next((value[key] for key in TIMES if value.get(key) is not None), None)
    if when is None:
        when = next((answer[key] for key in TIMES if answer.get(key) is not None), None)
    return _Request(
        str(name), None if when is None else seconds_of(when, "timestamp"), prompt, output_tokens, output_id
    )


def _object(value: Object | None, name: str) -> Object | None:
    found = value.get(name) if value is not None else None
    return cast("Object", found) if isinstance(found, dict) else None


def _message_of(answer: Object) -> Object | None:
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return _object(first, "message") if isinstance(first, dict) else None


def _output_tokens(usage: Object, body: Object, said: Object | None, count: Count) -> int:
    for key in ("completion_tokens", "output_tokens"):
        if usage.get(key) is not None:
            return max(1, tokens_of(usage[key], key, 0))
    if said is not None and isinstance(said.get("content"), str):
        return max(1, count(str(said["content"])))
    for key in LIMITS:
        if body.get(key) is not None:
            return tokens_of(body[key], key)
    raise Fault("how long the output is, is not said; give `completion_tokens` or `max_tokens`")


def _prompt(usage: Object, body: Object, contents: _Contents, line: str) -> tuple[Run, ...]:
    told = next((usage[key] for key in ("prompt_tokens", "input_tokens") if usage.get(key) is not None), None)
    length = None if told is None else tokens_of(told, "prompt_tokens")
    runs: list[Run] = []
    messages = body.get("messages")
    if isinstance(messages, list) and messages:
        tools = body.get("tools")
        runs = contents.text(_canonical(tools)) if tools else []
        for message in messages:
            runs += contents.message(message)
    elif body.get("prompt") is not None:
        runs = contents.prompt(body["prompt"])
    elif length is not None:
        runs = [(contents.id_of(("prompt", line)), length)]
    if not runs:
        raise Fault("there is no prompt; give `messages` or `prompt`, not empty, or `prompt_tokens`")
    prompt = joined(runs if length is None else _cut(runs, length))
    tokens_of(sum(tokens for _, tokens in prompt), "the prompt's length")
    return prompt


def _cut(runs: list[Run], length: int) -> list[Run]:
    """Return `runs` with exactly `length` tokens: the last run longer, or the end cut off."""
    result: list[Run] = []
    left = length
    for content, tokens in runs:
        if left > 0:
            result.append((content, min(tokens, left)))
        left -= tokens
    if left > 0:
        content, tokens = result[-1]
        result[-1] = (content, tokens + left)
    return result


def _said(message: Object) -> str:
    return _canonical([message.get("role", "assistant"), message.get("content"), message.get("tool_calls") or None])


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)

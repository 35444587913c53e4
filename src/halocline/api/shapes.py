"""The JSON of answers: completions and chat completions, whole and in chunks, exactly as OpenAI's clients expect it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from halocline.api.ports import Front
from halocline.engine.messages import Logprobs, TextDelta, TokenText

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""


@dataclass
class Collected:
    """A whole choice, put together from its deltas."""

    text: list[str] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: TextDelta) -> None:
        """Append one delta."""
        self.text.append(delta.text)
        self.tokens += delta.tokens
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason


class Shape(Protocol):
    """How one endpoint writes its choices."""

    prefix: str
    whole: str
    chunk: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the choice of a stream's first chunk, if it has one before any token."""
        ...

    def delta(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """Return the choice of one chunk."""
        ...

    def choice(self, index: int, collected: Collected) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        ...


class CompletionShape:
    """/v1/completions."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def __init__(self, front: Front, echoes: Sequence[str], *, logprobs: bool) -> None:
        self._front = front
        self._echoes = echoes
        """For each choice the text that stands before what is generated."""
        self._logprobs = logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        echo = self._echoes[index]
        return {"index": index, "text": echo, "logprobs": None, "finish_reason": None} if echo else None

    def delta(self, index: int, delta: TextDelta) -> dict[str, Any]:
        return self._choice(index, delta.text, delta.tokens, delta.finish_reason)

    def choice(self, index: int, collected: Collected) -> dict[str, Any]:
        text = self._echoes[index] + "".join(collected.text)
        return self._choice(index, text, collected.tokens, collected.finish_reason)

    def _choice(self, index: int, text: str, tokens: Sequence[TokenText], reason: str | None) -> dict[str, Any]:
        logprobs = self._table(index, tokens) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _table(self, index: int, tokens: Sequence[TokenText]) -> dict[str, Any]:
        """Return the four parallel lists of the older logprobs form."""
        table: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            values = _logprobs(token)
            best = {self._front.token(each)[0]: _finite(value) for each, value in reversed(values.top)}
            table["tokens"].append(token.text)
            table["token_logprobs"].append(_finite(values.token_logprob))
            table["top_logprobs"].append({token.text: _finite(values.token_logprob)} | best)
            table["text_offset"].append(len(self._echoes[index]) + token.start)
        return table


class ChatShape:
    """/v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, front: Front, *, logprobs: bool) -> None:
        self._front = front
        self._logprobs = logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, delta: TextDelta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        logprobs = self._list(delta.tokens)
        return {"index": index, "delta": content, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def choice(self, index: int, collected: Collected) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(collected.text), "refusal": None}
        logprobs = self._list(collected.tokens)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": collected.finish_reason}

    def _list(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: TokenText) -> dict[str, Any]:
        values = _logprobs(token)
        best = [_candidate(*self._front.token(each), value) for each, value in values.top]
        return _candidate(token.text, token.data, values.token_logprob) | {"top_logprobs": best}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the token counts of an answer; of its prompt tokens, `cached_tokens` were not computed for it."""
    assert cached_tokens <= prompt_tokens, f"{cached_tokens} of {prompt_tokens} prompt tokens were cached"
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _candidate(text: str, data: bytes | None, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": None if data is None else list(data)}


def _logprobs(token: TokenText) -> Logprobs:
    assert token.logprobs is not None, f"token {token.token_id} was computed without log-probabilities"
    return token.logprobs


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)

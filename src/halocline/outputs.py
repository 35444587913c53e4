"""What goes into `LLM` and comes out: prompts in their spellings, completions as they grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halocline.engine.messages import Logprobs, TextDelta
from halocline.errors import ParameterError
from halocline.params import SamplingParams, check_characters, checked_salt
from halocline.schedule.events import FinishReason

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its token ids, or one of them by name: {"prompt": ...}, {"prompt_token_ids": ...}; the latter may have a
"cache_salt" beside it: cached prefixes are shared among prompts with the same one."""
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one place: its natural-log probability and its rank (1: the most probable)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt, as far as it has come."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """All tokens, the end-of-sequence token and those of a stop string included."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token that ended it, if one did."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids`: its own log-probability and those of the most probable ones, by token id."""


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None
    """The text; None where token ids were given or a conversation."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int | None = None
    """Tokens of the prompt that the prefix cache had, so that none of the completions computed them; None until the
    first of them is computed."""


def is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a single prompt: a text, a mapping, or a list of token ids that is not empty."""
    if isinstance(prompts, (str, Mapping)):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], int)


def read_prompt(prompt: Prompt) -> tuple[str | None, Sequence[int] | None]:
    """Return the text or the token ids of a prompt; raises ParameterError when it is neither."""
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), read_prompt(list(prompt["prompt_token_ids"]))[1]
        return read_prompt(prompt.get("prompt", ()))
    if isinstance(prompt, str):
        check_characters("prompt", prompt)
        return prompt, None
    are_ids = not isinstance(prompt, (bytes, bytearray)) and all(
        isinstance(token, int) and not isinstance(token, bool) for token in prompt
    )
    if not are_ids:
        raise ParameterError("a prompt must be a text, a list of token ids, or a mapping with one of them", "prompt")
    return None, list(prompt)


def salt_of(prompt: Prompt) -> str:
    """Return the cache salt of a prompt, "" for none; raises ParameterError when it is none that can be used."""
    return checked_salt(prompt.get("cache_salt")) if isinstance(prompt, Mapping) else ""


def read_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its text parts joined; raises ParameterError when it has no role or no text."""
    if isinstance(message, Mapping):
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            texts = [part.get("text") if _is_text(part) else None for part in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        if isinstance(message.get("role"), str) and isinstance(content, str):
            check_characters("messages", message["role"] + content)
            return {**message, "content": content}
    raise ParameterError(
        'a message must be a mapping such as {"role": "user", "content": "..."}; content may be a list of text parts',
        "messages",
    )


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text"


def one_for_each(params: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
    """Return one SamplingParams for each of `prompts`; raises ParameterError when a list has another length."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise ParameterError(f"sampling_params is {params!r}; give a SamplingParams, or a list with one per prompt")
    if len(params) != prompts:
        raise ParameterError(f"{len(params)} sampling_params for {prompts} prompts; give one, or one for each")
    return list(params)


def grow(output: CompletionOutput, delta: TextDelta, text_of: Callable[[int], tuple[str, bytes | None]]) -> None:
    """Add what is new to a completion; `text_of` prints a token by itself."""
    output.text += delta.text
    output.token_ids += delta.token_ids
    output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
    if output.logprobs is not None:
        output.logprobs += [
            _logprobs(token_id, found, lambda token_id: text_of(token_id)[0])
            for token_id, found in zip(delta.token_ids, delta.logprobs, strict=True)
        ]


async def merge(generations: Sequence[AsyncIterator[TextDelta]]) -> AsyncIterator[tuple[int, TextDelta]]:
    """Yield the deltas of several generations as they come, each with its generation's index."""
    waiting = {asyncio.ensure_future(anext(each)): index for index, each in enumerate(generations)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                index = waiting.pop(future)
                delta = future.result()
                if delta.finish_reason is None:
                    waiting[asyncio.ensure_future(anext(generations[index]))] = index
                yield index, delta
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def empty_completion(index: int, params: SamplingParams) -> CompletionOutput:
    return CompletionOutput(index, logprobs=None if params.logprobs is None else [])


def _logprobs(token_id: int, found: Logprobs | None, text_of: Callable[[int], str]) -> dict[int, Logprob]:
    assert found is not None, f"token {token_id} came without the log-probabilities that were asked for"
    own = {token_id: Logprob(found.token_logprob, found.rank, text_of(token_id))}
    best = {each: Logprob(logprob, rank, text_of(each)) for rank, (each, logprob) in enumerate(found.top, start=1)}
    return own | {each: value for each, value in best.items() if each != token_id}

"""Every field that a client may send, and what becomes of it: the one table, printed in docs/api.md.

A field is honoured, ignored (it cannot change the answer), or refused by name (it would change the answer, and we do
not do it yet). A field that stands nowhere here is refused too, with the nearest known name. `null` is absence.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halocline.api.errors import ApiError

Endpoint = Literal["completions", "chat"]
BOTH: tuple[Endpoint, ...] = ("completions", "chat")
COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
CHAT: tuple[Endpoint, ...] = ("chat",)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a request body."""

    name: str
    endpoints: tuple[Endpoint, ...]
    treatment: Literal["honoured", "ignored", "refused"]
    text: str
    harmless: tuple[Any, ...] = ()
    """Values of a refused field that ask for nothing, and are taken."""


def _honoured(name: str, endpoints: tuple[Endpoint, ...], text: str) -> Field:
    return Field(name, endpoints, "honoured", text)


def _ignored(name: str, endpoints: tuple[Endpoint, ...], text: str) -> Field:
    return Field(name, endpoints, "ignored", text)


def _refused(name: str, endpoints: tuple[Endpoint, ...], text: str, *harmless: object) -> Field:
    return Field(name, endpoints, "refused", text, harmless)


FIELDS: tuple[Field, ...] = (
    _honoured("model", BOTH, "the served model's name; another name is a 404; absent: the served model"),
    _honoured("prompt", COMPLETIONS, "a string, a list of strings, a list of token ids, or a list of such lists"),
    _honoured(
        "messages",
        CHAT,
        "roles system, developer (as system), user, assistant; content is text or text parts; `name` is ignored",
    ),
    _honoured("stream", BOTH, "send server-sent events, ended by `data: [DONE]`"),
    _honoured(
        "stream_options",
        BOTH,
        "`include_usage`: a last chunk with the token counts; only with `stream`; `include_obfuscation` is ignored",
    ),
    _honoured("n", BOTH, "completions per prompt, 1 to 128; completion i of a seeded request has seed + i"),
    _honoured("max_tokens", BOTH, "the most tokens to generate; absent: as many as fit"),
    _honoured("max_completion_tokens", CHAT, "the newer name of `max_tokens`; both only if equal"),
    _honoured("min_tokens", BOTH, "no end of sequence and no stop before this many tokens"),
    _honoured("ignore_eos", BOTH, "go on past the end-of-sequence token"),
    _honoured("stop", BOTH, "a string or up to 16 that end the text and are not part of it"),
    _honoured("stop_token_ids", BOTH, "token ids that end the text"),
    _honoured("seed", BOTH, "makes sampling a function of (seed, position)"),
    _honoured("temperature", BOTH, "0 (greedy) to 100; default 1"),
    _honoured("top_p", BOTH, "above 0, to 1; default 1"),
    _honoured("top_k", BOTH, "keep the k most probable tokens; 0 or -1: all"),
    _honoured("min_p", BOTH, "0 to 1; keep tokens at least so probable, relative to the best"),
    _honoured("presence_penalty", BOTH, "-2 to 2"),
    _honoured("frequency_penalty", BOTH, "-2 to 2"),
    _honoured("repetition_penalty", BOTH, "above 0; 1 is none"),
    Field("logprobs", COMPLETIONS, "honoured", "0 to 20: log-probabilities of each token and of so many best ones"),
    Field("logprobs", CHAT, "honoured", "true: log-probabilities of each token"),
    _honoured("top_logprobs", CHAT, "0 to 20 best tokens at each position; only with `logprobs`"),
    _honoured("echo", COMPLETIONS, "true: the text begins with the prompt; not together with `logprobs`"),
    _honoured("return_token_ids", BOTH, "true: each choice has `token_ids`, the end of sequence and stops included"),
    _honoured(
        "cache_salt",
        BOTH,
        "1 to 256 characters; cached prefixes are shared only among requests with the same one (absent: with all that "
        "have none)",
    ),
    _ignored("user", BOTH, "no accounts are kept"),
    _ignored("metadata", BOTH, "nothing is stored"),
    _ignored("store", BOTH, "nothing is stored"),
    _ignored("service_tier", BOTH, "there is one tier"),
    _ignored("safety_identifier", BOTH, "no accounts are kept"),
    _ignored("prompt_cache_key", BOTH, "nothing is routed by it; `cache_salt` keeps prefixes apart"),
    _ignored("prompt_cache_retention", BOTH, "how long a prefix stays is the arena's business"),
    _ignored("prompt_cache_options", CHAT, "prefixes are found without being named"),
    _ignored("parallel_tool_calls", CHAT, "there are no tools"),
    _refused("best_of", COMPLETIONS, "candidates are not ranked", 1),
    _refused("suffix", COMPLETIONS, "no insertion", ""),
    _refused("logit_bias", BOTH, "logits are not biased", {}),
    _refused("response_format", CHAT, "no structured output", {"type": "text"}),
    _refused("tools", CHAT, "no tool calls", []),
    _refused("tool_choice", CHAT, "no tool calls", "none", "auto"),
    _refused("functions", CHAT, "no function calls", []),
    _refused("function_call", CHAT, "no function calls", "none", "auto"),
    _refused("modalities", CHAT, "text only", ["text"]),
    _refused("audio", CHAT, "text only"),
    _refused("prediction", CHAT, "no predicted outputs"),
    _refused("reasoning_effort", CHAT, "no control of reasoning"),
    _refused("verbosity", CHAT, "no control of verbosity"),
    _refused("web_search_options", CHAT, "no search"),
    _refused("moderation", CHAT, "no moderation"),
)


def check_names(body: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """Return the honoured fields that are present; raise an ApiError that names the first field we cannot honour."""
    fields = {field.name: field for field in FIELDS if endpoint in field.endpoints}
    present = {name: value for name, value in body.items() if value is not None}
    for name, value in present.items():
        field = fields.get(name)
        if field is None:
            raise _unsupported(f"unknown field {name!r}{_guess(name, fields)}", name, "unknown_field")
        # 1 == True in Python, but not in JSON.
        if field.treatment == "refused" and not any(
            value == harmless and type(value) is type(harmless) for harmless in field.harmless
        ):
            raise _unsupported(f"{name!r} is not supported: {field.text}", name, "unsupported_field")
    return {name: value for name, value in present.items() if fields[name].treatment == "honoured"}


def _unsupported(message: str, name: str, code: str) -> ApiError:
    return ApiError(400, message, param=name, code=code)


def _guess(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def known_name(param: str | None) -> str | None:
    """Return the field of the table that `param` is or lies in; logs get no names that clients make up."""
    root = re.split(r"[.\[]", param or "")[0]
    return root if any(field.name == root for field in FIELDS) else None


def table() -> str:
    """Return the table as Markdown, as docs/api.md prints it."""
    lines = ["| field | completions | chat | |", "|---|---|---|---|"]
    for field in FIELDS:
        cells = [field.treatment if endpoint in field.endpoints else "" for endpoint in BOTH]
        allowed = f" (taken: {', '.join(f'`{json.dumps(each)}`' for each in field.harmless)})" if field.harmless else ""
        lines.append(f"| `{field.name}` | {cells[0]} | {cells[1]} | {field.text}{allowed} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")

"""What a client may ask of one request.

Names, meanings and defaults follow vLLM's SamplingParams where it has them, except that an absent `max_tokens`
means "as many as fit" and not 16.
"""

from __future__ import annotations

import msgspec

from halocline.errors import ParameterError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
"""Of one stop string: a text is held back as long as it could become one."""
MAX_STOP_TOKENS = 1024
MAX_N = 128
MAX_SALT_CHARACTERS = 256


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to continue a prompt. Every field is checked at construction; a wrong one raises ParameterError."""

    n: int = 1
    """How many independent completions to make of the prompt (1 to 128)."""
    temperature: float = 1.0
    """0 is greedy; above, logits are divided by it (0 to 100)."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this (above 0, to 1)."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the most probable one (0 to 1)."""
    max_tokens: int | None = None
    """The most tokens to generate; None: as many as fit the arena and the model."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many tokens."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token, to max_tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the text, of 1 to 1,024 characters; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text, beside the model's own end-of-sequence tokens; at most 1,024."""
    seed: int | None = None
    """Makes the sampling noise a function of (seed, position); None: the engine picks one per request."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token generated before (-2 to 2)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per time it was generated before (-2 to 2)."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens in prompt or output (above 0)."""
    logprobs: int | None = None
    """Return the log-probability of each token and of this many most probable ones (0 to 20); None: none."""

    def __post_init__(self) -> None:
        """Check every field; the text of the error names the field, its value and its range."""
        _check_whole("n", self.n, 1, MAX_N)
        _check_real("temperature", self.temperature, 0.0, 100.0)
        _check_real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p <= 0.0:
            raise ParameterError(f"top_p is {self.top_p}; it must be above 0 and at most 1", "top_p")
        _check_whole("top_k", self.top_k, -1, 2**31 - 1)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        if self.max_tokens is not None:
            _check_whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}; lower the first", "min_tokens"
            )
        _check_flag("ignore_eos", self.ignore_eos)
        self._check_stops()
        if self.seed is not None:
            _check_whole("seed", self.seed, -(2**63), 2**63 - 1)
        _check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_real("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    def _check_stops(self) -> None:
        # Lists and single strings are what people write; the stored form is a tuple so that the value is hashable.
        stop = _as_tuple("stop", self.stop)
        tokens = _as_tuple("stop_token_ids", self.stop_token_ids)
        msgspec.structs.force_setattr(self, "stop", stop)
        msgspec.structs.force_setattr(self, "stop_token_ids", tokens)
        if len(stop) > MAX_STOP_STRINGS:
            raise ParameterError(f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ParameterError(f"stop holds {_shown(text)}; every one must be a string that is not empty", "stop")
            if len(text) > MAX_STOP_CHARACTERS:
                raise ParameterError(
                    f"stop holds a string of {len(text)} characters; at most {MAX_STOP_CHARACTERS} are allowed", "stop"
                )
            check_characters("stop", text)
        if len(tokens) > MAX_STOP_TOKENS:
            raise ParameterError(
                f"stop_token_ids has {len(tokens)} tokens; at most {MAX_STOP_TOKENS} are allowed", "stop_token_ids"
            )
        for token in tokens:
            _check_whole("stop_token_ids", token, 0, 2**31 - 1)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0


def checked_salt(value: object) -> str:
    """Return a client's cache salt, "" for none; raises ParameterError, which does not quote it: it may be a secret.

    Prompts share cached prefixes only where their salts are equal. It is compared and nothing else.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ParameterError(f"cache_salt is of type {type(value).__name__}; it must be a string", "cache_salt")
    if not 1 <= len(value) <= MAX_SALT_CHARACTERS:
        raise ParameterError(
            f"cache_salt has {len(value)} characters; it must have 1 to {MAX_SALT_CHARACTERS}, or be left out",
            "cache_salt",
        )
    check_characters("cache_salt", value)
    return value


def check_characters(name: str, text: str) -> None:
    """Raise ParameterError for a text that cannot be written down; it is not quoted: it may be a secret."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ParameterError(f"{name} holds half of a surrogate pair, which is no character", name)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"  # Python refuses to write it


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)):
        raise ParameterError(f"{name} is {_shown(value)}; it must be a list", name)
    return tuple(value)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ParameterError(f"{name} is {_shown(value)}; it must be true or false", name)


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ParameterError(f"{name} is {_shown(value)}; it must be a whole number from {low} to {high}", name)


def _check_real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ParameterError(f"{name} is {_shown(value)}; it must be a number from {low:g} to {high:g}", name)

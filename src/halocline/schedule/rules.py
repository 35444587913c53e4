"""What the operator decided about scheduling: one frozen record, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from halocline.errors import ConfigError
from halocline.memory.host import HostCosts

Admission = tuple[Literal["expected"], float] | tuple[Literal["guaranteed"]]


@dataclass(frozen=True, slots=True)
class Rules:
    """How requests are admitted and steps are filled. Raises ConfigError with every problem at once."""

    step_tokens: int
    """The most tokens that one step computes."""
    max_running_requests: int
    """Request slots: the most requests that hold memory at once."""
    max_model_len: int
    """The most tokens of prompt and output together."""
    vocab_size: int
    """Token ids are below this."""
    admission: Admission = ("expected", 0.9)
    """`("expected", quantile)` grants the prompt and that quantile of observed outputs, `("guaranteed",)` all of it."""
    default_max_tokens: int = 1024
    """Under `guaranteed`, the limit of a request that gives none."""
    clip_max_tokens: bool = False
    """Lower a max_tokens that is too large to the largest that would do, instead of refusing it."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence tokens."""
    max_waiting_requests: int = 4096
    """An arrival beyond this many waiting requests is refused as `overloaded`."""
    prefix_cache: bool = True
    """Whether pages of requests that left are kept for others that begin alike."""
    prefill_delay_seconds: float = 0.0
    """How long a new prefill may be held back for a fuller batch while others decode; 0 turns it off."""
    prefill_delay_tokens: int = 2048
    """The batch that is waited for: so many tokens to prefill end the delay at once."""
    prefill_delay_low_bytes: int = 0
    """Nothing is held back while running requests hold fewer bytes of the arena: the device would idle."""
    lookahead_tokens: int = 0
    """Tokens that a decode may compute in one step beyond the next one, so that a step may leap 1 + this many. Every
    price counts them."""
    host_costs: HostCosts = field(default_factory=HostCosts)
    """What decides whether pages are copied to the host arena, where there is one, or computed again."""
    decode_reserve_tokens: int = 512
    """Output tokens, beyond the first, that a request is granted when its prompt is received from another worker."""

    def __post_init__(self) -> None:
        """Check every field."""
        problems = [
            f"{name} is {value}; it must be at least {least}"
            for name, value, least in (
                ("step_tokens", self.step_tokens, 1),
                ("max_running_requests", self.max_running_requests, 1),
                ("max_model_len", self.max_model_len, 2),
                ("vocab_size", self.vocab_size, 1),
                ("default_max_tokens", self.default_max_tokens, 1),
                ("max_waiting_requests", self.max_waiting_requests, 1),
                ("prefill_delay_seconds", self.prefill_delay_seconds, 0),
                ("prefill_delay_tokens", self.prefill_delay_tokens, 1),
                ("prefill_delay_low_bytes", self.prefill_delay_low_bytes, 0),
                ("lookahead_tokens", self.lookahead_tokens, 0),
                ("decode_reserve_tokens", self.decode_reserve_tokens, 0),
            )
            if value < least
        ]
        if self.step_tokens < self.max_running_requests:
            problems.append(
                f"step_tokens is {self.step_tokens} but {self.max_running_requests} requests may decode in one step; "
                "raise step_tokens or lower max_running_requests"
            )
        if self.admission[0] == "expected" and not 0.0 < self.admission[1] <= 1.0:
            problems.append(f"the admission quantile is {self.admission[1]}; it must be above 0 and at most 1")
        if problems:
            raise ConfigError(problems)

    @property
    def is_guaranteed(self) -> bool:
        """Whether a request that starts always finishes without being retracted for memory."""
        return self.admission[0] == "guaranteed"

"""What the API needs of a front end. `engine.front.FrontEnd` is one; the two meet in `serve.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from halocline.engine.messages import ModelFacts, TextDelta
from halocline.params import SamplingParams


class Generation(Protocol):
    """One sequence that is being generated."""

    prompt_tokens: int

    @property
    def completion_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int | None: ...

    async def begun(self) -> None: ...

    def __aiter__(self) -> AsyncIterator[TextDelta]: ...

    def close(self) -> None:
        """Stop it, if it still goes on."""
        ...


class Health(Protocol):
    """A verdict on the engine."""

    @property
    def is_healthy(self) -> bool: ...

    def body(self) -> dict[str, Any]: ...


class Metrics(Protocol):
    """What is counted and scraped."""

    def responded(self, route: str, status: int) -> None: ...

    def render(self) -> bytes: ...


class Front(Protocol):
    """Prompts become tokens, tokens become text; errors are those of `halocline.errors`."""

    model_name: str
    created: int

    @property
    def metrics(self) -> Metrics: ...

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def has_chat_template(self) -> bool: ...

    async def encode(self, text: str) -> tuple[int, ...]: ...

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def token(self, token_id: int) -> tuple[str, bytes | None]: ...

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        index: int = 0,
        cache_salt: str = "",
        prefill_at: str = "",
    ) -> Generation: ...

    def health(self) -> Health: ...

    def worker(self) -> dict[str, Any]: ...

    async def drain(self, seconds: float) -> int: ...

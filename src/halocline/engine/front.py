"""The front end: engine client and tokenizer together. Prompts become tokens, tokens become text.

front = FrontEnd(client, prompts, model_name="gemma3-270m")
generation = await front.generate(await front.encode("Once"), SamplingParams())    # raises when refused
async for delta in generation: print(delta.text)
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from halocline.engine.client import EngineClient
from halocline.engine.detokenize import TextMaker
from halocline.engine.health import Health, judge
from halocline.engine.messages import ModelFacts, TextDelta
from halocline.engine.metrics import Metrics
from halocline.engine.sequence import SequenceText
from halocline.engine.stream import TokenStream
from halocline.errors import EngineDeadError, HaloclineError, TooLargeError
from halocline.params import SamplingParams
from halocline.units import ceil_div

logger = logging.getLogger(__name__)

LONG_TEXT_CHARACTERS = 4096
"""Longer texts are tokenized in a thread, so that other streams go on meanwhile."""
MARKUP_CHARACTERS = 32
"""About what a chat template writes around each part of a message."""
SEED_BITS = 63


class Chat(Protocol):
    """How text and messages become tokens: `model.chat.ChatTemplate`, or anything alike."""

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        ...

    @property
    def is_fallback(self) -> bool:
        """Whether the model has no chat template and a plain one stands in for it."""
        ...

    def encode(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the tokens of a conversation, up to where the assistant speaks."""
        ...


class Generation:
    """One sequence that is being generated: an async iterator of TextDelta."""

    def __init__(
        self, front: FrontEnd, stream: TokenStream, text: SequenceText, prompt_tokens: int, started_at: float
    ) -> None:
        self._front = front
        self._stream = stream
        self._text = text
        self.prompt_tokens = prompt_tokens
        self._started_at = started_at
        self._first_at: float | None = None
        self._is_counted = False

    @property
    def request_id(self) -> str:
        """The engine's id of the sequence, as logs show it."""
        return self._stream.request_id

    @property
    def completion_tokens(self) -> int:
        """Tokens computed so far."""
        return self._text.completion_tokens

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that the prefix cache had; known with the first token."""
        return self._stream.cached_tokens

    @property
    def max_tokens(self) -> int:
        """The limit that applies."""
        return self._stream.max_tokens

    async def begun(self) -> None:
        """Wait until the first token is there; raises the error that ends the sequence before it."""
        try:
            await self._stream.begun()
        except HaloclineError as error:
            self._fail(error)
            raise

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> TextDelta:
        if self._text.finish_reason is not None:
            raise StopAsyncIteration
        try:
            batch = await anext(self._stream)
        except HaloclineError as error:
            self._fail(error)
            raise
        if self._first_at is None:
            self._first_at = time.monotonic()
            self._front.metrics.first_token_seconds.observe(self._first_at - self._started_at)
        delta = self._text.take(batch)
        if delta.finish_reason is not None:
            self._stream.close("stop")
            self._count(delta.finish_reason)
        return delta

    def close(self) -> None:
        """Stop generating, if it still goes on; a second call does nothing."""
        self._stream.close()
        self._count("abort")

    def _fail(self, error: HaloclineError) -> None:
        self._count("error")
        logger.warning("event=request_failed request=%s error=%r", self.request_id, str(error))

    def _count(self, reason: str) -> None:
        if self._is_counted:
            return
        self._is_counted = True
        now, tokens, metrics = time.monotonic(), self.completion_tokens, self._front.metrics
        metrics.finished(reason)
        metrics.output_tokens.observe(tokens)
        if self.cached_tokens is not None:
            metrics.cached_tokens.observe(self.cached_tokens)
        if reason in ("stop", "length") and self._first_at is not None:
            metrics.request_seconds.observe(now - self._started_at)
            if tokens > 1:
                metrics.token_seconds.observe((now - self._first_at) / (tokens - 1))
        logger.info(
            "event=request_end request=%s reason=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d "
            "seconds=%.3f",
            self.request_id,
            reason,
            self.prompt_tokens,
            self.cached_tokens or 0,
            tokens,
            now - self._started_at,
        )


class FrontEnd:
    """What api and llm speak to."""

    def __init__(
        self,
        client: EngineClient,
        chat: Chat,
        *,
        model_name: str | None = None,
        health_seconds: float = 30.0,
        seed: int = 0,
    ) -> None:
        self.client = client
        self._chat = chat
        self.model_name = model_name or client.model.name
        self.created = int(time.time())
        self._health_seconds = health_seconds
        self._seeds = random.Random(seed)
        self._maker = TextMaker(chat.tokenizer)
        # A tokenizer drops the truncation of its file at first use; threads must not find it at that.
        chat.tokenizer.encode("")
        self.metrics = Metrics(lambda: client.snapshot, lambda: client.dead_reason is None, self.model_name)

    @property
    def facts(self) -> ModelFacts:
        """What the engine said of its model."""
        return self.client.model

    @cached_property
    def _longest_token_characters(self) -> int:
        # Half a second for a large vocabulary, so only when somebody sends a long text.
        return max(map(len, self._chat.tokenizer.get_vocab()))

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template of its own."""
        return not self._chat.is_fallback

    async def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a plain prompt, with the special tokens that the model wants."""
        await self._check_length(len(text), "prompt")
        return await self._off_loop(lambda: self._chat.tokenizer.encode(text), len(text))

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Return the tokens of a conversation; raises RequestError when the template refuses it."""
        limit = self.facts.max_model_len
        if len(messages) > limit:
            message = f"{len(messages)} messages have at least a token each, and max_model_len is {limit}; send fewer"
            raise TooLargeError(message, "messages", "context_length_exceeded")
        await self._check_length(sum(len(message["content"]) for message in messages), "messages")
        # Roles and a template's own words take time to write, too.
        characters = sum(len(str(text)) + MARKUP_CHARACTERS for message in messages for text in message.values())
        return await self._off_loop(lambda: self._chat.encode(messages), characters)

    async def _check_length(self, characters: int, param: str) -> None:
        """Refuse a text that is too long however it is tokenized: that takes a second per million characters."""
        limit = self.facts.max_model_len
        if characters <= limit:
            return
        longest = await asyncio.to_thread(lambda: self._longest_token_characters)
        if characters > limit * longest:
            raise TooLargeError(
                f"a text of {characters} characters has at least {ceil_div(characters, longest)} tokens (no token is "
                f"longer than {longest} characters), and max_model_len is {limit}; shorten the prompt",
                param,
                "context_length_exceeded",
            )

    async def _off_loop(self, encode: Callable[[], Sequence[int]], characters: int) -> tuple[int, ...]:
        return tuple(encode() if characters < LONG_TEXT_CHARACTERS else await asyncio.to_thread(encode))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones skipped."""
        return self._maker.decode(token_ids)

    def token(self, token_id: int) -> tuple[str, bytes | None]:
        """Return one token by itself, as text and as bytes."""
        return self._maker.token(token_id)

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        index: int = 0,
        seed: int | None = None,
        cache_salt: str = "",
        prefill_at: str = "",
    ) -> Generation:
        """Submit one sequence and wait until the engine accepts it; `index` tells the n completions of a prompt apart.

        `seed` is what `seed_of` gave for this sequence before; None: asked now. `cache_salt` as `params.checked_salt`
        returns it. `prefill_at` is the link address of the worker that is to compute the prompt; empty: this one.
        Raises RequestError, TooLargeError, OverloadedError or EngineDeadError.
        """
        # Before the submission: an engine accepts a sequence and sends its first token in one message.
        started_at = time.monotonic()
        seed = self.seed_of(params, index) if seed is None else seed
        stream = await self.client.submit(
            tuple(prompt), params, seed=seed, request_id=request_id, cache_salt=cache_salt, prefill_at=prefill_at
        )
        self.metrics.prompt_tokens.observe(len(prompt))
        logger.info(
            "event=request_start request=%s prompt_tokens=%d max_tokens=%d",
            stream.request_id,
            len(prompt),
            stream.max_tokens,
        )
        return Generation(self, stream, SequenceText(self._maker, prompt, params), len(prompt), started_at)

    def seed_of(self, params: SamplingParams, index: int) -> int:
        """Return completion `index`'s seed: seed + index of a prompt that has one, else the next of the engine's."""
        if params.seed is None:
            return self._seeds.getrandbits(SEED_BITS)
        return (params.seed + index) % (1 << SEED_BITS)

    def health(self) -> Health:
        """Judge whether work goes forward; a worker among others also says what it is to them."""
        verdict = judge(self.client.sight(), self._health_seconds)
        link = self.client.hello.link
        return verdict if link is None else replace(verdict, about=link.words())

    def worker(self) -> dict[str, Any]:
        """Return what a router asks of a worker of its group, in bytes and requests of this moment."""
        hello, figures, verdict = self.client.hello, self.client.snapshot.figures, self.health()
        link = hello.link
        body: dict[str, Any] = {
            "object": "halocline.worker",
            "role": "both" if link is None else link.role,
            "epoch": "" if link is None else link.epoch,
            "link_address": "" if link is None else link.address,
            "fingerprint": "" if link is None else link.fingerprint,
            "model": self.model_name,
            "max_model_len": self.facts.max_model_len,
            "status": verdict.state,
            "message": verdict.message,
        }
        capacity = hello.capacity
        total_bytes = 0 if capacity is None else capacity.arena_bytes
        longest = 0 if capacity is None else capacity.longest_request_tokens
        if figures is None:  # it has just started: nothing is taken, as its first figures will say
            taken, waiting, running = 0, 0, 0
        else:
            arena = figures.arena
            total_bytes, taken = arena.total_bytes, arena.used_bytes - arena.cached_bytes + arena.promised_bytes
            waiting, running = figures.waiting + figures.retracted, figures.running
        return body | {
            "total_bytes": total_bytes,
            "free_bytes": max(0, total_bytes - taken),
            "token_bytes": total_bytes // longest if longest else 0,
            "waiting": waiting,
            "running": running,
        }

    async def drain(self, seconds: float) -> int:
        """Take no new requests, wait for those that run, end the rest with an error; returns how many those were."""
        self.client.is_draining = True
        deadline = time.monotonic() + seconds
        while self.client.sequences and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        rest = self.client.fail_all(
            EngineDeadError(f"the server is stopping; it waited {seconds:g} s for this request")
        )
        logger.info("event=drained failed=%d", rest)
        return rest

"""Generating text from Python: `LLM`, and its streaming twin `AsyncLLM`. Names and shapes are vLLM's where it has them.

Both start an engine process and speak to it through the same front end as the HTTP server. `LLM` runs the conversation
on an event loop in a thread of its own, so that it also works where a loop runs already (notebooks).
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any, Self, TypeVar

from halocline.compose import Prepared, begin_engine, open_front, prepare
from halocline.config import Config, build
from halocline.engine.front import FrontEnd, Generation
from halocline.errors import EngineDeadError, HaloclineError, ParameterError
from halocline.memory.facts import CapacityFacts
from halocline.outputs import (
    CompletionOutput,
    Messages,
    Prompt,
    RequestOutput,
    empty_completion,
    grow,
    is_one_prompt,
    merge,
    one_for_each,
    read_message,
    read_prompt,
    salt_of,
)
from halocline.params import SamplingParams, checked_salt

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput"]
T = TypeVar("T")

SUBMITTED_PER_SLOT = 2
"""`LLM` keeps so many prompts per request slot in the engine: enough that no slot is idle, and memory is bounded."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt as it goes to the engine."""

    text: str | None
    token_ids: Sequence[int]
    params: SamplingParams
    salt: str


class AsyncLLM:
    """A model in an engine process of its own; streams completions on the running event loop.

    async with AsyncLLM("gemma3-270m", kv_bytes="256MiB") as llm:
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)
    """

    def __init__(self, model: str = Config.model, **settings: Any) -> None:
        # A program's own output matters more than the engine's life; a server's log is another matter.
        self.config = build({"model": model, "log_level": "warning"}, settings)
        self._front: FrontEnd | None = None
        self._prepared: Prepared | None = None
        self._numbers = count()
        self._lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._sequences: dict[str, list[str]] = {}
        """The engine's names of each request's completions, while it runs."""

    @property
    def capacity(self) -> CapacityFacts | None:
        """What the arena holds; None before the start, or where only the engine knows."""
        memory = None if self._prepared is None else self._prepared.memory
        return None if memory is None else memory.facts

    async def start(self) -> Self:
        """Find the model and start the engine; raises ConfigError or ModelError with what to do."""
        async with self._starting():
            if self._front is None:
                await self._start()
        return self

    def _starting(self) -> asyncio.Lock:
        # One at a time starts or closes. A lock belongs to one event loop, and a program may run several in turn.
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock[0] is not loop:
            self._lock = loop, asyncio.Lock()
        return self._lock[1]

    async def _start(self) -> None:
        engine = begin_engine()
        try:
            self._prepared = await asyncio.to_thread(prepare, self.config)
            self._front = await open_front(self._prepared, engine)
        except BaseException:
            engine.close()
            raise

    async def close(self) -> None:
        """End the engine process; a second call does nothing."""
        async with self._starting():
            front, self._front = self._front, None
            if front is not None:
                await front.client.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yield the output so far, each time that it has grown; it is one object, `finished` at the end.

        Leaving the loop early stops the generation and frees its memory.
        """
        params = sampling_params or SamplingParams()
        salt, seeds = salt_of(prompt), self._seeds(params)
        text, token_ids = await self._tokens(prompt)
        async for output in self._stream(_Asked(text, token_ids, params, salt), seeds, request_id):
            yield output

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the assistant's answer to a conversation, as `generate` does.

        Cached prefixes are shared among conversations with the same `cache_salt`.
        """
        params = sampling_params or SamplingParams()
        salt, seeds = checked_salt(cache_salt), self._seeds(params)
        token_ids = await self._running.encode_chat([read_message(message) for message in messages])
        async for output in self._stream(_Asked(None, token_ids, params, salt), seeds, request_id):
            yield output

    async def abort(self, request_id: str) -> None:
        """End a request: its stream ends with what there is, for the reason "abort". Unknown ids are ignored."""
        for name in self._sequences.get(request_id, ()):
            self._running.client.abort(name)

    @property
    def _running(self) -> FrontEnd:
        if self._front is None:
            raise EngineDeadError("the engine is not running: use `async with AsyncLLM(...) as llm`, or call start()")
        return self._front

    async def _tokens(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        text, token_ids = read_prompt(prompt)
        if token_ids is None:
            assert text is not None, "a prompt is a text or token ids"
            token_ids = await self._running.encode(text)
        return text, token_ids

    def _seeds(self, params: SamplingParams) -> list[int]:
        # Before anything is awaited: a long text takes longer to tokenize, and must not change others' seeds.
        return [self._running.seed_of(params, index) for index in range(params.n)]

    async def _stream(self, asked: _Asked, seeds: list[int], name: str | None) -> AsyncIterator[RequestOutput]:
        name = name or f"generate-{next(self._numbers)}"
        if name in self._sequences:
            raise ParameterError(f"request_id {name!r} is in use", "request_id")
        completions = [empty_completion(index, asked.params) for index in range(asked.params.n)]
        output = RequestOutput(name, asked.text, list(asked.token_ids), completions)
        self._sequences[name] = [f"{name}-{index}" for index in range(asked.params.n)]
        generations: list[Generation] = []
        try:
            await self._submit(output, asked, seeds, generations)
            async for index, delta in merge(generations):
                known = [each.cached_tokens for each in generations if each.cached_tokens is not None]
                output.num_cached_tokens = min(known, default=None)
                grow(output.outputs[index], delta, self._running.token)
                output.finished = all(each.finish_reason for each in output.outputs)
                yield output
        finally:
            for generation in generations:
                generation.close()
            del self._sequences[name]

    async def _submit(self, output: RequestOutput, asked: _Asked, seeds: list[int], accepted: list[Generation]) -> None:
        """Submit all completions of a prompt at once; `accepted` gets those that run, also when one is refused."""
        submissions = (
            self._running.generate(
                output.prompt_token_ids, asked.params, request_id=name, seed=seed, cache_salt=asked.salt
            )
            for name, seed in zip(self._sequences[output.request_id], seeds, strict=True)
        )
        answers = await asyncio.gather(*submissions, return_exceptions=True)
        accepted += [answer for answer in answers if not isinstance(answer, BaseException)]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer


class LLM:
    """A model in an engine process of its own, for programs without an event loop.

    with LLM("gemma3-270m", kv_bytes="256MiB") as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

    Settings are those of `halocline serve`; unknown ones are refused, naming the nearest.
    """

    def __init__(self, model: str = Config.model, **settings: Any) -> None:
        self._async = AsyncLLM(model, **settings)
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="halocline-llm", daemon=True)
        self._thread.start()
        # Also when the program forgets `close`: the engine must not outlive the object.
        self._end = weakref.finalize(self, _end, self._async, self._loop, self._thread, self._pid)
        try:
            self._run(self._async.start())
        except BaseException:
            self.close()
            raise

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self._async.config

    @property
    def capacity(self) -> CapacityFacts | None:
        """What the arena holds."""
        return self._async.capacity

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, and return the outputs in the order of the prompts.

        `sampling_params` holds for all, or is a list with one for each. Raises RequestError, naming the prompt, when
        one cannot be served; the others are stopped then.
        """
        listed = [prompts] if is_one_prompt(prompts) else list(prompts)
        return self._all(
            [lambda params, each=each: self._async.generate(each, params) for each in listed], sampling_params, use_tqdm
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, and return the outputs in their order.

        Cached prefixes are shared among conversations with the same `cache_salt`.
        """
        listed = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        return self._all(
            [lambda params, each=each: self._async.chat(each, params, cache_salt=cache_salt) for each in listed],
            sampling_params,
            use_tqdm,
        )

    def close(self) -> None:
        """End the engine process; a second call does nothing."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _all(
        self,
        streams: Sequence[Callable[[SamplingParams], AsyncIterator[RequestOutput]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        shows_progress: bool,
    ) -> list[RequestOutput]:
        if not self._end.alive:
            raise EngineDeadError("this LLM is closed")
        if os.getpid() != self._pid:
            raise EngineDeadError(
                f"this LLM belongs to process {self._pid}, of which this one is a fork: make another one here"
            )
        paired = list(zip(streams, one_for_each(params, len(streams)), strict=True))
        with progress_bar(len(paired), shown=shows_progress) as advance:
            return self._run(self._gather(paired, advance))

    async def _gather(
        self,
        paired: Sequence[tuple[Callable[[SamplingParams], AsyncIterator[RequestOutput]], SamplingParams]],
        advance: Callable[[], None],
    ) -> list[RequestOutput]:
        room = asyncio.Semaphore(max(1, self.config.max_running_requests * SUBMITTED_PER_SLOT))

        async def last(number: int, stream: AsyncIterator[RequestOutput]) -> RequestOutput:
            # The semaphore serves in the order of asking, so prompts keep their seniority.
            async with room:
                try:
                    *_, output = [each async for each in stream]
                except HaloclineError as error:
                    error.add_note(f"prompt {number} of {len(paired)}")
                    raise
            advance()
            return output

        tasks = [asyncio.ensure_future(last(number, make(params))) for number, (make, params) in enumerate(paired)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop's thread; Ctrl-C here stops it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Show how many of `total` prompts are done, on standard error if that is a terminal; yields what to call."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not shown or not console.is_terminal) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)


def _end(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    """Close the engine and end the loop's thread; runs once, also at the interpreter's exit."""
    if os.getpid() != pid:
        return  # a fork has neither the thread nor the engine, and would wait for them for ever
    if loop.is_running():
        asyncio.run_coroutine_threadsafe(llm.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
    loop.close()

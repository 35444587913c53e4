"""From prompts to an answer: submit every choice, then collect them or stream them as they come."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from halocline.api.errors import api_error
from halocline.api.ports import Front, Generation
from halocline.api.requests import Order
from halocline.api.shapes import Collected, Shape, usage
from halocline.api.sse import DONE, ClientGoneError, EventStream, event, unless_gone
from halocline.engine.messages import TextDelta

CLIENT_GONE = 499
"""Nobody sees this status but log and metrics."""


class Answer:
    """The choices of one HTTP request; choice i continues prompt i // n."""

    def __init__(
        self, front: Front, shape: Shape, order: Order, prompts: Sequence[tuple[int, ...]], prefill_at: str = ""
    ) -> None:
        """`prefill_at`: link address of the worker that is to compute the prompts; empty: this one."""
        self._front = front
        self._shape = shape
        self._order = order
        self._prompts = prompts
        self._prefill_at = prefill_at
        self._id = shape.prefix + uuid.uuid4().hex
        self._created = int(time.time())
        self._generations: list[Generation] = []

    async def respond(self, request: Request, headers: dict[str, str]) -> Response:
        """Return the HTTP answer; what the engine refuses is raised before a stream begins, for a status of its own."""
        headers = {"x-request-id": self._id, **headers}
        try:
            if self._order.stream:
                await unless_gone(request.receive, self._begin())
                return EventStream(self._events(), self._close, headers)
            body = await unless_gone(request.receive, self._collect())
        except ClientGoneError:
            self._close()
            return Response(status_code=CLIENT_GONE)
        except BaseException:
            self._close()
            raise
        return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")

    async def _begin(self) -> None:
        await self._submit()
        if self._prefill_at:
            # Another worker's death can still have a status of its own, and another worker can be tried.
            await first_of([each.begun() for each in self._generations])

    async def _submit(self) -> None:
        """Submit all choices together: the engine takes them in at once, and one refusal ends all."""
        n = self._order.params.n
        tasks = [
            asyncio.ensure_future(
                self._front.generate(
                    self._prompts[i // n],
                    self._order.params,
                    request_id=f"{self._id}-{i}",
                    index=i % n,
                    cache_salt=self._order.cache_salt,
                    prefill_at=self._prefill_at,
                )
            )
            for i in range(len(self._prompts) * n)
        ]
        try:
            self._generations = list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(result, BaseException):
                    result.close()
            raise

    async def _collect(self) -> dict[str, Any]:
        await self._submit()
        collected = [Collected() for _ in self._generations]
        try:
            async with aclosing(_merged(self._generations)) as deltas:
                async for index, delta in deltas:
                    collected[index].add(delta)
        finally:
            self._close()
        choices = [self._with_ids(self._shape.choice(i, each), each.token_ids) for i, each in enumerate(collected)]
        return self._body(self._shape.whole, choices) | {"usage": self._usage()}

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            for i in range(len(self._generations)):
                opening = self._shape.opening(i)
                if opening is not None:
                    yield self._chunk([opening])
            async with aclosing(_merged(self._generations)) as deltas:
                async for index, delta in deltas:
                    if not self._says_something(delta):
                        continue
                    yield self._chunk([self._with_ids(self._shape.delta(index, delta), delta.token_ids)])
            if self._order.include_usage:
                yield event(self._body(self._shape.chunk, []) | {"usage": self._usage()})
        except Exception as error:
            yield event(api_error(error).body())
        finally:
            self._close()
        yield DONE

    def _says_something(self, delta: TextDelta) -> bool:
        return bool(delta.text or delta.tokens or delta.finish_reason or self._order.token_ids)

    def _with_ids(self, choice: dict[str, Any], token_ids: Sequence[int]) -> dict[str, Any]:
        return choice | {"token_ids": list(token_ids)} if self._order.token_ids else choice

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        body = self._body(self._shape.chunk, choices)
        return event(body | {"usage": None} if self._order.include_usage else body)

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        model = self._front.model_name
        return {"id": self._id, "object": kind, "created": self._created, "model": model, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        prompt_tokens = sum(len(prompt) for prompt in self._prompts)
        completion_tokens = sum(each.completion_tokens for each in self._generations)
        return usage(prompt_tokens, completion_tokens, self._cached_tokens())

    def _cached_tokens(self) -> int:
        """Count the prompt tokens that nobody computed for this answer: of each prompt what all its choices found."""
        n = self._order.params.n
        found = [each.cached_tokens or 0 for each in self._generations]
        return sum(min(found[i : i + n]) for i in range(0, len(found), n))

    def _close(self) -> None:
        for generation in self._generations:
            generation.close()


async def first_of(waits: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait until the first of them is over, drop the others, and raise what it raised."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield the deltas of all generations as they come, each with its index; the first error ends all."""
    if len(generations) == 1:
        async for delta in generations[0]:
            yield 0, delta
        return
    # One place: a reader that stops reading leaves the rest in the streams, which are bounded.
    queue: asyncio.Queue[tuple[int, TextDelta | Exception | None]] = asyncio.Queue(maxsize=1)
    tasks = [asyncio.ensure_future(_feed(queue, i, each)) for i, each in enumerate(generations)]
    running = len(tasks)
    try:
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    queue: asyncio.Queue[tuple[int, TextDelta | Exception | None]], index: int, generation: Generation
) -> None:
    try:
        async for delta in generation:
            await queue.put((index, delta))
    except Exception as error:
        await queue.put((index, error))
    else:
        await queue.put((index, None))

"""Tokens on their way to a reader: batches, ends, errors, and a reader that is too slow."""

from __future__ import annotations

import asyncio

import pytest

from halocline.engine.messages import TokenReport
from halocline.engine.stream import TokenStream
from halocline.errors import EngineDeadError, FailedError


class Cancels(list[tuple[str, str]]):
    def __call__(self, request_id: str, reason: str) -> None:
        self.append((request_id, reason))


def stream(limit: int = 100) -> tuple[TokenStream, Cancels]:
    cancels = Cancels()
    return TokenStream("a", cancels, limit), cancels


async def test_what_came_since_the_last_read_is_one_batch() -> None:
    tokens, _ = stream()
    tokens.push(TokenReport("a", 1))
    tokens.push(TokenReport("a", 2))
    assert [each.token_id for each in await anext(tokens)] == [1, 2]
    tokens.push(TokenReport("a", 3, None, "length"))
    assert [each.token_id for each in await anext(tokens)] == [3]
    with pytest.raises(StopAsyncIteration):
        await anext(tokens)


async def test_a_waiting_reader_is_woken() -> None:
    tokens, _ = stream()
    waiting = asyncio.ensure_future(anext(tokens))
    await asyncio.sleep(0)
    tokens.push(TokenReport("a", 1))
    assert len(await waiting) == 1


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    tokens, cancels = stream()
    tokens.push(TokenReport("a", 1))
    tokens.fail(EngineDeadError("gone"))
    assert len(await anext(tokens)) == 1
    with pytest.raises(EngineDeadError, match="gone"):
        await anext(tokens)
    tokens.close()
    assert cancels == [], "what has ended is not cancelled"


async def test_closing_cancels_once() -> None:
    tokens, cancels = stream()
    tokens.close()
    tokens.close("stop")
    assert cancels == [("a", "abort")]


async def test_a_reader_that_falls_too_far_behind_is_cut_off() -> None:
    tokens, cancels = stream(limit=3)
    for token in range(10):
        tokens.push(TokenReport("a", token))
    assert cancels == [("a", "abort")]
    with pytest.raises(FailedError, match="3 tokens behind"):
        await anext(tokens)


async def test_failing_before_acceptance_wakes_the_submitter() -> None:
    tokens, _ = stream()
    tokens.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):
        await tokens.accepted

"""Four requests that memory pressure retracts one after another, and the moment when no more can come back.

1. a senior takes all there is but the pages of one prompt (beside the floor) and goes on decoding
2. each of four juniors gets its prompt's pages, grows, asks for one page more, and gives way: nobody helps it to.
   The next one comes after it and is more senior than the last
3. the senior leaves, and those come back, in order of seniority, whose whole lives fit together; the first of the
   rest waits and says why; it comes back when one of them has ended
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from halocline.engine.stream import TokenStream
from halocline.params import SamplingParams
from testing.pair import link_of, metrics
from testing.rooms import Life, Pages, Room, difference, sum_of
from testing.server import PATIENCE_SECONDS, LiveServer

T = TypeVar("T")


class Reader:
    """Reads one stream in the background."""

    def __init__(self, stream: TokenStream, patience_seconds: float) -> None:
        self.stream = stream
        self.patience_seconds = patience_seconds
        self.tokens: list[int] = []
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for batch in self.stream:
            self.tokens += [each.token_id for each in batch if each.token_id is not None]

    async def has(self, tokens: int) -> None:
        """Wait until so many tokens came."""
        deadline = time.monotonic() + self.patience_seconds
        while len(self.tokens) < tokens:
            assert not self.task.done(), f"the stream ended after {len(self.tokens)} tokens: {self.task}"
            assert time.monotonic() < deadline, f"{len(self.tokens)} of {tokens} tokens came"
            await asyncio.sleep(0.002)


@dataclass(frozen=True)
class Asked:
    """What a client asks for."""

    prompt: list[int]
    new_tokens: int

    @property
    def life(self) -> Life:
        """Its tokens."""
        return Life(len(self.prompt), self.new_tokens)


@dataclass
class Pressure:
    """Two workers, a senior and its juniors."""

    prefill: LiveServer
    decode: LiveServer
    room: Room
    """The decode worker's."""
    senior: Asked
    juniors: Sequence[Asked]
    """The most senior of them first."""
    patience_seconds: float = PATIENCE_SECONDS
    readers: list[Reader] = field(default_factory=list)
    """Of the juniors, in their order."""
    given_way: list[int] = field(default_factory=list)
    """How many tokens each had when all had given way."""

    @property
    def lives(self) -> list[Life]:
        """The juniors' lives, in their order."""
        return [junior.life for junior in self.juniors]

    def check_room(self) -> None:
        """The engine has cut its arena as the room says, and nobody but the juniors can give way, each of them must."""
        capacity = self.decode.client.hello.capacity
        assert capacity is not None, "the engine has a real arena"
        layout = self.room.layout
        assert (capacity.slabs, capacity.slab_bytes) == (layout.slabs, layout.slab_bytes)
        cut = [(pool.name, pool.page_tokens, pool.pages_per_slab, pool.stride_bytes) for pool in layout.pools]
        assert [(pool.name, pool.page_tokens, pool.pages_per_slab, pool.stride_bytes) for pool in capacity.pools] == cut
        taken = self.room.life(self.senior.life)
        for life in self.lives:
            assert self.room.fits(taken, self.room.life(Life(life.prompt_tokens, 1))), "a prompt has its pages"
            assert not self.room.fits(taken, self.room.life(life)), "and its answer has not"
            last = Life(life.positions, 1)
            assert self.room.life(last) == self.room.life(life), "what is left of a life needs as much as all of it"

    def run(self) -> dict[str, float]:
        """Retract all juniors, let the senior go, and return the figures of the moment when no more come back."""
        senior = self._wait_for(self._press())
        self._until(lambda seen: seen["halocline_retractions_total"] == len(self.juniors), "all to have given way")
        seen = metrics(self.decode)
        assert not senior.task.done(), "the senior left before the juniors had given way"
        assert (seen["halocline_requests{state=decoding}"], seen["halocline_waiting{reason=memory}"]) == (1, 1)
        assert seen["halocline_requests{state=retracted}"] == len(self.juniors)
        self.given_way = self._tokens()
        self.decode.loop.call_soon_threadsafe(senior.stream.close)
        return self._come_back()

    async def _press(self) -> Reader:
        senior = await self._submit(self.senior, 0, ignore_eos=True)  # who ignores it has its whole life granted
        await senior.has(1)
        last = len(self.juniors)
        for number, junior in zip(range(last, 0, -1), reversed(self.juniors), strict=True):
            reader = await self._submit(junior, number)
            await reader.has(1)
            self.readers.insert(0, reader)
        return senior

    async def _submit(self, asked: Asked, priority: int, **wishes: bool) -> Reader:
        params = SamplingParams(max_tokens=asked.new_tokens, min_tokens=asked.new_tokens, temperature=0.0, **wishes)
        at = link_of(self.prefill)
        stream = await self.decode.client.submit(tuple(asked.prompt), params, priority=priority, prefill_at=at)
        return Reader(stream, self.patience_seconds)

    def _come_back(self) -> dict[str, float]:
        """Wait until those who can have come back decode, then see that they stay as many until one of them ends."""
        count = self.room.come_back(self.lives)
        seen = self._until(lambda seen: at_work(seen) == (count, 0), f"{count} to decode, and nobody to prefill")
        held = pages_of(seen, self.room, "live", "promised")
        assert held == sum_of(self.room.lives(self.lives[:count]), self.room.floor), "whole lives, and the floor"
        waiting = len(self.juniors) - count
        assert seen["halocline_requests{state=retracted}"] == waiting
        # The first of them waits for memory, whoever is behind it for its turn.
        assert seen.get("halocline_waiting{reason=memory}", 0) == min(1, waiting)
        assert seen.get("halocline_waiting{reason=queue}", 0) == max(0, waiting - 1)
        while not self._any_has_ended():
            busy, tokens = sum(at_work(metrics(self.decode))), self._tokens()
            if not self._any_has_ended():
                assert busy <= count
                assert tokens[count:] == self.given_way[count:], "somebody came back before its turn"
        assert all(now > then for now, then in zip(self._tokens()[:count], self.given_way, strict=False))
        return seen

    def left(self, seen: dict[str, float]) -> Pages:
        """Return what was left beside whole lives, floor included: slabs of a shared arena, pages of each share."""
        layout = self.room.layout
        promised = difference(pages_of(seen, self.room, "promised"), self.room.floor)
        if self.room.ratio is not None:
            return difference(pages_of(seen, self.room, "free"), promised)
        free = int(seen["halocline_arena_free_bytes"]) // layout.slab_bytes
        if all(pool.pages_per_slab == 1 for pool in layout.pools):
            return (free - sum(promised),)
        # Pages in slabs that could be gathered are no loss: with moves, only counts matter.
        needed = sum(self.room.slabs(sum_of(pages_of(seen, self.room, "live"), promised)))
        assert free - sum(self.room.slabs(promised)) <= layout.slabs - needed
        return (layout.slabs - needed,)

    def end(self) -> list[list[int]]:
        """Wait for the ends of all juniors and return their tokens, in their order."""
        self._wait_for(self._all_end())
        for worker in (self.prefill, self.decode):
            worker.wait_idle()
            assert metrics(worker)["halocline_violations_total"] == 0
        last = metrics(self.decode)
        assert last["halocline_retractions_total"] == len(self.juniors), "who came back gave way again"
        assert last["halocline_transfer_received_total"] == len(self.juniors) + 1, "a prompt travelled twice"
        return [reader.tokens for reader in self.readers]

    def _tokens(self) -> list[int]:
        return [len(reader.tokens) for reader in self.readers]

    def _any_has_ended(self) -> bool:
        return any(reader.task.done() for reader in self.readers)

    async def _all_end(self) -> None:
        await asyncio.gather(*(reader.task for reader in self.readers))

    def _wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.decode.loop).result(self.patience_seconds)

    def _until(self, holds: Callable[[dict[str, float]], bool], what: str) -> dict[str, float]:
        """Return the first figures of which `holds` is true."""
        deadline = time.monotonic() + self.patience_seconds
        while not holds(seen := metrics(self.decode)):
            assert time.monotonic() < deadline, f"waited {self.patience_seconds} s for {what}: {at_work(seen)}"
            time.sleep(0.01)
        return seen


def at_work(seen: dict[str, float]) -> tuple[int, int]:
    """Return how many decode, and how many are on their way to it."""
    states = {
        state: int(seen[f"halocline_requests{{state={state}}}"]) for state in ("decoding", "prefilling", "receiving")
    }
    return states.pop("decoding"), sum(states.values())


def pages_of(seen: dict[str, float], room: Room, *states: str) -> Pages:
    """Return the pages of these states, per pool."""
    return tuple(
        int(sum(seen[f"halocline_pool_pages{{pool={pool.name},state={state}}}"] for state in states))
        for pool in room.layout.pools
    )

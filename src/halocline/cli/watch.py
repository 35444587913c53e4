"""Watching a server from outside: its /metrics, read again and again, and the highest values seen."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

import httpx

from halocline.replay import read_figures

EVERY_SECONDS = 0.2
IDLE_LOOKS = 50
USED = "halocline_arena_used_bytes"
CACHED = "halocline_arena_cached_bytes"
RETRACTIONS = "halocline_retractions_total"
POOL = "halocline_arena_pool_bytes"
PEAK_RUNNING = "halocline_peak_running"


class Watch:
    """Reads a server's figures while the `with` block runs; keeps those of the moment when most bytes were needed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._task: asyncio.Task[None] | None = None
        self.last: dict[str, float] = {}
        """The latest figures, by `name` or `name{label}`."""
        self.at_peak: dict[str, float] = {}
        """The figures of the moment at which most bytes of the arena were needed."""
        self.peak_running = 0
        """The most requests that held memory at once."""

    async def __aenter__(self) -> Self:
        await self._look()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None, "a Watch ends once, after it began"
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        with contextlib.suppress(httpx.HTTPError):
            await self._look()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            with contextlib.suppress(httpx.HTTPError):
                await self._look()

    async def _look(self) -> None:
        self.last = await read_figures(self._url)
        self.peak_running = max(self.peak_running, running_requests(self.last))
        if needed_bytes(self.last) >= needed_bytes(self.at_peak):
            self.at_peak = self.last


async def until_idle(url: str) -> dict[str, float]:
    """Wait until a server's figures show that nothing is needed any more, at most some seconds, and return them."""
    for _ in range(IDLE_LOOKS):
        figures = await read_figures(url)
        if not needed_bytes(figures) and not running_requests(figures):
            break
        await asyncio.sleep(EVERY_SECONDS)
    return figures


def running_requests(figures: dict[str, float]) -> int:
    """Return how many requests hold memory: those that prefill or decode."""
    return int(sum(figures.get(f"halocline_requests{{{state}}}", 0) for state in ("prefilling", "decoding")))


def needed_bytes(figures: dict[str, float]) -> int:
    """Return the bytes that somebody needs: the used ones, less those that are only kept because there is room."""
    return int(figures.get(USED, 0) - figures.get(CACHED, 0))


def bytes_by_pool(figures: dict[str, float]) -> dict[str, int]:
    """Return the bytes of each pool that somebody needs: of all owners but the cache."""
    pools: dict[str, int] = {}
    for name, value in figures.items():
        if name.startswith(f"{POOL}{{"):
            owner, _, pool = name.removeprefix(f"{POOL}{{").removesuffix("}").partition(",")
            if owner == "cached":
                continue
            pools[pool] = pools.get(pool, 0) + int(value)
    return pools

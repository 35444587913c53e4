"""Asks every worker, again and again, how it is (GET /v1/worker), and writes the answers into the book."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import httpx
import msgspec

from halocline.api.routing.book import Book, Report, Worker

logger = logging.getLogger(__name__)

WORKER_PATH = "/v1/worker"
TOKEN_HEADER = "x-halocline-link-token"
MOST_REPORT_BYTES = 64 << 10


class Prober:
    """One task per worker; `on_news` is called after each answer or silence."""

    def __init__(
        self,
        book: Book,
        client: httpx.AsyncClient,
        token: str,
        on_news: Callable[[Worker], None],
        *,
        every_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self._book, self._client, self._token, self._on_news = book, client, token, on_news
        self._every_seconds, self._timeout_seconds = every_seconds, timeout_seconds
        self._asked = {id(each): asyncio.Event() for each in book.workers}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Ask everyone once, all together; then keep asking."""
        await asyncio.gather(*(self.look(each) for each in self._book.workers))
        self._tasks = [asyncio.create_task(self._watch(each)) for each in self._book.workers]

    async def stop(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hurry(self, worker: Worker) -> None:
        """Ask this one now: there is a doubt about it."""
        self._asked[id(worker)].set()

    async def _watch(self, worker: Worker) -> None:
        asked = self._asked[id(worker)]
        while True:
            try:
                async with asyncio.timeout(self._every_seconds):
                    await asked.wait()
            except TimeoutError:
                pass
            asked.clear()
            await self.look(worker)

    async def look(self, worker: Worker) -> None:
        """Ask one worker once."""
        before = worker.state, worker.reason, worker.epoch
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._ask(worker)
        except TimeoutError:
            self._book.missed(worker, f"no answer within {self._timeout_seconds:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._book.missed(worker, str(error) or type(error).__name__)
        if before != (worker.state, worker.reason, worker.epoch):
            level = logging.INFO if worker.is_up else logging.WARNING
            logger.log(
                level,
                "event=worker url=%s side=%s state=%s epoch=%s reason=%r",
                worker.url,
                worker.side,
                worker.state,
                worker.epoch,
                worker.reason,
            )
        self._on_news(worker)

    async def _ask(self, worker: Worker) -> None:
        body = bytearray()
        async with self._client.stream("GET", worker.url + WORKER_PATH, headers={TOKEN_HEADER: self._token}) as answer:
            async for part in answer.aiter_raw():
                body += part
                if len(body) > MOST_REPORT_BYTES:
                    break
        now = asyncio.get_running_loop().time()
        if answer.status_code == 403:
            self._book.refused(worker, "it does not accept this router's link token", now)
        elif answer.status_code in (404, 405):
            self._book.refused(worker, f"it has no {WORKER_PATH}; is it a Halocline worker of this version?", now)
        elif answer.status_code != 200:
            self._book.missed(worker, f"{WORKER_PATH} answered {answer.status_code}")
        else:
            try:
                report = msgspec.json.decode(body, type=Report)
            except msgspec.MsgspecError as error:
                self._book.refused(worker, f"its {WORKER_PATH} cannot be read: {error}", now)
            else:
                self._book.answered(worker, report, now)

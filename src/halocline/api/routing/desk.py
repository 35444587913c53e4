"""What all requests of a router share: the book, the connections to workers, and which requests are under way."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any, Literal, Protocol

import httpx

from halocline.api.errors import BUSY, SERVER, ApiError
from halocline.api.routing.book import Book, Pick, Worker
from halocline.api.routing.metrics import RouterMetrics
from halocline.api.routing.order import Order
from halocline.api.routing.probe import Prober
from halocline.api.routing.retry import SAYS_DOWN, Attempts, Fault
from halocline.api.routing.settings import RouteSettings

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0


class Passing(Protocol):
    """A request that is being passed on."""

    def cut(self, why: Literal["lost", "stopping"], words: str) -> None:
        """End the attempt that is under way."""
        ...


class Desk:
    """One router's workers and requests."""

    def __init__(self, settings: RouteSettings, link_token: str, transport: httpx.AsyncBaseTransport | None = None):
        self.settings, self.link_token = settings, link_token
        self.book = Book(settings.prefill, settings.decode, settings.lost_seconds)
        # A new connection for every request: one that was kept may just be closing, and a request that breaks on it
        # looks like a worker that died. Answers take as long as they take; whether their worker lives is found out by
        # the prober.
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
            transport=transport,
        )
        self.prober = Prober(
            self.book,
            self.client,
            link_token,
            self._news,
            every_seconds=settings.probe_seconds,
            timeout_seconds=settings.probe_timeout_seconds,
        )
        self.relays: set[Passing] = set()
        self.metrics = RouterMetrics(self.book, lambda: len(self.relays))
        self._at: dict[int, Passing] = {}
        """By the number of the flight at a decode worker: whose it is."""
        self.is_draining = False
        self._stop_words = ""

    async def start(self) -> None:
        """Ask all workers how they are, and go on asking."""
        await self.prober.start()

    async def close(self) -> None:
        """Ask no more and close all connections."""
        await self.prober.stop()
        await self.client.aclose()

    # ---- one request

    def check_room(self) -> None:
        """Refuse a request that would be one too many, or comes when the router is stopping."""
        if self.is_draining:
            raise self._stopping()
        if len(self.relays) >= self.settings.max_requests:
            raise ApiError(
                429,
                f"{len(self.relays)} requests are under way; the router takes {self.settings.max_requests} at a time",
                type=BUSY,
                code="overloaded",
                headers={"retry-after": "1"},
            )

    def pick(self, relay: Passing, order: Order, attempts: Attempts) -> Pick:
        """Choose where the next attempt goes; raises ApiError when there is none, or enough were made."""
        if self._stop_words:
            raise self._stopping()
        if not attempts.may_retry:
            raise self._gave_up(attempts)
        matched = self.book.matched(order.load)
        pick = self.book.pick(
            order.load,
            asyncio.get_running_loop().time(),
            without=attempts.without,
            can_prefill=order.wants_prefill and attempts.can_prefill,
        )
        if pick is None:
            raise self._gave_up(attempts) if attempts.faults else self._nobody()
        self._at[pick.flights[0].number] = relay
        known = (matched[pick.decode.name], matched[pick.prefill.name] if pick.prefill else 0)
        self.metrics.sent(pick, known, wanted_prefill=order.wants_prefill)
        return pick

    def computed(self, pick: Pick) -> None:
        """Note that an attempt's prompt is computed."""
        self.book.computed(pick)

    def end(self, pick: Pick) -> None:
        """Note that an attempt is over."""
        self._at.pop(pick.flights[0].number, None)
        self.book.end(pick)

    def suspect(self, pick: Pick, fault: Fault) -> None:
        """Draw from a fault what it says of workers."""
        if fault.kind == "prefill" and pick.prefill is not None:
            self.book.lost_pair(pick, asyncio.get_running_loop().time())
            self.prober.hurry(pick.prefill)
        elif fault.kind in SAYS_DOWN and pick.decode.epoch == pick.flights[0].epoch:
            self.book.missed(pick.decode, fault.words)
            self.prober.hurry(pick.decode)

    # ---- errors

    def _nobody(self) -> ApiError:
        return ApiError(
            503,
            f"no decode worker can take the request: {self.book.blockers()}",
            type=SERVER,
            code="no_decode_worker",
            headers={"retry-after": self._retry_after()},
        )

    def _gave_up(self, attempts: Attempts) -> ApiError:
        """Say what the last attempt failed of, in its own code where it is known to clients."""
        last, tried = attempts.faults[-1], len(attempts.faults)
        # What a decode worker says of a lost prompt has addresses in it; the log has those.
        what = "no other worker could compute the prompt" if last.kind == "prefill" else last.words
        words = f"{what} (attempt {tried} of at most {attempts.most}; no other worker is left to try)"
        if last.kind == "overloaded":
            return ApiError(429, words, type=BUSY, code="overloaded", headers={"retry-after": "1"})
        codes = {"prefill": "prefill_lost", "engine": "engine_unavailable"}
        code = codes.get(last.kind, "worker_lost")
        return ApiError(503, words, type=SERVER, code=code, headers={"retry-after": self._retry_after()})

    def _stopping(self) -> ApiError:
        words = self._stop_words or "the router is stopping and takes no new requests"
        return ApiError(503, words, type=SERVER, code="router_stopping", headers={"retry-after": "1"})

    def _retry_after(self) -> str:
        """Seconds until a worker that came back would be known."""
        return str(max(1, round(self.settings.probe_seconds + 0.5)))

    # ---- news

    def _news(self, worker: Worker) -> None:
        """End the attempts that are lost, as far as the latest answer or silence of a worker tells."""
        if worker.side != "decode":
            return
        now = asyncio.get_running_loop().time()
        for flight in list(worker.flights.values()):
            reason = self.book.lost_reason(flight, now)
            relay = self._at.get(flight.number)
            if reason is not None and relay is not None:
                relay.cut("lost", reason)

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return status and body of /health: 200 while some decode worker takes requests."""
        book = self.book
        down = [each for each in book.workers if not each.is_up]
        alive = any(each.is_up for each in book.decode)
        if self.is_draining:
            state, message = "draining", "the router is stopping and takes no new requests"
        elif not alive:
            state, message = "no_decode_worker", "no decode worker takes requests"
        elif down:
            state, message = "degraded", f"{len(down)} of {len(book.workers)} workers take no requests"
            if book.prefill and not any(each.is_up for each in book.prefill):
                message += "; no prefill worker is left, so decode workers compute prompts themselves"
        else:
            state, message = "ok", "serving"
        states = Counter(each.state for each in book.workers)
        body = {
            "status": state,
            "message": message,
            "model": book.model,
            "requests": len(self.relays),
            "states": dict(states),
            "dead": [f"{each.url}: {each.reason}" for each in down],
            "workers": [_told(each) for each in book.workers],
        }
        return (200 if state in ("ok", "degraded") else 503), body

    async def drain(self, seconds: float) -> int:
        """Take no new requests, wait for those under way, end the rest with an error; returns how many those were."""
        self.is_draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.relays and loop.time() < deadline:
            await asyncio.sleep(0.02)
        rest = list(self.relays)
        self._stop_words = f"the router is stopping; it waited {seconds:g} s for this request"
        for relay in rest:
            relay.cut("stopping", self._stop_words)
        logger.info("event=drained failed=%d", len(rest))
        return len(rest)


def _told(worker: Worker) -> dict[str, Any]:
    told: dict[str, Any] = {
        "url": worker.url,
        "side": worker.side,
        "state": worker.state,
        "reason": worker.reason or None,
        "requests": len(worker.flights),
        "restarts": worker.restarts,
    }
    if worker.report is not None:
        report = worker.report
        told |= {"role": report.role, "epoch": report.epoch, "model": report.model, "link": report.link_address or None}
        told |= {"free_bytes": worker.free_bytes, "total_bytes": report.total_bytes, "waiting": report.waiting}
    return told

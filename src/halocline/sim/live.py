"""A workload as load on a live OpenAI-compatible server, ours or another, seen from the client's side.

    open loop    each job is sent at its own time (over the time scale), however long the answers take
    saturated    `concurrency` clients: the next job in order is sent when one has ended

Who arrives when, whose turn waits for which, and whose client goes away is decided by the simulator's own `Lobby`. A
request *waits* from being sent to its first token and *runs* from there to its end: more a client cannot see. Where the
server is a Halocline, its /metrics tell of the arena meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import httpx

from halocline.sim.client import Answer, LoadError, ask, open_client
from halocline.sim.gauge import Gauge
from halocline.sim.lobby import Lobby
from halocline.sim.prompts import as_text, as_token_ids
from halocline.sim.scrape import arena_of, figures_of
from halocline.sim.simulation import Progress
from halocline.sim.workload import Job, Workload

SAMPLE_SECONDS = 0.25
SETTLE_SECONDS = 2.0
"""So long may a server's figures take to tell of the last answer; then they are reported as they are."""
OUTPUT_TOKENS = "halocline_output_tokens_total"
CLIENT_FAULT = range(400, 500)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Which server, and how the load is put on it."""

    url: str
    model: str
    api_key: str | None = None
    as_text: bool = False
    """Send words instead of token ids."""
    concurrency: int | None = None
    """So many clients in a saturated loop; None: the open loop."""
    time_scale: float = 1.0
    ttft_limit_seconds: float = 10.0
    tpot_limit_seconds: float = 0.1


@dataclass
class Seen:
    """What the clients saw, all of it; times in seconds since the start."""

    gauge: Gauge
    answers: list[Answer] = field(default_factory=list)
    """Of the finished requests."""
    short: int = 0
    """Finished with fewer tokens than asked."""
    counts: Counter[str] = field(default_factory=Counter)
    """How the others ended: rejected, failed, aborted."""
    errors: Counter[str] = field(default_factory=Counter)
    """What the server said of those."""
    prompt_tokens: int = 0
    """Of all jobs that were sent."""
    latest_seconds: float = 0.0
    """How late the latest job was sent: a load generator that cannot keep up measures itself."""
    seconds: float = 0.0
    before: dict[str, float] = field(default_factory=dict)
    """The server's figures at the start and at the end; empty where it shows none."""
    after: dict[str, float] = field(default_factory=dict)

    @property
    def ended(self) -> int:
        """Jobs that are done with, however."""
        return len(self.answers) + self.counts.total()


async def run_live(target: Target, workload: Workload, on_progress: Callable[[Progress], None]) -> Seen:
    """Send all of `workload` and return what was seen. What fails is counted, and never ends the run."""
    async with open_client(target.url, target.api_key, target.concurrency) as client:
        before = await _look(client)
        load = _Load(target, workload, client, before)
        sampler = asyncio.create_task(load.sample(on_progress))
        try:
            await load.drive()
        finally:
            sampler.cancel()
            with suppress(asyncio.CancelledError):
                await sampler
        load.seen.after = await _look_at_all(client, load.seen) if before else {}
    on_progress(load.progress())
    return load.seen


class _Load:
    """One run in progress."""

    def __init__(self, target: Target, workload: Workload, client: httpx.AsyncClient, before: dict[str, float]) -> None:
        self._target, self._client, self._jobs = target, client, len(workload.jobs)
        asked = {content for job in workload.jobs if job.after is not None for content, _ in job.prompt}
        self._continued = {job.output_id for job in workload.jobs if job.output_id in asked}
        """Answers that a later turn has in its prompt."""
        self._said: dict[int, list[int]] = {}
        self._lobby = Lobby(workload, saturated=target.concurrency is not None, time_scale=target.time_scale)
        self._most = target.concurrency or self._jobs
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._defect: BaseException | None = None
        self._start = time.perf_counter()
        arena = arena_of(before)
        self.seen = Seen(Gauge(tuple(arena.held) if arena else ()), before=before)
        self.seen.gauge.look(arena)

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._start

    def progress(self) -> Progress:
        """Return how far the run is."""
        gauge, now = self.seen.gauge, self._now
        return Progress(self.seen.ended, self._jobs, now, now, 0, gauge.running, gauge.waiting)

    async def drive(self) -> None:
        """Send everything and wait for the last answer."""
        try:
            while self._lobby.left or self._busy:
                for job in self._lobby.let_in(self._now):
                    self._leave(job)
                while len(self._lobby) and len(self._busy) < self._most:
                    self._send(*self._lobby.next(self._now))
                await self._wait()
                if self._defect is not None:
                    raise self._defect
        finally:
            tasks = list(self._busy.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.seen.seconds = self._now
            self.seen.gauge.drain(self.seen.seconds)
            self.seen.gauge.sample(self.seen.seconds)

    async def _wait(self) -> None:
        """Wait for the next end of a request, or for the next arrival."""
        due = self._lobby.next_seconds
        if not self._busy and due is None:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), None if due is None else max(0.0, due - self._now))
        self._changed.clear()

    def _send(self, job: Job, due: float) -> None:
        now, gauge = self._now, self.seen.gauge
        self.seen.latest_seconds = max(self.seen.latest_seconds, now - due)
        self.seen.prompt_tokens += job.prompt_tokens
        gauge.change(now, waiting=1)
        task = asyncio.create_task(self._ask(job))
        self._busy[job.id] = task
        task.add_done_callback(partial(self._end, job))
        if self._target.concurrency is not None:
            if len(self._busy) == self._most:
                gauge.press(now)
            if not self._lobby.left:
                gauge.drain(now)

    async def _ask(self, job: Job) -> None:
        gauge, answer = self.seen.gauge, Answer()
        prompt = as_text(job) if self._target.as_text else as_token_ids(job, self._said)
        is_continued = job.output_id in self._continued and not self._target.as_text

        def first() -> None:
            gauge.change(self._now, running=1, waiting=-1)

        try:
            await ask(
                self._client, self._target.model, prompt, job.output_tokens, answer, first, wants_ids=is_continued
            )
            if not answer.first_token_seconds:
                raise LoadError("an answer held no token")
        except asyncio.CancelledError:
            self.seen.counts["aborted"] += 1
        except LoadError as error:
            self.seen.counts["rejected" if error.status in CLIENT_FAULT else "failed"] += 1
            self.seen.errors[str(error)] += 1
        else:
            if is_continued:
                self._said[job.output_id] = answer.token_ids
                answer.token_ids = []
            self.seen.answers.append(answer)
            self.seen.short += answer.output_tokens < job.output_tokens
        finally:
            has_run = bool(answer.first_token_seconds)
            gauge.change(self._now, running=-has_run, waiting=has_run - 1)

    def _end(self, job: Job, task: asyncio.Task[None]) -> None:
        del self._busy[job.id]
        self._lobby.ended(job, self._now)
        self._changed.set()
        if not task.cancelled():
            self._defect = self._defect or task.exception()

    def _leave(self, job: Job) -> None:
        """Let the client of `job` go away, if it is still there."""
        if job.id in self._busy:
            self._busy[job.id].cancel()
        else:
            self._lobby.drop(job)
            self.seen.counts["aborted"] += 1
            self._lobby.ended(job, self._now)

    async def sample(self, on_progress: Callable[[Progress], None]) -> None:
        """Look at the server and tell of the progress now and then, until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            if self.seen.before:
                self.seen.gauge.look(arena_of(await _look(self._client)))
            self.seen.gauge.sample(self._now)
            on_progress(self.progress())


async def _look_at_all(client: httpx.AsyncClient, seen: Seen) -> dict[str, float]:
    """Return the server's figures once they tell of every answer that came: they follow it by up to half a second."""
    expected = seen.before.get(OUTPUT_TOKENS, 0) + sum(answer.output_tokens for answer in seen.answers)
    latest = time.perf_counter() + SETTLE_SECONDS
    while True:
        figures = await _look(client)
        if figures.get(OUTPUT_TOKENS, expected) >= expected or time.perf_counter() >= latest:
            return figures
        await asyncio.sleep(SETTLE_SECONDS / 40)


async def _look(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the figures of the server's /metrics if it is a Halocline; empty where it is not, or does not answer."""
    try:
        response = await client.get("/metrics", timeout=10)
        figures = figures_of(response.text) if response.status_code == 200 else {}
    except (httpx.HTTPError, ValueError, UnicodeDecodeError):
        return {}
    return figures if arena_of(figures) else {}

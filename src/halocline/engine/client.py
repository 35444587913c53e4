"""The front end's side of the process boundary: starts the engine, submits sequences, notices its death.

    client = await EngineClient.start(Spec("module:build", settings), on_progress)
    stream = await client.submit(prompt_token_ids, params)     # returns once accepted; raises when refused
    async for tokens in stream: ...
    await client.close()

Everything runs on one event loop. Sending never blocks it; what is unread is bounded per stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import zmq

from halocline.engine.health import Sight
from halocline.engine.launch import (
    COMMANDS_KEPT,
    EngineProcess,
    Launched,
    how_it_ended,
    launch,
    start_error,
    wait_for_exit,
)
from halocline.engine.messages import (
    AcceptedReport,
    AdmittedReport,
    Bye,
    Cancel,
    Command,
    FailedReport,
    Figures,
    Hello,
    ModelFacts,
    Outputs,
    RejectedReport,
    Report,
    SequenceReport,
    Shutdown,
    Snapshot,
    Spec,
    StartFailed,
    Starting,
    Submit,
    TokenReport,
    decode_report,
    encode,
)
from halocline.engine.stream import UNREAD_TOKENS, TokenStream
from halocline.errors import (
    EngineDeadError,
    FailedError,
    HaloclineError,
    LostError,
    OverloadedError,
    RequestError,
    TooLargeError,
)
from halocline.params import SamplingParams
from halocline.schedule.events import FinishReason

logger = logging.getLogger(__name__)

GOODBYE_SECONDS = 20.0
"""An engine that has not ended by then is killed."""
REPORTS_IN_A_ROW = 8
"""A report that is there already is received without a look at the event loop; after so many, others get their turn."""
DEATHBED_MS = 200
"""How long to listen for an engine's last words once it has ended."""

OnProgress = Callable[[str, float | None], None]


class EngineClient:
    """One engine process, as its front end sees it."""

    def __init__(self, link: Launched, on_progress: OnProgress | None, unread_tokens: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._link: Launched | None = link
        self._on_progress = on_progress
        self._unread_tokens = unread_tokens
        self._streams: dict[str, TokenStream] = {}
        self._numbers = count()
        self._hello: asyncio.Future[Hello] = self._loop.create_future()
        self._bye: asyncio.Future[Bye] = self._loop.create_future()
        self._heard_at = self._loop.time()
        self._tasks = {self._loop.create_task(self._pump(link))}
        self._loop.add_reader(link.engine.beacon, self._beacon_closed, link)
        self.dead_reason: str | None = None
        self._dead = asyncio.Event()
        self.snapshot = Snapshot()
        """The engine's latest figures."""
        self.is_draining = False

    @classmethod
    async def start(
        cls,
        spec: Spec,
        on_progress: OnProgress | None = None,
        *,
        unread_tokens: int = UNREAD_TOKENS,
        engine: EngineProcess | None = None,
    ) -> EngineClient:
        """Start an engine process, or take `engine`, which was begun before, and wait until it is ready.

        Raises ConfigError, ModelError or EngineDeadError with the engine's own words when it cannot start.
        """
        client = cls(launch(spec, engine), on_progress, unread_tokens)
        try:
            await asyncio.shield(client._hello)
        except BaseException:
            await client.close(goodbye_seconds=0)
            raise
        return client

    @property
    def hello(self) -> Hello:
        """What the engine said of itself when it was ready."""
        return self._hello.result()

    @property
    def model(self) -> ModelFacts:
        """What the engine said of its model."""
        return self.hello.model

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None after `close`."""
        return None if self._link is None else self._link.engine.process.pid

    @property
    def sequences(self) -> int:
        """Sequences that have been submitted and have not ended."""
        return len(self._streams)

    def sight(self) -> Sight:
        """Return what can be seen of the engine now, for `health.judge`."""
        silent = self._loop.time() - self._heard_at
        return Sight(self.dead_reason, self.is_draining, len(self._streams), silent, self.snapshot)

    async def submit(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        *,
        seed: int = 0,
        priority: int = 0,
        request_id: str | None = None,
        cache_salt: str = "",
        prefill_at: str = "",
    ) -> TokenStream:
        """Submit one sequence and wait for the engine's yes (`params.n` is ignored: n sequences are n calls).

        Cached prefixes are shared among sequences with the same `cache_salt`, which `params.checked_salt` has checked.
        `prefill_at` is the link address of the worker that is to compute the prompt.
        Raises TooLargeError or RequestError when it can never run, OverloadedError when too many wait, EngineDeadError.
        """
        self._check_room()
        name = request_id or f"request-{next(self._numbers)}"
        assert name not in self._streams, f"request id {name} is in use"
        stream = TokenStream(name, self.cancel, self._unread_tokens)
        if not self._streams:
            self._heard_at = self._loop.time()
        self._streams[name] = stream
        try:
            self._send(Submit(name, prompt, params, seed, priority, cache_salt, prefill_at))
            await stream.accepted
        except BaseException:
            stream.close()
            raise
        return stream

    def cancel(self, request_id: str, reason: FinishReason = "abort") -> None:
        """Stop a sequence; its memory is free within a step. Unknown ids are ignored."""
        if self._streams.pop(request_id, None) is not None and self.dead_reason is None:
            with contextlib.suppress(OverloadedError):
                self._send(Cancel(request_id, reason))

    def abort(self, request_id: str) -> None:
        """Stop a sequence like `cancel`; its stream ends with what there is, for the reason "abort"."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self.cancel(request_id)
            stream.accept(stream.max_tokens, stream.clipped)
            stream.push(TokenReport(request_id, None, finish_reason="abort"))

    def fail_all(self, error: HaloclineError) -> int:
        """End every sequence with `error`, here and in the engine; returns how many there were."""
        streams = list(self._streams.values())
        for stream in streams:
            self.cancel(stream.request_id)
            stream.fail(error)
        return len(streams)

    async def died(self) -> None:
        """Wait until the engine is dead, for whatever reason: `dead_reason` says which."""
        await self._dead.wait()

    def kill(self) -> None:
        """End the engine process at once."""
        if self._link is not None:
            self._link.engine.process.kill()

    async def close(self, goodbye_seconds: float = GOODBYE_SECONDS) -> tuple[str, ...]:
        """End the engine and free everything, once; returns the violations that its last recount found."""
        link, self._link = self._link, None
        if link is None:
            return ()
        self.is_draining = True
        self.fail_all(EngineDeadError("the engine was closed"))
        try:
            if self.dead_reason is None and goodbye_seconds > 0:
                with contextlib.suppress(zmq.Again):  # it reads no commands: it will be killed
                    link.commands.send(encode(Shutdown()), zmq.NOBLOCK)
                # Not for its goodbye: an engine that is killed meanwhile says none. What it said is read meanwhile.
                await wait_for_exit(link.engine.process, goodbye_seconds)
                if link.engine.process.poll() is None:
                    logger.error("event=engine_killed waited_seconds=%g", goodbye_seconds)
                else:
                    await asyncio.wait([self._bye], timeout=DEATHBED_MS / 1000)
        finally:
            # Also when whoever closes is cancelled meanwhile: the process must not stay.
            self._loop.remove_reader(link.engine.beacon)
            for task in self._tasks:
                task.cancel()
            # Before anything is awaited, where a second cancellation would end this.
            link.close()
            self._die("the engine was closed")
            await asyncio.gather(*self._tasks, return_exceptions=True)
        return self._bye.result().violations if self._bye.done() and not self._bye.cancelled() else ()

    # --- sending

    def _check_room(self) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        if self._link is None or self.is_draining:
            raise EngineDeadError("the server is stopping and takes no new requests")
        limit = self.model.max_running_requests + self.model.max_waiting_requests
        if len(self._streams) >= limit:
            raise OverloadedError(
                f"{len(self._streams)} sequences run or wait already (max_running_requests "
                f"{self.model.max_running_requests} + max_waiting_requests {self.model.max_waiting_requests}); "
                "try again later"
            )

    def _send(self, command: Command) -> None:
        if self._link is None:
            return
        try:
            self._link.commands.send(encode(command), zmq.NOBLOCK)
        except zmq.Again:
            raise OverloadedError(f"the engine has {COMMANDS_KEPT} unread commands; try again later") from None

    # --- receiving

    async def _pump(self, link: Launched) -> None:
        try:
            while True:
                for _ in range(REPORTS_IN_A_ROW):
                    self._take(await link.reports.recv())
                await asyncio.sleep(0)
        except Exception as error:
            # Nobody would ever hear from the engine again: better an error for everybody than a silent wait.
            logger.exception("event=reports_failed")
            self._die(f"the reports of the engine can no longer be read: {error!r}")

    def _take(self, frame: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            report: Report = decode_report(frame)
        except msgspec.DecodeError as error:
            logger.error("event=bad_report error=%r", error)
            return
        match report:
            case Outputs(reports):
                for each in reports:
                    self._dispatch(each)
            case Figures(snapshot):
                self.snapshot = snapshot
            case Starting(text, fraction):
                if self._on_progress is not None:
                    self._on_progress(text, fraction)
            case Hello():
                _resolve(self._hello, report)
            case StartFailed():
                self._fail_start(start_error(report))
            case Bye():
                _resolve(self._bye, report)

    def _dispatch(self, report: SequenceReport) -> None:
        stream = self._streams.get(report.request_id)
        if stream is None:
            return
        match report:
            case TokenReport():
                if report.finish_reason is not None:
                    del self._streams[report.request_id]
                stream.push(report)
            case AcceptedReport(_, max_tokens, clipped):
                stream.accept(max_tokens, clipped)
            case AdmittedReport(_, cached_tokens):
                stream.cached_tokens = cached_tokens
            case RejectedReport():
                del self._streams[report.request_id]
                stream.fail(_rejection(report))
            case FailedReport(_, message, code):
                del self._streams[report.request_id]
                stream.fail(LostError(message) if code == LostError.code else FailedError(message))

    # --- death

    def _beacon_closed(self, link: Launched) -> None:
        self._loop.remove_reader(link.engine.beacon)
        self._tasks.add(self._loop.create_task(self._mourn(link)))

    async def _mourn(self, link: Launched) -> None:
        """Hear the last words, learn how the process ended, and tell everybody who waits."""
        await asyncio.wait([self._bye], timeout=DEATHBED_MS / 1000)
        await wait_for_exit(link.engine.process, 2.0)
        self._die(f"the engine process has ended: {how_it_ended(link.engine.process.returncode)}")
        # Its sockets are of no use to anybody; the folder goes now and not only when the front end ends.
        link.engine.folder.close()

    def _die(self, reason: str) -> None:
        if self.dead_reason is None:
            self.dead_reason = reason
            self._dead.set()
            if self._link is not None and not self._bye.done():
                logger.error("event=engine_dead reason=%r sequences=%d", reason, len(self._streams))
        error = EngineDeadError(self.dead_reason)
        self._fail_start(error)
        self.fail_all(error)

    def _fail_start(self, error: Exception) -> None:
        if not self._hello.done():
            self._hello.set_exception(error)
            self._hello.exception()


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _rejection(report: RejectedReport) -> HaloclineError:
    if report.code == "overloaded":
        return OverloadedError(report.message)
    kind = TooLargeError if report.code == "context_length_exceeded" else RequestError
    return kind(report.message, report.param, report.code)

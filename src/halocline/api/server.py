"""The HTTP server around the application: listening, signals, and a stop that lets running requests end.

first SIGINT or SIGTERM    no new connections, new requests are refused with 503; what ends within drain_seconds
                           ends, the rest gets an error
a second one               everything gets the error at once
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Iterator
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from halocline.api.patience import PatientProtocol
from halocline.errors import ConfigError

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 5.0
"""How long clients have to read the error that a stop ends their request with."""
BACKLOG = 2048
"""Connections that wait to be accepted."""
ACCEPTED_IN_A_ROW = 128
"""How many of them asyncio accepts before it looks at anything else; it logs each that it cannot."""
MOST_DESCRIPTORS = 65536


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises ConfigError with one sentence when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except UnicodeError as error:  # a label that is empty, too long, or of no known characters
        raise ConfigError([f"cannot listen on {host!r}: it is no host name ({error})"]) from error
    except OSError as error:
        raise ConfigError([f"cannot listen on {host}:{port}: {error.strerror or error}"]) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = "; another program uses the port: stop it or choose another --port" if error.errno == 98 else ""
        raise ConfigError([f"cannot listen on {host}:{port}: {error.strerror}{hint}"]) from error
    return listener


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handlers: the server below has its own idea of a stop."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and keep the queue long that uvicorn makes as short as what it accepts in a row."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Drainable(Protocol):
    """What takes requests behind the application: a front end, or a router's desk."""

    async def drain(self, seconds: float) -> int:
        """Take no new requests, wait for those that run, end the rest; returns how many those were."""
        ...


class Server:
    """Serves one application until it is told to stop."""

    def __init__(self, app: FastAPI, front: Drainable, listener: socket.socket, *, drain_seconds: float = 5.0) -> None:
        self._front = front
        self._listener = listener
        self._drain_seconds = drain_seconds
        self._stops = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            http=PatientProtocol,
            backlog=ACCEPTED_IN_A_ROW,
            ws="none",
            timeout_graceful_shutdown=int(drain_seconds + LAST_WORDS_SECONDS),
        )
        self._uvicorn = _Uvicorn(config)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that the server listens on."""
        name: tuple[Any, ...] = self._listener.getsockname()
        return str(name[0]), int(name[1])

    def stop(self) -> None:
        """Begin to stop; a second call ends at once. For signal handlers on the event loop."""
        self._stops += 1
        logger.info("event=stop_requested times=%d", self._stops)
        self._stop.set()
        if self._stops > 1:
            self._hurry.set()

    @property
    def is_hurried(self) -> bool:
        """Whether it has been told a second time to stop."""
        return self._hurry.is_set()

    async def hurried(self) -> None:
        """Wait until it has been told a second time to stop."""
        await self._hurry.wait()

    async def serve(self) -> int:
        """Serve until `stop`; returns an exit code: 0 after an orderly stop, 130 when it was hurried."""
        http = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._listener]))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({http, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await self._end(http)
        return 130 if self._stops > 1 else 0

    async def _end(self, http: asyncio.Future[None]) -> None:
        self._uvicorn.should_exit = True
        draining = asyncio.ensure_future(self._front.drain(self._drain_seconds))
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
            await self._front.drain(0.0)
            self._uvicorn.force_exit = True
        hurry.cancel()
        await http


class Start:
    """What a stop signal ends: the task that starts a server, and once that is there, the server in its own way."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "only a task can be cancelled"
        self._task = task
        self._is_cancelled = False
        self.server: Server | None = None

    def stop(self) -> None:
        """Stop what there is. For signal handlers on the event loop."""
        if self.server is not None:
            self.server.stop()
        elif not self._is_cancelled:  # a second time would cancel the cleaning up
            self._is_cancelled = True
            self._task.cancel()


def allow_connections() -> None:
    """Use as many file descriptors as the system allows, within reason: its first limit, often 1,024, is low."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, MOST_DESCRIPTORS)
    if now != resource.RLIM_INFINITY and now < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system that counts otherwise keeps its own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


@contextlib.contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """While this lasts, SIGTERM raises KeyboardInterrupt: what is being fetched or converted cleans up after itself."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[Start]:
    """While this lasts, SIGINT and SIGTERM stop what the running task starts.

    From the first moment to the last: between two handlers a signal would kill a server that has said that it serves.
    """
    start, loop = Start(), asyncio.get_running_loop()
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    for each in before:
        loop.add_signal_handler(each, start.stop)
    try:
        yield start
    finally:
        for each, handler in before.items():
            loop.remove_signal_handler(each)
            if handler is not None:
                signal.signal(each, handler)  # and not the system's own, which kills

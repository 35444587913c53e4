"""The server: engine, front end and HTTP put together, and its life from the first line to the last.

    bind the port -> find and check the model -> print what the arena holds -> start the engine -> serve -> drain

What can be wrong is found in this order, so a port in use costs no minute of loading. Ctrl-C or SIGTERM drains; a
second one ends at once. The engine process ends with this one, however this one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import uvicorn
import yaml

from halocline.api.app import create_app
from halocline.compose import Prepared, open_front, prepare
from halocline.config import Config
from halocline.engine.front import FrontEnd
from halocline.errors import ConfigError, EngineDeadError
from halocline.units import format_bytes

logger = logging.getLogger("halocline.serve")

SERVING_AT = "serving at "
"""The line that says where; programs that start a server wait for it."""
LAST_ERRORS_SECONDS = 5.0
"""After the drain, streams get so long to deliver their last event."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def run_server(config: Config) -> int:
    """Serve until told to stop; returns the exit code. Raises ConfigError or ModelError before it serves."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=LOG_FORMAT)
    logging.getLogger("halocline").setLevel(config.log_level.upper())
    with bound(config.host, config.port) as listener:
        prepared = prepare(config)
        say(f"{prepared.model_name}: {prepared.source.folder}")
        if prepared.memory is not None:
            say(*prepared.memory.facts.lines())
        return asyncio.run(_serve(prepared, listener))


async def _serve(prepared: Prepared, listener: socket.socket) -> int:
    end = _End(prepared.config.drain_seconds)
    try:
        front = await open_front(prepared, lambda text, fraction: say(text))
    except asyncio.CancelledError:
        return 0
    try:
        if prepared.memory is None:
            say(f"arena: {format_bytes(front.client.hello.capacity['arena_bytes'])}, what the device has left")
        app = create_app(front, api_key=prepared.config.api_key)
        server = _Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        end.of(server, front)
        url = _url(listener)
        say(f"{SERVING_AT}{url}", *_try_it(url, prepared), "Ctrl-C stops")
        await server.serve(sockets=[listener])
        was_dead = front.client.dead_reason is not None
    finally:
        violations = await front.client.close()
    return 1 if violations or was_dead else 0


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handling: stopping a model server takes two more steps."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _End:
    """What SIGINT and SIGTERM do: before serving, give up; then drain; at the second one, end at once."""

    def __init__(self, drain_seconds: float) -> None:
        self._drain_seconds = drain_seconds
        self._loop = asyncio.get_running_loop()
        self._starting = asyncio.current_task()
        self._serving: tuple[_Server, FrontEnd] | None = None
        self._stopping: asyncio.Task[None] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)

    def of(self, server: _Server, front: FrontEnd) -> None:
        """From now on there is something to drain."""
        self._serving = (server, front)

    def _on_signal(self, number: int) -> None:
        if self._serving is None:
            assert self._starting is not None, "the server starts inside a task"
            self._starting.cancel()
        elif self._stopping is None:
            say("stopping: no new requests; Ctrl-C again ends at once")
            self._stopping = self._loop.create_task(self._drain(*self._serving))
        else:
            # The kernel closes what is open; the engine sees that, removes its sockets and ends too.
            os._exit(128 + number)

    async def _drain(self, server: _Server, front: FrontEnd) -> None:
        server.should_exit = True
        failed = await front.drain(self._drain_seconds)
        if failed:
            say(f"{failed} sequences did not end within {self._drain_seconds:g} s and got an error")
        await asyncio.sleep(LAST_ERRORS_SECONDS)
        server.force_exit = True


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket bound to `host` and `port`; raises ConfigError when that is impossible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            [f"cannot listen on {host!r} ({error.strerror}); set --host to an address of this machine"]
        ) from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            # Listening now takes the port; clients that come before the model is loaded wait instead of failing.
            listener.listen(2048)
        except OSError as error:
            raise ConfigError([_no_port(host, port, error)]) from error
        yield listener


def _no_port(host: str, port: int, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"port {port} on {host} needs more rights; set --port above 1023"
    return (
        f"port {port} on {host} is in use ({error.strerror}); stop what listens there, or set --port 0 for a free one"
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def _try_it(url: str, prepared: Prepared) -> list[str]:
    key = " -H 'Authorization: Bearer ...'" if prepared.config.api_key else ""
    body = f'{{"model": "{prepared.model_name}", "prompt": "The sea is", "max_tokens": 32, "temperature": 0}}'
    return [f"try   curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'"]


def say(*lines: str) -> None:
    """Print lines for the operator, at once."""
    for line in lines:
        print(line, flush=True)


@dataclass(frozen=True, slots=True)
class Started:
    """A server that runs in a process of its own."""

    url: str
    process: subprocess.Popen[str]
    lines: deque[str]
    """The last lines that it printed."""


@contextmanager
def running_server(config: Config, echo: Callable[[str], None] | None = None) -> Iterator[Started]:
    """Start `halocline serve` with these settings in a process of its own, and stop it at the end.

    `echo` gets every line that it prints. Raises EngineDeadError with its last words when it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="halocline-settings-") as folder:
        path = Path(folder) / "server.yaml"
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(asdict(config)), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "halocline", "serve", "--config", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        try:
            yield _wait_until_it_serves(process, echo or (lambda line: None))
        finally:
            _stop(process, config.drain_seconds)


def _wait_until_it_serves(process: subprocess.Popen[str], echo: Callable[[str], None]) -> Started:
    assert process.stdout is not None, "the server's output is a pipe"
    lines: deque[str] = deque(maxlen=200)
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        echo(lines[-1])
        if line.startswith(SERVING_AT):
            started = Started(line.removeprefix(SERVING_AT).strip(), process, lines)
            threading.Thread(target=_read_on, args=(started, echo), daemon=True).start()
            return started
    raise EngineDeadError(f"the server did not start (exit code {process.wait()}): " + " | ".join(list(lines)[-5:]))


def _read_on(started: Started, echo: Callable[[str], None]) -> None:
    """Keep the pipe empty: a server whose output nobody reads would stand still."""
    for line in started.process.stdout or ():
        started.lines.append(line.rstrip("\n"))
        echo(started.lines[-1])


def _stop(process: subprocess.Popen[str], drain_seconds: float) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(drain_seconds + LAST_ERRORS_SECONDS + 30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

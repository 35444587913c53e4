"""The server: engine, front end and HTTP put together, and its life from the first line to the last.

    bind the port -> begin the engine's process -> find and check the model -> print what the arena holds
                  -> let the engine build it -> serve -> drain

What can be wrong is found in this order, so a port in use costs no minute of loading. Ctrl-C or SIGTERM drains; a
second one ends at once. The engine process ends with this one, however this one ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Queue

import yaml

from halocline.api.app import create_app
from halocline.api.server import (
    LAST_WORDS_SECONDS,
    Server,
    allow_connections,
    listen,
    sigterm_is_ctrl_c,
    stopped_by_signals,
)
from halocline.compose import Prepared, begin_engine, open_front, prepare
from halocline.config import Config
from halocline.engine.client import EngineClient
from halocline.engine.front import FrontEnd
from halocline.engine.launch import EngineProcess
from halocline.errors import EngineDeadError
from halocline.memory.facts import CapacityFacts
from halocline.route import TOKEN_VARIABLE, link_token_of

logger = logging.getLogger("halocline.serve")

SERVING_AT = "serving at "
"""The line that says where; programs that start a server wait for it."""
HURRIED_SECONDS = 1.0
"""How long an engine has to end by itself once somebody has said twice to stop."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def run_server(config: Config, *, outlives_engine: bool = True) -> int:
    """Serve until told to stop; returns the exit code. Raises ConfigError or ModelError before it serves.

    A server by itself outlives its engine, to say what became of it; one whose place others can take ends with it.
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=LOG_FORMAT)
    logging.getLogger("halocline").setLevel(config.log_level.upper())
    config = replace(config, link_token=link_token(config))
    allow_connections()
    try:
        with listen(config.host, config.port) as listener, sigterm_is_ctrl_c(), closing(begin_engine()) as engine:
            prepared = prepare(config)
            say(f"{prepared.model_name}: {prepared.source.folder}")
            if prepared.memory is not None:
                say(*memory_lines(config, prepared.memory.facts))
            return asyncio.run(_serve(prepared, engine, listener, outlives_engine=outlives_engine))
    except KeyboardInterrupt:
        # Told to stop before there was anything to serve.
        return 0


def link_token(config: Config) -> str | None:
    """Return the secret of the group that this server belongs to; None: it belongs to none. Raises ConfigError."""
    if config.role == "both" and config.link_token is None and not os.environ.get(TOKEN_VARIABLE):
        return None
    return link_token_of(config.link_token)


async def _serve(prepared: Prepared, engine: EngineProcess, listener: socket.socket, *, outlives_engine: bool) -> int:
    with stopped_by_signals() as start:
        try:
            front = await open_front(prepared, engine, lambda text, fraction: say(text))
        except asyncio.CancelledError:
            # Told to stop before there was anything to serve.
            return 0
        app = create_app(front, api_key=prepared.config.api_key, link_token=prepared.config.link_token)
        start.server = server = Server(app, front, listener, drain_seconds=prepared.config.drain_seconds)
        mourning = None if outlives_engine else asyncio.ensure_future(_stop_when_dead(front.client, server))
        try:
            _tell(prepared, front, server)
            code = await server.serve()
            was_dead = front.client.dead_reason is not None
        finally:
            if mourning is not None:
                mourning.cancel()
            violations = await _close(front.client, engine, server)
    if server.is_hurried:  # perhaps only while the engine ended, whose recount nobody heard then
        code = 130
    return 1 if violations or was_dead else code


async def _stop_when_dead(client: EngineClient, server: Server) -> None:
    await client.died()
    server.stop()


async def _close(client: EngineClient, engine: EngineProcess, server: Server) -> tuple[str, ...]:
    """End the engine; one that does not end by itself is killed, and soon if somebody is in a hurry."""
    closing, hurry = asyncio.ensure_future(client.close()), asyncio.ensure_future(server.hurried())
    await asyncio.wait({closing, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    await asyncio.wait({closing}, timeout=HURRIED_SECONDS)
    if not closing.done():
        engine.process.kill()
    return await closing


def _tell(prepared: Prepared, front: FrontEnd, server: Server) -> None:
    """Say where the server is, and what was not known before its engine was there."""
    capacity, link = front.client.hello.capacity, front.client.hello.link
    if prepared.memory is None and capacity is not None:
        say(*memory_lines(prepared.config, capacity))
    if link is not None:
        say(f"role {link.role}{f', links at {link.address}' if link.address else ''}")
    url = _url(*server.address)
    say(f"{SERVING_AT}{url}", *_try_it(url, prepared), "Ctrl-C stops")


def memory_lines(config: Config, facts: CapacityFacts) -> list[str]:
    """Return what the operator is told of the memory: what it holds, and whether prefixes are kept in it."""
    kept = f"on: equal beginnings are computed once, in granules of {facts.granule_tokens} tokens"
    most = max((row.requests for row in facts.concurrency), default=0)
    slots = f"of these at most {config.max_running_requests} run at once (max_running_requests)"
    lines = [*facts.lines(), *([slots] if most > config.max_running_requests else [])]
    return [*lines, f"prefix cache {kept if config.keeps_prefixes else 'off'}"]


def _url(host: str, port: int) -> str:
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    host = everywhere.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _try_it(url: str, prepared: Prepared) -> list[str]:
    key = " -H 'Authorization: Bearer ...'" if prepared.config.api_key else ""
    body = f'{{"model": "{prepared.model_name}", "prompt": "The sea is", "max_tokens": 32, "temperature": 0}}'
    return [f"try   curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'"]


def say(*lines: str) -> None:
    """Print lines for the operator, at once."""
    for line in lines:
        # One write with its end: the engine's log may go to the same pipe.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


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
        lines: deque[str] = deque(maxlen=200)
        urls: Queue[str | None] = Queue()
        reader = threading.Thread(target=_read, args=(process, lines, urls, echo), daemon=True)
        reader.start()
        try:
            url = urls.get()
            if url is None:
                words = " | ".join(list(lines)[-5:])
                raise EngineDeadError(f"the server did not start (exit code {process.wait()}): {words}")
            yield Started(url, process, lines)
        finally:
            _stop(process, config.drain_seconds)
            reader.join()


def _read(
    process: subprocess.Popen[str], lines: deque[str], urls: Queue[str | None], echo: Callable[[str], None] | None
) -> None:
    """Keep the pipe empty to its end: a server whose output nobody reads would stand still."""
    assert process.stdout is not None, "the server's output is a pipe"
    with process.stdout:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if echo is not None:
                echo(lines[-1])
            if line.startswith(SERVING_AT):
                urls.put(line.removeprefix(SERVING_AT).strip())
    urls.put(None)


def _stop(process: subprocess.Popen[str], drain_seconds: float) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(drain_seconds + LAST_WORDS_SECONDS + 30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

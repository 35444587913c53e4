"""A live server in a thread: real sockets, a real engine process, any number of clients.

with live_server(reply="Hi") as server:
    httpx.get(server.url + "/health")
    server.wait_idle()

Run as a program (`python -m testing.server JSON`), it is the same in a process of its own, to be killed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from halocline.api.app import create_app
from halocline.api.server import Server, listen, stopped_by_signals
from halocline.engine.client import EngineClient
from halocline.engine.front import Chat, FrontEnd
from halocline.engine.messages import Snapshot, Spec
from testing.engine import fake_chat, fake_spec

T = TypeVar("T")
PATIENCE_SECONDS = 60.0
"""Bound of every wait; no test is decided by how long anything takes below it."""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS} s for this: {what}"
        time.sleep(0.01)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds, letting the event loop run."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS} s for this: {what}"
        await asyncio.sleep(0.005)


class LiveServer:
    """What a test sees of the server in the thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: EngineClient, front: FrontEnd, server: Server) -> None:
        self.loop, self.client, self.front, self.server = loop, client, front, server
        host, port = server.address
        self.url = f"http://{host}:{port}"

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_SECONDS)

    @property
    def snapshot(self) -> Snapshot:
        """The engine's latest figures."""
        return self.client.snapshot

    @property
    def used_bytes(self) -> int:
        """Bytes that requests hold, by the latest figures; what is only cached is not counted."""
        figures = self.snapshot.figures
        return 0 if figures is None else figures.arena.used_bytes - figures.arena.cached_bytes

    def wait_idle(self) -> None:
        """Wait until the engine says that nothing runs and nothing is used."""
        wait_until(lambda: not self.client.sequences, "no sequences in the front end")
        wait_until(lambda: not self.snapshot.has_work and self.used_bytes == 0, "an idle engine with 0 used bytes")


@contextmanager
def live_server(
    *,
    spec: Spec | None = None,
    chat: Chat | None = None,
    api_key: str | None = None,
    link_token: str | None = None,
    **settings: Any,
) -> Iterator[LiveServer]:
    """Serve until the block ends; `settings` go to the fake engine, `spec` and `chat` replace it by another."""
    health_seconds, drain_seconds = settings.pop("health_seconds", 30.0), settings.pop("drain_seconds", 0.0)
    unread_tokens = settings.pop("unread_tokens", 4096)
    ready: list[LiveServer | BaseException] = []
    started = threading.Event()

    async def serve() -> None:
        client = await EngineClient.start(spec or fake_spec(**settings), unread_tokens=unread_tokens)
        try:
            front = FrontEnd(client, chat or fake_chat(), health_seconds=health_seconds)
            server = Server(
                create_app(front, api_key=api_key, link_token=link_token),
                front,
                listen("127.0.0.1", 0),
                drain_seconds=drain_seconds,
            )
            ready.append(LiveServer(asyncio.get_running_loop(), client, front, server))
            started.set()
            await server.serve()
        finally:
            violations.extend(await client.close())

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            ready.append(error)
            started.set()

    violations: list[str] = []
    thread = threading.Thread(target=run, name="live-server")
    thread.start()
    assert started.wait(PATIENCE_SECONDS), "the server did not start"
    live = ready[0]
    if isinstance(live, BaseException):
        thread.join()
        raise live
    try:
        yield live
    finally:
        live.loop.call_soon_threadsafe(live.server.stop)
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "the server did not stop"
    assert not violations, violations
    assert ready[1:] == [], ready[1:]


def events(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, which must end with [DONE]."""
    with http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def main(settings: dict[str, Any]) -> int:
    """Serve the fake in this process, with its signals; prints the address and the engine's process id."""
    drain_seconds = settings.pop("drain_seconds", 5.0)
    with stopped_by_signals() as start:
        client = await EngineClient.start(fake_spec(**settings))
        front = FrontEnd(client, fake_chat())
        start.server = server = Server(create_app(front), front, listen("127.0.0.1", 0), drain_seconds=drain_seconds)
        print(json.dumps({"port": server.address[1], "engine": client.pid}), flush=True)
        code = await server.serve()
        await client.close()
    return code


if __name__ == "__main__":
    sys.exit(asyncio.run(main(json.loads(sys.argv[1]))))

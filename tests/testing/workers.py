"""Workers that only look like it, behind a real router: HTTP on loopback, every answer and fault under the test's hand.

async with routed(prefill=1, decode=2) as router:
    router.decode[0].script.append(answer_error(503, "engine_unavailable"))
    response = await router.http.post("/v1/completions", json={"prompt": "Hi"})

A fake worker says what `report` says, and answers each request with the next of `script`, or with its own name. It is
asked how it is only at the start, when the router has a doubt, and when a test calls `look`: no clock decides.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from halocline.api.routing.app import create_router_app
from halocline.api.routing.book import Worker
from halocline.api.routing.desk import Desk
from halocline.api.routing.settings import RouteSettings
from halocline.api.server import Server, listen
from testing.server import until

TOKEN = "the-link-token"


@dataclass
class Asked:
    """One request as a worker got it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    writer: asyncio.StreamWriter
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the router has closed the connection."""

    async def head(self, status: int = 200, kind: str = "text/event-stream", length: int | None = None) -> None:
        size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nx-request-id: of-worker\r\n{size}\r\n\r\n"
        await self.raw(head.encode())

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def event(self, body: dict[str, Any]) -> None:
        await self.chunk(b"data: " + json.dumps(body).encode() + b"\n\n")

    async def token(self, text: str) -> None:
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})

    async def done(self) -> None:
        await self.chunk(b"data: [DONE]\n\n")
        await self.raw(b"0\r\n\r\n")

    async def whole(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        await self.head(status, "application/json", len(data))
        await self.raw(data)

    def reset(self) -> None:
        """Break the connection off, as the kernel does for a process that was killed."""
        self.writer.transport.abort()


Answer = Callable[["FakeWorker", Asked], Awaitable[None]]


async def answer_name(worker: FakeWorker, asked: Asked) -> None:
    """Answer with the worker's name, streamed as two tokens or whole."""
    if isinstance(asked.body, dict) and asked.body.get("stream"):
        await asked.head()
        for part in worker.name.partition("-")[0::2]:
            await asked.token(part)
        await asked.done()
    else:
        await asked.whole(200, {"choices": [{"index": 0, "text": worker.name, "finish_reason": "stop"}]})


def answer_error(status: int, code: str, message: str = "no") -> Answer:
    """Answer with an error in OpenAI's shape."""

    async def answer(worker: FakeWorker, asked: Asked) -> None:
        await asked.whole(status, {"error": {"message": message, "type": "server_error", "param": None, "code": code}})

    return answer


def opening(role: str = "assistant") -> dict[str, Any]:
    """The event with which every chat stream begins, before any token."""
    return {"choices": [{"index": 0, "delta": {"role": role, "content": ""}, "finish_reason": None}]}


async def answer_reset(worker: FakeWorker, asked: Asked) -> None:
    """Die before the first byte."""
    asked.reset()


async def answer_never(worker: FakeWorker, asked: Asked) -> None:
    """Stand still, as a stopped process does, until the router closes the connection."""
    await asked.is_gone.wait()


class FakeWorker:
    """One address; several lives."""

    def __init__(self, name: str, role: str, token: str = TOKEN) -> None:
        self.name, self.token = name, token
        self.asked: list[Asked] = []
        self.probes = 0
        self.script: list[Answer] = []
        self.report: dict[str, Any] = {
            "object": "halocline.worker",
            "role": role,
            "epoch": f"{name}-1",
            "model": "tiny",
            "fingerprint": "f",
            "link_address": f"tcp://{name}:1" if role != "decode" else "",
            "status": "ok",
            "total_bytes": 1000,
            "free_bytes": 1000,
            "token_bytes": 0,
            "waiting": 0,
            "running": 0,
        }
        self._server: asyncio.Server | None = None
        self._port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Close the port and break every connection off."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def restart(self, **report: Any) -> None:
        """Live again at the same address, as another process."""
        self.report |= {"epoch": self.report["epoch"] + "+"} | report
        await self.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._answer(await _read(reader, writer), reader)
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, asked: Asked, reader: asyncio.StreamReader) -> None:
        if asked.path == "/v1/worker":
            self.probes += 1
            if asked.headers.get("x-halocline-link-token") != self.token:
                await answer_error(403, "link_token")(self, asked)
            else:
                await asked.whole(200, self.report)
            return
        self.asked.append(asked)
        watch = asyncio.create_task(_watch(asked, reader))
        try:
            await (self.script.pop(0) if self.script else answer_name)(self, asked)
        finally:
            watch.cancel()


async def _watch(asked: Asked, reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        await reader.read(1)
    asked.is_gone.set()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Asked:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:]) if name}
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    try:
        body = json.loads(raw) if raw else None
    except ValueError:
        body = raw
    return Asked(method, path, headers, body, writer)


@dataclass
class Routed:
    """A router over fake workers."""

    desk: Desk
    http: httpx.AsyncClient
    url: str
    server: Server
    decode: list[FakeWorker]
    prefill: list[FakeWorker]

    def known(self, fake: FakeWorker) -> Worker:
        """What the router knows of a fake."""
        return next(each for each in self.desk.book.workers if each.url == fake.url)

    async def look(self, *fakes: FakeWorker) -> None:
        """Let the router ask workers how they are."""
        for fake in fakes or (*self.decode, *self.prefill):
            await self.desk.prober.look(self.known(fake))

    async def complete(self, prompt: str = "Hi", **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **body})

    async def who(self, prompt: str = "Hi", **body: Any) -> str:
        """Return the name of the decode worker that answers."""
        response = await self.complete(prompt, **body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    async def idle(self) -> None:
        """Wait until nothing is under way, and check that the book counts nothing either."""
        await until(lambda: not self.desk.relays, "an idle router")
        assert not [each.url for each in self.desk.book.workers if each.flights]


@asynccontextmanager
async def routed(*, prefill: int = 0, decode: int = 1, ready: bool = True, **settings: Any) -> AsyncIterator[Routed]:
    """Route over so many fake workers until the block ends. `ready`: they listen before the router asks them."""
    fakes = [FakeWorker(f"decode-{i}", "decode") for i in range(decode)]
    others = [FakeWorker(f"prefill-{i}", "prefill") for i in range(prefill)]
    async with AsyncExitStack() as stack:
        for fake in (*fakes, *others):
            await fake.start()
            stack.push_async_callback(fake.kill)
            if not ready:
                await fake.kill()
        defaults = {"probe_seconds": 60.0, "probe_timeout_seconds": 60.0, "drain_seconds": 0.0, "port": 0}
        chosen = RouteSettings(
            prefill=tuple(each.url for each in others), decode=tuple(each.url for each in fakes), **defaults | settings
        )
        desk = Desk(chosen, TOKEN)
        await desk.start()
        stack.push_async_callback(desk.close)
        server = Server(create_router_app(desk), desk, listen("127.0.0.1", 0), drain_seconds=chosen.drain_seconds)
        serving = asyncio.create_task(server.serve())
        host, port = server.address
        url = f"http://{host}:{port}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        try:
            yield Routed(desk, http, url, server, fakes, others)
        finally:
            server.stop()
            await serving

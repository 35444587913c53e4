"""Clients that go away: whatever they were doing, their memory is free again and nobody else notices."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from halocline.units import KIB
from testing.engine import fake_spec
from testing.server import LiveServer, live_server, wait_until

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "a", "ignore_eos": True, "max_tokens": 2000}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(reply="Hé 😀 {prompt}", step_seconds=0.002) as live:
        yield live


async def stream_and_perhaps_leave(http: httpx.AsyncClient, chance: random.Random, body: dict[str, Any]) -> str:
    """Read a stream to its end, or leave it after a random number of events."""
    leaves_after = chance.choice([0, 0, 1, 2, 5, 20, None])
    read = 0
    async with http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            read += bool(line)
            if leaves_after is not None and read > leaves_after:
                return "left"
    return "stayed"


async def many(server: LiveServer, bodies: list[dict[str, Any]], seed: int) -> None:
    """Send all bodies, 100 at once, with random disconnects; afterwards nothing may be left."""
    chance = random.Random(seed)
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=120.0, limits=limits) as http:
        ends = await asyncio.gather(*(stream_and_perhaps_leave(http, chance, body) for body in bodies))
    assert min(ends.count("left"), ends.count("stayed")) >= len(bodies) // 10
    server.wait_idle()
    assert server.snapshot.violations == ()
    assert server.snapshot.counters["defects"] == 0


async def test_streams_of_several_choices_with_random_disconnects_leave_nothing(server: LiveServer) -> None:
    chance = random.Random(5)
    bodies = [
        {"prompt": f"p{i}", "n": chance.choice([1, 1, 3]), "max_tokens": chance.randint(1, 40), "ignore_eos": True}
        for i in range(150)
    ]
    await many(server, bodies, seed=6)


async def test_500_streams_in_a_small_real_arena_leave_nothing_though_requests_are_retracted() -> None:
    chance = random.Random(7)
    bodies = [{"prompt": "LONG" if chance.random() < 0.08 else "abcdefghijkl", "max_tokens": 128} for _ in range(500)]
    spec = fake_spec("build_on_arena", reply="{prompt}", kv_bytes=64 * KIB)
    with live_server(spec=spec) as server:
        await many(server, bodies, seed=8)
        figures = server.snapshot.figures
        assert figures is not None
        assert figures.totals.retractions > 0, "the arena was too large for this test to mean anything"
        assert figures.totals.aborted > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_while_it_waits_is_aborted(server: LiveServer, stream: bool) -> None:
    body = httpx.Request("POST", "http://x" + COMPLETIONS, json=ENDLESS | {"stream": stream})
    with socket.create_connection(server.server.address) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body.content)}\r\n\r\n"
        connection.sendall(head.encode() + body.content)
        wait_until(lambda: server.used_bytes > 0, "the request to hold memory")
    server.wait_idle()


def test_a_client_that_hangs_up_in_the_middle_of_its_body_is_forgotten(server: LiveServer) -> None:
    with socket.create_connection(server.server.address) as connection:
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200
    server.wait_idle()


def test_a_client_that_reads_nothing_stops_nobody_and_is_cut_off() -> None:
    settings = {"reply": "x" * 64, "model_len": 400_000, "pages": 100_000}
    with live_server(**settings, unread_tokens=500) as server, socket.socket() as connection:
        # A small window, so that the server's own buffer fills and its sends wait.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.server.address)
        body = b'{"prompt": "a", "ignore_eos": true, "max_tokens": 300000, "stream": true, "logprobs": 20}'
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: server.used_bytes > 0, "the request to hold memory")
        for _ in range(5):
            answer = httpx.post(server.url + COMPLETIONS, json={"prompt": "b", "max_tokens": 5}, timeout=60.0)
            assert answer.status_code == 200, "others go on"
        server.wait_idle()
        read = b""
        while b"[DONE]" not in read[-4096:]:
            part = connection.recv(65536)
            assert part, "the stream ended without a word"
            read = read[-65536:] + part
        assert b"tokens behind" in read

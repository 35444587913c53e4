"""One live server with a fake engine for all tests of a module, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from testing.server import LiveServer, live_server

REPLY = "Hé 😀 {prompt}"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(reply=REPLY) as live:
        yield live


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_is_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test on the shared server nothing runs, nothing is used and no law is broken."""
    yield
    if "server" in request.fixturenames:
        live: LiveServer = request.getfixturevalue("server")
        live.wait_idle()
        assert live.snapshot.violations == ()

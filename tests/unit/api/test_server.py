"""The server as a process: health and metrics, orderly and hurried stops, and deaths."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h11
import httpx
import psutil
import pytest

from halocline.api import patience
from halocline.api.server import listen
from halocline.errors import ConfigError
from testing.server import LiveServer, live_server, wait_until

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "a", "ignore_eos": True, "max_tokens": 2000}


def test_health_says_serving(http: httpx.Client) -> None:
    response = http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok", "message": "serving"})


def test_health_names_the_blocked_request_and_its_refusal() -> None:
    with live_server(stuck=True, health_seconds=1.0) as server, httpx.Client(base_url=server.url) as http:
        with http.stream("POST", COMPLETIONS, json={"prompt": "a", "stream": True}) as response:
            wait_until(lambda: http.get("/health").status_code == 503, "the stall to be noticed")
            body = http.get("/health").json()
            assert body["status"] == "stalled"
            assert body["blocked"]["request"].startswith(response.headers["x-request-id"])
            assert body["blocked"]["reason"] == "memory"
            assert "0 of 4096 pages" in body["message"]
        wait_until(lambda: http.get("/health").status_code == 200, "health to return")


def test_metrics_are_scraped_and_count_answers(http: httpx.Client) -> None:
    http.post(COMPLETIONS, json={"prompt": "a"})
    http.post(COMPLETIONS, json={"prompt": ""})
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'halocline_http_responses_total{route="completions",status="400"} 1.0' in response.text
    assert 'halocline_sequences_finished_total{reason="stop"} 1.0' in response.text
    assert "halocline_time_to_first_token_seconds_count 1.0" in response.text


def test_the_death_of_the_engine_reaches_every_client_and_the_server_says_so() -> None:
    with live_server(step_seconds=0.01) as server, httpx.Client(base_url=server.url, timeout=60.0) as http:
        whole: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: whole.append(httpx.post(server.url + COMPLETIONS, json=ENDLESS)))
        waiting.start()
        with http.stream("POST", COMPLETIONS, json=ENDLESS | {"stream": True, "n": 3}) as response:
            lines = response.iter_lines()
            next(lines)
            wait_until(lambda: server.client.sequences == 4, "both requests to run")
            assert server.client.pid is not None
            os.kill(server.client.pid, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == ("engine_unavailable", "server_error")
        assert "SIGKILL" in error["message"]
        waiting.join()
        assert whole[0].status_code == 503
        assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 503
        health = http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        assert "halocline_engine_up" in http.get("/metrics").text


def test_a_port_in_use_is_one_sentence() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="another program uses the port"):
        listen("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("host", [".foo", "a" * 64 + ".invalid", "\udcff"])
def test_a_host_that_is_no_name_is_one_sentence(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen(host, 0)


HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
HALF_A_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{"
BEGINNINGS = {
    "nothing": [],
    "half a head": [b"POST /v1/completions HTTP/1.1\r\nHost: a"],
    "half a body": [HALF_A_BODY],
    # A byte after the answer: until then uvicorn itself closes what is idle.
    "half of the next head": [HEALTH, b"GET", b" "],
    "half a body behind a request": [HEALTH + HALF_A_BODY],
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_a_connection_on_which_no_whole_request_comes_is_closed(
    beginning: str, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "REQUEST_SECONDS", 0.3)
    with socket.create_connection(server.server.address, timeout=60) as connection:
        for number, part in enumerate(BEGINNINGS[beginning]):
            connection.sendall(part)
            if number == 0 and part == HEALTH:
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        while connection.recv(65536):
            pass


class Timers:
    """The event loop of one connection, with its timers."""

    def __init__(self) -> None:
        self.running: list[object] = []

    def call_later(self, seconds: float, act: object) -> Any:
        handle = SimpleNamespace(cancel=lambda: self.running.remove(handle), seconds=seconds)
        self.running.append(handle)
        return handle


def test_each_request_has_a_time_of_its_own_and_an_answer_takes_what_it_takes() -> None:
    """Answered before its body was read, as by a 401, a request leaves no time for the next one to be cut by."""
    protocol = patience.PatientProtocol.__new__(patience.PatientProtocol)
    timers = Timers()
    protocol.loop, protocol.transport = timers, SimpleNamespace(is_closing=lambda: False)  # type: ignore[assignment]
    protocol.cycle, protocol.conn = None, SimpleNamespace(their_state=h11.IDLE)  # type: ignore[assignment]
    protocol._look()
    (first,) = timers.running
    protocol.cycle, protocol.conn.their_state = SimpleNamespace(response_complete=False), h11.SEND_BODY
    protocol._look()
    assert timers.running == [first], "its body is awaited: the same request"
    protocol.conn.their_state = h11.DONE
    protocol._look()
    assert timers.running == [], "its answer is awaited"
    protocol.cycle, protocol.conn.their_state = SimpleNamespace(response_complete=True), h11.SEND_BODY
    protocol._look()
    (second,) = timers.running
    protocol.conn.their_state = h11.IDLE
    protocol._look()
    (third,) = timers.running
    assert third is not second, "the rest of an answered request has come, and the next one has its own time"
    protocol._look()
    assert timers.running == [third]


def test_a_client_that_has_asked_may_wait_for_its_answer_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "REQUEST_SECONDS", 0.5)
    with live_server(step_seconds=0.05) as slow, httpx.Client(base_url=slow.url) as client:
        for _ in range(2):  # on one connection
            answer = client.post(COMPLETIONS, json=ENDLESS | {"max_tokens": 20}).json()
            assert answer["usage"]["completion_tokens"] == 20


def test_a_host_that_is_nowhere_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen("no.such.host.invalid", 0)


class Program:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], port: int, engine: int) -> None:
        self.process, self.port, self.engine = process, port, engine
        self.url = f"http://127.0.0.1:{port}"

    def stream(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0)


@contextlib.contextmanager
def program(folder: Path, **settings: Any) -> Iterator[Program]:
    tests = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": tests, "TMPDIR": str(folder)}
    arguments = [sys.executable, "-W", "error", "-m", "testing.server", json.dumps(settings)]
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            told = json.loads(process.stdout.readline())
            yield Program(process, told["port"], told["engine"])
        finally:
            process.kill()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for sockets with a short name; nothing may be left in it."""
    with tempfile.TemporaryDirectory(prefix="h") as name:
        yield Path(name)
        wait_until(lambda: list(Path(name).iterdir()) == [], "the folder of the sockets to be removed")


def test_a_stop_lets_running_requests_end_and_takes_no_new_ones(folder: Path) -> None:
    with program(folder, step_seconds=0.01, drain_seconds=60) as server, server.stream() as http:
        body = ENDLESS | {"stream": True, "max_tokens": 100}
        with http.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not accepts(server.port), "new connections to be refused")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(60) == 0
    assert not psutil.pid_exists(server.engine)


def test_a_request_that_does_not_end_in_time_gets_an_error(folder: Path) -> None:
    with program(folder, step_seconds=0.05, drain_seconds=0.2) as server, server.stream() as http:
        with http.stream("POST", COMPLETIONS, json=ENDLESS | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert "the server is stopping; it waited 0.2 s" in error["message"]
        assert rest[-1] == "data: [DONE]"
        assert server.process.wait(60) == 0
    assert not psutil.pid_exists(server.engine)


def test_a_second_signal_does_not_wait(folder: Path) -> None:
    with program(folder, step_seconds=0.05, drain_seconds=3600) as server, server.stream() as http:
        with http.stream("POST", COMPLETIONS, json=ENDLESS | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            wait_until(lambda: not accepts(server.port), "new connections to be refused")
            server.process.send_signal(signal.SIGINT)
            assert "error" in [line for line in lines if line][-2]
        assert server.process.wait(60) == 130
    assert not psutil.pid_exists(server.engine)


def test_killing_the_server_ends_its_engine_and_leaves_nothing(folder: Path) -> None:
    with program(folder, step_seconds=0.01) as server, server.stream() as http:
        with http.stream("POST", COMPLETIONS, json=ENDLESS | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.kill()
            with pytest.raises(httpx.TransportError):
                list(lines)
        wait_until(lambda: not psutil.pid_exists(server.engine), "the engine to end")


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5.0).close()
    except OSError:
        return False
    return True


def test_requests_on_open_connections_are_refused_while_it_drains() -> None:
    body = ENDLESS | {"stream": True, "max_tokens": 200}
    with (
        live_server(step_seconds=0.01) as server,
        httpx.Client(base_url=server.url, timeout=60.0) as http,
        http.stream("POST", COMPLETIONS, json=body) as response,
    ):
        next(response.iter_lines())
        server.client.is_draining = True
        refused = http.post(COMPLETIONS, json={"prompt": "a"})
        assert refused.status_code == 503
        assert "stopping" in refused.json()["error"]["message"]
        assert http.get("/health").json()["status"] == "draining"

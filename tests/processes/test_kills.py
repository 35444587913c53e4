"""Workers and routers that die or stop under 32 streaming clients: the rest lives, and clients get all or an error.

Everything is a process of its own, started by the command line: two workers, a router before them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from halocline.serve import SERVING_AT
from testing.models import reference_tokens, save_tiny, tiny_model, tiny_prompt
from testing.pair import TOKEN, parse
from testing.server import wait_until

pytestmark = pytest.mark.e2e

CLIENTS = 32
TOKENS = 96
LEASE_SECONDS = 3.0
PROMPTS = [tiny_prompt(200 + 3 * number, seed=number) for number in range(CLIENTS)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Program:
    """One process of the group, which can be started again in the same place."""

    arguments: list[str]
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "halocline", *self.arguments, "--port", str(self.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "HALOCLINE_LINK_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert any(line.startswith(SERVING_AT) for line in self.process.stdout), "it ended before it served"

    def family(self) -> list[psutil.Process]:
        """The process and its engine."""
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def send(self, number: int) -> None:
        for each in self.family():
            each.send_signal(number)

    def end(self) -> None:
        if self.process is None:
            return
        for each in self.family() if self.process.poll() is None else []:
            each.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def metrics(self) -> dict[str, float]:
        return parse(httpx.get(f"{self.url}/metrics", timeout=10).text)

    def is_idle(self) -> bool:
        """Whether nothing runs or waits, and no page is held but by the cache."""
        seen = self.metrics()
        owned = sum(
            value for name, value in seen.items() if name.startswith("halocline_arena_pool_bytes{owner=running")
        )
        moving = sum(value for name, value in seen.items() if name.startswith("halocline_transfers{"))
        return owned == moving == 0 and seen["halocline_violations_total"] == 0


@dataclass
class Group:
    prefill: Program
    decode: Program
    router: Program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("kills"), "gemma3")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model = tiny_model("gemma3")
    return [reference_tokens(model, prompt, TOKENS) for prompt in PROMPTS]


@pytest.fixture
def group(folder: Path) -> Iterator[Group]:
    common = ["serve", str(folder), "--dtype", "float64", "--threads", "1", "--kv-bytes", "8MiB", "--audit", "every"]
    common += ["--step-tokens", "320", "--max-running-requests", "40", "--lease-seconds", str(LEASE_SECONDS)]
    prefill, decode = Program([*common, "--role", "prefill"]), Program([*common, "--role", "decode"])
    router = Program(["route", "--prefill", prefill.url, "--decode", decode.url])
    with ExitStack() as stack:
        for program in (prefill, decode, router):
            stack.callback(program.end)
            program.start()
        yield Group(prefill, decode, router)


async def ask(http: httpx.AsyncClient, number: int) -> list[int] | str:
    """Return all tokens of an answer, or the code of the error that came instead or at its end."""
    body = {"prompt": PROMPTS[number], "max_tokens": TOKENS, "temperature": 0, "stream": True}
    tokens: list[int] = []
    try:
        async with http.stream(
            "POST", "/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True}
        ) as answer:
            if answer.status_code != 200:
                return str(httpx.Response(answer.status_code, content=await answer.aread()).json()["error"]["code"])
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event: dict[str, Any] = httpx.Response(200, content=line.removeprefix("data: ")).json()
                if "error" in event:
                    return str(event["error"]["code"])
                tokens += event["choices"][0]["token_ids"]
    except httpx.TransportError as error:
        return type(error).__name__
    return tokens


async def load(url: str, misfortune: Any, after_seconds: float) -> list[list[int] | str]:
    """Send all clients, let the misfortune happen meanwhile, and collect what each of them got."""
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        clients = [asyncio.ensure_future(ask(http, number)) for number in range(CLIENTS)]
        await asyncio.sleep(after_seconds)
        await asyncio.to_thread(misfortune)
        return list(await asyncio.wait_for(asyncio.gather(*clients), 120))


def answered(got: list[list[int] | str], expected: list[list[int]]) -> tuple[int, set[str]]:
    """Count whole answers, all of which must be right; return the errors that the others got."""
    whole = [(tokens, wanted) for tokens, wanted in zip(got, expected, strict=True) if not isinstance(tokens, str)]
    assert all(tokens == wanted for tokens, wanted in whole), "an answer is not what generate says"
    return len(whole), {each for each in got if isinstance(each, str)}


def all_get_answers(group: Group, expected: list[list[int]]) -> None:
    wait_until(lambda: isinstance(asyncio.run(load_one(group.router.url)), list), "a group that answers")
    whole, errors = answered(asyncio.run(load(group.router.url, lambda: None, 0.0)), expected)
    assert (whole, errors) == (CLIENTS, set())


async def load_one(url: str) -> list[int] | str:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        return await ask(http, 0)


@pytest.mark.parametrize("after_seconds", [0.2, 1.0])
def test_a_killed_prefill_worker_takes_nobody_with_it(
    group: Group, expected: list[list[int]], after_seconds: float
) -> None:
    got = asyncio.run(load(group.router.url, group.prefill.end, after_seconds))
    _, errors = answered(got, expected)
    assert errors <= {"prefill_lost", "no_worker", "engine_unavailable"}, errors
    assert httpx.get(f"{group.decode.url}/health").status_code == 200
    started = time.monotonic()
    wait_until(group.decode.is_idle, "the memory of all that was lost to be free")
    assert time.monotonic() - started < LEASE_SECONDS + 5
    group.prefill.start()
    before = group.prefill.metrics()["halocline_transfer_sent_total"]
    wait_until(lambda: _is_used(group, before), "the restarted worker to be used")
    all_get_answers(group, expected)


def _is_used(group: Group, before: float) -> bool:
    asyncio.run(load_one(group.router.url))
    time.sleep(0.6)
    return group.prefill.metrics()["halocline_transfer_sent_total"] > before


def test_a_killed_decode_worker_leaves_the_prefill_worker_free(group: Group, expected: list[list[int]]) -> None:
    got = asyncio.run(load(group.router.url, group.decode.end, 0.5))
    _, errors = answered(got, expected)
    assert errors, "who was cut off was told"
    wait_until(group.prefill.is_idle, "the prefill worker to be free of the dead one's requests")
    group.decode.start()
    all_get_answers(group, expected)


def test_a_killed_router_leaves_both_workers_free(group: Group, expected: list[list[int]]) -> None:
    got = asyncio.run(load(group.router.url, group.router.end, 0.5))
    _, errors = answered(got, expected)
    assert errors, "no stream was cut off: the router died too late"
    for each in (group.prefill, group.decode):
        assert httpx.get(f"{each.url}/health").status_code == 200
        wait_until(each.is_idle, "a worker to be free")
    group.router.start()
    all_get_answers(group, expected)


def test_a_prefill_worker_that_stops_and_wakes_changes_no_page(group: Group, expected: list[list[int]]) -> None:
    def stop_and_wake() -> None:
        group.prefill.send(signal.SIGSTOP)
        time.sleep(2.5 * LEASE_SECONDS)
        group.prefill.send(signal.SIGCONT)

    got = asyncio.run(load(group.router.url, stop_and_wake, 0.2))
    answered(got, expected)
    all_get_answers(group, expected)
    for each in (group.prefill, group.decode):
        wait_until(each.is_idle, "a worker to be free")

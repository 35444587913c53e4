"""Workers and routers that die or stop under 32 streaming clients: the rest lives, and clients get all or an error.

Everything is a process of its own, started by the command line: two workers, a router before them, joined by links of
either kind. All memory that the living held for the dead is free within a lease and a margin, counted from the kill and
read from /metrics; nothing with a name is left behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from halocline.engine.rendezvous import PREFIX
from halocline.serve import SERVING_AT
from testing.models import reference_tokens, save_tiny, tiny_model, tiny_prompt
from testing.pair import TOKEN, parse
from testing.server import wait_until

pytestmark = pytest.mark.e2e

CLIENTS = 32
TOKENS = 96
LEASE_SECONDS = 3.0
MARGIN_SECONDS = 7.0
"""For a step, a turn and a scrape on a machine that has other things to do."""
PROMPTS = [tiny_prompt(200 + 3 * number, seed=number) for number in range(CLIENTS)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Program:
    """One process of the group, which can be started again in the same place."""

    arguments: list[str]
    scratch: str
    """Where its sockets may be."""
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
            env={**os.environ, "HALOCLINE_LINK_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "TMPDIR": self.scratch},
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

    def kill_server(self) -> None:
        """Kill the process that was started, and not its engine: that one ends by itself."""
        engines = self.family()[1:]
        assert self.process is not None
        self.process.kill()
        gone, alive = psutil.wait_procs(engines, timeout=MARGIN_SECONDS)
        assert gone
        assert not alive, "an engine outlives its server"

    def named_memory(self) -> list[str]:
        """Files under /dev/shm that its processes have mapped: what a killed one could leave behind."""
        return [each.path for process in self.family() for each in process.memory_maps() if "/dev/shm" in each.path]

    def metrics(self) -> dict[str, float]:
        return parse(httpx.get(f"{self.url}/metrics", timeout=10).text)

    def is_idle(self) -> bool:
        """Whether nothing runs, waits or travels, and no page is held but by the cache."""
        seen = self.metrics()
        held = [value for name, value in seen.items() if name.startswith(tuple(map(OWNED.format, OWNERS)))]
        moving = [value for name, value in seen.items() if name.startswith("halocline_transfers{")]
        assert held, "no page is counted"
        assert moving, "no transfer is counted"
        landing = seen["halocline_transfer_landing_bytes"]
        assert seen["halocline_violations_total"] == 0
        return sum(held) == sum(moving) == landing == 0

    def holds_no_landing(self) -> bool:
        """Whether no memory waits for what another worker computes."""
        return self.metrics()["halocline_transfer_landing_bytes"] == 0


OWNED, OWNERS = "halocline_arena_pool_bytes{{owner={}", ("running", "locked", "transfer")


@dataclass
class Group:
    prefill: Program
    decode: Program
    router: Program
    scratch: str

    def folders(self) -> list[Path]:
        """Folders for sockets that are there, of the living and of the dead."""
        return sorted(Path(self.scratch).glob(PREFIX + "*"))


class Watch:
    """Measures how long the living hold memory for the dead."""

    def __init__(self, kill: Callable[[], None], *reached: Callable[[], bool]) -> None:
        self._kill, self._reached = kill, reached
        self.seconds = 0.0

    def __call__(self) -> None:
        self._kill()
        began = time.monotonic()
        for reached in self._reached:
            while not reached():
                assert time.monotonic() - began < LEASE_SECONDS + MARGIN_SECONDS, "memory of the dead is not free"
                time.sleep(0.1)
        self.seconds = time.monotonic() - began
        print(f"free {self.seconds:.1f} s after the kill")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("kills"), "gemma3")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model = tiny_model("gemma3")
    return [reference_tokens(model, prompt, TOKENS) for prompt in PROMPTS]


@pytest.fixture(params=["shm", "tcp"])
def group(folder: Path, request: pytest.FixtureRequest) -> Iterator[Group]:
    common = ["serve", str(folder), "--dtype", "float64", "--threads", "1", "--kv-bytes", "8MiB", "--audit", "every"]
    common += ["--step-tokens", "320", "--max-running-requests", "40", "--lease-seconds", str(LEASE_SECONDS)]
    common += ["--link-kind", request.param]
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-"))
        prefill = Program([*common, "--role", "prefill"], scratch)
        decode = Program([*common, "--role", "decode"], scratch)
        router = Program(["route", "--prefill", prefill.url, "--decode", decode.url], scratch)
        for program in (prefill, decode, router):
            stack.callback(program.end)
            program.start()
            assert program.named_memory() == []
        yield Group(prefill, decode, router, scratch)


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
    kill = Watch(group.prefill.end, group.decode.holds_no_landing)
    got = asyncio.run(load(group.router.url, kill, after_seconds))
    _, errors = answered(got, expected)
    assert errors <= {"prefill_lost", "no_worker", "engine_unavailable"}, errors
    assert httpx.get(f"{group.decode.url}/health").status_code == 200
    wait_until(group.decode.is_idle, "the decode worker to have nothing left")
    group.prefill.start()
    assert len(group.folders()) == 2, "whoever starts removes what was left by processes killed together"
    before = group.prefill.metrics()["halocline_transfer_sent_total"]
    wait_until(lambda: _is_used(group, before), "the restarted worker to be used")
    all_get_answers(group, expected)


def _is_used(group: Group, before: float) -> bool:
    asyncio.run(load_one(group.router.url))
    time.sleep(0.6)
    return group.prefill.metrics()["halocline_transfer_sent_total"] > before


def test_a_killed_decode_worker_leaves_the_prefill_worker_free(group: Group, expected: list[list[int]]) -> None:
    kill = Watch(group.decode.kill_server, group.prefill.is_idle)
    got = asyncio.run(load(group.router.url, kill, 0.5))
    _, errors = answered(got, expected)
    assert errors, "who was cut off was told"
    assert len(group.folders()) == 1, "the engine of a killed server removes their folder"
    group.decode.end()
    group.decode.start()
    all_get_answers(group, expected)


def test_a_killed_router_leaves_both_workers_free(group: Group, expected: list[list[int]]) -> None:
    kill = Watch(group.router.end, group.prefill.is_idle, group.decode.is_idle)
    got = asyncio.run(load(group.router.url, kill, 0.5))
    _, errors = answered(got, expected)
    assert errors, "no stream was cut off: the router died too late"
    for each in (group.prefill, group.decode):
        assert httpx.get(f"{each.url}/health").status_code == 200
    assert len(group.folders()) == 2
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

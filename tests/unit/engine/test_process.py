"""Two real processes: start, refusals to start, work, deaths of either side, and what is left behind (nothing)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from halocline.engine.client import EngineClient
from halocline.engine.health import judge
from halocline.engine.launch import begin
from halocline.engine.messages import Spec
from halocline.engine.process import settle_memory
from halocline.engine.rendezvous import Folder
from halocline.engine.stream import TokenStream
from halocline.errors import ConfigError, EngineDeadError, FailedError, ModelError, OverloadedError, TooLargeError
from halocline.params import SamplingParams
from testing.engine import EOS, fake_spec, ids_of
from testing.server import until, wait_until

PROMPT = tuple(ids_of("hi"))
ENDLESS = SamplingParams(ignore_eos=True, max_tokens=2000)


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="h") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@contextlib.asynccontextmanager
async def engine(*, unread_tokens: int = 4096, **settings: Any) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(fake_spec(**settings), unread_tokens=unread_tokens)
    try:
        yield client
    finally:
        assert await client.close() == (), "the last recount found something"


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


async def tokens_of(stream: TokenStream) -> list[int | None]:
    return [each.token_id async for batch in stream for each in batch]


def used_bytes(client: EngineClient) -> int:
    figures = client.snapshot.figures
    return -1 if figures is None else figures.arena.used_bytes


async def test_an_engine_starts_works_and_leaves_nothing_behind(own_temporary_folder: Path) -> None:
    said: list[tuple[str, float | None]] = []
    client = await EngineClient.start(fake_spec(reply="ok"), lambda text, fraction: said.append((text, fraction)))
    pid = client.pid
    assert pid is not None
    assert said == [("loading a fake", 0.5)]
    assert (client.model.name, client.hello.pid) == ("fake", pid)
    assert len(list(own_temporary_folder.iterdir())) == 1
    assert await tokens_of(await client.submit(PROMPT, SamplingParams())) == [*ids_of("ok"), EOS]
    assert await client.close() == ()
    assert not psutil.pid_exists(pid)
    assert list(own_temporary_folder.iterdir()) == []
    with pytest.raises(EngineDeadError):
        await client.submit(PROMPT, SamplingParams())
    await client.close()


@pytest.mark.parametrize(
    ("misfortune", "error", "words"),
    [
        ("config", ConfigError, "kv_bytes is too small; step_tokens is too small"),
        ("model", ModelError, "no such model: 'nowhere'"),
        ("defect", EngineDeadError, "ValueError: a defect while building"),
        ("vanish", EngineDeadError, "exit code 7"),
    ],
)
async def test_an_engine_that_cannot_start_says_why(
    misfortune: str,
    error: type[Exception],
    words: str,
    own_temporary_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(error, match=words):
        await EngineClient.start(fake_spec(misfortune=misfortune))
    assert list(own_temporary_folder.iterdir()) == []
    assert error is EngineDeadError or caplog.messages == [], "the exception says it; the log need not"


async def test_a_builder_that_does_not_exist_is_named() -> None:
    with pytest.raises(EngineDeadError, match="nosuchmodule"):
        await EngineClient.start(Spec(builder="nosuchmodule:build", log_level="critical"))


async def test_an_engine_imports_ahead_and_then_builds_what_it_is_told(own_temporary_folder: Path) -> None:
    marker = own_temporary_folder / "imported"
    (own_temporary_folder / "ahead_of_time.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()")
    # Named after one that does not exist: what cannot be imported ahead is left to whoever needs it.
    with environment(PYTHONPATH=str(own_temporary_folder)):
        begun = begin(("nosuchmodule", "ahead_of_time"))
    await until(marker.exists, "the module to be imported")
    assert begun.process.poll() is None, "it waits to be told"
    client = await EngineClient.start(fake_spec(reply="ok"), engine=begun)
    assert client.pid == begun.process.pid
    assert await tokens_of(await client.submit(PROMPT, SamplingParams())) == [*ids_of("ok"), EOS]
    assert await client.close() == ()
    begun.close()
    assert begun.process.returncode == 0, "it was told to end, and not killed"


def test_an_engine_that_is_told_nothing_ends_and_leaves_nothing(own_temporary_folder: Path) -> None:
    begun = begin()
    assert len(list(own_temporary_folder.iterdir())) == 1
    begun.close()
    begun.close()
    assert begun.process.returncode == -signal.SIGKILL
    assert list(own_temporary_folder.iterdir()) == []


async def test_however_often_a_start_is_cancelled_everything_is_freed(own_temporary_folder: Path) -> None:
    """A second time while it cleaned up, sockets stayed open, and the process hung at its end."""
    process = psutil.Process()
    files, others = process.num_fds(), set(process.children())
    starting = asyncio.ensure_future(EngineClient.start(fake_spec(step_seconds=1)))
    await until(lambda: bool(set(process.children()) - others), "the engine to be begun")
    for _ in range(4):
        starting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: process.num_fds() == files, "all files to be closed")
    assert list(own_temporary_folder.iterdir()) == []
    assert set(process.children()) <= others


async def test_an_engine_whose_sockets_cannot_be_bound_is_not_left(
    own_temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(psutil.Process().children())
    monkeypatch.setattr(Folder, "reports", property(lambda folder: f"ipc://{folder.path}/absent/reports.sock"))
    with pytest.raises(zmq.ZMQError):
        await EngineClient.start(fake_spec())
    assert set(psutil.Process().children()) <= others
    assert list(own_temporary_folder.iterdir()) == []


async def test_many_sequences_run_side_by_side() -> None:
    async with engine(reply="{prompt}!") as client:
        prompts = [tuple(ids_of(f"prompt {i}")) for i in range(100)]
        streams = await asyncio.gather(*(client.submit(prompt, SamplingParams()) for prompt in prompts))
        answers = await asyncio.gather(*map(tokens_of, streams))
        assert answers == [[*prompt, *ids_of("!"), EOS] for prompt in prompts]


async def test_refusals_are_raised_where_the_request_is_made() -> None:
    async with engine(model_len=16, slots=1, waiting=1, step_seconds=0.005, stuck=True) as client:
        with pytest.raises(TooLargeError, match="exceed max_model_len 16") as caught:
            await client.submit(PROMPT, SamplingParams(max_tokens=100))
        assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
        held = [await client.submit(PROMPT, SamplingParams())]
        with pytest.raises(OverloadedError, match="1 requests wait already"):
            await client.submit(PROMPT, SamplingParams())
        for stream in held:
            stream.close()


async def test_the_front_end_itself_bounds_what_is_outstanding() -> None:
    async with engine(slots=2, waiting=1, step_seconds=0.002) as client:
        held = [await client.submit(PROMPT, ENDLESS) for _ in range(3)]
        with pytest.raises(OverloadedError, match=r"max_running_requests 2 \+ max_waiting_requests 1"):
            await client.submit(PROMPT, ENDLESS)
        for stream in held:
            stream.close()


async def test_cancelling_frees_the_memory() -> None:
    async with engine(step_seconds=0.002) as client:
        stream = await client.submit(PROMPT, ENDLESS)
        await until(lambda: used_bytes(client) > 0, "the request to hold memory")
        stream.close()
        await until(lambda: used_bytes(client) == 0, "0 used bytes")
        assert client.sequences == 0


async def test_a_submission_that_is_cancelled_while_it_waits_is_withdrawn() -> None:
    async with engine(step_seconds=0.3) as client:
        running = await client.submit(PROMPT, ENDLESS)
        submitting = asyncio.ensure_future(client.submit(PROMPT, ENDLESS))
        await asyncio.sleep(0)
        assert client.sequences == 2
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        assert client.sequences == 1
        running.close()
        await until(lambda: not client.snapshot.has_work and used_bytes(client) == 0, "an idle engine")


async def test_a_reader_that_does_not_read_is_cut_off_and_the_others_go_on() -> None:
    async with engine(unread_tokens=50, model_len=100_000, pages=100_000) as client:
        slow = await client.submit(PROMPT, SamplingParams(ignore_eos=True, max_tokens=50_000))
        await until(lambda: slow.has_ended, "the slow reader to be cut off")
        with pytest.raises(FailedError, match="50 tokens behind"):
            await tokens_of(slow)
        assert await tokens_of(await client.submit(PROMPT, SamplingParams())) == [*ids_of("Hello."), EOS]


async def test_killing_the_engine_reaches_everybody_who_waits(own_temporary_folder: Path) -> None:
    client = await EngineClient.start(fake_spec(step_seconds=0.01))
    streams = [await client.submit(PROMPT, ENDLESS) for _ in range(20)]
    readers = [asyncio.ensure_future(tokens_of(stream)) for stream in streams]
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    for result in await asyncio.gather(*readers, return_exceptions=True):
        assert isinstance(result, EngineDeadError)
        assert "SIGKILL" in str(result)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await client.submit(PROMPT, ENDLESS)
    assert judge(client.sight(), 30.0).state == "dead"
    await until(lambda: list(own_temporary_folder.iterdir()) == [], "the folder to be removed")
    await client.close()


async def test_the_engine_does_not_end_by_signals_that_a_terminal_sends_to_all() -> None:
    async with engine(reply="still here") as client:
        assert client.pid is not None
        assert os.getpgid(client.pid) != os.getpgid(0), "a terminal's Ctrl-C must not reach it"
        for each in (signal.SIGINT, signal.SIGTERM):
            os.kill(client.pid, each)
        assert await tokens_of(await client.submit(PROMPT, SamplingParams())) == [*ids_of("still here"), EOS]


async def test_closing_ends_what_still_runs_with_an_error() -> None:
    client = await EngineClient.start(fake_spec(step_seconds=0.01))
    stream = await client.submit(PROMPT, ENDLESS)
    reader = asyncio.ensure_future(tokens_of(stream))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(EngineDeadError):
        await reader


async def test_a_blocked_engine_is_seen_as_stalled() -> None:
    async with engine(stuck=True) as client:
        stream = await client.submit(PROMPT, SamplingParams(), request_id="the-blocked-one")
        await until(lambda: client.snapshot.stalled_seconds > 0.1, "the stall to be reported")
        verdict = judge(client.sight(), 0.1)
        assert verdict.state == "stalled"
        assert verdict.blocked is not None
        assert verdict.blocked["request"] == "the-blocked-one"
        stream.close()
        await until(lambda: judge(client.sight(), 0.1).is_healthy, "health again")


async def test_an_engine_that_hangs_in_a_step_is_seen_as_silent() -> None:
    client = await EngineClient.start(fake_spec(step_seconds=3600.0))
    submitting = asyncio.ensure_future(client.submit(PROMPT, SamplingParams()))
    await until(lambda: client.sight().silent_seconds > 0.2, "the silence to be noticed")
    assert judge(client.sight(), 0.2).state == "silent"
    submitting.cancel()
    await client.close(goodbye_seconds=0)


async def test_closing_waits_no_longer_for_an_engine_that_was_killed_meanwhile() -> None:
    client = await EngineClient.start(fake_spec())
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    closing = asyncio.ensure_future(client.close(goodbye_seconds=3600))
    await asyncio.sleep(0.05)
    os.kill(client.pid or client.hello.pid, signal.SIGKILL)
    assert await asyncio.wait_for(closing, 60) == ()


async def test_a_front_end_that_can_no_longer_read_reports_tells_everybody() -> None:
    client = await EngineClient.start(fake_spec(step_seconds=0.01))
    stream = await client.submit(PROMPT, ENDLESS)

    def broken(frame: bytes) -> None:
        raise ValueError("a defect in the front end")

    client._take = broken  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match="a defect in the front end"):
        await tokens_of(stream)
    await client.close()


async def test_figures_that_cannot_be_told_end_nobodys_request() -> None:
    async with engine(reply="still here", figures="broken") as client:
        assert await tokens_of(await client.submit(PROMPT, SamplingParams())) == [*ids_of("still here"), EOS]


WAITS = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from halocline.engine.launch import begin
print(begin().process.pid, flush=True)
time.sleep(3600)
"""
PARENT = """
import asyncio, sys, tempfile
tempfile.tempdir = sys.argv[1]
from testing.engine import fake_spec, ids_of
from halocline.engine.client import EngineClient
from halocline.params import SamplingParams

async def main():
    client = await EngineClient.start(fake_spec(step_seconds=0.01))
    await client.submit(tuple(ids_of("hi")), SamplingParams(ignore_eos=True, max_tokens=2000))
    print(client.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("program", [PARENT, WAITS], ids=["serves", "waits"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_front_end_dies_the_engine_ends_and_nothing_is_left(
    how: int, program: str, own_temporary_folder: Path
) -> None:
    arguments = [sys.executable, "-c", program, str(own_temporary_folder)]
    with (
        environment(PYTHONPATH=str(Path(__file__).parents[2])),
        subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent,
    ):
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.send_signal(how)
        parent.wait()
    wait_until(lambda: not psutil.pid_exists(pid), "the engine to end")
    wait_until(lambda: list(own_temporary_folder.iterdir()) == [], "the folder to be removed")


def test_what_is_built_for_good_is_out_of_the_garbage_collectors_sight() -> None:
    threshold = gc.get_threshold()
    kept = [[] for _ in range(1000)]
    try:
        settle_memory()
        assert gc.get_freeze_count() > len(kept), "not frozen"
        assert not any(each is kept for each in gc.get_objects()), "a collection still visits what was built before"
        assert gc.get_threshold()[0] > threshold[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)

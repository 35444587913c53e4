"""A sender in a process of its own that is killed or stopped: what the receiver is left with."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from halocline.disagg import messages as wire
from halocline.disagg.links import LinkPost
from halocline.disagg.post import Delivered, Down, Up
from halocline.memory.retention import Full
from testing.layouts import small_layout
from testing.links import End, Kind, key, landed, make_end, pages_message, pool_pages, wait_for, wait_until

LAYOUT = small_layout(Full(), page_tokens=256, slabs=2048)
"""16 MiB, far more than sockets hold."""
PAGES = 1800
RUN = pool_pages(0, *range(PAGES))


def sender_main(kind: Kind, folder: str) -> None:
    """Serve a link, send one chunk to whoever comes for each message that is heard, until the pipe is closed."""
    end = make_end(LAYOUT, "sender", kind, Path(folder))
    print(end.post.address, flush=True)
    peer = wait_for(end, Up, 60).peer
    while True:
        heard = wait_for(end, Delivered, 60).message
        assert isinstance(heard, wire.Accept)
        end.post.send(peer, pages_message((RUN,), attempt=heard.attempt), (RUN,))


@contextmanager
def sending(kind: Kind, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a sender in another process and yield it with its address."""
    tests = Path(__file__).resolve().parents[2]
    code = (
        f"import sys; sys.path.insert(0, {str(tests)!r})\n"
        f"import importlib.util as u; s = u.spec_from_file_location('sender', {__file__!r})\n"
        f"m = u.module_from_spec(s); s.loader.exec_module(m); m.sender_main({kind!r}, {str(folder)!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def mapped_arenas() -> int:
    """Return how many arenas of other processes are mapped here."""
    return sum("memfd:arena" in line for line in Path("/proc/self/maps").read_text().splitlines())


def open_landing(end: End, peer: str, attempt: int = 1) -> None:
    end.landings.open(key(peer, attempt), 0, PAGES * 256, (pool_pages(0, *range(100, 100 + PAGES)),))


def test_nothing_of_a_killed_sender_stays_mapped_or_open(tmp_path: Path) -> None:
    end = make_end(LAYOUT, "receiver")
    try:
        gc.collect()
        before, mapped_before = len(os.listdir("/proc/self/fd")), mapped_arenas()
        with sending("shm", tmp_path) as (process, address):
            peer = end.post.dial(address)
            wait_for(end, Up)
            assert mapped_arenas() == mapped_before + 1
            open_landing(end, peer)
            gc.disable()
            process.kill()
            process.wait()
            wait_for(end, Down)
            wait_until(lambda: mapped_arenas() == mapped_before, 5)
            assert len(os.listdir("/proc/self/fd")) <= before + 1  # the pipe of the process
    finally:
        gc.enable()
        end.post.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_sender_that_is_stopped_past_the_close_and_wakes_changes_no_page(kind: Kind, tmp_path: Path) -> None:
    end = make_end(LAYOUT, "receiver")
    try:
        with sending(kind, tmp_path) as (process, address):
            peer = end.post.dial(address)
            wait_for(end, Up)
            open_landing(end, peer)
            end.post.send(peer, wire.Accept("r", 1, 0))
            if kind == "tcp":
                wait_until(lambda: end.post.figures()["received_page_bytes"] > 0)
            process.send_signal(signal.SIGSTOP)
            begin = time.monotonic()
            end.landings.close(key(peer))
            assert time.monotonic() - begin < 1.0
            end.arena[:] = 0x44
            open_landing(end, peer, attempt=2)
            end.landings.close(key(peer, 2))
            process.send_signal(signal.SIGCONT)
            landed(end)
            end.post.send(peer, wire.Accept("r", 2, 0))
            assert landed(end).refused
            assert np.all(end.arena == 0x44)
    finally:
        end.post.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_sender_that_is_killed_while_it_sends_brings_the_connection_down_soon(kind: Kind, tmp_path: Path) -> None:
    end = make_end(LAYOUT, "receiver")
    try:
        with sending(kind, tmp_path) as (process, address):
            peer = end.post.dial(address)
            wait_for(end, Up)
            open_landing(end, peer)
            end.post.send(peer, wire.Accept("r", 1, 0))
            process.kill()
            begin = time.monotonic()
            while not isinstance(news := next_news(end.post), Down):
                assert news is None or isinstance(news, Delivered)
                assert time.monotonic() - begin < 5
            end.landings.close(key(peer))
    finally:
        end.post.close()


def next_news(post: LinkPost) -> object:
    time.sleep(0.002)
    news = post.poll()
    return news[-1] if news else None

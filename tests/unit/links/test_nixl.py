"""Links by the NIXL library itself, over TCP on loopback: what arrives, and what of a peer that is stopped or killed.

Skipped where the library is not installed: `make nixl` installs it and runs this file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from halocline.disagg import messages as wire
from halocline.disagg import writer
from halocline.disagg.nixl_agent import NixlAgent, missing
from halocline.disagg.post import Delivered, Down, Up
from halocline.memory.retention import Full, Sliding
from testing.layouts import small_layout
from testing.links import (
    End,
    key,
    landed,
    make_end,
    pages_message,
    pool_pages,
    send_chunk,
    wait_for,
    wait_until,
)
from testing.nixl import nixl_end, nixl_joined

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

LAYOUT = small_layout(Full(), Sliding(8), page_tokens=4, slabs=16)
RUNS = (pool_pages(0, 3, 4, 9), pool_pages(1, 11, 12))
TARGETS = (pool_pages(0, 1, 0, 5), pool_pages(1, 7, 8))
LARGE = small_layout(Full(), page_tokens=256, slabs=2048)
"""16 MiB, far more than sockets hold."""
PAGES = 1800
RUN = pool_pages(0, *range(0, PAGES, 2), *range(1, PAGES, 2))
"""Hardly any two of them adjoin each other."""


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


def sender_main(is_deaf: bool) -> None:
    """Serve a link, send one chunk to whoever comes for each message that is heard, until it is killed.

    A deaf one lets nothing be read before it gets SIGUSR1.
    """
    awake, serve = threading.Event(), NixlAgent._serve
    signal.signal(signal.SIGUSR1, lambda *_: awake.set())
    if is_deaf:
        NixlAgent._serve = lambda self: (awake.wait(), serve(self))[1]  # type: ignore[method-assign]
    end = nixl_end(LARGE, "sender", listens=True)
    print(end.post.address, flush=True)
    while True:
        for news in end.post.poll():
            if isinstance(news, Delivered) and isinstance(news.message, wire.Accept):
                end.post.send(news.peer, pages_message((RUN,), attempt=news.message.attempt), (RUN,))
        time.sleep(0.002)


@contextmanager
def sending(is_deaf: bool = False) -> Iterator[tuple[subprocess.Popen[str], End, str]]:
    """Run a sender in another process; yield it, a receiver, and the receiver's name for it."""
    tests = Path(__file__).resolve().parents[2]
    code = (
        f"import sys; sys.path.insert(0, {str(tests)!r})\n"
        f"import importlib.util as u; s = u.spec_from_file_location('sender', {__file__!r})\n"
        f"m = u.module_from_spec(s); s.loader.exec_module(m); m.sender_main({is_deaf})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    end = nixl_end(LARGE, "receiver")
    try:
        assert process.stdout is not None
        peer = end.post.dial(process.stdout.readline().strip())
        wait_for(end, Up)
        yield process, end, peer
    finally:
        end.post.close()
        process.kill()
        process.communicate()


def open_landing(end: End, peer: str, attempt: int = 1) -> None:
    end.landings.open(key(peer, attempt), 0, PAGES * 256, (pool_pages(0, *range(100, 100 + PAGES)),))


def test_pages_stand_where_the_landing_has_them_and_nothing_else_changes() -> None:
    with nixl_joined(LAYOUT, LAYOUT) as (sender, to_receiver, receiver, peer):
        assert sender.post.address.startswith("nixl://127.0.0.1:")
        before = receiver.arena.copy()
        receiver.landings.open(key(peer), 0, 12, TARGETS)
        send_chunk(sender, to_receiver, RUNS)
        assert landed(receiver).refused == ""
        page_bytes = 0
        for pool, (source, target) in enumerate(zip(RUNS, TARGETS, strict=True)):
            size, stride = (
                LAYOUT.pools[pool].page_bytes,
                LAYOUT.pools[pool].stride_bytes,
            )
            for theirs, ours in zip(source.pages, target.pages, strict=True):
                expected = sender.arena[theirs * stride : theirs * stride + size]
                before[ours * stride : ours * stride + size] = expected
                page_bytes += size
        assert np.array_equal(receiver.arena, before)
        assert receiver.landings.missing(key(peer)) == 0
        assert receiver.post.figures()["received_page_bytes"] == page_bytes


def test_pages_of_another_length_are_cut_anew() -> None:
    ours = small_layout(Full(), page_tokens=1, slabs=64)
    with nixl_joined(small_layout(Full(), page_tokens=8, slabs=16), ours) as (
        sender,
        to_receiver,
        receiver,
        peer,
    ):
        receiver.landings.open(key(peer), 0, 13, (pool_pages(0, *range(40, 53)),))
        send_chunk(sender, to_receiver, (pool_pages(0, 5, 2),))
        assert landed(receiver).refused == ""
        assert receiver.landings.missing(key(peer)) == 0
        theirs, here = sender.layout.pools[0], ours.pools[0]
        for position in range(13):
            page = sender.arena[(5, 2)[position // 8] * theirs.stride_bytes :][: theirs.page_bytes]
            row = page.reshape(2, 8, -1)[:, position % 8]  # one layer: its keys, then its values
            assert np.array_equal(
                receiver.arena[(40 + position) * here.stride_bytes :][: here.page_bytes],
                row.ravel(),
            )


def test_a_page_whose_bytes_are_not_those_that_were_summed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with nixl_joined(LAYOUT, LAYOUT) as (sender, to_receiver, receiver, peer):
        right = writer.checksum
        monkeypatch.setattr(writer, "checksum", lambda page: right(page) ^ 1)
        receiver.landings.open(key(peer), 0, 12, TARGETS)
        send_chunk(sender, to_receiver, RUNS)
        assert landed(receiver).refused == "the checksum of a page is wrong"
        assert receiver.landings.missing(key(peer)) > 0
        monkeypatch.setattr(writer, "checksum", right)
        receiver.landings.open(key(peer, 2), 0, 12, TARGETS)
        send_chunk(sender, to_receiver, RUNS, attempt=2)
        assert landed(receiver).refused == ""


def test_a_second_connection_between_the_same_two_works_beside_the_first_and_after_it() -> None:
    with nixl_joined(LAYOUT, LAYOUT) as (sender, _, receiver, former):
        peers = [former]
        for _ in range(3):
            peer = receiver.post.dial(sender.post.address)
            wait_for(receiver, Up)
            to_receiver = wait_for(sender, Up).peer
            receiver.landings.open(key(peer), 0, 12, TARGETS)
            send_chunk(sender, to_receiver, RUNS)
            assert landed(receiver).refused == ""
            receiver.post.hang_up(peers[-1], "there is another")
            wait_for_end(receiver)
            wait_for_end(sender)
            peers.append(peer)


def ask(end: End, peer: str, attempt: int = 1) -> None:
    """Open a landing, and have its pages sent."""
    open_landing(end, peer, attempt)
    end.post.send(peer, wire.Accept("r", attempt, 0))


def wait_for_reads(end: End) -> None:
    """Wait until pages are being read."""
    wait_until(lambda: end.post.figures()["received_page_bytes"] > 0)


def wait_for_end(end: End, seconds: float = 10.0) -> None:
    """Wait until a connection is lost."""
    wait_until(lambda: any(isinstance(news, Down) for news in end.post.poll()), seconds)


def test_a_landing_that_is_closed_while_its_pages_are_read_is_closed_at_once_and_never_written_again() -> None:
    with sending(is_deaf=True) as (process, end, peer):
        ask(end, peer)
        wait_for_reads(end)
        begin = time.monotonic()
        end.landings.close(key(peer))
        assert time.monotonic() - begin < 1.0
        end.arena[:] = 0x44
        process.send_signal(signal.SIGUSR1)
        assert landed(end).refused == "the landing was closed"
        assert np.all(end.arena == 0x44)
        ask(end, peer, attempt=2)
        assert landed(end).refused == ""
        assert end.landings.missing(key(peer, 2)) == 0


def test_a_peer_that_is_stopped_while_it_is_read_and_wakes_after_the_close_changes_no_page() -> None:
    with sending() as (process, end, peer):
        ask(end, peer)
        wait_for_reads(end)
        process.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        end.landings.close(key(peer))
        assert time.monotonic() - begin < 1.0
        end.arena[:] = 0x44
        process.send_signal(signal.SIGCONT)
        landed(end)
        assert np.all(end.arena == 0x44)


def test_a_peer_that_is_killed_while_it_is_read_is_lost_soon_and_another_can_be_read() -> None:
    with sending(is_deaf=True) as (process, end, peer):
        ask(end, peer)
        wait_for_reads(end)
        process.kill()
        wait_for_end(end)
        end.landings.close(key(peer))
        again = nixl_end(LARGE, "another sender", listens=True)
        try:
            other = end.post.dial(again.post.address)
            wait_for(end, Up)
            to_receiver = wait_for(again, Up).peer
            open_landing(end, other)
            again.post.send(to_receiver, pages_message((RUN,)), (RUN,))
            assert landed(end).refused == ""
        finally:
            again.post.close()


def test_a_worker_ends_though_it_reads_from_a_peer_that_does_not_answer() -> None:
    with sending(is_deaf=True) as (_, end, peer):
        ask(end, peer)
        wait_for_reads(end)
        begin = time.monotonic()
        end.post.close()
        assert time.monotonic() - begin < 5


def test_a_connection_that_is_hung_up_while_it_reads_gives_its_memory_back_when_the_read_ends() -> None:
    with sending(is_deaf=True) as (process, end, peer):
        lots = end.post._home.nixl._lots
        ask(end, peer)
        wait_for_reads(end)
        end.post.hang_up(peer, "nobody wants it any more")
        wait_for_end(end)
        assert lots.free == 6, "two reads were ahead, and neither has ended"
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: lots.free == 8)


def test_who_was_not_started_for_it_is_told_so() -> None:
    sender, receiver = (
        nixl_end(LAYOUT, "sender", listens=True),
        make_end(LAYOUT, "receiver"),
    )
    try:
        receiver.post.dial(sender.post.address)
        with pytest.raises(
            AssertionError,
            match="its pages go by NIXL; start this worker with --link-kind nixl, too",
        ):
            wait_for(receiver, Up)
    finally:
        receiver.post.close()
        sender.post.close()


def test_it_listens_on_loopback_only() -> None:
    def listening() -> set[str]:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        inodes = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if exists(name)}
        return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}

    def exists(name: str) -> bool:
        return os.path.lexists(f"/proc/self/fd/{name}")

    end = nixl_end(LAYOUT, "sender", listens=True)
    try:
        assert listening() == {"0100007F"}
    finally:
        end.post.close()

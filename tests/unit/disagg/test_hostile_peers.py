"""Links against peers that lie, talk nonsense or leave: others go on, and nothing wrong reaches a landing."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from halocline.disagg import messages as wire
from halocline.disagg import stream, writer
from halocline.disagg.arena_pages import ArenaPages, Bytes, checksum
from halocline.disagg.landings import Landings
from halocline.disagg.links import LinkPost, listen_for_links
from halocline.disagg.post import Delivered, Down, News, Up
from halocline.errors import LinkError
from halocline.memory.layout import LayerKV, solve_layout
from halocline.memory.retention import Full
from halocline.schedule.events import PoolPages

SECRET = b"right"
LAYOUT = solve_layout([LayerKV(0, Full(), 1, 64, 64)], 1 << 20, 16)
FACTS = wire.facts_of(LAYOUT, model="m", dtype="d", vocab_size=9)
PAGES = 20


class End:
    """One worker's links."""

    def __init__(self, epoch: str, fill: int, secret: bytes = SECRET, kind: str = "", folder: Path = Path()) -> None:
        self.memory = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.memory, LAYOUT.arena_bytes)
        fcntl.fcntl(self.memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.arena = np.frombuffer(mmap.mmap(self.memory, LAYOUT.arena_bytes), np.uint8)
        self.arena[:] = fill
        pages = ArenaPages(self.arena, FACTS.pools)
        self.landings = Landings(pages, LAYOUT.pools)
        listener = listen_for_links(kind, "127.0.0.1", 0, folder) if kind else None
        hello = wire.Hello(role="both", epoch=epoch, facts=FACTS)
        self.post = LinkPost(hello, secret, pages, self.landings, self.memory, listener)
        self.news: list[News] = []

    def next(self) -> News:
        ends = time.monotonic() + 10
        while not self.news:
            assert time.monotonic() < ends, "nothing came"
            select.select([self.post], [], [], 0.1)
            self.news += self.post.poll()
        return self.news.pop(0)

    def close(self) -> None:
        self.post.close()
        os.close(self.memory)


@pytest.fixture(params=["tcp", "shm"])
def sender(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[End]:
    end = End("sender", 7, kind=request.param, folder=tmp_path)
    yield end
    end.close()


@pytest.fixture
def receiver() -> Iterator[End]:
    end = End("receiver", 1)
    yield end
    end.close()


def fetch(sender: End, receiver: End) -> tuple[str, Delivered]:
    """Let twenty pages travel; return the receiver's name of the link and what was told of them."""
    name = receiver.post.dial(sender.post.address)
    assert isinstance(receiver.next(), Up)
    up = sender.next()
    while not isinstance(up, Up):
        up = sender.next()
    run = PoolPages(0, np.arange(PAGES, dtype=np.int32))
    receiver.landings.open((name, "r", 1), 0, PAGES * 16, (run,))
    sender.post.send(up.peer, wire.Pages("r", 1, 0, 0, (wire.PageRun(0, PAGES),)), (run,))
    told = receiver.next()
    assert isinstance(told, Delivered), told
    return name, told


def test_pages_stand_verified_when_they_are_told_of(sender: End, receiver: End) -> None:
    name, told = fetch(sender, receiver)
    assert not told.refused
    assert receiver.landings.missing((name, "r", 1)) == 0
    assert (receiver.arena[: LAYOUT.pools[0].page_bytes] == 7).all()


def test_pages_that_are_recalled_while_they_are_summed_are_refused(
    sender: End, receiver: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recalling(page: Bytes) -> int:
        if threading.current_thread().name.endswith("-out"):
            sender.post.recall("peer-1", "r", 1)
        return checksum(page)

    monkeypatch.setattr(writer, "checksum", recalling)
    name, told = fetch(sender, receiver)
    assert told.refused == "the checksum of a page is wrong"
    assert receiver.landings.missing((name, "r", 1)) > 0


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n" * 9, stream.PREFACE + b"n" * 32 + b"p" * 32, b"HALO", b""])
def test_who_does_not_prove_the_secret_is_hung_up_on_and_others_go_on(sender: End, receiver: End, said: bytes) -> None:
    kind, _, where = sender.post.address.partition("://")
    hostile = socket.socket(socket.AF_UNIX if kind == "shm" else socket.AF_INET)
    host, _, port = where.rpartition(":")
    hostile.connect(where if kind == "shm" else (host, int(port)))
    with hostile:
        with contextlib.suppress(OSError):  # it may be hung up on already
            hostile.sendall(said)
            hostile.shutdown(socket.SHUT_WR)
        assert isinstance(sender.next(), Down)
    assert not fetch(sender, receiver)[1].refused


def test_a_dialer_with_another_secret_learns_why(sender: End) -> None:
    stranger = End("stranger", 1, b"wrong")
    stranger.post.dial(sender.post.address)
    told = stranger.next()
    stranger.close()
    assert isinstance(told, Down)


@pytest.mark.parametrize(
    "head", [stream.HEAD.pack(b"HL", 1, stream.MAX_FRAME_BYTES + 1), b"HX" + bytes(5), stream.HEAD.pack(b"HL", 9, 0)]
)
def test_a_frame_that_is_none_or_too_long_is_refused_by_its_head(head: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(5)
        there.sendall(head)
        with pytest.raises(LinkError, match=r"no frame|announces"):
            stream.receive_frame(here)

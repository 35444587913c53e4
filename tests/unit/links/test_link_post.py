"""Real links in one process: what arrives, and that neither side's fence has a hole."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from halocline.disagg import messages as wire
from halocline.disagg import stream, writer
from halocline.disagg.arena_pages import ArenaPages, Bytes
from halocline.disagg.landings import Landings
from halocline.disagg.links import LinkPost, listen_for_links
from halocline.disagg.post import Delivered, Down, Up
from halocline.memory.retention import Full, Sliding
from testing import links
from testing.layouts import small_layout
from testing.links import End, Kind, joined, key, landed, pool_pages, send_chunk, wait_for, wait_until

LAYOUT = small_layout(Full(), Sliding(8), page_tokens=4, slabs=16)
RUNS = (pool_pages(0, 3, 4, 9), pool_pages(1, 11, 12))
TARGETS = (pool_pages(0, 1, 0, 5), pool_pages(1, 7, 8))

both_kinds = pytest.mark.parametrize("kind", ["shm", "tcp"])


def stand(receiver: End, source: Bytes) -> bool:
    """Whether the target pages hold what the run's pages hold in `source`."""
    for pool, (run, target) in enumerate(zip(RUNS, TARGETS, strict=True)):
        size, stride = LAYOUT.pools[pool].page_bytes, LAYOUT.pools[pool].stride_bytes
        for theirs, ours in zip(run.pages, target.pages, strict=True):
            here = receiver.arena[ours * stride : ours * stride + size]
            if not np.array_equal(here, source[theirs * stride : theirs * stride + size]):
                return False
    return True


@both_kinds
def test_pages_stand_where_the_landing_has_them_and_nothing_else_changes(kind: Kind, tmp_path: Path) -> None:
    with joined(LAYOUT, LAYOUT, kind, tmp_path) as (sender, to_receiver, receiver, peer):
        before = receiver.arena.copy()
        receiver.landings.open(key(peer), 0, 12, TARGETS)
        send_chunk(sender, to_receiver, RUNS)
        assert landed(receiver).refused == ""
        for pool, (source, target) in enumerate(zip(RUNS, TARGETS, strict=True)):
            size, stride = LAYOUT.pools[pool].page_bytes, LAYOUT.pools[pool].stride_bytes
            for theirs, ours in zip(source.pages, target.pages, strict=True):
                expected = sender.arena[theirs * stride : theirs * stride + size]
                before[ours * stride : ours * stride + size] = expected
        assert np.array_equal(receiver.arena, before)
        assert receiver.landings.missing(key(peer)) == 0


@both_kinds
def test_pages_for_a_closed_landing_are_drained_and_the_next_message_arrives(kind: Kind, tmp_path: Path) -> None:
    with joined(LAYOUT, LAYOUT, kind, tmp_path) as (sender, to_receiver, receiver, peer):
        before = receiver.arena.copy()
        receiver.landings.open(key(peer), 0, 12, TARGETS)
        receiver.landings.close(key(peer))
        send_chunk(sender, to_receiver, RUNS)
        assert landed(receiver).refused
        sender.post.send(to_receiver, wire.Offer("r", 2))
        assert landed(receiver).message == wire.Offer("r", 2)
        assert np.array_equal(receiver.arena, before)


@both_kinds
def test_a_recall_while_checksums_are_taken_lets_no_later_bytes_pass_as_right(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages' next owner writes as soon as `recall` has returned; what it wrote must not arrive as verified."""
    reached, go_on, real = threading.Event(), threading.Event(), writer.checksum

    def held(page: np.ndarray) -> int:
        if threading.current_thread().name.endswith("-out") and not reached.is_set():
            reached.set()
            go_on.wait(20)
        return real(page)

    with joined(LAYOUT, LAYOUT, kind, tmp_path) as (sender, to_receiver, receiver, peer):
        right = sender.arena.copy()
        receiver.landings.open(key(peer), 0, 12, TARGETS)
        monkeypatch.setattr(writer, "checksum", held)
        send_chunk(sender, to_receiver, RUNS)
        assert reached.wait(20)
        recalled = threading.Thread(target=sender.post.recall, args=(to_receiver, "r", 1))
        recalled.start()
        recalled.join(0.2)
        if not recalled.is_alive():  # it did not wait for the page that is being read
            sender.arena[:] = 0xEE
        go_on.set()
        recalled.join(20)
        sender.arena[:] = 0xEE
        sender.post.send(to_receiver, wire.Offer("r", 2))
        came = landed(receiver)
        if isinstance(came.message, wire.Pages):
            is_right = stand(receiver, right)
            assert came.refused or is_right, "bytes of a later owner were taken for pages of this request"
            came = landed(receiver)
        assert came.message == wire.Offer("r", 2)


def test_a_close_while_a_page_is_half_received_ends_all_writing(tmp_path: Path) -> None:
    """Large pages, and a sender whose second half comes only after the close."""
    layout = small_layout(Full(), page_tokens=256, slabs=512)
    with joined(layout, layout, "tcp", tmp_path) as (sender, to_receiver, receiver, peer):
        runs, targets = (pool_pages(0, *range(400)),), (pool_pages(0, *range(100, 500)),)
        receiver.landings.open(key(peer), 0, 400 * 256, targets)
        send_chunk(sender, to_receiver, runs)
        wait_until(lambda: receiver.post.figures()["received_page_bytes"] > 0)
        receiver.landings.close(key(peer))
        receiver.arena[:] = 0x55
        send_chunk(sender, to_receiver, runs, chunk=1)
        landed(receiver)
        assert landed(receiver).refused
        assert np.all(receiver.arena == 0x55)


def test_what_comes_of_a_page_after_its_landing_was_closed_is_written_nowhere(tmp_path: Path) -> None:
    """Half a page stands in the landing, the other half is still with the peer."""
    size = LAYOUT.pools[0].page_bytes
    receiver = links.make_end(LAYOUT, "receiver", "tcp", tmp_path)
    host, _, port = receiver.post.address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 10) as sock:
            stream.prove(sock, links.SECRET, "dialer")
            sock.sendall(stream.frame(stream.MESSAGE, wire.encode(links.hello(LAYOUT, "peer"))))
            peer = wait_for(receiver, Up).peer
            receiver.landings.open(key(peer), 0, 12, TARGETS)
            receiver.arena[:] = 0
            packed = wire.encode(links.pages_message(RUNS))
            sock.sendall(stream.frame(stream.PAGES, stream.encode_pages(stream.PagesBody(packed))))
            sock.sendall(b"\x77" * (size // 2))
            wait_until(lambda: bool((receiver.arena == 0x77).sum() == size // 2))
            receiver.landings.close(key(peer))
            receiver.arena[:] = 0x55
            rest = [len(run.pages) * (LAYOUT.pools[pool].page_bytes + 8) for pool, run in enumerate(RUNS)]
            sock.sendall(b"\x77" * (sum(rest) - size // 2))
            assert landed(receiver).refused
            assert np.all(receiver.arena == 0x55)
    finally:
        receiver.post.close()


def test_a_group_that_is_about_to_be_pulled_is_not_once_its_landing_is_closed(tmp_path: Path) -> None:
    """The reader has found the landing and waits for its lock; so does whoever closes it, and comes first."""
    with joined(LAYOUT, LAYOUT, "shm", tmp_path) as (sender, to_receiver, receiver, peer):
        receiver.landings.open(key(peer), 0, 12, TARGETS)
        landing = receiver.landings.find(key(peer))
        assert landing is not None
        with landing.lock:
            send_chunk(sender, to_receiver, RUNS)
            wait_until(lambda: sender.post.figures()["sent_page_bytes"] > 0)
            time.sleep(0.1)
            landing.is_open = False
            receiver.arena[:] = 0x55
        assert landed(receiver).refused == "the landing was closed"
        assert np.all(receiver.arena == 0x55)


@both_kinds
def test_a_chunk_that_comes_twice_is_not_written_again(kind: Kind, tmp_path: Path) -> None:
    with joined(LAYOUT, LAYOUT, kind, tmp_path) as (sender, to_receiver, receiver, peer):
        receiver.landings.open(key(peer), 0, 12, TARGETS)
        send_chunk(sender, to_receiver, RUNS)
        assert landed(receiver).refused == ""
        receiver.arena[:] = 0x33
        send_chunk(sender, to_receiver, RUNS)
        assert landed(receiver).refused == ""
        assert np.all(receiver.arena == 0x33)


def test_a_page_that_changed_since_it_was_announced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver was stopped; when it wakes and pulls, the pages belong to another request."""
    with joined(LAYOUT, LAYOUT, "shm", tmp_path) as (sender, to_receiver, receiver, peer):
        receiver.landings.open(key(peer), 0, 12, TARGETS)
        landing = receiver.landings.find(key(peer))
        assert landing is not None
        with landing.lock:  # the receiver's thread stands still before it pulls
            send_chunk(sender, to_receiver, RUNS)
            wait_until(lambda: sender.post.figures()["sent_page_bytes"] > 0)
            sender.arena[:] = 0xEE
        assert "checksum" in landed(receiver).refused
        assert receiver.landings.missing(key(peer)) > 0


@both_kinds
def test_no_descriptor_is_left_after_a_link_is_closed(kind: Kind, tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    folders = [tmp_path / str(i) for i in range(3)]
    counts = []
    for folder in folders:
        folder.mkdir()
        with joined(LAYOUT, LAYOUT, kind, folder) as (sender, _, _, _):
            readable = sender.post._home.descriptor
        if readable is not None:
            os.close(readable)
        del sender
        gc.collect()
        counts.append(descriptors())
    assert counts[1] == counts[2]


def test_whoever_hears_that_a_link_is_up_may_send_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the listening thread is held up between accepting a connection and noting its name."""
    real = threading.Thread.start

    def held(thread: threading.Thread) -> None:
        real(thread)
        if threading.current_thread().name == "halocline-links":
            time.sleep(0.3)

    monkeypatch.setattr(threading.Thread, "start", held)
    with joined(LAYOUT, LAYOUT, "tcp", tmp_path) as (sender, to_receiver, receiver, _):
        sender.post.send(to_receiver, wire.Offer("r", 1))
        assert wait_for(receiver, Delivered, 5).message == wire.Offer("r", 1)


def test_workers_with_other_secrets_do_not_join(tmp_path: Path) -> None:
    sender = links.make_end(LAYOUT, "sender", "tcp", tmp_path)
    receiver = links.make_end(LAYOUT, "receiver", secret=b"another secret")
    try:
        receiver.post.dial(sender.post.address)
        assert "link token" in wait_for(receiver, Down).why
        assert "link token" in wait_for(sender, Down).why
    finally:
        receiver.post.close()
        sender.post.close()


def test_an_arena_that_could_shrink_under_its_reader_is_not_mapped(tmp_path: Path) -> None:
    """Reading behind the end of a file that was cut off ends a process."""
    sender = links.make_end(LAYOUT, "sender", "shm", tmp_path, is_sealed=False)
    receiver = links.make_end(LAYOUT, "receiver")
    try:
        receiver.post.dial(sender.post.address)
        assert "sealed" in wait_for(receiver, Down).why
    finally:
        receiver.post.close()
        sender.post.close()


class SlowListener(socket.socket):
    """A listener that has accepted somebody, and says so only a moment after it was told to end."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(fileno=listener.detach())
        self.is_ending = threading.Event()

    def accept(self) -> tuple[socket.socket, object]:
        found = super().accept()
        assert self.is_ending.wait(20)
        time.sleep(0.1)
        return found

    def shutdown(self, how: int) -> None:
        super().shutdown(how)
        self.is_ending.set()


def test_who_is_accepted_while_a_worker_ends_is_left_with_all_others() -> None:
    own = links.hello(LAYOUT, "worker")
    pages = ArenaPages(np.zeros(LAYOUT.arena_bytes, np.uint8), own.facts.pools)
    listener = SlowListener(listen_for_links("tcp", "127.0.0.1", 0, Path()))
    place = listener.getsockname()
    post = LinkPost(own, links.SECRET, pages, Landings(pages, LAYOUT.pools), listener=listener)
    with socket.create_connection(place, 10) as sock:
        time.sleep(0.1)  # it is accepted
        post.close()
        sock.settimeout(5)
        try:
            while sock.recv(4096):
                continue
        except ConnectionResetError:
            return  # it is left


def test_a_worker_ends_also_where_the_system_had_no_thread_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    end = links.make_end(LAYOUT, "worker")

    def full(self: threading.Thread) -> None:
        raise RuntimeError(f"no thread for {self.name}")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        end.post.dial("tcp://127.0.0.1:1")
    end.post.close()
    assert end.post.figures()["received_bytes"] == 0

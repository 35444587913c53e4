"""The staging buffer: never over its quota, no page is passed over, and a quota of one page suffices."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from halocline.disagg import messages as wire
from halocline.disagg import staging as staging_module
from halocline.disagg import stream, writer
from halocline.disagg.arena_pages import checksum
from halocline.disagg.post import Delivered, Down, Up
from halocline.disagg.staging import Claim, Staging
from halocline.memory.retention import Full
from halocline.schedule.events import PoolPages
from testing.layouts import small_layout
from testing.links import SECRET, End, Kind, joined, key, landed, make_end, send_chunk, wait_for, wait_until

THEIRS = small_layout(Full(), page_tokens=64, slabs=64)
OURS = small_layout(Full(), page_tokens=4, slabs=1024)
PAGE_BYTES = THEIRS.pools[0].page_bytes
PAGES = 40
TOKENS = PAGES * 64


def always() -> bool:
    return True


def test_many_threads_never_get_more_than_the_quota_nor_the_same_bytes() -> None:
    staging, wrong = Staging(1000), []

    def work(seed: int) -> None:
        draw = np.random.default_rng(seed)
        for _ in range(60):
            with staging.claim(int(draw.integers(1, 600)), always) as claim:
                assert claim is not None
                claim.room[:] = seed
                if staging.staged_bytes > 1000:
                    wrong.append("over the quota")
                time.sleep(0.0002)
                if not (claim.room == seed).all():
                    wrong.append("two had the same bytes")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert staging.staged_bytes == 0
    assert 600 < staging.most_bytes <= 1000


def test_a_large_page_is_not_passed_over_by_small_ones() -> None:
    staging, order = Staging(100), []

    def want(size: int) -> threading.Thread:
        def work() -> None:
            with staging.claim(size, always) as claim:
                assert claim is not None
                order.append(size)

        waiting = len(staging._waiting)
        thread = threading.Thread(target=work)
        thread.start()
        wait_until(lambda: len(staging._waiting) > waiting or not thread.is_alive())
        return thread

    with staging.claim(60, always):
        threads = [want(100), want(30)]  # 30 would fit beside the 60
        time.sleep(0.15)
        assert order == []
    for thread in threads:
        thread.join(5)
    assert order == [100, 30]


def test_who_is_no_longer_wanted_stops_waiting_and_others_go_on() -> None:
    staging, is_wanted = Staging(100), True
    got: list[Claim | None] = []

    def work() -> None:
        with staging.claim(100, lambda: is_wanted) as claim:
            got.append(claim)

    thread = threading.Thread(target=work)
    with staging.claim(60, always):
        thread.start()
        wait_until(lambda: staging.is_awaited)
        is_wanted = False
        thread.join(5)
        with staging.claim(40, always) as claim:
            assert claim is not None
    assert got == [None]


def target(count: int = PAGES, first: int = 0) -> tuple[PoolPages, ...]:
    return (PoolPages(0, np.arange(first, first + count * 16, dtype=np.int32)),)


def source(count: int = PAGES) -> tuple[PoolPages, ...]:
    return (PoolPages(0, np.arange(count, dtype=np.int32)[::-1].copy()),)


def stands(receiver: End, sender: End, first: int, count: int = PAGES) -> bool:
    """Whether pages of 64 positions lie as pages of 4 in the receiver's arena, from page `first` on."""
    theirs, ours = THEIRS.pools[0], OURS.pools[0]
    for place, number in enumerate(source(count)[0].pages):
        page = sender.arena[number * theirs.stride_bytes :][: theirs.page_bytes].reshape(2, 16, -1)  # K and V
        for part in range(16):
            at = (first + place * 16 + part) * ours.stride_bytes
            here = receiver.arena[at : at + ours.page_bytes].reshape(2, -1)
            if not np.array_equal(here, page[:, part]):
                return False
    return True


@contextmanager
def many(count: int, staging_bytes: int) -> Iterator[tuple[End, list[tuple[End, str, str]]]]:
    """Yield a receiver and `count` senders over TCP: (end, its name for the receiver, the receiver's for it)."""
    with ExitStack() as stack:
        receiver = make_end(OURS, "receiver", staging_bytes=staging_bytes)
        stack.callback(receiver.post.close)
        senders = []
        for number in range(count):
            sender = make_end(THEIRS, f"sender {number}", "tcp")
            stack.callback(sender.post.close)
            name = receiver.post.dial(sender.post.address)
            wait_for(receiver, Up)
            senders.append((sender, wait_for(sender, Up).peer, name))
        yield receiver, senders


@pytest.mark.parametrize("pages", [1, 3])
def test_while_many_peers_send_the_quota_holds_and_all_of_it_arrives(pages: int) -> None:
    quota = pages * PAGE_BYTES + PAGE_BYTES // 2
    with many(5, quota) as (receiver, senders):
        for number, (_, _, name) in enumerate(senders):
            receiver.landings.open(key(name), 0, TOKENS, target(10, number * 160))
        for sender, to_receiver, _ in senders:
            send_chunk(sender, to_receiver, source(10))
        seen = []
        for _ in senders:
            assert landed(receiver).refused == ""
            figures = receiver.post.figures()
            seen.append(figures["staged_bytes"])
            assert figures["staging_bytes"] == quota
        assert max(seen) <= quota
        assert PAGE_BYTES <= receiver.post._staging.most_bytes <= pages * PAGE_BYTES
        assert receiver.post.figures()["staged_bytes"] == 0
        for number, (sender, _, _) in enumerate(senders):
            assert stands(receiver, sender, number * 160, 10)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_sender_waits_while_there_is_no_room_and_nothing_of_it_is_lost(kind: Kind, tmp_path: Path) -> None:
    with joined(THEIRS, OURS, kind, tmp_path, staging_bytes=PAGE_BYTES) as (sender, to_receiver, receiver, peer):
        receiver.landings.open(key(peer), 0, TOKENS, target())
        with receiver.post._staging.claim(PAGE_BYTES, always):
            send_chunk(sender, to_receiver, source())
            wait_until(lambda: receiver.post._staging.is_awaited)
            time.sleep(0.1)
            assert receiver.landings.missing(key(peer)) == TOKENS, "a page came into a buffer that is full"
            assert receiver.post.figures()["staged_bytes"] == PAGE_BYTES
        assert landed(receiver).refused == ""
        assert receiver.landings.missing(key(peer)) == 0
        assert stands(receiver, sender, 0)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_landing_that_is_closed_while_its_page_waits_for_room_is_drained(kind: Kind, tmp_path: Path) -> None:
    with joined(THEIRS, OURS, kind, tmp_path, staging_bytes=PAGE_BYTES) as (sender, to_receiver, receiver, peer):
        before = receiver.arena.copy()
        receiver.landings.open(key(peer), 0, TOKENS, target())
        with receiver.post._staging.claim(PAGE_BYTES, always):
            send_chunk(sender, to_receiver, source())
            wait_until(lambda: receiver.post._staging.is_awaited)
            receiver.landings.close(key(peer))
            assert landed(receiver).refused
        receiver.landings.open(key(peer, 2), 0, TOKENS, target(first=16))
        assert np.array_equal(receiver.arena, before)
        send_chunk(sender, to_receiver, source(), attempt=2)
        assert landed(receiver).refused == ""
        assert stands(receiver, sender, 16)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_page_that_is_wrong_is_not_cut(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, sums = writer.checksum, iter(range(PAGES))
    monkeypatch.setattr(writer, "checksum", lambda page: real(page) ^ (next(sums) == 1))
    with joined(THEIRS, OURS, kind, tmp_path, staging_bytes=PAGE_BYTES) as (sender, to_receiver, receiver, peer):
        before = receiver.arena.copy()
        receiver.landings.open(key(peer), 0, TOKENS, target())
        send_chunk(sender, to_receiver, source())
        assert "checksum" in landed(receiver).refused
        changed = (receiver.arena != before).reshape(-1, OURS.pools[0].stride_bytes).any(1)
        assert changed.nonzero()[0].tolist() == list(range(16)), "something else than the first page was cut"
        assert receiver.landings.missing(key(peer)) == TOKENS - 64
        assert receiver.post.figures()["staged_bytes"] == 0


def test_a_peer_that_stops_half_way_through_a_page_does_not_hold_others_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "HOLD_SECONDS", 0.3)
    message = wire.encode(wire.Pages("r", 1, 0, 0, (wire.PageRun(0, 2),)))
    page = np.full(PAGE_BYTES, 7, np.uint8)
    receiver = make_end(OURS, "receiver", "tcp", staging_bytes=PAGE_BYTES)
    host, _, port = receiver.post.address.removeprefix("tcp://").rpartition(":")
    try:
        socks = []
        for name in ("slow", "quick"):
            own = wire.Hello(role="both", epoch=name, facts=wire.facts_of(THEIRS, model="m", dtype="d", vocab_size=9))
            sock = socket.create_connection((host, int(port)), 10)
            stream.prove(sock, SECRET, "dialer")
            sock.sendall(stream.frame(stream.MESSAGE, wire.encode(own)))
            peer = wait_for(receiver, Up).peer
            receiver.landings.open(key(peer), 0, 128, target(2, 64 * len(socks)))
            sock.sendall(stream.frame(stream.PAGES, stream.encode_pages(stream.PagesBody(message))))
            socks.append(sock)
        slow, quick = socks
        slow.sendall(page[:100].tobytes())
        wait_until(lambda: receiver.post.figures()["staged_bytes"] > 0)
        slow.sendall(page[100:200].tobytes())
        time.sleep(0.4)  # nobody waits: it may take its time
        for _ in range(2):
            quick.sendall(page.tobytes() + checksum(page).to_bytes(8, "little"))
        news: list[object] = []
        wait_until(lambda: len(news.extend(receiver.post.poll()) or news) == 2)
        (down,) = [each for each in news if isinstance(each, Down)]
        (came,) = [each for each in news if isinstance(each, Delivered)]
        assert "staging" in down.why
        assert came.refused == ""
    finally:
        receiver.post.close()
        for sock in socks:
            sock.close()


def test_a_peer_whose_pages_could_never_be_cut_is_refused_with_the_setting_that_helps(tmp_path: Path) -> None:
    sender = make_end(THEIRS, "sender", "tcp", tmp_path)
    receiver = make_end(OURS, "receiver", staging_bytes=PAGE_BYTES - 1)
    alike = make_end(OURS, "alike", "tcp")
    try:
        receiver.post.dial(sender.post.address)
        assert f"one of {PAGE_BYTES} bytes" in (why := wait_for(receiver, Down).why)
        assert "staging_bytes" in why
        receiver.post.dial(alike.post.address)  # nothing of it is cut
        wait_for(receiver, Up)
    finally:
        receiver.post.close()
        sender.post.close()
        alike.post.close()

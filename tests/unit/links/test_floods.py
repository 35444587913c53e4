"""Peers that are too many, say too much, too slowly, or hear nothing: each is held within bounds, and others go on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from halocline.disagg import connection, inbox, stream, writer
from halocline.disagg import links as links_module
from halocline.disagg import messages as wire
from halocline.disagg.post import Delivered, Down, Up
from halocline.memory.retention import Full
from testing.layouts import small_layout
from testing.links import SECRET, End, hello, joined, landed, make_end, pool_pages, send_chunk, wait_for, wait_until

LAYOUT = small_layout(Full(), page_tokens=4, slabs=16)
Place = tuple[str, int]


@contextmanager
def listening() -> Iterator[tuple[End, Place]]:
    end = make_end(LAYOUT, "worker", "tcp")
    host, _, port = end.post.address.removeprefix("tcp://").rpartition(":")
    try:
        yield end, (host, int(port))
    finally:
        end.post.close()


def by_hand(place: Place, epoch: str) -> socket.socket:
    """Return a socket over which proof and hello have gone out."""
    sock = socket.create_connection(place, 10)
    stream.prove(sock, SECRET, "dialer")
    sock.sendall(stream.frame(stream.MESSAGE, wire.encode(hello(LAYOUT, epoch))))
    return sock


def is_left(sock: socket.socket) -> bool:
    """Whether the other side has hung up."""
    sock.settimeout(5)
    try:
        while sock.recv(4096):
            continue
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


# ---- connections


def test_more_connections_than_the_limit_are_refused_until_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "MOST_ACCEPTED", 3)
    with listening() as (end, place), ExitStack() as stack:
        peers = []
        for number in range(3):
            peers.append(stack.enter_context(by_hand(place, f"friend {number}")))
            wait_for(end, Up)
        with socket.create_connection(place, 10) as late:
            assert is_left(late)
        peers[1].close()
        wait_for(end, Down)
        stack.enter_context(by_hand(place, "another"))
        wait_for(end, Up)


def test_where_all_places_are_taken_the_oldest_stranger_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "MOST_ACCEPTED", 3)
    with listening() as (end, place), ExitStack() as stack:
        stack.enter_context(by_hand(place, "friend"))
        wait_for(end, Up)
        strangers = [stack.enter_context(socket.create_connection(place, 10)) for _ in range(2)]
        stack.enter_context(by_hand(place, "another friend"))
        assert isinstance(next(news for news in iter(lambda: next_of(end), None) if isinstance(news, Up)), Up)
        assert is_left(strangers[0])
        strangers[1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            strangers[1].recv(4096) and strangers[1].recv(4096)


def next_of(end: End) -> object:
    while not end.news:
        end.news.extend(end.post.poll())
        time.sleep(0.002)
    return end.news.popleft()


def test_strangers_that_come_and_go_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while the engine hears nothing: it is in a long step."""
    monkeypatch.setattr(inbox, "MOST_STRANGERS", 5)
    with listening() as (end, place):
        before = threading.active_count()
        for _ in range(60):
            socket.create_connection(place, 10).close()
        wait_until(lambda: threading.active_count() <= before)
        with by_hand(place, "friend"):
            wait_until(lambda: any(isinstance(news, Up) for news in end.post._inbox._news))
            assert len(end.post._connections) <= 3, "strangers that have gone are remembered"
            assert len(end.post._inbox._news) <= 6, "the engine would have to hear of every stranger"


def test_a_worker_that_gets_no_thread_says_so_and_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as (end, place):
        real = threading.Thread.start

        def none_left(thread: threading.Thread) -> None:
            if thread.name.startswith("halocline-peer"):
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", none_left)
        with socket.create_connection(place, 10) as sock:
            assert is_left(sock)
        end.post.dial("tcp://127.0.0.1:1")
        assert "thread" in wait_for(end, Down).why
        monkeypatch.undo()
        with by_hand(place, "friend"):
            wait_until(lambda: any(isinstance(news, Up) for news in end.post.poll()))


# ---- slow ones


def test_a_hello_that_comes_byte_by_byte_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a peer that knows the secret."""
    monkeypatch.setattr(connection, "HELLO_SECONDS", 0.5)
    packed = stream.frame(stream.MESSAGE, wire.encode(hello(LAYOUT, "slow")))
    with listening() as (end, place), socket.create_connection(place, 10) as sock:
        stream.prove(sock, SECRET, "dialer")
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            for place_of_byte in range(len(packed) - 1):
                sock.sendall(packed[place_of_byte : place_of_byte + 1])
                time.sleep(0.02)
                if time.monotonic() - begin > 10:
                    break
        assert "too long" in wait_for(end, Down).why
        assert time.monotonic() - begin < 5.0


# ---- many messages


def flood(sock: socket.socket, packed: bytes, most: int) -> int:
    """Send frames until the other side takes no more for a while; return how many went out whole."""
    sock.settimeout(0.3)
    sent = 0
    view = memoryview(packed * most)
    try:
        while sent < len(view):
            sent += sock.send(view[sent : sent + (1 << 16)])
    except TimeoutError:
        return sent // len(packed)
    return most


@pytest.mark.parametrize(("bound", "most"), [("MOST_MESSAGES", 50), ("MOST_BYTES", 100_000)])
def test_who_says_more_than_the_engine_hears_has_to_wait_and_is_heard_in_the_end(
    bound: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, bound, most)
    packed = stream.frame(stream.MESSAGE, wire.encode(wire.Fail("r", 1, "x" * 4000)))
    held = most if bound == "MOST_MESSAGES" else most // len(packed)
    with listening() as (end, place), by_hand(place, "talker") as talker, by_hand(place, "friend") as friend:
        wait_until(lambda: len(end.post._inbox._news) == 2)  # both are up
        sent = flood(talker, packed, 20_000)
        assert sent < 20_000, "all of it was taken, though nobody heard it"
        wait_until(lambda: len(end.post._inbox._news) == 2 + held)
        friend.sendall(stream.frame(stream.MESSAGE, wire.encode(wire.Offer("other", 1))))
        wait_until(lambda: len(end.post._inbox._news) == 3 + held)  # others are heard all the same
        heard, deadline = 0, time.monotonic() + 30
        while heard < sent and time.monotonic() < deadline:
            news = end.post.poll()
            assert len(news) <= 3 + held
            heard += sum(isinstance(each, Delivered) and isinstance(each.message, wire.Fail) for each in news)
        assert heard >= sent


def test_a_single_message_above_the_bound_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MOST_BYTES", 1000)
    with listening() as (end, place), by_hand(place, "talker") as talker:
        wait_for(end, Up)
        for _ in range(3):
            talker.sendall(stream.frame(stream.MESSAGE, wire.encode(wire.Fail("r", 1, "x" * 4000))))
        for _ in range(3):
            assert isinstance(landed(end).message, wire.Fail)


@pytest.mark.parametrize("ending", ["hang up", "close"])
def test_a_connection_that_waits_to_be_heard_ends_at_once(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MOST_MESSAGES", 10)
    with listening() as (end, place), by_hand(place, "talker") as talker:
        peer = wait_for(end, Up).peer
        flood(talker, stream.frame(stream.MESSAGE, wire.encode(wire.Fail("r", 1, "x" * 4000))), 20_000)
        begin = time.monotonic()
        if ending == "hang up":
            end.post.hang_up(peer, "enough")
            assert wait_for(end, Down).why == "enough"
        else:
            end.post.close()
        assert time.monotonic() - begin < 5.0  # closing waits 15 s for a thread that does not end


# ---- peers that do not read


@pytest.mark.parametrize(("bound", "most"), [("MOST_MESSAGES", 200), ("MOST_BYTES", 1 << 20)])
def test_who_never_reads_is_left_with_the_reason_and_others_are_served(
    bound: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, bound, most)
    with listening() as (end, place), by_hand(place, "deaf"):
        deaf = wait_for(end, Up).peer
        message = wire.Fail("r", 1, "x" * 4000)
        begin, down, sent = time.monotonic(), None, 0
        while down is None and time.monotonic() - begin < 30:
            for _ in range(100):
                end.post.send(deaf, message)
            sent += 100
            queued = end.post._connections[deaf]._writer
            assert len(queued._words) <= 200 or bound == "MOST_BYTES"
            assert queued._queued_bytes <= (1 << 20) or bound == "MOST_MESSAGES"
            down = next((news for news in end.post.poll() if isinstance(news, Down)), None)
        assert down is not None, f"{sent} messages wait and the connection still stands"
        assert "does not read" in down.why
        with by_hand(place, "friend") as friend:
            end.post.send(wait_for(end, Up).peer, wire.Offer("r", 7))
            friend.settimeout(5)
            assert wire.decode(stream.receive_frame(friend).body) == hello(LAYOUT, "worker")
            assert wire.decode(stream.receive_frame(friend).body) == wire.Offer("r", 7)


def test_a_message_that_is_longer_than_any_may_be_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 2000)
    with listening() as (end, place), by_hand(place, "friend"):
        end.post.send(wait_for(end, Up).peer, wire.Fail("r", 1, "x" * 4000))
        assert "exceeds" in wait_for(end, Down).why


# ---- order


def test_messages_overtake_pages_that_are_queued(tmp_path: Path) -> None:
    """Else what renews the leases of other requests would stand behind all pages of one."""
    with joined(LAYOUT, LAYOUT, "tcp", tmp_path) as (sender, to_receiver, receiver, _):
        out = sender.post._connections[to_receiver]._writer
        with out._fence:
            for chunk in range(3):
                send_chunk(sender, to_receiver, (pool_pages(0, 1, 2),), chunk)
            wait_until(lambda: len(out._loads) == 2)  # the first is being sent
            sender.post.send(to_receiver, wire.Offer("r", 9))
            sender.post.send(to_receiver, wire.Heartbeat())
        came = [landed(receiver).message for _ in range(5)]
        assert [getattr(each, "chunk", each) for each in came] == [0, wire.Offer("r", 9), wire.Heartbeat(), 1, 2]
        assert out._queued_bytes == 0


def test_a_recall_takes_only_that_attempts_pages_out_of_the_queue(tmp_path: Path) -> None:
    with joined(LAYOUT, LAYOUT, "tcp", tmp_path) as (sender, to_receiver, receiver, _):
        out = sender.post._connections[to_receiver]._writer
        with out._fence:
            for attempt in (1, 2, 1, 3):
                send_chunk(sender, to_receiver, (pool_pages(0, 1, 2),), attempt=attempt)
            wait_until(lambda: len(out._loads) == 3)
            sender.post.recall(to_receiver, "r", 2)
            assert [each.attempt for each in out._loads] == [("r", 1), ("r", 3)]
        attempts = [landed(receiver).message.attempt for _ in range(3)]
        assert attempts == [1, 1, 3]
        assert out._queued_bytes == 0

"""Whoever can reach a link's address and speaks something else: it gets nothing, and others do not suffer."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halocline.disagg import connection, inbox, stream
from halocline.disagg import messages as wire
from halocline.disagg.post import Delivered, Down, Up
from halocline.memory.retention import Full
from testing.layouts import small_layout
from testing.links import SECRET, End, hello, make_end, wait_for

LAYOUT = small_layout(Full(), page_tokens=4, slabs=16)


@contextmanager
def listening() -> Iterator[tuple[End, tuple[str, int]]]:
    end = make_end(LAYOUT, "worker", "tcp")
    host, _, port = end.post.address.removeprefix("tcp://").rpartition(":")
    try:
        yield end, (host, int(port))
    finally:
        end.post.close()


def joined_by_hand(place: tuple[str, int], own: wire.Hello) -> socket.socket:
    """Return a socket over which proof and hello have gone out."""
    sock = socket.create_connection(place, 10)
    stream.prove(sock, SECRET, "dialer")
    sock.sendall(stream.frame(stream.MESSAGE, wire.encode(own)))
    return sock


def friend_still_joins(end: End) -> None:
    """Another worker with the right secret is served."""
    other = make_end(LAYOUT, "friend")
    try:
        other.post.dial(end.post.address)
        wait_for(other, Up)
    finally:
        other.post.close()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n" + bytes(60), b"HALOLINK\xff" + bytes(32), bytes(200)]
)
def test_a_stranger_hears_nothing_but_the_preface_and_is_left(said: bytes) -> None:
    with listening() as (end, place):
        with socket.create_connection(place, 10) as sock:
            sock.sendall(said)
            heard = bytearray()
            while part := sock.recv(4096):
                heard += part
        assert len(heard) <= len(stream.PREFACE) + stream.NONCE_BYTES
        assert isinstance(wait_for(end, Down), Down)
        friend_still_joins(end)


def test_the_listeners_own_proof_sent_back_to_it_proves_nothing() -> None:
    with listening() as (end, place):
        with socket.create_connection(place, 10) as sock:
            preface = stream.receive(sock, len(stream.PREFACE) + stream.NONCE_BYTES)
            sock.sendall(preface)
            sock.sendall(stream.receive(sock, stream.PROOF_BYTES))
            assert sock.recv(1) == b""
        assert "token" in wait_for(end, Down).why


def test_slow_strangers_are_left_in_time_and_hold_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that say a byte in a while: the time is one for all of the greeting, not one per byte."""
    monkeypatch.setattr(connection, "HELLO_SECONDS", 0.6)
    with listening() as (end, place):
        before = threading.active_count()
        socks, most = [], 0
        try:
            for _ in range(100):
                socks.append(socket.create_connection(place, 10))
                most = max(most, threading.active_count() - before)
            begin = time.monotonic()
            while time.monotonic() < begin + 1.5:
                for sock in socks:
                    with contextlib.suppress(OSError):
                        sock.send(b"H")
                most = max(most, threading.active_count() - before)
                time.sleep(0.1)
            assert threading.active_count() - before <= 2, "strangers that still speak are still heard"
            assert most <= 34, f"strangers hold {most} threads"
            friend_still_joins(end)
        finally:
            for sock in socks:
                sock.close()


def test_a_listener_that_was_out_of_descriptors_listens_on() -> None:
    with listening() as (end, place):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        probe = socket.socket()
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe.fileno() + 1, hard))
        try:
            probe.connect(place)  # the listener's accept has no descriptor for it
            time.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            probe.close()
        friend_still_joins(end)


@pytest.mark.parametrize(
    "facts",
    [
        {"page_bytes": 1 << 45},
        {"page_bytes": 1 << 61},
        {"stride_bytes": 0},
        {"stride_bytes": 1},
        {"page_tokens": 1 << 20},
    ],
)
def test_a_hello_whose_page_sizes_do_not_follow_from_its_layers_is_refused(facts: dict[str, int]) -> None:
    """Nothing is allocated from a size that a peer only claims."""
    own = hello(LAYOUT, "liar")
    pool = msgspec.structs.replace(own.facts.pools[0], **facts)
    lie = msgspec.structs.replace(own, facts=msgspec.structs.replace(own.facts, pools=(pool,)))
    with listening() as (end, place):
        with joined_by_hand(place, lie) as sock:
            news = wait_for(end, Down)
            assert "page" in news.why, news.why
            assert sock.recv(1 << 16) is not None
        friend_still_joins(end)


@pytest.mark.parametrize(
    "frame",
    [
        stream.HEAD.pack(b"XX", 1, 4) + b"abcd",
        stream.HEAD.pack(stream.MAGIC, 9, 4) + b"abcd",
        stream.HEAD.pack(stream.MAGIC, 1, 0xFFFFFFFF),
        stream.frame(stream.MESSAGE, b"\xc1"),
        stream.frame(stream.MESSAGE, wire.encode(hello(LAYOUT, "again"))),
        stream.frame(stream.PAGES, b"\x91\xc4\x00"),
        stream.frame(stream.PAGES, stream.encode_pages(stream.PagesBody(wire.encode(wire.Heartbeat())))),
    ],
)
def test_a_broken_frame_ends_the_connection_and_no_other(frame: bytes) -> None:
    with listening() as (end, place):
        with joined_by_hand(place, hello(LAYOUT, "peer")) as sock:
            wait_for(end, Up)
            sock.sendall(frame)
            assert wait_for(end, Down).why
        friend_still_joins(end)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.lists(
        st.one_of(
            st.binary(max_size=64),
            st.builds(stream.frame, st.sampled_from([1, 2]), st.binary(max_size=48)),
            st.builds(
                lambda pages: stream.frame(stream.PAGES, stream.encode_pages(pages)),
                st.builds(
                    lambda runs, numbers: stream.PagesBody(
                        wire.encode(wire.Pages("r", 1, 0, 0, tuple(wire.PageRun(*run) for run in runs))), numbers
                    ),
                    st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 9)), max_size=3),
                    st.lists(st.binary(max_size=9), max_size=3).map(tuple),
                ),
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_whatever_a_peer_says_the_worker_lives_and_its_arena_is_untouched(data: list[bytes]) -> None:
    with listening() as (end, place):
        before = end.arena.copy()
        with joined_by_hand(place, hello(LAYOUT, "peer")) as sock:
            wait_for(end, Up)
            try:
                for part in data:
                    sock.sendall(part)
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it has hung up already
            deadline = time.monotonic() + 10
            is_down = False
            while not is_down and time.monotonic() < deadline:
                end.news.extend(end.post.poll())
                is_down = any(isinstance(news, Down) for news in end.news)
                time.sleep(0.002)
            assert is_down, "a half-closed connection is over"
            assert all(isinstance(news, Down | Delivered) for news in end.news)
        assert (end.arena == before).all()


def test_a_frame_head_is_read_as_the_layout_of_it_says() -> None:
    assert stream.HEAD.size == 7
    assert struct.unpack("<2sBI", stream.frame(stream.PAGES, b"abc")[:7]) == (b"HL", 2, 3)


def test_a_peer_whose_pages_come_slowly_is_known_to_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says meanwhile stands behind its pages, and a worker of which nothing is heard is left."""
    monkeypatch.setattr(inbox, "BEAT_SECONDS", 0.1)
    message = wire.encode(wire.Pages("r", 1, 0, 0, (wire.PageRun(0, 4),)))
    with listening() as (end, place), joined_by_hand(place, hello(LAYOUT, "peer")) as sock:
        wait_for(end, Up)
        sock.sendall(stream.frame(stream.PAGES, stream.encode_pages(stream.PagesBody(message))))
        for _ in range(3):
            sock.sendall(bytes(LAYOUT.pools[0].page_bytes + stream.SUM_BYTES))
            time.sleep(0.15)
        assert wait_for(end, Delivered, 5).message == wire.Heartbeat()

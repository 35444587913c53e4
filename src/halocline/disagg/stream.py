"""What goes over a socket: a proof that both sides know the secret, then frames. Nothing else is ever parsed.

    preface     "HALOLINK" version nonce(32)             both ways
    proof       HMAC-SHA256(secret, side, both nonces)   both ways; before it is right, nothing of the peer is read
    frame       "HL" kind(1) length(4) body(length)
    pages       a frame; then the pages, group by group: over TCP their bytes, then the xxh3 of each; where they are
                described (on one host) the frame says where they lie, and only the xxh3 of each follows
    group       pages of one run that follow each other: as many as fit `GROUP_BYTES` where the other side takes them
                over as they are, one where it has to cut them anew. Both sides know it from both hellos

Every length is compared with its limit before anything is allocated for it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from halocline.disagg.messages import MAX_MESSAGE_BYTES, MAX_POOLS, PROTOCOL_VERSION, PoolFacts, has_equal_pages
from halocline.errors import LinkError

PREFACE = b"HALOLINK" + bytes([PROTOCOL_VERSION])
NONCE_BYTES = 32
PROOF_BYTES = 32
HEAD = struct.Struct("<2sBI")
MAGIC = b"HL"
MESSAGE, PAGES = 1, 2
SUM_BYTES = 8
TOO_SLOW = "the peer took too long to say who it is"
MAX_FRAME_BYTES = 2 * MAX_MESSAGE_BYTES
PIECE_BYTES = 1 << 20
"""Of what a peer announces, not more than this is allocated ahead of what has come."""
GROUP_BYTES = 1 << 20
DESCRIBED_GROUP_BYTES = 8 << 20
"""Where nothing but checksums follows, each message costs as much as a good part of a page."""
MOST_GROUP_PAGES = 256
Side = Literal["dialer", "listener"]


class Frame(NamedTuple):
    """One frame as it came."""

    kind: int
    body: bytearray

    @property
    def wire_bytes(self) -> int:
        """Bytes that it took on the wire."""
        return HEAD.size + len(self.body)


class PagesBody(msgspec.Struct, frozen=True, array_like=True):
    """The body of a frame that brings pages, or says where they lie."""

    message: bytes
    """A packed `messages.Pages`."""
    numbers: Annotated[tuple[bytes, ...], Meta(max_length=MAX_POOLS)] = ()
    """On one host: page numbers in the sender's arena, int32, of each pool."""


class Group(NamedTuple):
    """Pages that travel together."""

    pool: int
    first: int
    """Place of the first of them in its run."""
    pages: int


def groups(counts: Sequence[int], sizes: Sequence[int]) -> Iterator[Group]:
    """Yield the groups of a chunk: `counts` pages of each pool, `sizes` pages of it at once."""
    for pool, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        for first in range(0, count, size):
            yield Group(pool, first, min(size, count - first))


def equal_pools(here: Sequence[PoolFacts], there: Sequence[PoolFacts]) -> tuple[bool, ...]:
    """Return whether pages of each pool are taken over byte by byte."""
    return tuple(has_equal_pages(own, other) for own, other in zip(here, there, strict=True))


def group_sizes(pools: Sequence[PoolFacts], are_equal: Sequence[bool], *, are_described: bool) -> tuple[int, ...]:
    """Return how many pages of each pool make a group; the same whichever side asks, and for both directions."""
    most_bytes = DESCRIBED_GROUP_BYTES if are_described else GROUP_BYTES
    sizes = [min(MOST_GROUP_PAGES, max(1, most_bytes // max(1, pool.page_bytes))) for pool in pools]
    return tuple(size if same else 1 for size, same in zip(sizes, are_equal, strict=True))


encode_pages = msgspec.msgpack.Encoder().encode
_pages_decoder = msgspec.msgpack.Decoder(PagesBody)


def decode_pages(body: bytearray) -> PagesBody:
    """Unpack the body of a frame of pages; raises LinkError when it is none."""
    try:
        return _pages_decoder.decode(body)
    except msgspec.DecodeError as error:
        raise LinkError(f"what came is no frame of pages: {str(error)[:200]}") from error


def prove(sock: socket.socket, secret: bytes, side: Side, until: float | None = None) -> None:
    """Prove to the peer that this side knows the secret, and have it prove the same; raises LinkError or OSError.

    `until`: the moment, by the monotonic clock, at which the peer must have said all of it.
    """
    own = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(PREFACE + own)
    preface = bytes(receive(sock, len(PREFACE) + NONCE_BYTES, until))
    if not preface.startswith(PREFACE):
        raise LinkError("the peer does not speak this version of the link protocol")
    other = preface[len(PREFACE) :]
    nonces = own + other if side == "dialer" else other + own
    sock.sendall(_proof(secret, side, nonces))
    theirs: Side = "listener" if side == "dialer" else "dialer"
    if not hmac.compare_digest(bytes(receive(sock, PROOF_BYTES, until)), _proof(secret, theirs, nonces)):
        raise LinkError("the peer does not know this group's link token")


def _proof(secret: bytes, side: Side, nonces: bytes) -> bytes:
    return hmac.new(secret, side.encode() + nonces, hashlib.sha256).digest()


def frame(kind: int, body: bytes) -> bytes:
    """Return a whole frame."""
    if len(body) > MAX_FRAME_BYTES:
        raise LinkError(f"a frame of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return HEAD.pack(MAGIC, kind, len(body)) + body


def receive_frame(sock: socket.socket, limit_bytes: int = MAX_FRAME_BYTES, until: float | None = None) -> Frame:
    """Wait for one frame; raises LinkError for one that is none or too long, ConnectionError at the end."""
    magic, kind, length = HEAD.unpack(receive(sock, HEAD.size, until))
    if magic != MAGIC or kind not in (MESSAGE, PAGES):
        raise LinkError("what came is no frame")
    if length > limit_bytes:
        raise LinkError(f"a frame announces {length} bytes; the limit is {limit_bytes}")
    return Frame(kind, receive(sock, length, until))


def receive(sock: socket.socket, size: int, until: float | None = None) -> bytearray:
    """Wait for exactly so many bytes; raises ConnectionError when the connection ends before.

    With `until` the time is one for all bytes: who says one after another in time does not stay for ever.
    """
    if size > PIECE_BYTES:
        data = bytearray()
        while len(data) < size:
            data += receive(sock, min(PIECE_BYTES, size - len(data)), until)
        return data
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise LinkError(TOO_SLOW)
            sock.settimeout(left)
        try:
            got = sock.recv_into(view, len(view), socket.MSG_WAITALL)
        except TimeoutError as error:
            raise LinkError(TOO_SLOW) from error
        if not got:
            raise ConnectionError("the connection ended")
        view = view[got:]
    return data

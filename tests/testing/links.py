"""Two real posts in one process, over shared memory or TCP, with arenas of random bytes."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from halocline.disagg import messages as wire
from halocline.disagg.actions import Key
from halocline.disagg.arena_pages import ArenaPages, Bytes
from halocline.disagg.landings import Landings
from halocline.disagg.links import STAGING_BYTES, LinkPost, listen_for_links
from halocline.disagg.post import Delivered, Down, News, Up
from halocline.memory.layout import ArenaLayout
from halocline.schedule.events import PoolPages

Kind = Literal["shm", "tcp"]
NewsKind = TypeVar("NewsKind", Up, Down, Delivered)
SECRET = b"a secret of this group"


@dataclass
class End:
    """One worker's end of a link."""

    layout: ArenaLayout
    arena: Bytes
    landings: Landings
    post: LinkPost
    news: deque[News] = field(default_factory=deque)
    """What was polled and nobody has asked for yet."""


def hello(layout: ArenaLayout, epoch: str) -> wire.Hello:
    """Return what a worker with this arena says of itself."""
    return wire.Hello(role="both", epoch=epoch, facts=wire.facts_of(layout, model="m", dtype="d", vocab_size=9))


def make_end(
    layout: ArenaLayout,
    epoch: str,
    kind: Kind | None = None,
    folder: Path | None = None,
    secret: bytes = SECRET,
    is_sealed: bool = True,
    staging_bytes: int = STAGING_BYTES,
) -> End:
    """Make a worker's end whose arena has random bytes; with a kind, it listens."""
    seed = sum(epoch.encode())
    contents = np.random.default_rng(seed).integers(0, 256, layout.arena_bytes, np.uint8)
    descriptor, arena = None, contents
    if kind == "shm":
        file = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, layout.arena_bytes)
        if is_sealed:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        arena = np.frombuffer(mmap.mmap(file, layout.arena_bytes), np.uint8)
        arena[:] = contents
        descriptor = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(file)
    own = hello(layout, epoch)
    pages = ArenaPages(arena, own.facts.pools)
    landings = Landings(pages, layout.pools)
    listener = None if kind is None else listen_for_links(kind, "127.0.0.1", 0, folder or Path())
    return End(layout, arena, landings, LinkPost(own, secret, pages, landings, descriptor, listener, staging_bytes))


def wait_for(end: End, kind: type[NewsKind], seconds: float = 20.0) -> NewsKind:
    """Return the next news of a kind; others before it are dropped, but a lost connection is an error."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        end.news.extend(end.post.poll())
        while end.news:
            news = end.news.popleft()
            if isinstance(news, kind):
                return news
            if isinstance(news, Down):
                raise AssertionError(f"the connection is down: {news.why}")
        time.sleep(0.002)
    raise AssertionError(f"no {kind.__name__} within {seconds} s")


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something holds; an error when it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"nothing of it within {seconds} s"
        time.sleep(0.005)


@contextmanager
def joined(
    theirs: ArenaLayout, ours: ArenaLayout, kind: Kind, folder: Path, staging_bytes: int = STAGING_BYTES
) -> Iterator[tuple[End, str, End, str]]:
    """Yield (sender, its name for the receiver, receiver, its name for the sender) of a standing link."""
    sender, receiver = (
        make_end(theirs, "sender", kind, folder),
        make_end(ours, "receiver", staging_bytes=staging_bytes),
    )
    try:
        peer = receiver.post.dial(sender.post.address)
        wait_for(receiver, Up)
        yield sender, wait_for(sender, Up).peer, receiver, peer
    finally:
        receiver.post.close()
        sender.post.close()


def pool_pages(first_page: int, *numbers: int) -> PoolPages:
    """Return the pages of one pool."""
    return PoolPages(first_page, np.array(numbers, np.int32))


def pages_message(runs: tuple[PoolPages, ...], chunk: int = 0, attempt: int = 1) -> wire.Pages:
    """Return the message that goes with pages."""
    counts = tuple(wire.PageRun(run.first_page, len(run.pages)) for run in runs)
    return wire.Pages("r", attempt, chunk, 0, counts)


def send_chunk(sender: End, peer: str, runs: tuple[PoolPages, ...], chunk: int = 0, attempt: int = 1) -> None:
    """Send pages of request `r`."""
    sender.post.send(peer, pages_message(runs, chunk, attempt), runs)


def key(peer: str, attempt: int = 1) -> Key:
    """Return the key of request `r`."""
    return Key(peer, "r", attempt)


def landed(receiver: End) -> Delivered:
    """Return the next message that came."""
    return wait_for(receiver, Delivered)

"""Both ends of a link whose pages go by the NIXL library: where pages lie is said, and read from there.

The connection itself is an ordinary one over TCP: the proof, hellos, messages, and for pages their numbers and their
checksums. Behind the hellos whoever was dialed says how its arena is reached, under a MAC of its own, because the
library is not made to read the words of strangers. The dialer reads pages ahead into staging memory, a lot at a time;
from there they are copied into their landing under its lock, and the copy is compared with the checksum. So a page
that comes late, or not at all, is nobody's: closing a landing waits for a copy at most and for no peer.
"""

from __future__ import annotations

import hashlib
import hmac
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np

from halocline.disagg import stream
from halocline.disagg.arena_pages import Bytes
from halocline.disagg.messages import PoolFacts
from halocline.disagg.nixl_agent import MAX_METADATA_BYTES, Introduction, NixlAgent, Ranges, Read
from halocline.disagg.nixl_staging import Lots, lot_bytes_for
from halocline.errors import LinkError

MAC_BYTES = 32
MAX_INTRODUCTION_BYTES = 2 * MAX_METADATA_BYTES
PURPOSE = b"halocline nixl introduction"
QUICK_SECONDS = 5e-5
SLOW_SECONDS = 2e-3
IMPATIENT_SECONDS = 0.2
"""A read that takes longer than this is looked after less often."""

Places = Sequence[tuple[int, int]]
"""(pool, page number) each."""


class Offered:
    """The end of whoever was dialed: its pages are read by the other."""

    def __init__(self, agent: NixlAgent, secret: bytes) -> None:
        self._agent, self._secret = agent, secret
        self._is_over = False
        agent.welcome()

    def introduction(self) -> bytes:
        """Return what the dialer's `Pulled` takes."""
        body = self._agent.introduction()
        return mac(self._secret, body) + body

    def described(self) -> None:
        """Note that the other has been told of pages, and will read them."""
        self._agent.stir()

    def close(self) -> None:
        """End it; a second call does nothing."""
        if not self._is_over:
            self._is_over = True
            self._agent.farewell()


class Pulled:
    """The dialer's end: pages of the other's arena, read ahead."""

    def __init__(
        self,
        agent: NixlAgent,
        lots: Lots,
        secret: bytes,
        introduction: bytes,
        pools: tuple[PoolFacts, ...],
        sock: socket.socket,
        is_over: Callable[[], bool],
    ) -> None:
        """`pools`: the peer's, from its hello. `is_over`: whether the connection has ended. Raises LinkError."""
        given, body = introduction[:MAC_BYTES], introduction[MAC_BYTES:]
        if not hmac.compare_digest(given, mac(secret, body)):
            raise LinkError("the peer's introduction to NIXL is not its own")
        self._agent, self._lots, self._pools, self._ended = agent, lots, pools, is_over
        largest = max(pool.page_bytes for pool in pools)
        if largest > lots.lot_bytes:
            raise LinkError(f"the peer's pages of {largest} bytes exceed a lot of staging memory, {lots.lot_bytes}")
        self._hangs_up = select.poll()
        self._hangs_up.register(sock, select.POLLRDHUP)
        self._abandoned: list[Read] = []
        self._views: Generator[Bytes] | None = None
        self._peer: Introduction | None = agent.meet(body)

    def pages(self, pool: int) -> int:
        """Return how many pages a pool of the peer could have at most."""
        return self._known.size // self._pools[pool].stride_bytes

    def expect(self, places: Places) -> None:
        """Begin to read pages that `next_page` will be asked for, in this order; what was expected before is left."""
        self.leave()
        self._views = self.views(places)

    def next_page(self) -> Bytes:
        """Return the next page's bytes, valid until the next call."""
        assert self._views is not None, "a page is expected before it is taken"
        return next(self._views)

    def leave(self) -> None:
        """Read nothing more of what is expected."""
        if self._views is not None:
            self._views.close()
            self._views = None

    def views(self, places: Places) -> Generator[Bytes]:
        """Yield the bytes of the peer's pages in order, each valid until the next is asked for.

        Reads go on ahead, so whoever closes the iterator early leaves them behind. Raises LinkError when the peer is
        lost. The numbers must be ones that the pools can have.
        """
        batches, flying = deque(self._batches(places)), deque[tuple[Read, Bytes, Places]]()
        try:
            while batches or flying:
                while batches and len(flying) < 2:
                    lot = self._lots.take(self._is_over, is_second=bool(flying))
                    if lot is None:
                        break
                    batch = batches.popleft()
                    flying.append((self._begin(batch, lot), lot, batch))
                if not flying:
                    raise LinkError("the connection ended")
                self._wait(flying[0][0])
                _, lot, batch = flying[0]
                begin = 0
                for pool, _ in batch:
                    yield lot[begin : begin + self._pools[pool].page_bytes]
                    begin += self._pools[pool].page_bytes
                flying.popleft()
                self._lots.give(lot)
        finally:
            for read, lot, _ in flying:
                self._leave_to(read, lot)

    def _leave_to(self, read: Read, lot: Bytes) -> None:
        # Only what may still be written is remembered: every chunk is left with its last lot, which is done.
        if read.is_over:
            self._lots.give(lot)
            return
        self._lots.abandon(read, lot)
        self._abandoned = [each for each in self._abandoned if not each.is_over]
        self._abandoned.append(read)

    def close(self) -> None:
        """End it; a second call does nothing."""
        self.leave()
        peer, self._peer = self._peer, None
        if peer is not None:
            self._agent.part(peer, self._abandoned)

    @property
    def _known(self) -> Introduction:
        assert self._peer is not None, "nothing is read after the end"
        return self._peer

    def _is_over(self) -> bool:
        return self._ended() or bool(self._hangs_up.poll(0))

    def _batches(self, places: Places) -> Iterator[Places]:
        batch: list[tuple[int, int]] = []
        size = 0
        for place in places:
            page_bytes = self._pools[place[0]].page_bytes
            if size + page_bytes > self._lots.lot_bytes:
                yield batch
                batch, size = [], 0
            batch.append(place)
            size += page_bytes
        if batch:
            yield batch

    def _begin(self, batch: Places, lot: Bytes) -> Read:
        pools, numbers = np.array(batch, np.uint64).T
        strides = np.array([pool.stride_bytes for pool in self._pools], np.uint64)[pools]
        sizes = np.array([pool.page_bytes for pool in self._pools], np.uint64)[pools]
        theirs = np.uint64(self._known.address) + numbers * strides
        # Pages that adjoin each other at the peer are one run; here they do anyway.
        runs = np.flatnonzero(np.append(True, theirs[1:] != theirs[:-1] + sizes[:-1]))
        sums = np.add.reduceat(sizes, runs)
        own = np.uint64(lot.ctypes.data) + np.cumsum(sums, dtype=np.uint64) - sums
        try:
            return self._agent.read(self._known, Ranges(theirs[runs], sums), Ranges(own, sums))
        except LinkError:
            self._lots.give(lot)
            raise

    def _wait(self, read: Read) -> None:
        begun = time.monotonic()
        while not read.is_done():
            is_slow = time.monotonic() - begun > IMPATIENT_SECONDS
            if is_slow and self._is_over():
                raise LinkError("the connection ended")
            time.sleep(SLOW_SECONDS if is_slow else QUICK_SECONDS)


def mac(secret: bytes, body: bytes) -> bytes:
    """Return the MAC of an introduction."""
    return hmac.new(secret, PURPOSE + body, hashlib.sha256).digest()


class NixlLinks:
    """The library in one worker: what all its connections share."""

    def __init__(self, host: str, pools: tuple[PoolFacts, ...], arena: Bytes | None) -> None:
        """`host`: this worker's address in the network that pages go by; `arena`: what others read, None: nobody does.

        Raises LinkError where the library is missing or cannot use that network.
        """
        self._agent = NixlAgent(host)
        self._lots = Lots(self._agent, lot_bytes_for(pools))
        if arena is not None:
            self._agent.offer(arena)

    def offer(self, sock: socket.socket, secret: bytes) -> Offered:
        """Tell who has dialed how the arena is reached, behind the hellos."""
        offered = Offered(self._agent, secret)
        try:
            sock.sendall(stream.frame(stream.MESSAGE, offered.introduction()))
        except BaseException:
            offered.close()
            raise
        return offered

    def pull(
        self,
        sock: socket.socket,
        secret: bytes,
        pools: tuple[PoolFacts, ...],
        is_over: Callable[[], bool],
        until: float,
    ) -> Pulled:
        """Hear from whoever was dialed how its arena is reached, until a moment; raises LinkError or OSError."""
        said = bytes(stream.receive_frame(sock, MAX_INTRODUCTION_BYTES, until).body)
        return Pulled(self._agent, self._lots, secret, said, pools, sock, is_over)

    def close(self) -> None:
        """End it, when all connections have ended."""
        self._lots.close()
        self._agent.close()

"""Memory that reads of the library may write into: a few lots of one quota, registered once.

A read that is given up because its connection ended may still write. Its lot stays with it until the library says
that it is over; if that is never, the lot is lost, and no arena, and no other page, is.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import numpy as np

from halocline.disagg.arena_pages import Bytes
from halocline.disagg.messages import PoolFacts
from halocline.disagg.nixl_agent import NixlAgent, Read
from halocline.memory.layout import MAX_PAGE_TOKENS

LOTS = 8
LOT_BYTES = 8 << 20
LOOK_SECONDS = 0.05


class Lots:
    """All staging memory of one worker. Every method may be called from any thread."""

    def __init__(self, agent: NixlAgent, lot_bytes: int, count: int = LOTS) -> None:
        """Take `count` lots of `lot_bytes` each; pages of the memory are only used once bytes come."""
        self.lot_bytes = lot_bytes
        memory: Bytes = np.frombuffer(mmap.mmap(-1, count * lot_bytes), np.uint8)
        agent.register(memory)
        self._changed = threading.Condition()
        self._free = [memory[begin : begin + lot_bytes] for begin in range(0, count * lot_bytes, lot_bytes)]
        self._count = count
        self._left: list[tuple[Read, Bytes]] = []
        """Lots that a read which nobody waits for may still write into."""

    @property
    def free(self) -> int:
        """How many lots are free."""
        with self._changed:
            self._sweep()
            return len(self._free)

    def take(self, is_over: Callable[[], bool], is_second: bool = False) -> Bytes | None:
        """Return a lot, shape (lot bytes,); wait for the first one, and give nobody a second from the last half.

        So a connection whose peer is silent holds one or two lots, and others go on. None: `is_over` meanwhile, or no
        second lot is to be had.
        """
        with self._changed:
            while True:
                self._sweep()
                if len(self._free) > (self._count // 2 if is_second else 0):
                    return self._free.pop()
                if is_second or is_over():
                    return None
                self._changed.wait(LOOK_SECONDS)

    def give(self, lot: Bytes) -> None:
        """Give back a lot whose read is over."""
        with self._changed:
            self._free.append(lot)
            self._changed.notify()

    def abandon(self, read: Read, lot: Bytes) -> None:
        """Leave a lot to a read that nobody waits for any more."""
        with self._changed:
            self._left.append((read, lot))

    def close(self) -> None:
        """Let go of all reads; the memory stays until the agent is closed."""
        with self._changed:
            self._left.clear()

    def _sweep(self) -> None:
        over = [(read, lot) for read, lot in self._left if read.is_over]
        self._left = [pair for pair in self._left if not any(pair[1] is lot for _, lot in over)]
        self._free.extend(lot for _, lot in over)


def lot_bytes_for(pools: tuple[PoolFacts, ...]) -> int:
    """Return the size of a lot in which the largest page fits that any worker of this model can have."""
    longest = [pool.stride_bytes * -(-MAX_PAGE_TOKENS // pool.page_tokens) for pool in pools]
    return -(-max(LOT_BYTES, *longest) // mmap.PAGESIZE) * mmap.PAGESIZE

"""The bytes of pages: this worker's arena, or the arena of a worker on the same host, mapped for reading only.

A page of a pool is one run of bytes at `number * stride`; what lies behind `page_bytes` in it is padding and never
travels. Inside, each layer has K and V by position: that is all that cutting pages anew has to know.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from halocline.disagg.messages import PoolFacts

Bytes = NDArray[np.uint8]


class Band(NamedTuple):
    """One layer's K or V in a page, by position."""

    offset: int
    position_bytes: int


def bands(pool: PoolFacts) -> Iterator[Band]:
    """Yield where the K and V of each layer lie in a page of a pool of positions, in the order of its layers."""
    for layer in pool.layers:
        yield Band(layer.k_offset, layer.kv_heads * layer.k_dim * layer.dtype_bytes)
        yield Band(layer.v_offset, layer.kv_heads * layer.v_dim * layer.dtype_bytes)


class ArenaPages:
    """The pages of one arena, as arrays of bytes."""

    def __init__(self, arena: Bytes, pools: tuple[PoolFacts, ...]) -> None:
        """`arena`: shape (arena bytes,). Views of it are handed out; no byte is copied."""
        self.pools = pools
        self._pools = tuple(
            arena[: len(arena) // pool.stride_bytes * pool.stride_bytes].reshape(-1, pool.stride_bytes)
            for pool in pools
        )

    @classmethod
    def mapped(cls, descriptor: int, pools: tuple[PoolFacts, ...]) -> ArenaPages:
        """Map the arena of another worker; its bytes can be read and never written. Raises OSError or ValueError."""
        return cls(np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8), pools)

    def pages(self, pool: int) -> int:
        """Return how many pages a pool could have at most: all slabs its own."""
        return len(self._pools[pool])

    def page(self, pool: int, number: int) -> Bytes:
        """Return a view of the used bytes of one page, shape (page_bytes,)."""
        return self._pools[pool][number, : self.pools[pool].page_bytes]


def checksum(page: Bytes) -> int:
    """Return the xxh3 of a page, 64 bits."""
    return xxhash.xxh3_64_intdigest(memoryview(page.data))


def copy_positions(
    source: Bytes,
    source_pool: PoolFacts,
    source_at: int,
    target: Bytes,
    target_pool: PoolFacts,
    target_at: int,
    count: int,
) -> None:
    """Copy `count` positions between pages of different lengths, from place `source_at` to place `target_at`."""
    for theirs, ours in zip(bands(source_pool), bands(target_pool), strict=True):
        begin = theirs.offset + source_at * theirs.position_bytes
        place = ours.offset + target_at * ours.position_bytes
        size = count * ours.position_bytes
        target[place : place + size] = source[begin : begin + size]

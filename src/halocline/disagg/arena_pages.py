"""The bytes of pages: this worker's arena, or the arena of a worker on the same host, mapped for reading only.

A page of a pool is one run of bytes at `number * stride`; what lies behind `page_bytes` in it is padding and never
travels. Inside, each layer has K and V by position: that is all that cutting pages anew has to know.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from halocline.disagg.messages import LayerFacts, PoolFacts
from halocline.errors import LinkError
from halocline.huge_pages import map_file
from halocline.memory.layout import MAX_PAGE_TOKENS, STRIDE_UNIT_BYTES

Bytes = NDArray[np.uint8]
HOT_BYTES = 256 << 10
"""So much is copied and then summed while the cache has it: with source and copy, half of a second-level cache."""


class Band(NamedTuple):
    """One layer's K or V in a page, by position."""

    offset: int
    position_bytes: int


def bands(layer: LayerFacts) -> tuple[Band, Band]:
    """Return where K and V of a layer lie in a page of positions."""
    row_bytes = layer.kv_heads * layer.dtype_bytes
    return Band(layer.k_offset, row_bytes * layer.k_dim), Band(layer.v_offset, row_bytes * layer.v_dim)


def paired_bands(source: PoolFacts, target: PoolFacts) -> Iterator[tuple[Band, Band]]:
    """Yield the K and V of each layer in pages of two lengths.

    They are paired by layer and not by place: which layer comes first in a page depends on the page's length.
    """
    theirs = {layer.label: layer for layer in source.layers}
    for layer in target.layers:
        yield from zip(bands(theirs[layer.label]), bands(layer), strict=True)


def check_pages(pools: Sequence[PoolFacts]) -> None:
    """Raise LinkError where a peer's page sizes do not follow from its layers, before anything is sized by them."""
    for pool in pools:
        runs = [
            (band.offset, band.position_bytes * pool.page_tokens)
            for layer in pool.layers
            for band in ((Band(layer.k_offset, layer.state_bytes),) if layer.state_bytes else bands(layer))
        ]
        used, end = sum(size for _, size in runs), max((offset + size for offset, size in runs), default=0)
        if pool.page_tokens > MAX_PAGE_TOKENS:
            raise LinkError(
                f"its pool {pool.name} has pages of {pool.page_tokens} positions; {MAX_PAGE_TOKENS} is most"
            )
        if not end <= pool.page_bytes <= min(pool.stride_bytes, used + STRIDE_UNIT_BYTES * len(runs)):
            raise LinkError(
                f"its pool {pool.name} cannot have pages of {pool.page_bytes} bytes every {pool.stride_bytes}: "
                f"its layers use {used} and end at {end}"
            )


class ArenaPages:
    """The pages of one arena, as arrays of bytes."""

    def __init__(self, arena: Bytes, pools: tuple[PoolFacts, ...]) -> None:
        """`arena`: shape (arena bytes,). Views of it are handed out; no byte is copied."""
        self.pools = pools
        self._pools = tuple(
            arena[: len(arena) // pool.stride_bytes * pool.stride_bytes].reshape(-1, pool.stride_bytes)
            for pool in pools
        )
        self._rows = tuple(rows[:, : pool.page_bytes] for rows, pool in zip(self._pools, pools, strict=True))

    @classmethod
    def mapped(cls, descriptor: int, pools: tuple[PoolFacts, ...]) -> ArenaPages:
        """Map the arena of another worker; its bytes can be read and never written. Raises OSError or ValueError.

        Only memory that can no longer shrink: reading behind its new end would kill this process.
        """
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise LinkError("the peer's arena is not sealed against shrinking")
        size = os.fstat(descriptor).st_size
        return cls(np.frombuffer(map_file(descriptor, size, is_writable=False), np.uint8), pools)

    def pages(self, pool: int) -> int:
        """Return how many pages a pool could have at most: all slabs its own."""
        return len(self._pools[pool])

    def page(self, pool: int, number: int) -> Bytes:
        """Return a view of the used bytes of one page, shape (page_bytes,)."""
        page: Bytes = self._rows[pool][number]
        return page

    def spans(self, pool: int, numbers: Sequence[int], most_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of places in `numbers` whose pages lie in one row without padding, up to `most_bytes`.

        A page that is larger is a row of its own.
        """
        facts = self.pools[pool]
        most = max(1, most_bytes // max(1, facts.page_bytes)) if facts.page_bytes == facts.stride_bytes else 1
        begin = 0
        for end in range(1, len(numbers) + 1):
            if end == len(numbers) or end - begin == most or numbers[end] != numbers[end - 1] + 1:
                yield begin, end
                begin = end

    def span(self, pool: int, number: int, count: int) -> Bytes:
        """Return a view of `count` pages from `number` on, between which there is no padding; of one in any case."""
        if count == 1:
            return self.page(pool, number)
        return self._pools[pool][number : number + count].reshape(-1)


def checksum(page: Bytes) -> int:
    """Return the xxh3 of a page, 64 bits."""
    return xxhash.xxh3_64_intdigest(page.data)


def copy_and_sum(source: Bytes, target: Bytes) -> int:
    """Copy a page; return the checksum of the copy."""
    if len(source) <= HOT_BYTES:
        target[:] = source
        return checksum(target)
    state = xxhash.xxh3_64()
    for begin in range(0, len(source), HOT_BYTES):
        piece = target[begin : begin + HOT_BYTES]
        piece[:] = source[begin : begin + HOT_BYTES]
        state.update(piece.data)
    return state.intdigest()


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
    for theirs, ours in paired_bands(source_pool, target_pool):
        begin = theirs.offset + source_at * theirs.position_bytes
        place = ours.offset + target_at * ours.position_bytes
        size = count * ours.position_bytes
        target[place : place + size] = source[begin : begin + size]

"""In what pieces the pages of a chunk travel: each small enough that leases hear of it in time.

A lease is renewed by what has arrived, and a chunk may be of any size: pages of a long prompt, or of a step that
computed a whole one, take longer than a lease on a slow line although they move all the time. So a chunk is cut, and
each part is a chunk of its own on the wire, with its own number, checksums and answer.

    chunk of the scheduler     | full 0 ..................... 9 | window 3 4 5 | state |
    chunks on the wire         | full 0 1 2 3 | 4 5 6 7 | 8 9     window 3 | 4 5   state |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from halocline.schedule.events import PoolPages

PARTS_PER_LEASE = 8
"""So many parts arrive within a lease even over the slowest line: the same margin as for messages said again."""
SLOWEST_BYTES_PER_SECOND = 50_000_000
"""What a line carries that is worth having: gigabit Ethernet which two transfers share, at 0.8 of its rate. Loopback
TCP was measured at 1.9 GB/s: there a part of a lease of 10 s takes 33 ms, and the cut costs nothing."""


def part_bytes(lease_seconds: float) -> int:
    """Return how many bytes of pages travel under one number at most: 62.5 MB for a lease of 10 s."""
    return max(1, int(SLOWEST_BYTES_PER_SECOND * lease_seconds / PARTS_PER_LEASE))


def cut(pools: Sequence[PoolPages], page_bytes: Sequence[int], most_bytes: int) -> Iterator[tuple[PoolPages, ...]]:
    """Yield the parts of a chunk, in order: whole pages, as many as fit `most_bytes`, and never none.

    `pools` and the parts have one entry per pool; a pool's page has `page_bytes` bytes. A page that is larger than
    `most_bytes` travels alone. A chunk without pages has no parts.
    """
    ends = [0] * len(pools)
    begins, used = list(ends), 0
    for number, (pool, size) in enumerate(zip(pools, page_bytes, strict=True)):
        for _ in range(len(pool.pages)):
            if used and used + size > most_bytes:
                yield _part(pools, begins, ends)
                begins, used = list(ends), 0
            ends[number] += 1
            used += size
    if used:
        yield _part(pools, begins, ends)


def _part(pools: Sequence[PoolPages], begins: Sequence[int], ends: Sequence[int]) -> tuple[PoolPages, ...]:
    return tuple(
        PoolPages(pool.first_page + begin, pool.pages[begin:end])
        for pool, begin, end in zip(pools, begins, ends, strict=True)
    )

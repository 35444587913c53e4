"""How a chunk is cut: nothing lost, nothing twice, no part too large and none without a page."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halocline.disagg.leases import RESENDS_PER_LEASE
from halocline.disagg.parts import cut, part_bytes
from halocline.schedule.events import PoolPages

sizes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7), st.integers(1, 12)), min_size=1, max_size=4)


@given(sizes, st.integers(1, 40))
def test_the_parts_are_the_chunk(pools: list[tuple[int, int, int]], most: int) -> None:
    chunk = [
        PoolPages(first, 100 * at + np.arange(count, dtype=np.int32)) for at, (first, count, _) in enumerate(pools)
    ]
    page_bytes = [size for _, _, size in pools]
    parts = list(cut(chunk, page_bytes, most))
    for number, whole in enumerate(chunk):
        came = [(part[number].first_page + at, page) for part in parts for at, page in enumerate(part[number].pages)]
        assert came == list(enumerate(whole.pages, whole.first_page))
    for part in parts:
        counts = [len(run.pages) for run in part]
        assert sum(counts) == 1 or 0 < sum(map(int.__mul__, counts, page_bytes)) <= most


@given(sizes, st.integers(1, 40))
def test_there_are_at_most_twice_the_parts_that_there_must_be(pools: list[tuple[int, int, int]], most: int) -> None:
    """Two neighbours never fit into one."""
    chunk = [PoolPages(first, np.zeros(count, np.int32)) for first, count, _ in pools]
    page_bytes = [size for _, _, size in pools]
    used = [
        sum(len(run.pages) * size for run, size in zip(part, page_bytes, strict=True))
        for part in cut(chunk, page_bytes, most)
    ]
    assert all(one + other > most for one, other in pairwise(used))


def test_parts_are_as_long_as_the_lease_allows() -> None:
    assert part_bytes(10.0) == 62_500_000
    assert part_bytes(1e-9) == 1
    # Over the slowest line that counts, a lease of any length is renewed as often as a message is said again.
    assert part_bytes(3.0) * RESENDS_PER_LEASE == 3 * 50_000_000

"""What is read at which boundary, against a search position by position."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from halocline.cache.keys import token_key
from halocline.cache.match import Resume
from halocline.cache.node import TOMBSTONE
from halocline.memory.retention import Chunked, Full, Sliding
from testing.cache import CacheWorld, arena_of

KINDS = [Sliding(w) for w in (1, 2, 3, 5, 8, 9, 16, 17, 31, 40)] + [Chunked(a) for a in (1, 3, 4, 8, 12, 16, 24, 64)]


def pages_read(kind, page_tokens: int, boundary: int) -> set[int]:
    return {position // page_tokens for position in range(kind.first_needed(boundary), boundary)}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("page_tokens", "granule"), [(4, 4), (2, 8), (4, 16), (1, 4), (8, 32)])
def test_a_page_is_ever_read_when_some_boundary_reads_it(kind, page_tokens, granule):
    world = CacheWorld(arena_of((Full(), granule, 1), (kind, page_tokens, 1), slabs=4))
    resume = Resume(world.layout, world.tree.shape)
    last = 6 * granule
    read = set().union(*(pages_read(kind, page_tokens, b) for b in range(granule, last + 200, granule)))
    expected = [page in read for page in range(last // page_tokens)]
    assert resume.ever_read(1, 0, last // page_tokens).tolist() == expected
    assert resume.ever_read(1, 3, last // page_tokens).tolist() == expected[3:]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("page_tokens", "granule"), [(4, 4), (2, 8), (4, 16), (1, 4), (8, 32)])
def test_what_leaves_a_window_before_its_granule_is_whole_is_read_at_no_boundary(kind, page_tokens, granule):
    """Why such pages are freed, and not kept until the granule is whole: cached they would never be of use."""
    for page, computed in itertools.product(range(4 * granule // page_tokens), range(5 * granule)):
        whole_at = (page * page_tokens // granule + 1) * granule
        left = (page + 1) * page_tokens <= kind.first_needed(computed)
        if left and computed < whole_at:
            for boundary in range(granule, 12 * granule, granule):
                assert page not in pages_read(kind, page_tokens, boundary)


@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
@pytest.mark.parametrize("kind", [Sliding(9), Sliding(3), Sliding(20), Chunked(16), Chunked(24)], ids=str)
def test_freeing_what_no_boundary_reads_costs_no_hit(kind, chunk):
    """Pages of 4 tokens in granules of 16: all boundaries can be resumed, and no page is cached that none reads."""
    world = CacheWorld(arena_of((Full(), 16, 2), (kind, 4, 3), slabs=60))
    world.serve(range(100), chunk=chunk)
    world.check()
    nodes = sorted(world.tree.forest.nodes.values(), key=lambda node: node.start)
    held = np.concatenate([node.pages[1] for node in nodes]) != TOMBSTONE
    found = world.tree.match(token_key(range(100)))
    assert found.boundary_tokens == 96
    assert list(world.tree.boundaries(found)) == [96, 80, 64, 48, 32, 16, 0]
    read = set().union(*(pages_read(kind, 4, b) for b in range(16, 97, 16)))
    assert np.flatnonzero(held).tolist() == sorted(read)

"""Builders for arenas of a few slabs, and the settings of the property tests on them."""

from __future__ import annotations

from halocline.memory.arena import Arena
from halocline.memory.layout import ArenaLayout, PoolLayout
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State, describe

SLAB_BYTES = 64 * 27720
"""Divisible into 1 to 12 pages of whole 64-byte lines, so that any small pages_per_slab makes a clean layout."""


def layout(
    *,
    full: int | None = None,
    sliding: int | None = None,
    chunked: int | None = None,
    state: int | None = None,
    slabs: int,
) -> ArenaLayout:
    """Make a layout by hand: each number is the pages_per_slab of that pool; pools come in the order of the names."""
    kinds: list[tuple[Retention, int | None, int]] = [
        (Full(), full, 16),
        (Sliding(64), sliding, 16),
        (Chunked(64), chunked, 16),
        (State(), state, 1),
    ]
    pools = tuple(_pool(kind, per_slab, tokens) for kind, per_slab, tokens in kinds if per_slab is not None)
    return ArenaLayout(pools, SLAB_BYTES, slabs, slabs * SLAB_BYTES)


def arena(
    *,
    full: int | None = None,
    sliding: int | None = None,
    chunked: int | None = None,
    state: int | None = None,
    slabs: int,
    caps: tuple[int | None, ...] | None = None,
) -> Arena:
    """Make an arena; each number is the pages_per_slab of that pool."""
    return Arena(layout(full=full, sliding=sliding, chunked=chunked, state=state, slabs=slabs), caps)


def _pool(retention: Retention, per_slab: int, page_tokens: int) -> PoolLayout:
    stride = SLAB_BYTES // per_slab
    assert stride * per_slab == SLAB_BYTES, f"{per_slab} pages do not divide a slab of {SLAB_BYTES} bytes"
    return PoolLayout(describe(retention), retention, (), page_tokens, stride, per_slab, stride)

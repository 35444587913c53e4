"""What a host arena would hold: copies of retracted requests, and prefixes as the second level of the cache.

Both fill the same bytes, copies before prefixes; each is told as if it had all of them. By the engine's own functions:

    a retracted request   the pages that it reads from its next position on (`halocline.memory.host.read_span`): the
                          most over all positions at which it may be retracted
    a cached prompt       full pages up to its last granule, the window before that with the branch slack, the state:
                          what `halocline.cache.writeback` writes when the device gives it up
    how many fit          the host arena's predicate; there is no floor in it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from halocline.cache.marks import BRANCH_SLACK_TOKENS
from halocline.memory.budget import Budget
from halocline.memory.capacity import Mix, largest
from halocline.memory.demand import Demand
from halocline.memory.host import host_layout, read_span
from halocline.memory.layout import ArenaLayout, PoolLayout
from halocline.memory.retention import Chunked, Full, State
from halocline.sim.room import Row
from halocline.units import floor_to


@dataclass(frozen=True, slots=True)
class HostCost:
    """What one request leaves on the host, by its length."""

    prompt_tokens: int
    output_tokens: int
    bytes_by_pool: tuple[int, ...]
    """Of its copy when it is retracted, at most; in the order of the layout."""
    copy_bytes: int
    """Over all pools."""
    prefix_tokens: int
    """Of its prompt as a cached prefix: whole granules; 0 without a prefix cache."""
    prefix_bytes: int
    prefixes: int
    """How many such prefixes fit, that have nothing in common."""

    @property
    def held_tokens(self) -> int:
        """Prompt tokens that the host's level then holds."""
        return self.prefixes * self.prefix_tokens


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A host arena beside the device's."""

    quota_bytes: int
    slabs: int
    arena_bytes: int
    """Bytes of all slabs."""
    costs: tuple[HostCost, ...]
    """Of the rows that are one length, in their order."""
    retracted: tuple[int, ...]
    """By row: how many requests of it fit as copies."""


def plan_host(layout: ArenaLayout, quota_bytes: int, rows: Sequence[Row], *, keeps_prefixes: bool) -> HostPlan:
    """Plan a host arena of `quota_bytes` for requests of `rows`. Raises ConfigError when that is no whole slab."""
    host = host_layout(layout, quota_bytes)
    singles = [row.lengths[0] for row in rows if len(set(row.lengths)) == 1]
    return HostPlan(
        quota_bytes,
        host.slabs,
        host.arena_bytes,
        tuple(_cost(host, *length, keeps_prefixes=keeps_prefixes) for length in singles),
        tuple(_fitting(host, _mix(host, row.lengths)) for row in rows),
    )


def copied_pages(layout: ArenaLayout, prompt_tokens: int, output_tokens: int) -> Demand:
    """Return the most pages of a copy of such a request: its last output token is never computed."""
    last = max(1, prompt_tokens + output_tokens - 1)
    return Demand(_most_read(pool, last) for pool in layout.pools)


def prefix_pages(layout: ArenaLayout, prompt_tokens: int) -> tuple[int, Demand]:
    """Return the boundary up to which such a prompt is cached, and the pages that are written back for it."""
    boundary = floor_to(prompt_tokens, layout.granule_tokens)
    serves = max(0, min(boundary, prompt_tokens - BRANCH_SLACK_TOKENS))
    pages = []
    for pool in layout.pools:
        first = 0
        if not isinstance(pool.retention, Full | State):
            first = pool.retention.first_needed(serves) // pool.page_tokens
        pages.append(boundary // pool.page_tokens - first if pool.is_positional else int(boundary > 0))
    return boundary, Demand(pages)


def _most_read(pool: PoolLayout, last: int) -> int:
    # A window's pages rise until it is full, and then repeat with its period.
    period = 1
    if not isinstance(pool.retention, Full | State):
        reach = pool.retention.chunk_tokens if isinstance(pool.retention, Chunked) else 1
        period = lcm(pool.page_tokens, reach)
    spans = (read_span(pool, computed) for computed in range(max(1, last - period + 1), last + 1))
    return max(end - first for first, end in spans)


def _mix(layout: ArenaLayout, lengths: Sequence[tuple[int, int]]) -> Mix:
    known = {length: copied_pages(layout, *length) for length in set(lengths)}
    pages = [sum(known[length][pool] for length in lengths) for pool in range(len(layout.pools))]
    return Mix(Demand(pages), len(lengths))


def _fitting(layout: ArenaLayout, mix: Mix) -> int:
    budget = Budget(layout)
    most = layout.slabs * max(pool.pages_per_slab for pool in layout.pools)
    return max(0, largest(1, most, lambda requests: budget.fits_empty(mix.of(requests))))


def _cost(layout: ArenaLayout, prompt_tokens: int, output_tokens: int, *, keeps_prefixes: bool) -> HostCost:
    pages = copied_pages(layout, prompt_tokens, output_tokens)
    boundary, prefix = prefix_pages(layout, prompt_tokens) if keeps_prefixes else (0, Demand([0] * len(pages)))
    strides = [pool.stride_bytes for pool in layout.pools]
    by_pool = tuple(count * stride for count, stride in zip(pages, strides, strict=True))
    return HostCost(
        prompt_tokens,
        output_tokens,
        by_pool,
        sum(by_pool),
        boundary,
        sum(count * stride for count, stride in zip(prefix, strides, strict=True)),
        _fitting(layout, Mix(prefix, 1)) if boundary else 0,
    )

"""Where every byte of the arena is, conserved at every step (L13): used + holes + free = slabs * slab_bytes.

Pages count with their whole stride, so padding is inside `used` and shown beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from halocline.memory.budget import Budget
from halocline.memory.layout import ArenaLayout, PoolLayout
from halocline.memory.pool import Pool


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """One pool, in bytes unless said."""

    name: str
    slabs: int
    """Slabs that it owns."""
    running_bytes: int
    """Held by grants."""
    locked_bytes: int
    cached_bytes: int
    transfer_bytes: int
    """Kept by pins alone."""
    hole_bytes: int
    """Free pages inside its slabs."""
    promised_bytes: int
    """Granted and not yet committed; no part of `used`."""
    padding_bytes: int
    """Part of the used bytes that no layer uses."""
    live_tokens: int
    """Positions of its live pages (states in a state pool)."""
    capacity_tokens: int
    """Positions it could hold with all other pools as they are. Never summed, never compared between pools."""
    live_pages: int = 0
    free_pages: int = 0
    """Pages that are not live: those inside its slabs, and those of free slabs up to its share. In a shared arena every
    pool counts the same free slabs, so never summed. What is promised of them is in `promised_pages`."""
    promised_pages: int = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all live pages."""
        return self.running_bytes + self.locked_bytes + self.cached_bytes + self.transfer_bytes


@dataclass(frozen=True, slots=True)
class ArenaFigures:
    """The whole arena, in bytes. A ratio is always over `total_bytes`."""

    total_bytes: int
    free_bytes: int
    """Slabs that no pool owns."""
    remainder_bytes: int
    """Bytes of the budget that make no whole slab; no part of `total_bytes`."""
    pools: tuple[PoolFigures, ...]

    @property
    def used_bytes(self) -> int:
        """Bytes of all live pages of all pools."""
        return sum(pool.used_bytes for pool in self.pools)

    @property
    def running_bytes(self) -> int:
        """Bytes held by grants."""
        return sum(pool.running_bytes for pool in self.pools)

    @property
    def locked_bytes(self) -> int:
        """Bytes of locked pages of the cache."""
        return sum(pool.locked_bytes for pool in self.pools)

    @property
    def cached_bytes(self) -> int:
        """Bytes of evictable pages."""
        return sum(pool.cached_bytes for pool in self.pools)

    @property
    def transfer_bytes(self) -> int:
        """Bytes that only pins keep."""
        return sum(pool.transfer_bytes for pool in self.pools)

    @property
    def hole_bytes(self) -> int:
        """Bytes of free pages inside owned slabs."""
        return sum(pool.hole_bytes for pool in self.pools)

    @property
    def promised_bytes(self) -> int:
        """Bytes granted and not yet committed."""
        return sum(pool.promised_bytes for pool in self.pools)

    @property
    def padding_bytes(self) -> int:
        """Bytes of used pages that no layer uses."""
        return sum(pool.padding_bytes for pool in self.pools)


def figures(layout: ArenaLayout, budget: Budget, pools: list[Pool], free_slabs: int) -> ArenaFigures:
    """Turn the counters into bytes."""
    return ArenaFigures(
        total_bytes=layout.arena_bytes,
        free_bytes=free_slabs * layout.slab_bytes,
        remainder_bytes=layout.remainder_bytes,
        pools=tuple(_pool(shape, budget, pool, free_slabs) for shape, pool in zip(layout.pools, pools, strict=True)),
    )


def _pool(shape: PoolLayout, budget: Budget, pool: Pool, free_slabs: int) -> PoolFigures:
    number, stride = pool.number, shape.stride_bytes
    beside = budget.locked[number] + budget.transfer[number]
    return PoolFigures(
        name=shape.name,
        slabs=pool.slabs,
        running_bytes=(budget.held[number] - beside) * stride,
        locked_bytes=budget.locked[number] * stride,
        cached_bytes=budget.cached[number] * stride,
        transfer_bytes=budget.transfer[number] * stride,
        hole_bytes=pool.holes * stride,
        promised_bytes=budget.promised[number] * stride,
        padding_bytes=pool.live_pages * shape.padding_bytes,
        live_tokens=pool.live_pages * shape.page_tokens,
        capacity_tokens=budget.display_pages(number) * shape.page_tokens,
        live_pages=pool.live_pages,
        free_pages=pool.holes + min(free_slabs, budget.caps[number] - pool.slabs) * shape.pages_per_slab,
        promised_pages=budget.promised[number],
    )

"""Ways to divide memory, right and wrong ones, over the shipped arena and scheduler: only to show what each costs.

    shared, static R [S], equal pages, full    as `halocline.sim.policies` has them, in pages of 16 positions
    peak grants    the shared arena, but a request is granted what its largest chunk needs
    rings          the shared arena, but windows are set aside per request slot, at their full length

The last two exist nowhere in the program. Wrong policies of the scheduler stand in `testing.wrong`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, resident
from halocline.memory.grant import Grant, Refusal
from halocline.memory.layout import ArenaLayout, PoolLayout
from halocline.memory.retention import Chunked, Sliding
from halocline.memory.sizing import Caps
from halocline.sim import policies as shipped
from halocline.sim.policies import Layers, equal_groups, padding_share
from halocline.units import ceil_div

__all__ = ["equal_groups", "padding_share"]

PAGE_TOKENS = 16
Price = Callable[..., Demand]


@dataclass(frozen=True)
class Policy:
    """How an arena is cut, split and priced."""

    name: str
    lay_out: Callable[[Layers, int], ArenaLayout]
    split: Callable[[ArenaLayout], Caps | None] = lambda layout: None
    price: Price = resident
    arena: type[Arena] = Arena

    def make(self, layers: Layers, budget_bytes: int) -> Arena:
        """Return the policy's arena of so many bytes."""
        layout = self.lay_out(layers, budget_bytes)
        return self.arena(layout, self.split(layout))


def as_shipped(name: str) -> Policy:
    """Return a policy that the program has, with pages of 16 positions."""
    policy = shipped.policy_named(name)
    return Policy(name, lambda layers, budget_bytes: policy.lay_out(layers, budget_bytes, PAGE_TOKENS), policy.split)


SHARED = as_shipped("shared")
FULL = as_shipped("full")
EQUAL = as_shipped("equal-pages")
by_slabs = SHARED.lay_out


def static(ratio: float, *state_ratio: float) -> Policy:
    """Return the static split of `static:R` or `static:R:S`."""
    return as_shipped(":".join(["static", *(f"{number:g}" for number in (ratio, *state_ratio))]))


# ---- peak grants


def peak_for(step_tokens: int, *, for_life: bool) -> Price:
    """Return the price of whoever is granted its largest chunk: until the prompt is computed, or to the end."""

    def price(
        layout: ArenaLayout,
        prompt_tokens: int,
        max_new_tokens: int,
        computed_tokens: int = 0,
        lookahead_tokens: int = 0,
    ) -> Demand:
        right = resident(layout, prompt_tokens, max_new_tokens, computed_tokens, lookahead_tokens)
        left = prompt_tokens if for_life else prompt_tokens - computed_tokens
        if left <= 1:
            return right
        return Demand(
            max(pages, _chunk_peak(pool, prompt_tokens, min(step_tokens, left)))
            for pages, pool in zip(right, layout.pools, strict=True)
        )

    return price


def _chunk_peak(pool: PoolLayout, prompt_tokens: int, chunk_tokens: int) -> int:
    # A chunk of C tokens at a granule's border: ceil(C / P) + ceil((W - 1) / P), and never more than the prompt has.
    match pool.retention:
        case Sliding(window_tokens):
            before = window_tokens - 1
        case Chunked(local_tokens):
            before = local_tokens - 1
        case _:
            return 0
    size = pool.page_tokens
    return min(ceil_div(prompt_tokens, size), ceil_div(chunk_tokens, size) + ceil_div(before, size))


def peak_grants(step_tokens: int, *, for_life: bool = False) -> Policy:
    """Return the shared arena in which every request is granted its prefill peak."""
    name = "peak for life" if for_life else "peak grants"
    return Policy(name, by_slabs, price=peak_for(step_tokens, for_life=for_life))


# ---- rings


def ring_pages(pool: PoolLayout) -> int:
    """Return the pages of a ring that holds any window: W positions and the page that they straddle; 0 for others."""
    window = pool.retention.window_tokens if isinstance(pool.retention, Sliding) else 0
    return ceil_div(window - 1, pool.page_tokens) + 1 if window else 0


def price_of_rings(
    layout: ArenaLayout, prompt_tokens: int, max_new_tokens: int, computed_tokens: int = 0, lookahead_tokens: int = 0
) -> Demand:
    """Return the price of a request that takes a whole ring in each sliding pool, however short it is."""
    right = resident(layout, prompt_tokens, max_new_tokens, computed_tokens, lookahead_tokens)
    return Demand(max(pages, ring_pages(pool)) for pages, pool in zip(right, layout.pools, strict=True))


RINGS_PER_REQUEST = Policy("a ring per request", by_slabs, price=price_of_rings)


def rings(slots: int) -> Policy:
    """Return the arena in which rings for `slots` requests are set aside at the start; the rest is for full pages."""

    def split(layout: ArenaLayout) -> Caps:
        ringed = [ceil_div(slots * ring_pages(pool), pool.pages_per_slab) for pool in layout.pools]
        full = layout.slabs - sum(ringed)
        return tuple(slabs or max(0, full) for slabs in ringed)

    return Policy(f"rings x {slots}", by_slabs, split, price_of_rings)


# ---- arenas that keep what requests leave


class KeepingArena(Arena):
    """Keeps every page of a request that left, evictable, as a prefix cache does: so the arena is always full."""

    def release(self, grant: Grant) -> None:
        """Cache all that `grant` holds, then release it."""
        if grant.is_open and not any(grant.lent):
            for pool in range(len(self.pools)):
                if grant.pages(pool):
                    index = self.owners.indices_of(grant, self.pools[pool])
                    self.cache(grant, pool, self.pools[pool].handle_of[index])
        super().release(grant)


class SelfishArena(KeepingArena):
    """The same, but a pool may evict only its own pages for what it needs: what its peers have cached is theirs."""

    def fits(self, extra: Demand) -> bool:
        """Whether each pool finds what it lacks in free slabs and in its own cached pages."""
        budget = self.budget
        now = budget.slabs_by_pool(map(sum, zip(budget.held, budget.promised, budget.cached, strict=True)))
        then = budget.slabs_by_pool(map(sum, zip(budget.held, budget.promised, extra, strict=True)))
        wanted = sum(max(0, need - have) for need, have in zip(then, now, strict=True))
        return wanted <= budget.slabs - sum(now) and super().fits(extra)

    def reserve(self, owner: str, demand: Demand) -> Grant | Refusal:
        """Refuse what `fits` denies."""
        return super().reserve(owner, demand) if self.fits(demand) else self._no(demand)

    def extend(self, grant: Grant, demand: Demand) -> Grant | Refusal:
        """Refuse what `fits` denies."""
        extra = demand.minus(grant.demand)
        return super().extend(grant, demand) if self.fits(extra) else self._no(extra)

    def _no(self, extra: Demand) -> Refusal:
        return self.shortfall(extra) or Refusal("memory", extra, 1, f"1 slab is missing: {extra} would evict a peer's")


KEEPING = Policy("shared, all kept", by_slabs, arena=KeepingArena)
SELFISH = Policy("evicts only itself", by_slabs, arena=SelfishArena)


@contextmanager
def pricing(price: Price) -> Iterator[None]:
    """Let the scheduler price requests by `price` for as long as this lasts, at admission and afterwards."""
    if price is resident:
        yield
        return
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("halocline.schedule.") and getattr(module, "resident", None) is resident
    ]
    assert modules, "no module of the scheduler prices requests"
    patches = [patch.object(module, "resident", price) for module in modules]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()

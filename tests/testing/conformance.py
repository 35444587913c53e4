"""Builders of the attention tests: small layouts and plans made by hand, without solver, scheduler or arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from halocline.memory.layout import ArenaLayout, LayerKV, LayerPlace, PoolLayout
from halocline.memory.retention import Retention, describe
from halocline.params import SamplingParams
from halocline.step import PoolTables, Segment, StepPlan
from halocline.units import ceil_div, ceil_to

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def make_layout(layers: Sequence[LayerKV], page_tokens: Mapping[str, int] | int, slabs: int) -> ArenaLayout:
    """Lay `layers` out without a solver: one page of each pool per slab, of whatever size the largest needs."""
    by_retention: dict[Retention, list[LayerKV]] = {}
    for layer in layers:
        by_retention.setdefault(layer.retention, []).append(layer)
    drafts = []
    for retention, specs in by_retention.items():
        tokens = page_tokens if isinstance(page_tokens, int) else page_tokens[describe(retention)]
        places, offset = [], 0
        for spec in specs:
            k_bytes = tokens * spec.kv_heads * spec.k_dim * spec.dtype_bytes
            v_bytes = tokens * spec.kv_heads * spec.v_dim * spec.dtype_bytes
            places.append(LayerPlace(spec, offset, offset + k_bytes))
            offset += k_bytes + v_bytes
        drafts.append((retention, tuple(places), tokens, offset))
    slab_bytes = ceil_to(max(draft[3] for draft in drafts), 64)
    pools = tuple(
        PoolLayout(describe(retention), retention, places, tokens, page_bytes, 1, slab_bytes)
        for retention, places, tokens, page_bytes in drafts
    )
    return ArenaLayout(pools, slab_bytes, slabs, slabs * slab_bytes)


def make_arena(layout: ArenaLayout) -> Tensor:
    """Return an arena full of NaN (0xFF in every byte), so that a read of an unwritten position is seen."""
    return torch.full((layout.arena_bytes,), 0xFF, dtype=torch.uint8)


@dataclass
class HandScheduler:
    """Places requests on random pages and plans steps over them; gives up out-of-window pages after each step."""

    layout: ArenaLayout
    seed: int = 0
    free: list[int] = field(init=False)
    pages: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)
    """(request, pool) -> page index within the request -> page number."""

    def __post_init__(self) -> None:
        # One page per slab in every pool: one free list serves all pools, as slabs do in the arena.
        self.free = list(np.random.default_rng(self.seed).permutation(self.layout.slabs))

    def plan(self, step: int, work: Sequence[tuple[str, Sequence[int], int, int]]) -> StepPlan:
        """Plan one step of `work`: (request, its tokens so far, start, how many to compute)."""
        tables = tuple(self._table(index, work) for index in range(len(self.layout.pools)))
        segments = tuple(
            Segment(name, start, count, start + count == len(tokens), GREEDY, 0, tokens, len(tokens), False)
            for name, tokens, start, count in work
        )
        return StepPlan(
            step=step,
            moves=(),
            segments=segments,
            token_ids=np.concatenate([np.asarray(t[s : s + n], np.int64) for _, t, s, n in work]),
            positions=np.concatenate([np.arange(s, s + n, dtype=np.int64) for _, _, s, n in work]),
            query_starts=np.concatenate([[0], np.cumsum([n for *_, n in work])]).astype(np.int32),
            tables=tables,
        )

    def applied(self, request: str, position: int) -> None:
        """Free the pages that a token computed at `position` (the next one) no longer sees."""
        for index, pool in enumerate(self.layout.pools):
            held = self.pages.get((request, index), {})
            needed = pool.retention.first_needed(position) // pool.page_tokens
            for page in [page for page in held if page < needed]:
                self.free.append(held.pop(page))

    def _table(self, index: int, work: Sequence[tuple[str, Sequence[int], int, int]]) -> PoolTables:
        pool, pages, starts, firsts = self.layout.pools[index], [], [0], []
        for name, _, start, count in work:
            held = self.pages.setdefault((name, index), {})
            first = pool.retention.first_needed(start) // pool.page_tokens
            last = ceil_div(start + count, pool.page_tokens)
            pages += [held.setdefault(page, -1) for page in range(first, last)]
            for at, page in enumerate(range(first, last), starts[-1]):
                if held[page] < 0:
                    held[page] = pages[at] = self.free.pop()
            starts.append(len(pages))
            firsts.append(first)
        return PoolTables(
            np.array(pages, np.int32),
            np.array(starts, np.int32),
            np.array(firsts, np.int32),
            np.zeros(len(firsts), np.int32),
        )

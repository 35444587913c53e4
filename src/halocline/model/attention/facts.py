"""The facts of one step that every layer shares, and where one layer's K and V lie.

    plan.positions   |  812 |  97 | 64  65  66  67  68 |        one packed row of T tokens
    query_starts     0      1     2                    7
    per pool         pages, page_starts, first_page             which pages hold what each segment reads
                     write_rows, write_pages, write_slots       where each of the T tokens is written, if it is

They are computed once per step and pool, not once per layer: a model with 60 layers has two or three pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halocline.errors import InvariantError
from halocline.memory.layout import ArenaLayout, LayerPlace, PoolLayout
from halocline.memory.retention import Chunked, Positional, Retention, Sliding, State
from halocline.step import PoolTables, StepPlan


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer's K and V as strided views over the whole arena; every page of the pool is a row."""

    layer: int
    pool: int
    """Index of the layer's pool in `ArenaLayout.pools`."""
    retention: Positional
    page_tokens: int
    k: Tensor
    """Shape (pages, page_tokens, kv_heads, k_dim)."""
    v: Tensor
    """Shape (pages, page_tokens, kv_heads, v_dim)."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a layer does to q . k before the softmax, as the model gives it."""

    scaling: float
    """Multiplies every product; never a default of ours."""
    softcap: float | None = None
    """s becomes softcap * tanh(s / softcap)."""
    sinks: Tensor | None = None
    """One logit per query head, shape (heads,): joins the softmax and has no value."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """One pool's page tables as tensors on the model's device, and the host arrays they were made from."""

    tables: PoolTables
    pages: Tensor
    """int32, shape (total pages,)."""
    page_starts: Tensor
    """int32, shape (segments + 1,)."""
    first_page: Tensor
    """int32, shape (segments,)."""
    write_rows: Tensor | None
    """int64, shape (W,): the rows, of T, whose K and V are written; None: all, so W = T. The others are computed again
    for other pools: this pool has them already, in pages that belong to the prefix cache."""
    write_pages: Tensor
    """int64, shape (W,): the page that their K and V go to."""
    write_slots: Tensor
    """int64, shape (W,): their places within that page."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """All that attention needs to know of a step, apart from the layer and the query."""

    query_starts: Tensor
    """int32, shape (segments + 1,)."""
    starts: Tensor
    """int32, shape (segments,): position of each segment's first token."""
    rows: tuple[int, ...]
    """`query_starts` for the host."""
    first_positions: tuple[int, ...]
    """`starts` for the host."""
    pools: tuple[PoolFacts | None, ...]
    """In the order of `ArenaLayout.pools`; None for a pool of states."""

    @property
    def tokens(self) -> int:
        """T: how many tokens the step computes."""
        return self.rows[-1]

    @property
    def segments(self) -> int:
        """How many requests take part."""
        return len(self.first_positions)

    @classmethod
    def of(cls, plan: StepPlan, layout: ArenaLayout, device: torch.device | str = "cpu") -> AttentionStep:
        """Derive the facts from `plan`.

        Raises InvariantError when a page table does not cover what its segment reads and writes: the kernels would
        read another request's bytes.
        """
        starts = np.fromiter((segment.start for segment in plan.segments), np.int64, len(plan.segments))
        pools: list[PoolFacts | None] = []
        violations: list[str] = []
        for pool, tables in zip(layout.pools, plan.tables, strict=True):
            if pool.is_positional:
                violations += _uncovered(pool, tables, starts, np.diff(plan.query_starts))
                pools.append(None if violations else _pool_facts(pool, tables, plan, device))
            else:
                pools.append(None)
        if violations:
            raise InvariantError(violations)
        return cls(
            query_starts=_tensor(plan.query_starts, np.int32, device),
            starts=_tensor(starts, np.int32, device),
            rows=tuple(plan.query_starts.tolist()),
            first_positions=tuple(starts.tolist()),
            pools=tuple(pools),
        )


def pool_facts(step: AttentionStep, layer: LayerView) -> PoolFacts:
    """Return the facts of the layer's pool."""
    facts = step.pools[layer.pool]
    assert facts is not None, f"layer {layer.layer} lies in pool {layer.pool}, which holds states and no positions"
    return facts


def lower_bounds(retention: Retention, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each position, the first one that it sees: `Retention.first_needed` in bulk."""
    match retention:
        case Sliding(window_tokens):
            return np.maximum(positions - (window_tokens - 1), 0)
        case Chunked(chunk_tokens):
            return positions // chunk_tokens * chunk_tokens
        case _:
            return np.zeros_like(positions)


def layer_views(arena: Tensor, layout: ArenaLayout, dtype: torch.dtype, model: str = "target") -> dict[int, LayerView]:
    """Return the K and V views of every positional layer of `model`, by layer index.

    `arena` is the uint8 tensor of `layout.arena_bytes`; `dtype` is the element type of K and V.
    """
    assert arena.dtype == torch.uint8, f"the arena is a tensor of {arena.dtype}, not of bytes"
    assert arena.numel() >= layout.arena_bytes, f"the arena has {arena.numel()} of {layout.arena_bytes} bytes"
    views = {}
    for index, pool in enumerate(layout.pools):
        for place in pool.layers:
            if place.spec.model == model and not isinstance(pool.retention, State):
                k, v = _kv_views(arena, layout, pool, place, dtype)
                views[place.spec.layer] = LayerView(place.spec.layer, index, pool.retention, pool.page_tokens, k, v)
    return views


def _kv_views(
    arena: Tensor, layout: ArenaLayout, pool: PoolLayout, place: LayerPlace, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    spec = place.spec
    assert spec.dtype_bytes == dtype.itemsize, (
        f"layer {spec.layer} was laid out with {spec.dtype_bytes}-byte elements, but {dtype} has {dtype.itemsize}"
    )
    elements = arena[: layout.arena_bytes].view(dtype)
    pages = layout.slabs * pool.pages_per_slab
    assert pool.stride_bytes % dtype.itemsize == 0, f"a page stride of {pool.stride_bytes} bytes splits a {dtype}"

    def view(offset_bytes: int, dim: int) -> Tensor:
        assert offset_bytes % dtype.itemsize == 0, f"byte {offset_bytes} of the page splits a {dtype}"
        return elements.as_strided(
            (pages, pool.page_tokens, spec.kv_heads, dim),
            (pool.stride_bytes // dtype.itemsize, spec.kv_heads * dim, dim, 1),
            offset_bytes // dtype.itemsize + arena.storage_offset() // dtype.itemsize,
        )

    return view(place.k_offset, spec.k_dim), view(place.v_offset, spec.v_dim)


def _pool_facts(pool: PoolLayout, tables: PoolTables, plan: StepPlan, device: torch.device | str) -> PoolFacts:
    segment_of = np.repeat(np.arange(len(plan.segments)), np.diff(plan.query_starts))
    page_of = plan.positions // pool.page_tokens
    listed = tables.page_starts[segment_of] + page_of - tables.first_page[segment_of]
    pages, slots = tables.pages[listed], plan.positions - page_of * pool.page_tokens
    own = plan.positions >= tables.write_from[segment_of]
    rows = None if own.all() else np.flatnonzero(own)
    return PoolFacts(
        tables=tables,
        pages=_tensor(tables.pages, np.int32, device),
        page_starts=_tensor(tables.page_starts, np.int32, device),
        first_page=_tensor(tables.first_page, np.int32, device),
        write_rows=None if rows is None else _tensor(rows, np.int64, device),
        write_pages=_tensor(pages if rows is None else pages[rows], np.int64, device),
        write_slots=_tensor(slots if rows is None else slots[rows], np.int64, device),
    )


def _uncovered(
    pool: PoolLayout, tables: PoolTables, starts: NDArray[np.int64], tokens: NDArray[np.int32]
) -> Sequence[str]:
    needed = lower_bounds(pool.retention, starts) // pool.page_tokens
    first = tables.first_page.astype(np.int64)
    listed_end = (first + np.diff(tables.page_starts)) * pool.page_tokens
    bad = np.flatnonzero((first > needed) | (listed_end < starts + tokens))
    return [
        f"pool {pool.name}: segment {i} computes positions {starts[i]} to {starts[i] + tokens[i] - 1} but its pages "
        f"hold {first[i] * pool.page_tokens} to {listed_end[i] - 1}"
        for i in bad
    ]


def _tensor(array: NDArray[np.integer], dtype: type[np.integer], device: torch.device | str) -> Tensor:
    # A copy, never a view: the plan's arrays belong to the plan, and torch refuses read-only ones.
    return torch.from_numpy(np.array(array, dtype=dtype)).to(device)

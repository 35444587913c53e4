"""From layers to pools, pages and slabs: where every byte of the arena lies.

    arena   |---- slab 0 ----|---- slab 1 ----|---- slab 2 ----|  ...            equal slabs, each owned by one pool
    slab    |page|page|page|.|                                                   pages_per_slab pages of one stride
    page    |layer 0: K V|layer 1: K V|...|pad|                                  page_tokens positions of every layer

Page p of a pool starts at byte p * stride_bytes of the arena, whatever the slab, because slab_bytes is
pages_per_slab * stride_bytes for every pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from halocline.errors import ConfigError
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State, describe
from halocline.memory.solver import SOLVER_PAGE_TOKENS, PoolShape, best_cut, smallest_slab_bytes
from halocline.units import ceil_to, format_bytes

STRIDE_UNIT_BYTES = 64
"""Page strides are a multiple of this: a cache line, and the widest vector load."""
MAX_PAGE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps per position (or, for `State`, per request)."""

    layer: int
    """Index of the layer in its model, as `module.layer_idx` gives it."""
    retention: Retention
    kv_heads: int = 0
    k_dim: int = 0
    """Elements of one head's key."""
    v_dim: int = 0
    """Elements of one head's value; may differ from k_dim (latent attention)."""
    dtype_bytes: int = 2
    """Bytes of one element: 2 for bf16 and fp16, 4 for fp32, 8 for fp64."""
    state_bytes: int = 0
    """Bytes of the whole state; only for `State`."""
    model: str = "target"
    """Which model the layer belongs to: `target` or `draft`."""

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one position; 0 for a state layer."""
        return self.kv_heads * (self.k_dim + self.v_dim) * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where one layer's K and V lie inside each page of its pool, in bytes from the page's start.

    K is (page_tokens, kv_heads, k_dim) and V is (page_tokens, kv_heads, v_dim), both row-major and contiguous.
    """

    spec: LayerKV
    k_offset: int
    v_offset: int


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """One pool: all layers with the same retention."""

    name: str
    """As `describe(retention)` gives it; unique within an arena."""
    retention: Retention
    layers: tuple[LayerPlace, ...]
    page_tokens: int
    """Positions in one page, a power of two; 1 for a state pool, whose page is one whole state."""
    page_bytes: int
    """Bytes that the layers use of a page."""
    pages_per_slab: int
    stride_bytes: int
    """Distance between page starts: slab_bytes / pages_per_slab, a multiple of 64 and of every element size."""

    @property
    def is_positional(self) -> bool:
        """Whether the pool holds positions (all kinds except `State`)."""
        return not isinstance(self.retention, State)

    @property
    def padding_bytes(self) -> int:
        """Bytes of every page that no layer uses."""
        return self.stride_bytes - self.page_bytes


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The whole arena: `slabs` slabs of `slab_bytes`, and how each pool cuts a slab into pages."""

    pools: tuple[PoolLayout, ...]
    slab_bytes: int
    slabs: int
    budget_bytes: int
    """What was asked for; the part below one slab that cannot be used is `remainder_bytes`."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of all slabs together."""
        return self.slabs * self.slab_bytes

    @property
    def remainder_bytes(self) -> int:
        """Bytes of the budget that make no whole slab."""
        return self.budget_bytes - self.arena_bytes

    @property
    def granule_tokens(self) -> int:
        """G: the largest page_tokens of all positional pools (1 if there is none)."""
        return max((pool.page_tokens for pool in self.pools if pool.is_positional), default=1)


def solve_layout(
    layers: Sequence[LayerKV], budget_bytes: int, page_tokens: Mapping[str, int] | int | None = None
) -> ArenaLayout:
    """Lay out all layers (target and draft alike) in `budget_bytes` of arena.

    Layers with the same retention make one pool; pools are ordered full, sliding, chunked, state, shorter reach first.
    `page_tokens` sets the page length of all positional pools or, by pool name, of some (a power of two up to 256);
    what is not set is chosen up to 64. Raises ConfigError with every problem and its arithmetic.
    """
    problems = _layer_problems(layers)
    if problems:
        raise ConfigError(problems)
    groups = _group(layers)
    problems = _page_token_problems(groups, page_tokens)
    shapes = [] if problems else [_shape(retention, group, page_tokens) for retention, group in groups.items()]
    unit = lcm(STRIDE_UNIT_BYTES, *(layer.dtype_bytes for layer in layers))
    cut = best_cut(shapes, budget_bytes, unit) if shapes and budget_bytes > 0 else None
    if cut is None:
        raise ConfigError(problems or [_too_small(shapes, groups, budget_bytes, unit)])
    pools = tuple(
        _pool(retention, group, tokens, pages, cut.slab_bytes)
        for (retention, group), tokens, pages in zip(groups.items(), cut.page_tokens, cut.pages_per_slab, strict=True)
    )
    return ArenaLayout(pools, cut.slab_bytes, budget_bytes // cut.slab_bytes, budget_bytes)


def place_layers(layers: Sequence[LayerKV], page_tokens: int) -> tuple[tuple[LayerPlace, ...], int]:
    """Return where each layer lies in a page of `page_tokens` positions, and the bytes of the page.

    Runs whose sizes are multiples of 64 bytes come first, so that they start at multiples of 64; then wider elements
    before narrower ones, so that every offset is a multiple of its element size with nothing between.
    """

    def runs(layer: LayerKV) -> tuple[int, int]:
        if isinstance(layer.retention, State):
            return layer.state_bytes, 0
        position_bytes = layer.kv_heads * layer.dtype_bytes * page_tokens
        return position_bytes * layer.k_dim, position_bytes * layer.v_dim

    def order(layer: LayerKV) -> tuple[bool, int]:
        return any(size % STRIDE_UNIT_BYTES for size in runs(layer)), -layer.dtype_bytes

    places, offset = [], 0
    for layer in sorted(layers, key=order):
        k_bytes, v_bytes = runs(layer)
        k_offset = ceil_to(offset, layer.dtype_bytes)
        v_offset = k_offset + k_bytes
        offset = v_offset + v_bytes
        places.append(LayerPlace(layer, k_offset, v_offset))
    return tuple(places), offset


def _group(layers: Sequence[LayerKV]) -> dict[Retention, list[LayerKV]]:
    """Return the layers by retention, in the order of the pools."""

    def order(retention: Retention) -> tuple[int, int]:
        match retention:
            case Full():
                return 0, 0
            case Sliding(window_tokens):
                return 1, window_tokens
            case Chunked(chunk_tokens):
                return 2, chunk_tokens
            case State():
                return 3, 0

    kinds = sorted({layer.retention for layer in layers}, key=order)
    return {kind: [layer for layer in layers if layer.retention == kind] for kind in kinds}


def _shape(retention: Retention, layers: list[LayerKV], page_tokens: Mapping[str, int] | int | None) -> PoolShape:
    if isinstance(retention, State):
        choices: tuple[int, ...] = (1,)
    elif isinstance(page_tokens, int):
        choices = (page_tokens,)
    else:
        given = (page_tokens or {}).get(describe(retention))
        choices = SOLVER_PAGE_TOKENS if given is None else (given,)
    return PoolShape(retention, lambda tokens: place_layers(layers, tokens)[1], choices)


def _pool(retention: Retention, layers: list[LayerKV], page_tokens: int, pages: int, slab_bytes: int) -> PoolLayout:
    places, page_bytes = place_layers(layers, page_tokens)
    stride_bytes = slab_bytes // pages
    assert stride_bytes >= page_bytes, f"{describe(retention)}: a page of {page_bytes} bytes exceeds {stride_bytes}"
    return PoolLayout(describe(retention), retention, places, page_tokens, page_bytes, pages, stride_bytes)


def _layer_problems(layers: Sequence[LayerKV]) -> list[str]:
    """Return what is wrong with the layers themselves, one sentence each."""
    if not layers:
        return ["the model has no layer that keeps KV or state, so there is nothing to lay out"]
    problems, seen = [], set()
    for layer in layers:
        where = f"{layer.model} layer {layer.layer}"
        if (layer.model, layer.layer) in seen:
            problems.append(f"{where} is listed twice")
        seen.add((layer.model, layer.layer))
        if layer.dtype_bytes < 1:
            problems.append(f"{where} has elements of {layer.dtype_bytes} bytes; at least 1 is needed")
        elif isinstance(layer.retention, State):
            if layer.state_bytes < 1:
                problems.append(f"{where} keeps a state of {layer.state_bytes} bytes; at least 1 is needed")
        elif min(layer.kv_heads, layer.k_dim) < 1 or layer.v_dim < 0:
            problems.append(
                f"{where} has {layer.kv_heads} heads of {layer.k_dim} key and {layer.v_dim} value elements; "
                "heads and key must be at least 1"
            )
    return problems


def _page_token_problems(
    groups: Mapping[Retention, list[LayerKV]], page_tokens: Mapping[str, int] | int | None
) -> list[str]:
    """Return what is wrong with the page lengths that were set."""
    names = [describe(retention) for retention in groups if not isinstance(retention, State)]
    given = dict.fromkeys(names, page_tokens) if isinstance(page_tokens, int) else dict(page_tokens or {})
    problems = [
        f"page_tokens names a pool {name!r} that this model has not; its pools are {', '.join(names) or 'none'}"
        for name in given
        if name not in names
    ]
    return problems + [
        f"page_tokens of pool {name} is {tokens}; it must be a power of two from 1 to {MAX_PAGE_TOKENS}"
        for name, tokens in given.items()
        if not 1 <= tokens <= MAX_PAGE_TOKENS or tokens & (tokens - 1)
    ]


def _too_small(
    shapes: Sequence[PoolShape], groups: Mapping[Retention, list[LayerKV]], budget_bytes: int, unit: int
) -> str:
    slab_bytes = smallest_slab_bytes(shapes, unit)
    pages = ", ".join(
        f"{describe(retention)} {shape.page_bytes(shape.choices[0])} bytes (page_tokens {shape.choices[0]})"
        for retention, shape in zip(groups, shapes, strict=True)
    )
    return (
        f"the arena of {budget_bytes} bytes ({format_bytes(max(0, budget_bytes))}) is below one slab per pool: "
        f"{len(shapes)} pools x {slab_bytes} bytes = {len(shapes) * slab_bytes} bytes, where a slab holds the longest "
        f"page ({pages}); give more, or shorter pages"
    )

"""From layers to pools, pages and slabs: where every byte of the arena lies.

    arena   |---- slab 0 ----|---- slab 1 ----|---- slab 2 ----|  ...            equal slabs, each owned by one pool
    slab    |page|page|page|.|                                                   pages_per_slab pages of one stride
    page    |layer 0: K V|layer 1: K V|...|pad|                                  page_tokens positions of every layer

Page p of a pool starts at byte p * stride_bytes of the arena, whatever the slab, because slab_bytes is
pages_per_slab * stride_bytes for every pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from halocline.memory.retention import Retention, State


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

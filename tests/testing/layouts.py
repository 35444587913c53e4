"""Layers and layouts for tests: real shapes, by hand from the models' published configurations, and small ones."""

from __future__ import annotations

from collections.abc import Mapping

from halocline.memory.layout import ArenaLayout, LayerKV, solve_layout
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State
from halocline.units import GIB


def layers_of(
    *kinds: tuple[int, Retention], heads: int = 1, dim: int = 8, dtype_bytes: int = 2, state_bytes: int = 64
) -> tuple[LayerKV, ...]:
    """Return `count` layers of each retention, all of one size, numbered in the order given."""
    layers: list[LayerKV] = []
    for count, retention in kinds:
        for _ in range(count):
            if isinstance(retention, State):
                layer = LayerKV(len(layers), retention, dtype_bytes=dtype_bytes, state_bytes=state_bytes)
            else:
                layer = LayerKV(len(layers), retention, heads, dim, dim, dtype_bytes)
            layers.append(layer)
    return tuple(layers)


def small_layout(
    *retentions: Retention, page_tokens: Mapping[str, int] | int = 4, slabs: int = 8, state_bytes: int = 64
) -> ArenaLayout:
    """Return a layout with one layer per retention (kept in pool order) and exactly `slabs` slabs.

    One layer holds 32 bytes of K and V per position, so a page of 4 positions is 128 bytes.
    """
    layers = layers_of(*((1, retention) for retention in retentions), state_bytes=state_bytes)
    slab_bytes = solve_layout(layers, 1 << 30, page_tokens).slab_bytes
    return solve_layout_of_slab(layers, slab_bytes, slabs, page_tokens)


def solve_layout_of_slab(
    layers: tuple[LayerKV, ...], slab_bytes: int, slabs: int, page_tokens: Mapping[str, int] | int | None
) -> ArenaLayout:
    """Return the solver's layout for a large arena, cut down to `slabs` slabs of the same size."""
    large = solve_layout(layers, 1 << 30, page_tokens)
    assert large.slab_bytes == slab_bytes, f"the slab is {large.slab_bytes} bytes, not {slab_bytes}"
    return ArenaLayout(large.pools, slab_bytes, slabs, slabs * slab_bytes)


def _hybrid(full: int, other: int, retention: Retention, heads: int, dim: int) -> tuple[LayerKV, ...]:
    return layers_of((full, Full()), (other, retention), heads=heads, dim=dim)


GEMMA_3_270M = _hybrid(3, 15, Sliding(512), 1, 256)
GEMMA_3_1B = _hybrid(4, 22, Sliding(512), 1, 256)
GEMMA_3_4B = _hybrid(5, 29, Sliding(1024), 4, 256)
GEMMA_3_12B = _hybrid(8, 40, Sliding(1024), 8, 256)
GEMMA_3_27B = _hybrid(10, 52, Sliding(1024), 16, 128)
GPT_OSS_20B = _hybrid(12, 12, Sliding(128), 8, 64)
GPT_OSS_120B = _hybrid(18, 18, Sliding(128), 8, 64)
GEMMA_4_31B_LIKE = _hybrid(10, 50, Sliding(1024), 16, 128)
LLAMA_4_SCOUT = _hybrid(12, 36, Chunked(8192), 8, 128)
MIMO_V2_FLASH_LIKE = _hybrid(9, 39, Sliding(128), 8, 128)
COMMAND_R7B = _hybrid(8, 24, Sliding(4096), 8, 128)


def _recurrent(full: int, state: int, heads: int, dim: int, bytes_per_request: int) -> tuple[LayerKV, ...]:
    assert bytes_per_request % state == 0, f"{bytes_per_request} bytes do not divide into {state} layers"
    return layers_of((full, Full()), (state, State()), heads=heads, dim=dim, state_bytes=bytes_per_request // state)


QWEN3_NEXT_80B = _recurrent(12, 36, 2, 256, 77266944)
GRANITE_4_H_SMALL_LIKE = _recurrent(4, 36, 8, 128, 152819712)

MODEL_LAYERS: dict[str, tuple[LayerKV, ...]] = {
    "gemma-3-270m": GEMMA_3_270M,
    "gemma-3-1b": GEMMA_3_1B,
    "gemma-3-4b": GEMMA_3_4B,
    "gemma-3-12b": GEMMA_3_12B,
    "gemma-3-27b": GEMMA_3_27B,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_120B,
    "gemma-4-31b-like": GEMMA_4_31B_LIKE,
    "llama-4-scout": LLAMA_4_SCOUT,
    "mimo-v2-flash-like": MIMO_V2_FLASH_LIKE,
    "command-r7b": COMMAND_R7B,
    "qwen3-next-80b": QWEN3_NEXT_80B,
    "granite-4-h-small-like": GRANITE_4_H_SMALL_LIKE,
}
"""The checked shapes by name; "-like" marks those without a published configuration."""


def model_layout(name: str, budget_bytes: int = 16 * GIB, page_tokens: int | None = 16) -> ArenaLayout:
    """Return the layout of a named shape."""
    return solve_layout(MODEL_LAYERS[name], budget_bytes, page_tokens)

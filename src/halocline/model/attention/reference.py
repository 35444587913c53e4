"""The plain PyTorch backend: any device, any dtype, simple enough to be seen to be right.

It gathers each segment's pages, so it is slow; the other backends are compared with it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from halocline.memory.retention import Positional
from halocline.model.attention.facts import AttentionStep, LayerView, PoolFacts, Scores, lower_bounds


def write_kv(key: Tensor, value: Tensor, layer: LayerView, facts: PoolFacts) -> None:
    """Put the step's new K (T, kv_heads, k_dim) and V (T, kv_heads, v_dim) into their pages."""
    layer.k[facts.write_pages, facts.write_slots] = key.to(layer.k.dtype)
    layer.v[facts.write_pages, facts.write_slots] = value.to(layer.v.dtype)


class ReferenceAttention:
    """Attention by the definition, one segment after the other."""

    name = "reference"

    def write(self, key: Tensor, value: Tensor, layer: LayerView, step: AttentionStep) -> None:
        """Put the step's new K and V into their pages."""
        write_kv(key, value, layer, pool_facts(step, layer))

    def attend(self, query: Tensor, layer: LayerView, step: AttentionStep, scores: Scores) -> Tensor:
        """Return the attention of `query` (T, heads, k_dim) over its pages: (T, heads, v_dim)."""
        facts = pool_facts(step, layer)
        output = query.new_empty(query.shape[0], query.shape[1], layer.v.shape[3])
        for segment, start in enumerate(step.first_positions):
            rows = slice(step.rows[segment], step.rows[segment + 1])
            end = start + rows.stop - rows.start
            first, k, v = _gather(layer, facts, segment, start, end)
            visible = _visible(layer.retention, start, end, first).to(query.device)
            output[rows] = _attend(query[rows], k, v, visible, scores)
        return output


def pool_facts(step: AttentionStep, layer: LayerView) -> PoolFacts:
    """Return the facts of the layer's pool."""
    facts = step.pools[layer.pool]
    assert facts is not None, f"layer {layer.layer} lies in pool {layer.pool}, which holds states and no positions"
    return facts


def _gather(layer: LayerView, facts: PoolFacts, segment: int, start: int, end: int) -> tuple[int, Tensor, Tensor]:
    """Return (first position, K, V) of exactly the positions that the segment sees.

    Exactly: a page also holds bytes that nobody has written, and 0 * NaN is NaN.
    """
    first = layer.retention.first_needed(start)
    low, high = facts.tables.page_starts[segment : segment + 2]
    base = int(facts.tables.first_page[segment]) * layer.page_tokens
    pages = facts.pages[int(low) : int(high)].long()
    k, v = (view[pages].flatten(0, 1)[first - base : end - base] for view in (layer.k, layer.v))
    return first, k, v


def _visible(retention: Positional, start: int, end: int, first: int) -> Tensor:
    """Return which of the positions [first, end) each of [start, end) sees, as a mask of (queries, keys)."""
    queries, keys = np.arange(start, end)[:, None], np.arange(first, end)[None, :]
    return torch.from_numpy((keys <= queries) & (keys >= lower_bounds(retention, queries)))


def _attend(query: Tensor, k: Tensor, v: Tensor, visible: Tensor, scores: Scores) -> Tensor:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = query.shape[1] // k.shape[1]
    q = query.to(dtype).transpose(0, 1)
    k, v = (x.to(dtype).transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v))
    s = (q @ k.transpose(1, 2)) * scores.scaling
    if scores.softcap is not None:
        s = torch.tanh(s / scores.softcap) * scores.softcap
    s = s.masked_fill(~visible, -torch.inf)
    if scores.sinks is not None:
        s = torch.cat([s, scores.sinks.to(dtype)[:, None, None].expand(-1, s.shape[1], 1)], dim=-1)
    p = torch.softmax(s, dim=-1)[..., : k.shape[1]]
    return (p @ v).transpose(0, 1).to(query.dtype)

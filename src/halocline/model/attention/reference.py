"""The plain PyTorch backend: any device, any dtype, simple enough to be seen to be right.

It gathers each segment's pages, so it is slow; the other backends are compared with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from halocline.memory.retention import Positional
from halocline.model.attention.facts import AttentionStep, LayerView, PoolFacts, Scores, lower_bounds, pool_facts


def write_kv(key: Tensor, value: Tensor, layer: LayerView, facts: PoolFacts) -> None:
    """Put the step's new K (T, kv_heads, k_dim) and V (T, kv_heads, v_dim) into their pages, where they may be."""
    if facts.write_rows is not None:
        key, value = key[facts.write_rows], value[facts.write_rows]
    layer.k[facts.write_pages, facts.write_slots] = key.to(layer.k.dtype)
    layer.v[facts.write_pages, facts.write_slots] = value.to(layer.v.dtype)


class SegmentedAttention(ABC):
    """Attention in PyTorch, one segment after the other; how one segment attends is the subclass's."""

    def attend(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor] | None,
        layer: LayerView,
        step: AttentionStep,
        scores: Scores,
    ) -> Tensor:
        """Write `new` K and V into their pages, if any, and attend; see `AttentionBackend.attend`."""
        facts = pool_facts(step, layer)
        if new is not None:
            write_kv(*new, layer, facts)
        output = query.new_empty(query.shape[0], query.shape[1], layer.v.shape[3])
        for segment, start in enumerate(step.first_positions):
            rows = slice(step.rows[segment], step.rows[segment + 1])
            output[rows] = self.attend_segment(query[rows], layer, facts, (segment, start), scores)
        return output

    @abstractmethod
    def attend_segment(
        self, query: Tensor, layer: LayerView, facts: PoolFacts, segment: tuple[int, int], scores: Scores
    ) -> Tensor:
        """Return the attention of `query` (tokens, heads, k_dim); `segment` is (index in the step, first position)."""


class ReferenceAttention(SegmentedAttention):
    """Attention by the definition."""

    name = "reference"

    def attend_segment(
        self, query: Tensor, layer: LayerView, facts: PoolFacts, segment: tuple[int, int], scores: Scores
    ) -> Tensor:
        """Gather what the segment sees and attend in one product; see `SegmentedAttention.attend_segment`."""
        index, start = segment
        end = start + query.shape[0]
        first, k, v = _gather(layer, facts, index, start, end)
        seen = visible(layer.retention, (start, end), (first, end)).to(query.device)
        return _attend(query, k, v, seen, scores)


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


def visible(retention: Positional, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """Return which positions of the half-open range `keys` each of `queries` sees, as a mask of (queries, keys)."""
    i, j = np.arange(*queries)[:, None], np.arange(*keys)[None, :]
    return torch.from_numpy((j <= i) & (j >= lower_bounds(retention, i)))


def _attend(query: Tensor, k: Tensor, v: Tensor, seen: Tensor, scores: Scores) -> Tensor:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = query.shape[1] // k.shape[1]
    q = query.to(dtype).transpose(0, 1)
    k, v = (x.to(dtype).transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v))
    s = (q @ k.transpose(1, 2)) * scores.scaling
    if scores.softcap is not None:
        s = torch.tanh(s / scores.softcap) * scores.softcap
    s = s.masked_fill(~seen, -torch.inf)
    if scores.sinks is not None:
        s = torch.cat([s, scores.sinks.to(dtype)[:, None, None].expand(-1, s.shape[1], 1)], dim=-1)
    p = torch.softmax(s, dim=-1)[..., : k.shape[1]]
    return (p @ v).transpose(0, 1).to(query.dtype)

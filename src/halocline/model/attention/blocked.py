"""The fallback where nothing can be compiled: plain PyTorch, but never more than a block of pages at a time.

The softmax is kept online: running maximum, sum and unnormalised output per row, corrected block by block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from halocline.model.attention.facts import LayerView, PoolFacts, Scores
from halocline.model.attention.reference import SegmentedAttention, visible

BLOCK_TOKENS = 512
"""Positions gathered at a time: large enough for the products, small against a long context."""


class BlockedAttention(SegmentedAttention):
    """Attention block by block."""

    name = "blocked"

    def attend_segment(
        self, query: Tensor, layer: LayerView, facts: PoolFacts, segment: tuple[int, int], scores: Scores
    ) -> Tensor:
        """Fold one block after the other into an online softmax; see `SegmentedAttention.attend_segment`."""
        return _segment(query, layer, facts, *segment, scores)


def _segment(query: Tensor, layer: LayerView, facts: PoolFacts, segment: int, start: int, scores: Scores) -> Tensor:
    tokens, heads, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    # (kv_heads, group * tokens, k_dim): the rows that share a KV head make one product.
    q = query.to(dtype).mul(scores.scaling).view(tokens, layer.k.shape[2], -1, query.shape[2])
    q = q.permute(1, 2, 0, 3).flatten(1, 2)
    top, total = _empty_softmax(q, scores.sinks, tokens)
    output = q.new_zeros(*q.shape[:2], layer.v.shape[3])
    for k, v, first in _blocks(layer, facts, segment, start, start + tokens):
        s = q @ k.to(dtype).transpose(1, 2)
        if scores.softcap is not None:
            s = torch.tanh(s / scores.softcap) * scores.softcap
        seen = visible(layer.retention, (start, start + tokens), (first, first + k.shape[1])).to(s.device)
        s = s.masked_fill(~seen.repeat(s.shape[1] // tokens, 1), -torch.inf)
        before, top = top, torch.maximum(top, s.amax(dim=-1, keepdim=True))
        # A row that has seen nothing yet: any finite maximum gives 0 where -inf - -inf would give NaN.
        finite = top.masked_fill(top == -torch.inf, 0.0)
        p, fix = torch.exp(s - finite), torch.exp(before - finite)
        total = total * fix + p.sum(dim=-1, keepdim=True)
        output = output * fix + p @ v.to(dtype)
    return (output / total).view(heads, tokens, -1).transpose(0, 1).to(query.dtype)


def _empty_softmax(q: Tensor, sinks: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
    """Return maximum and sum of each row before its first block: of the sink alone, or of nothing."""
    if sinks is None:
        top = q.new_full((*q.shape[:2], 1), -torch.inf)
        return top, torch.zeros_like(top)
    top = sinks.to(q.dtype).view(q.shape[0], -1, 1).repeat_interleave(tokens, dim=1)
    return top, torch.ones_like(top)


def _blocks(
    layer: LayerView, facts: PoolFacts, segment: int, start: int, end: int
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield K and V (kv_heads, positions, dim) of the positions that [start, end) sees, and the first of them."""
    listed = slice(*facts.tables.page_starts[segment : segment + 2].tolist())
    pages = facts.pages[listed].long()
    base, first = int(facts.tables.first_page[segment]), layer.retention.first_needed(start)
    each = max(1, BLOCK_TOKENS // layer.page_tokens)
    for page in range(first // layer.page_tokens - base, len(pages), each):
        at = (base + page) * layer.page_tokens
        low, high = max(first, at), min(end, at + each * layer.page_tokens)
        if low < high:
            k, v = (view[pages[page : page + each]].flatten(0, 1)[low - at : high - at] for view in (layer.k, layer.v))
            yield k.transpose(0, 1), v.transpose(0, 1), low

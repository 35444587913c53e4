"""Attention by the definition, written apart from the backends, and requests whose K and V lie in a small arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from halocline.memory.layout import LayerKV
from halocline.memory.retention import Chunked, Full, Positional, Sliding
from halocline.model.attention import AttentionBackend, AttentionStep, Scores
from halocline.model.attention.facts import layer_views
from testing.conformance import HandScheduler, make_arena, make_layout


@dataclass
class Case:
    """One layer, and segments given as (start, tokens): each is a request whose positions below start were computed."""

    segments: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 16
    v_dim: int = 16
    page_tokens: int = 4
    retention: Positional = field(default_factory=Full)
    softcap: float | None = None
    sinks: bool = False
    kv_dtype: torch.dtype = torch.float64
    query_dtype: torch.dtype | None = None
    seed: int = 0

    def scores(self) -> Scores:
        sinks = torch.linspace(-1.0, 2.0, self.heads, dtype=self.dtype) if self.sinks else None
        return Scores(0.3, self.softcap, sinks)

    @property
    def dtype(self) -> torch.dtype:
        return self.query_dtype or self.kv_dtype

    def inputs(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Q, K and V of every position of each request, rounded to the types that they are kept in."""
        random = torch.Generator().manual_seed(self.seed)

        def draw(length: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(length, heads, dim, generator=random, dtype=torch.float64).to(dtype)

        return [
            (
                draw(start + tokens, self.heads, self.k_dim, self.dtype),
                draw(start + tokens, self.kv_heads, self.k_dim, self.kv_dtype),
                draw(start + tokens, self.kv_heads, self.v_dim, self.kv_dtype),
            )
            for start, tokens in self.segments
        ]


def by_definition(case: Case) -> Tensor:
    """What the step must return, in float64: (T, heads, v_dim)."""
    scores, rows = case.scores(), []
    for (start, tokens), (q, k, v) in zip(case.segments, case.inputs(), strict=True):
        for i in range(start, start + tokens):
            seen = [j for j in range(i + 1) if _sees(case.retention, i, j)]
            rows.append(torch.stack([_one_row(case, scores, q[i, h], k[seen], v[seen], h) for h in range(case.heads)]))
    return torch.stack(rows)


def _sees(retention: Positional, i: int, j: int) -> bool:
    match retention:
        case Sliding(window_tokens):
            return j > i - window_tokens
        case Chunked(chunk_tokens):
            return j // chunk_tokens == i // chunk_tokens
        case _:
            return True


def _one_row(case: Case, scores: Scores, q: Tensor, k: Tensor, v: Tensor, head: int) -> Tensor:
    kv_head = head * case.kv_heads // case.heads
    s = (k[:, kv_head].double() @ q.double()) * scores.scaling
    if scores.softcap is not None:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    weights = s.exp()
    total = weights.sum()
    if scores.sinks is not None:
        total = total + scores.sinks[head].double().exp()
    return (weights / total) @ v[:, kv_head].double()


def over_pages(case: Case, backend: AttentionBackend, device: str = "cpu") -> Tensor:
    """What `backend` returns for the step, after the earlier positions were written in steps of their own."""
    pages = Pages(case, backend, device)
    for i, (start, _) in enumerate(case.segments):
        if start:
            pages.run([(i, 0, start)])
            pages.scheduler.applied(f"r{i}", start)
    return pages.run([(i, start, count) for i, (start, count) in enumerate(case.segments)])


class Pages:
    """One layer's pages in an arena full of NaN, and steps over them with the inputs of a case."""

    def __init__(self, case: Case, backend: AttentionBackend, device: str = "cpu") -> None:
        self.layout = make_layout(
            [LayerKV(0, case.retention, case.kv_heads, case.k_dim, case.v_dim, case.kv_dtype.itemsize)],
            case.page_tokens,
            slabs=sum((start + tokens) // case.page_tokens + 2 for start, tokens in case.segments),
        )
        self.arena = make_arena(self.layout).to(device)
        self.scheduler = HandScheduler(self.layout, case.seed)
        self._backend, self._device = backend, device
        self._view = layer_views(self.arena, self.layout, case.kv_dtype)[0]
        self._inputs = case.inputs()
        scores = case.scores()
        self._scores = scores if scores.sinks is None else replace(scores, sinks=scores.sinks.to(device))

    def run(self, spans: Sequence[tuple[int, int, int]], write_from: Sequence[int] | None = None) -> Tensor:
        """Compute positions [start, start + count) of some segments, given as (segment, start, count).

        What is not to be written because it lies below `write_from` comes as NaN: it must not be looked at.
        """
        plan = self.scheduler.plan(0, [(f"r{i}", range(start + count), start, count) for i, start, count in spans])
        q, k, v = (
            torch.cat([self._inputs[i][kind][start : start + count] for i, start, count in spans]) for kind in range(3)
        )
        if write_from is not None:
            plan = replace(plan, tables=(replace(plan.tables[0], write_from=np.array(write_from, np.int32)),))
            shared = torch.from_numpy(plan.positions < np.repeat(plan.tables[0].write_from, np.diff(plan.query_starts)))
            k[shared] = v[shared] = torch.nan
        # Heads first in memory, as transformers gives them.
        q, k, v = (x.to(self._device).transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
        step = AttentionStep.of(plan, self.layout, self._device)
        return self._backend.attend(q, (k, v), self._view, step, self._scores)

"""The conformance check bites: attention that is broken in one small way gives other tokens, and is found.

Each fault is one that a kernel or a runner could really have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from halocline.memory.retention import Chunked, Sliding
from halocline.model.arena_tensor import PageMover
from halocline.model.attention import BACKENDS, AttentionStep, LayerView, ReferenceAttention, Scores
from testing.models import FAMILIES
from testing.serving import Setting, differences, generated, serve, told_apart

New = tuple[Tensor, Tensor] | None
Fault = Callable[[New, LayerView, AttentionStep, Scores], tuple[New, LayerView, AttentionStep, Scores]]


def _narrow_window(new: New, layer: LayerView, step: AttentionStep, scores: Scores) -> tuple:  # type: ignore[type-arg]
    if isinstance(layer.retention, Sliding):
        layer = replace(layer, retention=Sliding(layer.retention.window_tokens - 1))
    return new, layer, step, scores


def _half_chunk(new: New, layer: LayerView, step: AttentionStep, scores: Scores) -> tuple:  # type: ignore[type-arg]
    if isinstance(layer.retention, Chunked):
        layer = replace(layer, retention=Chunked(layer.retention.chunk_tokens // 2))
    return new, layer, step, scores


def _no_softcap(new: New, layer: LayerView, step: AttentionStep, scores: Scores) -> tuple:  # type: ignore[type-arg]
    return new, layer, step, replace(scores, softcap=None)


def _no_sinks(new: New, layer: LayerView, step: AttentionStep, scores: Scores) -> tuple:  # type: ignore[type-arg]
    return new, layer, step, replace(scores, sinks=None)


def _own_scaling(new: New, layer: LayerView, step: AttentionStep, scores: Scores) -> tuple:  # type: ignore[type-arg]
    return new, layer, step, replace(scores, scaling=layer.k.shape[3] ** -0.5)


def _last_token_not_written(new: New, layer: LayerView, step: AttentionStep, scores: Scores) -> tuple:  # type: ignore[type-arg]
    if new is not None:
        new = tuple(x.clone() for x in new)
        for x in new:
            x[-1] = 0
    return new, layer, step, scores


def _stale_page(new: New, layer: LayerView, step: AttentionStep, scores: Scores) -> tuple:  # type: ignore[type-arg]
    """The first page of the last segment is read from where another page lies."""
    facts = step.pools[layer.pool]
    at = int(facts.page_starts[-2])
    if len(facts.pages) > 1:
        pages = facts.pages.clone()
        pages[at] = pages[at - 1]
        step = replace(step, pools=tuple(replace(facts, pages=pages) if f is facts else f for f in step.pools))
    return new, layer, step, scores


FAULTS: list[tuple[str, Fault]] = [
    ("mistral", _narrow_window),
    ("gemma3", _narrow_window),
    ("llama4", _half_chunk),
    ("gemma2", _no_softcap),
    ("gpt-oss", _no_sinks),
    ("gemma3n", _own_scaling),
    ("llama", _last_token_not_written),
    ("llama", _stale_page),
    ("qwen3", _stale_page),
]


class Faulty(ReferenceAttention):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def attend(self, query: Tensor, new: New, layer: LayerView, step: AttentionStep, scores: Scores) -> Tensor:
        return super().attend(query, *self.fault(new, layer, step, scores))


@pytest.mark.parametrize(("family", "fault"), FAULTS, ids=[f"{family}{fault.__name__}" for family, fault in FAULTS])
def test_a_fault_in_attention_is_found(monkeypatch: pytest.MonkeyPatch, family: str, fault: Fault) -> None:
    dtype = FAMILIES[family].dtype
    monkeypatch.setitem(BACKENDS, "faulty", lambda: Faulty(fault))
    setting = Setting(arena="roomy", cache="off", admission="guaranteed", dtype=dtype)
    assert differences(generated(family, dtype), serve(family, replace(setting, attention="reference")).tokens) == []
    assert told_apart(family, replace(setting, attention="faulty"))


def test_a_fault_in_moves_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageMover, "move", lambda *_: None)
    outcome = serve("gemma3", Setting(page_tokens="2 full, 16 local", arena="small"))
    assert outcome.totals.moves > 0
    assert differences(generated("gemma3", Setting().dtype), outcome.tokens)


def test_a_difference_at_a_tie_is_forgiven_and_any_other_is_not() -> None:
    expected = generated("llama", Setting().dtype)
    tokens = [list(one.tokens) for one in expected]
    assert differences(expected, tokens) == []
    tokens[2][3] += 1
    assert differences(expected, tokens) == [
        f"request 2, token 3: {tokens[2][3]}, but generate says {expected[2].tokens[3]}"
    ]
    leads = tuple(1e-5 if place == 3 else lead for place, lead in enumerate(expected[2].leads))
    assert differences((*expected[:2], replace(expected[2], leads=leads), *expected[3:]), tokens) == []
    tokens[0].pop()
    assert any("of 12 tokens" in told for told in differences(expected, tokens))

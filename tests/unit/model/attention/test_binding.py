"""The registered function keeps nothing: models run side by side, and a model that cannot be served is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

from halocline.errors import InvariantError, ModelError
from halocline.memory.layout import LayerKV
from halocline.memory.retention import Full, Sliding
from halocline.model.attention import ArenaAttention, BlockedAttention, ReferenceAttention
from halocline.model.attention.binding import attend
from testing.conformance import HandScheduler, make_arena, make_layout

WINDOW = 6


@pytest.fixture(scope="module")
def loaded() -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=WINDOW, max_position_embeddings=64,
    )  # fmt: skip
    return MistralForCausalLM(config).double().eval()


@pytest.fixture
def model(loaded: MistralForCausalLM) -> MistralForCausalLM:
    return copy.deepcopy(loaded)


def _attention(
    layers: int = 2, window: int | None = WINDOW, backend: Any = None
) -> tuple[ArenaAttention, HandScheduler]:
    retention = Sliding(window) if window else Full()
    layout = make_layout([LayerKV(i, retention, 1, 8, 8, 8) for i in range(layers)], 4, slabs=20)
    attention = ArenaAttention(make_arena(layout), layout, torch.float64, backend or ReferenceAttention())
    return attention, HandScheduler(layout)


def _forward(
    model: nn.Module, attention: ArenaAttention, scheduler: HandScheduler, tokens: range, start: int = 0
) -> torch.Tensor:
    plan = scheduler.plan(0, [("r", tokens, start, len(tokens) - start)])
    attention.begin(plan)
    ids, positions = (torch.from_numpy(x.copy())[None] for x in (plan.token_ids, plan.positions))
    with torch.no_grad():
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]


def test_logits_equal_the_models_own(model: MistralForCausalLM, loaded: MistralForCausalLM) -> None:
    attention, scheduler = _attention()
    attention.attach(model)
    with torch.no_grad():
        wanted = loaded(torch.arange(15)[None]).logits[0]
    assert torch.allclose(_forward(model, attention, scheduler, range(15)), wanted, atol=1e-12, rtol=0)


def test_two_models_run_side_by_side_with_different_steps(loaded: MistralForCausalLM) -> None:
    models = [copy.deepcopy(loaded), copy.deepcopy(loaded)]
    pairs = [_attention(), _attention(backend=BlockedAttention())]
    for model, (attention, _) in zip(models, pairs, strict=True):
        attention.attach(model)
    plans = [
        scheduler.plan(0, [("r", range(low, low + 9), 0, 9)])
        for low, (_, scheduler) in zip((0, 20), pairs, strict=True)
    ]
    for (attention, _), plan in zip(pairs, plans, strict=True):
        attention.begin(plan)  # both begun before either computes
    for model, plan in zip(models, plans, strict=True):
        ids = torch.from_numpy(plan.token_ids)[None]
        with torch.no_grad():
            got = model(input_ids=ids, position_ids=torch.arange(9)[None], use_cache=False).logits
            assert torch.allclose(got, loaded(ids).logits, atol=1e-12, rtol=0)


def test_a_model_serves_one_runner_at_a_time(model: MistralForCausalLM) -> None:
    first, scheduler = _attention()
    first.attach(model)
    second, scheduler = _attention()
    with pytest.raises(InvariantError, match=r"layers \[0, 1\] of MistralForCausalLM already serve another runner"):
        second.attach(model)
    first.detach()
    second.attach(model)
    assert torch.isfinite(_forward(model, second, scheduler, range(9))).all()


def test_a_forward_without_a_step_is_refused(model: MistralForCausalLM) -> None:
    attention, _ = _attention()
    attention.attach(model)
    with pytest.raises(InvariantError, match="before a runner attached it and began a step"):
        model(torch.arange(5)[None], use_cache=False)


def test_a_forward_of_another_shape_than_the_steps_is_refused(model: MistralForCausalLM) -> None:
    attention, scheduler = _attention()
    attention.attach(model)
    attention.begin(scheduler.plan(0, [("r", range(9), 0, 9)]))
    with pytest.raises(InvariantError, match=r"are made for .*1, 2, 9, 8"):
        model(torch.arange(5)[None], use_cache=False)


@pytest.mark.parametrize("window", [None, WINDOW + 1])
def test_a_pool_with_another_window_than_the_models_is_refused(model: MistralForCausalLM, window: int | None) -> None:
    attention, scheduler = _attention(window=window)
    attention.attach(model)
    with pytest.raises(ModelError, match=f"its window is {WINDOW}, but its pool keeps"):
        _forward(model, attention, scheduler, range(5))


def test_a_layout_with_layers_that_the_model_lacks_is_refused(model: MistralForCausalLM) -> None:
    attention, _ = _attention(layers=3)
    with pytest.raises(ModelError, match=r"layers \[2\]"):
        attention.attach(model)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"attention_mask": torch.zeros(1)}, "builds a mask of its own"),
        ({"scaling": None}, "gives no scaling"),
        ({"position_bias": torch.zeros(1)}, "adds a bias"),
        ({"is_causal": False}, "is not causal"),
    ],
)
def test_a_call_that_we_would_compute_wrongly_is_refused(
    model: MistralForCausalLM, change: dict[str, Any], told: str
) -> None:
    attention, scheduler = _attention()
    attention.attach(model)
    attention.begin(scheduler.plan(0, [("r", range(3), 0, 3)]))
    module = model.model.layers[0].self_attn
    q, kv = torch.zeros(1, 2, 3, 8), torch.zeros(1, 1, 3, 8)
    call = {"attention_mask": None, "scaling": 1.0} | change
    with pytest.raises(ModelError, match=told):
        attend(module, q, kv, kv, **call)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "k_dim", "v_dim"), [(2, 2, 8, 8), (2, 1, 4, 8), (2, 1, 8, 4), (3, 2, 8, 8)]
)
def test_heads_that_the_arena_was_not_made_for_are_refused(
    model: MistralForCausalLM, heads: int, kv_heads: int, k_dim: int, v_dim: int
) -> None:
    attention, scheduler = _attention()
    attention.attach(model)
    attention.begin(scheduler.plan(0, [("r", range(3), 0, 3)]))
    q, k, v = torch.zeros(1, heads, 3, k_dim), torch.zeros(1, kv_heads, 3, k_dim), torch.zeros(1, kv_heads, 3, v_dim)
    with pytest.raises(InvariantError, match="layer 0: q, k, v are"):
        attend(model.model.layers[0].self_attn, q, k, v, None, scaling=1.0)


def test_dropout_and_unknown_words_of_the_family_change_nothing(model: MistralForCausalLM) -> None:
    attention, scheduler = _attention()
    attention.attach(model)
    attention.begin(scheduler.plan(0, [("r", range(3), 0, 3)]))
    module = model.model.layers[0].self_attn
    q, kv = torch.randn(1, 2, 3, 8).double(), torch.randn(1, 1, 3, 8).double()
    plain, weights = attend(module, q, kv, kv, None, scaling=0.5)
    other, _ = attend(module, q, kv, kv, None, scaling=0.5, dropout=0.0, output_attentions=False, position_ids=None)
    assert weights is None
    assert plain.shape == (1, 3, 2, 8)
    assert torch.equal(plain, other)

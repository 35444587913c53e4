"""Models that do not keep their config's promises are found at load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halocline.errors import ModelError
from halocline.memory.retention import Full, Sliding
from halocline.model.layers import kv_layers
from halocline.model.probe import check_model
from testing.models import VOCAB, tiny_model


def check(model: Any, **changes: Any) -> None:
    layers = kv_layers(model.config, 8)
    check_model(model, [dataclasses.replace(layers[0], **changes), *layers[1:]], VOCAB)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"retention": Full()}, "layer 0 attends with a window of 12, its config says full"),
        ({"retention": Sliding(13)}, "layer 0 attends with a window of 12, its config says sliding-13"),
        ({"kv_heads": 1}, r"layer 0 has KV of shape \(2, 16, 16\), its config says \(1, 16, 16\)"),
        ({"v_dim": 8}, r"\(2, 16, 16\), its config says \(2, 16, 8\)"),
        ({"layer": 9}, "its attention is called for layers .0, 1, 2, 3., expected .1, 2, 3, 9. once each"),
    ],
)
def test_a_difference_from_the_config_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check(tiny_model("gemma3"), **changes)


class Wrapped(nn.Module):
    """An attention or embedding module of the model with its inputs or outputs spoiled."""

    def __init__(self, inner: nn.Module, spoil: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.spoil = inner, spoil

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(self.spoil(x), *args, **kwargs)


def test_a_model_that_mixes_neighbouring_tokens_is_refused() -> None:
    model = tiny_model("llama")
    mix = Wrapped(model.model.layers[0].self_attn.k_proj, lambda x: x + x.roll(1, dims=1))
    model.model.layers[0].self_attn.k_proj = mix
    with pytest.raises(ModelError, match="what stands before it in a packed row"):
        check(model)


def test_a_model_that_counts_positions_itself_is_refused() -> None:
    model = tiny_model("llama")
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])
    with pytest.raises(ModelError, match="not on its given position"):
        check(model)


def test_a_model_that_looks_ahead_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[2].self_attn.is_causal = False
    with pytest.raises(ModelError, match="layer 2: it is not causal"):
        check(model)


def test_a_model_that_attends_twice_in_a_layer_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[3] = model.model.layers[2]
    with pytest.raises(ModelError, match=r"called for layers \[0, 1, 2, 2\]"):
        check(model)


def test_logits_of_another_width_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(ModelError, match=r"its logits are \(1, 1, 320\), not \(1, 1, 64\)"):
        check_model(model, kv_layers(model.config, 8), 64)


def test_the_probe_leaves_the_attention_as_it_was_also_when_it_refuses() -> None:
    model = tiny_model("gemma3")
    with pytest.raises(ModelError):
        check(model, kv_heads=1)
    assert model.config._attn_implementation == "eager"

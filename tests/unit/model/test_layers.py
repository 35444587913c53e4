"""What each layer keeps, from the config alone, and compared with what the model really does."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from halocline.errors import ModelError
from halocline.memory.retention import Chunked, Full, Retention, Sliding
from halocline.model.layers import kv_layers
from halocline.model.probe import check_model
from testing.models import FAMILIES, WINDOW, tiny_config, tiny_model

W, C, F = Sliding(WINDOW), Chunked(WINDOW), Full()
EXPECTED: dict[str, list[Retention]] = {
    "llama": [F, F, F, F],
    "mistral": [W, W, W, W],
    "qwen2": [F, F, W, W],
    "qwen3": [F, F, W, W],
    "gemma2": [W, F, W, F],
    "gemma3": [W, W, W, F],
    "cohere2": [W, W, W, F],
    "gpt-oss": [W, F, W, F],
    "phi3": [W, W, W, W],
    "llama4": [C, C, C, F],
    "gemma3n": [W, W, F, W],
    "exaone4": [W, W, W, F],
    "deepseek-v3": [F, F, F, F],
    "gemma4": [W, W, F, W],
    "ministral": [W, F, W, F],
    "olmo3": [W, W, W, F],
    "gpt2": [F, F, F, F],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_the_retentions_of_its_definition(family: str) -> None:
    layers = kv_layers(tiny_config(family), 2)
    assert [layer.retention for layer in layers] == EXPECTED[family]
    assert [layer.layer for layer in layers] == list(range(len(layers)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_promises_what_the_model_does(family: str) -> None:
    model = tiny_model(family)
    check_model(model, kv_layers(model.config, 8), model.config.vocab_size)
    assert model.config._attn_implementation == "eager"


def test_layers_that_reuse_an_earlier_layers_kv_own_none() -> None:
    config = tiny_config("gemma3n")
    assert config.num_hidden_layers == 6
    assert [layer.layer for layer in kv_layers(config, 2)] == [0, 1, 2, 3]


def test_widths_of_keys_and_values_may_differ() -> None:
    layer = kv_layers(tiny_config("deepseek-v3"), 2)[0]
    assert (layer.kv_heads, layer.k_dim, layer.v_dim) == (4, 24, 12)
    assert layer.token_bytes == 4 * (24 + 12) * 2


def test_gemma_3_270m_keeps_what_its_card_says() -> None:
    config = transformers.Gemma3TextConfig(
        hidden_size=640, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1, sliding_window=512
    )
    layers = kv_layers(config, 2)
    assert [layer.layer for layer in layers if layer.retention == Full()] == [5, 11, 17]
    assert {layer.retention for layer in layers} == {Full(), Sliding(512)}
    assert {layer.token_bytes for layer in layers} == {1024}


def test_sizes_may_differ_between_layers() -> None:
    layers = kv_layers(transformers.Gemma4TextConfig(), 2)
    assert {layer.k_dim for layer in layers if isinstance(layer.retention, Sliding)} == {256}
    assert {layer.k_dim for layer in layers if isinstance(layer.retention, Full)} == {512}


def test_a_multimodal_config_is_read_through_its_text_part() -> None:
    config = transformers.Gemma3Config(text_config=tiny_config("gemma3").to_dict())
    assert [layer.retention for layer in kv_layers(config, 2)] == EXPECTED["gemma3"]


@pytest.mark.parametrize(
    ("config_class", "settings", "kind"),
    [
        ("Qwen3NextConfig", {}, "linear_attention"),
        ("FalconH1Config", {}, "hybrid"),
        ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "conv"),
        ("DeepseekV32Config", {}, "indexed_attention"),
    ],
)
def test_layers_that_the_arena_cannot_hold_are_refused_by_name(
    config_class: str, settings: dict[str, Any], kind: str
) -> None:
    config = getattr(transformers, config_class)(**settings)
    with pytest.raises(ModelError, match=f"layers of kind '{kind}'"):
        kv_layers(config, 2)


def test_a_config_without_attention_heads_is_refused() -> None:
    with pytest.raises(ModelError, match="num_attention_heads"):
        kv_layers(transformers.RwkvConfig(num_hidden_layers=2), 2)

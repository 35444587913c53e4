"""Models without weights: counted, and their layers compared with what the config promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from halocline.errors import ModelError
from halocline.memory.retention import Full
from halocline.model.layers import kv_layers
from halocline.model.weightless import examine
from testing.models import tiny_config, tiny_model


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "deepseek-v3", "gemma4"])
def test_what_is_counted_and_checked_without_weights_is_what_the_model_has(family: str) -> None:
    config = tiny_config(family)
    found = examine(config, kv_layers(config, 2))
    assert found.parameters == sum(parameter.numel() for parameter in tiny_model(family).parameters())
    assert found.is_checked


def test_parameters_that_are_shared_count_once() -> None:
    tied, apart = (tiny_config("llama", tie_word_embeddings=tied) for tied in (True, False))
    counts = [examine(config, kv_layers(config, 2)).parameters for config in (tied, apart)]
    assert None not in counts
    assert counts[1] - counts[0] == tied.vocab_size * tied.hidden_size  # type: ignore[operator]


def test_layers_that_the_model_does_not_keep_are_refused() -> None:
    config = tiny_config("gemma3")
    layers = kv_layers(config, 2)
    with pytest.raises(ModelError, match="layer 0 attends with a window of 12, its config says full"):
        examine(config, [replace(layers[0], retention=Full()), *layers[1:]])


def test_a_model_that_cannot_be_built_is_neither_counted_nor_checked() -> None:
    config = transformers.MinistralConfig()  # its rotary part needs what the class does not give by default
    found = examine(config, kv_layers(config, 2))
    assert (found.parameters, found.is_checked) == (None, False)


def test_heads_that_only_the_models_code_doubles_are_doubled() -> None:
    config = CONFIG_MAPPING["mimo_v2_flash"]()
    layers = kv_layers(config, 2)
    assert {layer.kv_heads for layer in layers if layer.retention == Full()} == {config.num_key_value_heads} == {4}
    assert {layer.kv_heads for layer in layers if layer.retention != Full()} == {8}
    assert examine(config, layers).is_checked


@pytest.mark.slow
def test_no_default_configuration_promises_other_shapes_than_its_model_has() -> None:
    wrong = []
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = CONFIG_MAPPING[kind]()
            layers = kv_layers(config, 2)
        except Exception:  # not served, or its class needs more than its defaults
            continue
        try:
            examine(config, layers)
        except ModelError as error:
            if "has KV of shape" in str(error) or "attends with a window" in str(error):
                wrong.append(f"{kind}: {error}")
    assert not wrong

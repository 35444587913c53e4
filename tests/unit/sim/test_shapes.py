"""The table of shapes: its figures against hand-made ones, transformers' own defaults and the public list of shapes."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import transformers

from halocline.errors import ConfigError
from halocline.memory.layout import LayerKV
from halocline.memory.retention import Chunked, Full, Sliding, State, describe
from halocline.model.builtin import is_installed
from halocline.model.configs import load_config
from halocline.model.layers import kv_layers
from halocline.model.sources import resolve
from halocline.sim.shapes import Shape, shape_named, shapes
from testing.layouts import MODEL_LAYERS

SHARED = Path(os.environ.get("HALOCLINE_DATA", "/nowhere")) / "model_shapes.json"


def kinds(layers: tuple[LayerKV, ...]) -> Counter[tuple[str, int, int, int]]:
    """Return how many layers of each kind there are: what memory depends on."""
    return Counter(
        (describe(layer.retention), layer.token_bytes, layer.state_bytes, layer.dtype_bytes) for layer in layers
    )


@pytest.mark.parametrize("name", MODEL_LAYERS)
def test_a_shape_is_the_one_made_by_hand(name: str) -> None:
    assert shape_named(name).layers == MODEL_LAYERS[name]


@pytest.mark.skipif(not SHARED.exists(), reason="HALOCLINE_DATA has no model_shapes.json")
def test_the_table_holds_the_public_list_of_shapes() -> None:
    rows = json.loads(SHARED.read_text(encoding="utf-8"))["shapes"]
    for row in rows:
        layers = shape_named(row["name"]).layers
        for word, kind in (("full", Full), ("sliding", Sliding), ("chunked", Chunked), ("state", State)):
            own = [layer for layer in layers if isinstance(layer.retention, kind)]
            given = row.get(word, {"layers": 0})
            assert len(own) == given["layers"]
            if "bytes_per_request" in given:
                assert sum(layer.state_bytes for layer in own) == given["bytes_per_request"]
            elif own:
                assert {layer.token_bytes for layer in own} == {2 * given["kv_heads"] * given["head_dim"] * 2}
                reach = given.get("window") or given.get("chunk")
                assert {describe(layer.retention) for layer in own} == {word if reach is None else f"{word}-{reach}"}
    assert len(rows) == 13


@pytest.mark.parametrize(
    ("name", "config"),
    [("gpt-oss-120b", transformers.GptOssConfig()), ("llama-4-scout", transformers.Llama4TextConfig())],
)
def test_a_shape_is_the_one_that_transformers_has_by_default(name: str, config: transformers.PreTrainedConfig) -> None:
    assert kinds(shape_named(name).layers) == kinds(kv_layers(config, 2))


@pytest.mark.parametrize(("builtin", "name"), [("gemma3-270m", "gemma-3-270m"), ("smollm2-135m", "smollm2-135m")])
def test_the_shape_of_a_builtin_model_is_that_of_its_weights(builtin: str, name: str) -> None:
    if not is_installed(builtin):
        pytest.skip(f"{builtin} is not installed")
    config = load_config(resolve(builtin, quiet=True))
    assert kinds(shape_named(name).layers) == kinds(kv_layers(config, 2))
    assert shape_named(name).max_model_len == config.max_position_embeddings


def test_every_shape_has_a_source_and_says_when_it_is_only_alike() -> None:
    for shape in shapes():
        assert len(shape.source) > 20
        assert shape.name.endswith("-like") == ("not checked against a published configuration" in shape.source)
        assert (
            shape.parameters is None or shape.active_parameters is None or shape.active_parameters <= shape.parameters
        )
    names = [shape.name for shape in shapes()]
    assert len(set(names)) == len(names) >= 14


def test_gemma_3_27b_keeps_81920_bytes_of_each_position_for_good() -> None:
    layers = shape_named("gemma-3-27b").layers
    full = sum(layer.token_bytes for layer in layers if layer.retention == Full())
    assert full == 10 * 16 * (128 + 128) * 2 == 81_920
    assert sum(layer.token_bytes for layer in layers) - full == 52 * 8_192 == 425_984


def test_a_state_keeps_its_own_types_whatever_k_and_v_have() -> None:
    narrow = shape_named("qwen3-next-80b")
    wide = narrow.of_dtype(4)
    assert {layer.token_bytes for layer in wide.layers} == {2 * layer.token_bytes for layer in narrow.layers}
    assert {layer.state_bytes for layer in wide.layers} == {0, 77_266_944 // 36}
    # 32 heads x 128 x 128 in fp32, and 3 positions x 8,192 channels of convolution in bf16.
    assert 77_266_944 // 36 == 32 * 128 * 128 * 4 + 3 * 8_192 * 2


def test_a_drafts_layers_stand_beside_the_targets_own() -> None:
    both = shape_named("gpt-oss-120b").with_draft(shape_named("gpt-oss-20b"))
    assert Counter(layer.model for layer in both.layers) == {"target": 36, "draft": 24}
    assert both.name == "gpt-oss-120b + gpt-oss-20b"
    assert isinstance(both, Shape)


def test_an_unknown_name_is_answered_with_the_nearest_and_all_others() -> None:
    with pytest.raises(
        ConfigError, match=r"no shape is called 'gema-3-27b'; did you mean 'gemma-3-27b'\?.*gpt-oss-20b"
    ):
        shape_named("gema-3-27b")

"""From a name to what a model keeps: names of the table, files, folders and configuration classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from halocline.config import Config
from halocline.errors import ModelError
from halocline.model.layers import kv_layers
from halocline.model.sources import resolve as find
from halocline.plan import resolve, resolve_shape, shapes
from testing.gguf_files import write_tiny_gguf
from testing.models import save_tiny, tiny_config, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), "gemma3")


def test_every_name_of_the_table_is_a_model() -> None:
    for shape in shapes():
        assert resolve_shape(shape.name) == shape
    assert resolve_shape("gemma3-270m").layers == resolve_shape("gemma-3-270m").layers


def test_a_folder_and_a_config_alone_are_read_as_the_engine_reads_them(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "any name.json"
    shutil.copy(folder / "config.json", own)
    config = tiny_config("gemma3")
    for name in (folder, folder / "config.json", own):
        found = resolve(str(name), Config(dtype="float32"))
        assert found.shape.layers == kv_layers(config, 4)
        assert found.shape.parameters == sum(parameter.numel() for parameter in tiny_model("gemma3").parameters())
        assert (found.shape.max_model_len, found.kv_dtype) == (1024, "float32")
        assert found.shape.source == f"the configuration of {name} (gemma3_text)"


@pytest.mark.parametrize(
    ("settings", "word"),
    [({}, "float16"), ({"dtype": "float32"}, "float32"), ({"dtype": "float32", "kv_dtype": "bfloat16"}, "bfloat16")],
)
def test_k_and_v_have_the_models_type_or_the_one_asked_for(
    folder: Path, tmp_path: Path, settings: dict[str, str], word: str
) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "dtype": "float16"}))
    found = resolve(str(tmp_path), Config(**settings))  # type: ignore[arg-type]
    assert found.kv_dtype == word
    assert {layer.dtype_bytes for layer in found.shape.layers} == {getattr(torch, word).itemsize}


def test_a_type_that_this_machines_server_would_change_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halocline.model.dtypes._cpu_computes", lambda dtype: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "dtype": "bfloat16"}))
    found = resolve(str(tmp_path))
    assert found.kv_dtype == "bfloat16"
    assert found.notes == ("on this machine a server would hold K and V in float32, which --device cpu plans",)
    assert resolve(str(tmp_path), Config(device="cpu")).kv_dtype == "float32"


def test_a_gguf_file_is_planned_without_unpacking_it(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    found = resolve(str(path))
    assert not own_cache.exists()
    # What the engine makes of it: converted, and its config read from there.
    converted = transformers.AutoConfig.from_pretrained(find(str(path), quiet=True).folder)
    assert found.shape.layers == kv_layers(converted, getattr(torch, found.kv_dtype).itemsize)
    assert str(converted.dtype).endswith(found.kv_dtype)
    assert found.shape.max_model_len == converted.max_position_embeddings


def test_defaults_of_a_configuration_class_are_a_model() -> None:
    found = resolve("transformers:gpt_oss")
    assert (found.kv_dtype, found.shape.parameters) == ("bfloat16", 116_829_156_672)
    assert found.shape.parameters == resolve_shape("gpt-oss-120b").parameters
    assert found.shape.source == f"transformers {transformers.__version__}, defaults of GptOssConfig"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gema3-27b", r"unknown model 'gema3-27b'.*did you mean 'gemma-3-27b'.*transformers:TYPE"),
        ("GPT-OSS-20B", r"did you mean 'gpt-oss-20b'"),
        ("transformers:gptoss", r"no causal language model of type 'gptoss'; did you mean 'transformers:gpt_oss'\?"),
        ("transformers:qwen3_next", r"36 of 48 layers of kind 'linear_attention'.*not served yet"),
        ("transformers:gemma4_assistant", r"configuration class of 'gemma4_assistant' has no usable defaults"),
        ("transformers:bart", r"'bart' is an encoder-decoder"),
        ("./nowhere/config.json", r"there is no file or folder"),
    ],
)
def test_what_is_no_model_is_answered_with_what_there_is(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        resolve(name)


def test_a_config_that_is_none_is_refused(tmp_path: Path) -> None:
    for text in ("[1]", "{", '{"model_type": "nothing-known"}'):
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(ModelError):
            resolve(str(path))
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(str(tmp_path.parent))


HOSTILE = {
    "no name": ({"model_type": []}, r"has model_type \[\]; it must be a name"),
    "a name of objects": ({"model_type": {}}, r"has model_type \{\}; it must be a name"),
    "a negative type": ({"dtype": -1}, "dtype is -1; it must be auto or one of bfloat16, float16"),
    "half a type": ({"dtype": 1.5}, "dtype is 1.5; it must be auto"),
    "a true type": ({"dtype": True}, "dtype is True; it must be auto"),
    "whole numbers for K and V": ({"dtype": "int8"}, "dtype is torch.int8; it must be auto"),
    "an empty text": ({"text_config": {}}, r"'gpt2' has a text_config that is none: \{\}"),
    "a text": ({"text_config": "x"}, "has a text_config that is none: 'x'; leave it out"),
    "a number for a text": ({"text_config": 5}, "has a text_config that is none: 5"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be a whole number of at least 1"),
    "no heads of bert": ({"model_type": "bert", "num_attention_heads": 0}, "num_attention_heads is 0"),
    "half a head": ({"num_attention_heads": 1.5}, "num_attention_heads is 1.5"),
    "more heads than width": ({"num_attention_heads": 10**9}, "head_dim is 0"),
    "negative KV heads": ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
    "a wordy window": ({"sliding_window": "x"}, "the size in tokens of sliding_attention layers is 'x'"),
    "no window": ({"sliding_window": float("nan")}, "the size in tokens of sliding_attention layers is nan"),
    "negative layers": ({"num_hidden_layers": -1}, "does not describe its attention as others do"),
    "layers beyond number": ({"num_hidden_layers": 10**30}, "does not describe its attention as others do"),
    "a wordy limit": ({"max_position_embeddings": "x"}, "max_position_embeddings is 'x'; it must be a whole number"),
    "half a character": ({"model_type": "\ud800"}, "cannot read .* as JSON"),
}
"""Values that the configuration class of gpt2, which checks little, lets through."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_config_that_lies_is_refused_by_the_value_that_does(name: str, tmp_path: Path) -> None:
    changes, words = HOSTILE[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", **changes}))
    with pytest.raises(ModelError, match=words) as caught:
        resolve(str(path))
    str(caught.value).encode()


def test_a_config_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json' as JSON: maximum recursion depth"):
        resolve(str(path))


def test_a_config_whose_model_keeps_something_else_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halocline.model.layers._TWICE_THE_HEADS", {"gemma3_text"})
    with pytest.raises(ModelError, match=r"layer 0 has KV of shape \(2, 16, 16\), its config says \(4, 16, 16\)"):
        resolve(str(folder))

"""From a name to a loaded model, and every way in which that can fail, each in one sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from halocline.errors import ModelError
from halocline.model.configs import load_config, load_tokenizer
from halocline.model.dtypes import choose_device, choose_dtype, choose_kv_dtype
from halocline.model.layers import kv_layers
from halocline.model.loading import load
from halocline.model.sources import resolve
from testing.models import EOS, VOCAB, reference_tokens, save_tiny, tiny_config, tiny_model, tiny_prompt, tiny_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOCLINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny", "gemma3")


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**config, **fields}.items() if v is not None}))


# ---- what works --------------------------------------------------------------------------------------------------


def test_a_folder_loads_as_the_model_that_was_saved(folder: Path) -> None:
    source = resolve(str(folder))
    loaded = load(source, device="cpu")
    assert (source.name, source.kind, source.folder) == ("tiny", "folder", folder)
    assert (loaded.dtype, loaded.device.type) == (torch.float64, "cpu")
    assert (loaded.eos_token_ids, loaded.vocab_size, loaded.max_positions) == ((EOS,), VOCAB, 1024)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    prompt = tiny_prompt(20)
    assert reference_tokens(loaded.model, prompt, 8) == reference_tokens(tiny_model("gemma3"), prompt, 8)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_the_weights_come_in_the_type_that_was_asked_for(folder: Path, name: str) -> None:
    loaded = load(resolve(str(folder)), dtype=name)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {getattr(torch, name)}


def test_every_end_of_sequence_token_is_known(folder: Path) -> None:
    generation = {"eos_token_id": [EOS, 107], "bos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    edit_config(folder, eos_token_id=5)
    assert load(resolve(str(folder))).eos_token_ids == (EOS, 5, 107)


def test_a_config_and_a_tokenizer_need_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    source = resolve(str(folder), weights=False)
    assert load_config(source).model_type == "gemma3_text"
    assert load_tokenizer(source).encode("the quick") == tiny_tokenizer().encode("the quick")


def test_sharded_weights_load(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    assert load(resolve(str(tmp_path / "shards"))).vocab_size == VOCAB


# ---- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gema3-270m", "unknown model 'gema3-270m'.*did you mean 'gemma3-270m'"),
        ("./nowhere", "there is no file or folder './nowhere'"),
        ("nowhere/model.gguf", "there is no file or folder 'nowhere/model.gguf'"),
        ("/nowhere/at/all", "there is no file or folder '/nowhere/at/all'"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_was_looked_for(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(name)


@pytest.mark.parametrize("content", [b"PK\x03\x04 a zip", b"", b"GGU"])
def test_a_file_of_unknown_format_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="is a file of unknown format"):
        resolve(str(path))


def test_a_folder_of_gguf_files_says_to_name_one(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"holds GGUF files; name one of them: a\.gguf"):
        resolve(str(tmp_path))


# ---- what cannot be served ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "never_heard_of"}, "never_heard_of"),
        ({"model_type": "vit"}, "is of type 'vit', which is not a causal language model"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "mamba", "layer_types": None}, "4 of 4 layers of kind 'linear_attention': recurrent layers"),
        ({"model_type": None}, "model_type"),
        ({"num_hidden_layers": "four"}, "cannot use the config"),
        ({"layer_types": ["full_attention"]}, "cannot use the config"),
    ],
)
def test_configs_that_cannot_be_served_are_refused(folder: Path, fields: dict[str, Any], message: str) -> None:
    edit_config(folder, **fields)
    with pytest.raises(ModelError, match=message):
        load(resolve(str(folder)))


def test_a_model_that_looks_both_ways_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="BertLMHeadModel cannot be served from pages: layer 0: it is not causal"):
        load(resolve(str(tmp_path)))


def test_an_architecture_without_the_attention_interface_is_refused(tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="does not use the attention interface"):
        load(resolve(str(tmp_path)))


def test_missing_weights_are_not_replaced_by_random_ones(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors, the first is 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(resolve(str(folder)))


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    edit_config(folder, intermediate_size=100)
    with pytest.raises(ModelError, match="cannot load the weights of 'tiny'"):
        load(resolve(str(folder)))


# ---- code in model folders ---------------------------------------------------------------------------------------

REMOTE = """
from pathlib import Path
Path(__file__).with_name("ran").write_text("")
from transformers import PretrainedConfig
class OwnConfig(PretrainedConfig):
    model_type = "own"
"""


@pytest.fixture
def folder_with_code(folder: Path) -> Path:
    (folder / "own.py").write_text(REMOTE)
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    return folder


def test_a_folders_own_code_is_not_run(folder_with_code: Path) -> None:
    with pytest.raises(ModelError, match=r"brings Python code of its own.*--trust-remote-code"):
        load(resolve(str(folder_with_code)))
    assert not list(folder_with_code.rglob("ran"))


def test_a_tokenizers_own_code_is_not_run(folder: Path) -> None:
    (folder / "own.py").write_text(REMOTE)
    settings = {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    with pytest.raises(ModelError, match="cannot read the tokenizer of 'tiny'"):
        load_tokenizer(resolve(str(folder)))
    assert not list(folder.rglob("ran"))


OWN_MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_folders_own_code_is_run_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tmp_path / "own-llama", "llama")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", list(sys.path))
    (folder / "own.py").write_text(OWN_MODEL)
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_config(folder, model_type="own", architectures=["OwnForCausalLM"], auto_map=names)
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load_config(resolve(str(folder)))
    loaded = load(resolve(str(folder), trust_remote_code=True))
    assert type(loaded.model).__name__ == "OwnForCausalLM"
    assert [layer.layer for layer in kv_layers(loaded.config, 4)] == list(range(loaded.config.num_hidden_layers))


# ---- tokenizers --------------------------------------------------------------------------------------------------


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no tokenizer: .* lacks tokenizer\.json"):
        load_tokenizer(resolve(str(tmp_path)))


@pytest.mark.parametrize("text", ["", "{}", "not json"])
def test_a_damaged_tokenizer_is_refused(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match="cannot read the tokenizer of 'tiny'"):
        load_tokenizer(resolve(str(folder)))


# ---- types and devices -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "has_bf16", "expected"),
    [
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, torch.float32),
        ("float32", False, torch.float32),
        ("float64", False, torch.float64),
    ],
)
def test_auto_takes_the_configs_type_unless_the_cpu_would_emulate_it(
    own: str, has_bf16: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    config = tiny_config("llama", dtype=own)
    assert choose_dtype("auto", config, torch.device("cpu")) == expected
    assert choose_dtype("auto", config, torch.device("cuda")) == getattr(torch, own)


def test_a_config_without_a_type_means_float32() -> None:
    assert choose_dtype("auto", tiny_config("llama"), torch.device("cpu")) == torch.float32


def test_kv_has_the_weights_type_unless_told_otherwise() -> None:
    assert choose_kv_dtype("auto", torch.float16) == torch.float16
    assert choose_kv_dtype("float32", torch.float16) == torch.float32


@pytest.mark.parametrize("name", ["int8", "bf16", ""])
def test_an_unknown_type_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="it must be auto or one of bfloat16"):
        choose_kv_dtype(name, torch.float32)


@pytest.mark.parametrize("name", ["gpu", "cuda:999", "tpu:0"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="device"):
        choose_device(name)

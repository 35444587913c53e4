"""Model folders: what is wrong with one is said in a sentence, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halocline.errors import ModelError
from halocline.model.folder import check_folder, check_safetensors
from testing.models import save_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny", "llama")


def test_a_whole_folder_passes(folder: Path) -> None:
    check_folder(folder)


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json; a model folder holds"):
        check_folder(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00\xff"])
def test_a_config_that_is_no_json_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        check_folder(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no weights: neither model\.safetensors nor"):
        check_folder(folder)


def test_pickled_weights_are_refused_and_not_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        check_folder(folder)


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1])
def test_a_cut_off_file_is_refused_wherever_the_cut_is(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="fetch"):
        check_folder(folder)


@pytest.mark.parametrize("header", [b"{}}", b"[1, 2]", b'{"a": 1}', b'{"a": {"data_offsets": 3}}', b"\xff\xfe\xfd"])
def test_a_damaged_header_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="damaged"):
        check_safetensors(path)


def test_a_header_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    header = b"[" * 100_000
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="is damaged"):
        check_safetensors(tmp_path / "model.safetensors")


def test_a_header_of_absurd_size_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"x" * 100)
    with pytest.raises(ModelError, match="cut off"):
        check_safetensors(path)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files, the first is 'model-00002-of-00002\.s"):
        check_folder(folder)


def test_an_index_without_map_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="no usable weight_map"):
        check_folder(folder)

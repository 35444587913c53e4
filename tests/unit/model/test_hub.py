"""Hugging Face ids, offline: what lies in HF_HOME is found there, and what does not is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halocline.model.hub import looks_like_id
from testing.models import save_tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# In a process of its own: huggingface_hub reads its environment when it is imported.
SCRIPT = """
import json, sys
from halocline.errors import ModelError
from halocline.model.configs import load_tokenizer
from halocline.model.loading import load
from halocline.model.sources import resolve
answers = []
for name in sys.argv[1:]:
    try:
        source = resolve(name)
        loaded = load(source)
        answers.append([source.name, source.kind, str(source.folder), len(load_tokenizer(source)), loaded.vocab_size])
    except ModelError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


def put_in_hub_cache(home: Path, name: str) -> Path:
    """Lay out a tiny model as huggingface_hub keeps a downloaded one."""
    repo = home / "hub" / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    snapshot = save_tiny(repo / "snapshots" / COMMIT, "llama")
    (repo / "blobs").mkdir()
    for path in list(snapshot.iterdir()):
        blob = repo / "blobs" / path.name
        path.rename(blob)
        path.symlink_to(Path("../../blobs") / path.name)
    return snapshot


def test_offline_models_are_found_in_the_hubs_cache_or_named_as_missing(tmp_path: Path) -> None:
    snapshot = put_in_hub_cache(tmp_path, "water/tiny")
    (put_in_hub_cache(tmp_path, "water/pickled") / "model.safetensors").unlink()
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "water/tiny", "water/missing", "water/pickled"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    tiny, missing, pickled = json.loads(done.stdout)
    assert tiny == ["water/tiny", "hub", str(snapshot), 312, 320]
    assert missing.startswith("'water/missing' is not in the Hugging Face cache")
    assert "hf download water/missing" in missing
    assert pickled.startswith("'water/pickled' has no safetensors weights")


@pytest.mark.parametrize("name", ["google/gemma-3-270m", "a/b", "Qwen/Qwen2.5-0.5B_x"])
def test_ids_look_like_ids(name: str) -> None:
    assert looks_like_id(name)


@pytest.mark.parametrize("name", ["gemma3-270m", "./a/b", "/a/b", "a/b/c", "a/", "~/x", "../x"])
def test_paths_and_plain_names_do_not(name: str) -> None:
    assert not looks_like_id(name)

"""The cache on disk: built once, whole or not at all."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from halocline.errors import ModelError
from halocline.model.store import cache_root, cached_folder


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALOCLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_two(folder: Path) -> None:
    (folder / "a").write_text("1")
    (folder / "b").write_text("2")


def test_an_entry_is_built_once(root: Path) -> None:
    folder = cached_folder("tiny", write_two)
    assert folder == root / "tiny"
    assert cached_folder("tiny", lambda _: pytest.fail("built twice")) == folder
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]


def test_a_failed_build_leaves_nothing_and_the_next_one_starts_afresh(root: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        cached_folder("tiny", fail)
    assert [path.name for path in root.iterdir() if path.is_dir()] == []
    assert not (cached_folder("tiny", write_two) / "half").exists()


BUILDER = """
import sys, time
from pathlib import Path
from halocline.model.store import cached_folder
def build(folder):
    (folder / "half").write_text("")
    print("building", flush=True)
    time.sleep(float(sys.argv[1]))
    (folder / "half").rename(folder / "whole")
print("done", cached_folder("tiny", build).name, flush=True)
"""


def start_builder(seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(seconds)], stdout=subprocess.PIPE, text=True)


def test_a_killed_build_is_not_taken_for_a_finished_one(root: Path) -> None:
    with start_builder(60) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        process.kill()
    assert not (root / "tiny").exists()
    folder = cached_folder("tiny", write_two)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]
    assert [path.name for path in root.iterdir() if path.is_dir()] == ["tiny"]


def test_of_two_processes_one_builds_and_the_other_waits_for_it() -> None:
    with start_builder(0.5) as first, start_builder(0.5) as second:
        outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert sorted(outputs) == ["building\ndone tiny\n", "done tiny\n"]


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HALOCLINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set HALOCLINE_CACHE to a folder with room"):
        cached_folder("tiny", write_two)


def test_the_default_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALOCLINE_CACHE")
    assert cache_root() == Path.home() / ".cache" / "halocline"


def test_a_finished_entry_needs_no_lock(root: Path) -> None:
    cached_folder("tiny", write_two)
    for path in root.glob(".*"):
        path.unlink()
    started = time.monotonic()
    cached_folder("tiny", write_two)
    assert time.monotonic() - started < 1
    assert not list(root.glob(".*.lock"))

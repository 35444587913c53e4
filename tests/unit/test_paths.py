"""A text that a person typed is tried as a path, whatever it looks like."""

from __future__ import annotations

import os
from errno import EACCES
from pathlib import Path

import pytest

from halocline.config import Config
from halocline.errors import ConfigError, HaloclineError
from halocline.model.sources import resolve as find
from halocline.paths import existing_path
from halocline.plan import read_rows, resolve
from halocline.sim.generators import workload_named

LONG = "x" * 300
"""No file can be called so: names have at most 255 bytes."""


@pytest.mark.parametrize("text", [LONG, f"./{LONG}/config.json", "y/" * 3000, "a\0b", "~nobody-is-called-so/x"])
def test_what_can_be_no_path_names_nothing(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert existing_path(text) is None


def test_files_and_folders_are_found_and_what_leads_nowhere_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "dangling").symlink_to("absent")
    assert existing_path(str(file)) == existing_path("~/file") == file
    assert existing_path(str(tmp_path)) == tmp_path
    assert [existing_path(str(tmp_path / name)) for name in ("circle", "dangling", "file/below")] == [None] * 3


def test_what_may_not_be_read_is_not_said_to_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(EACCES, os.strerror(EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(ConfigError, match=r"cannot read .*: permission denied; give this user the right"):
            existing_path(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", denied)
        with pytest.raises(ConfigError, match=r"cannot look at locked/file: Permission denied; give this user"):
            existing_path("locked/file")


def test_a_list_of_lengths_may_be_longer_than_a_files_name() -> None:
    text = ",".join(f"{1000 + number}+256" for number in range(40))
    assert len(text) > 255
    assert len(read_rows(text)) == 41, "each, and their mix"


@pytest.mark.parametrize("name", [LONG, f"./{LONG}/config.json", f"{LONG}.gguf", f"./{LONG}.json", "~nobody-so/x"])
def test_a_model_of_a_long_name_is_answered_like_any_that_is_not_there(name: str) -> None:
    for resolving in (lambda: resolve(name, Config()), lambda: find(name)):
        with pytest.raises(HaloclineError, match=r"unknown model|there is no file or folder"):
            resolving()


@pytest.mark.parametrize("text", [LONG, f"flip:60:azure-like:requests=3|{LONG}", "~nobody-is-called-so/trace.jsonl"])
def test_a_workload_of_a_long_name_is_answered_like_any_that_is_not_there(text: str) -> None:
    with pytest.raises(ConfigError, match="is no file and no generator"):
        workload_named(text)

"""The compiled core is used only where it was asked for and made of exactly these sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halocline import compiled


@pytest.fixture(autouse=True)
def finders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if not isinstance(one, compiled.CoreFinder)])


def build_of(folder: Path, made_of: str) -> None:
    modules = {"halocline.units": "units.so"}
    (folder / compiled.MANIFEST).write_text(json.dumps({"hash": made_of, "modules": modules}))


def test_nothing_is_used_unless_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BUILD", tmp_path)
    monkeypatch.delenv("HALOCLINE_CORE", raising=False)
    build_of(tmp_path, compiled.sources_hash())
    compiled.use_if_wanted()
    assert compiled.core() == "python"


def test_a_build_of_these_sources_is_found_first_and_only_its_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BUILD", tmp_path)
    monkeypatch.setenv("HALOCLINE_CORE", "compiled")
    build_of(tmp_path, compiled.sources_hash())
    compiled.use_if_wanted()
    assert compiled.core() == "compiled"
    finder = sys.meta_path[0]
    spec = finder.find_spec("halocline.units", None)
    assert spec is not None
    assert spec.origin == str(tmp_path / "units.so")
    assert finder.find_spec("halocline.config", None) is None


@pytest.mark.parametrize("manifest", [None, "no json", "[]", "{}", '{"hash": "0", "modules": {}}'])
def test_any_other_build_is_refused_with_a_warning(
    manifest: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BUILD", tmp_path)
    monkeypatch.setenv("HALOCLINE_CORE", "compiled")
    if manifest is not None:
        (tmp_path / compiled.MANIFEST).write_text(manifest)
    with pytest.warns(RuntimeWarning, match="make compiled"):
        compiled.use_if_wanted()
    assert compiled.core() == "python"


@pytest.mark.parametrize("edited", ["memory/arena.py", "schedule/scheduler.py", "memory/demand.py", "params.py"])
def test_an_edited_source_changes_the_hash(edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*compiled.core_sources(), *compiled.INTERPRETED, "params.py"]
    for name in names:
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes((compiled.PACKAGE / name).read_bytes())
    monkeypatch.setattr(compiled, "PACKAGE", tmp_path)
    before = compiled.sources_hash()
    (tmp_path / edited).write_text((tmp_path / edited).read_text() + "\n")
    assert compiled.sources_hash() != before


def test_what_is_compiled_is_named_and_the_class_that_mypyc_would_compare_by_identity_is_not() -> None:
    names = compiled.core_sources()
    assert {"errors.py", "step.py", "units.py", "memory/arena.py", "cache/tree.py", "schedule/fill.py"} <= set(names)
    assert "memory/demand.py" not in names
    assert all((compiled.PACKAGE / name).is_file() for name in names)


def test_a_process_without_the_variable_runs_python() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HALOCLINE_CORE"}
    code = "import halocline.memory.arena as a, halocline.compiled as c; print(c.core(), a.__file__)"
    told = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert told.stdout.split()[0] == "python"
    assert told.stdout.strip().endswith("arena.py")


@pytest.mark.skipif(
    not (compiled.BUILD / compiled.MANIFEST).is_file()
    or json.loads((compiled.BUILD / compiled.MANIFEST).read_text())["hash"] != compiled.sources_hash(),
    reason="make compiled has not been run for these sources",
)
def test_both_cores_decide_alike(tmp_path: Path) -> None:
    digests = set()
    for wanted in ("python", "compiled"):
        file = tmp_path / f"{wanted}.json"
        command = f"replay mooncake-like:requests=100 --model gemma-3-27b --kv-bytes 20GiB --saturated --json {file}"
        environment = os.environ | {"HALOCLINE_CORE": wanted}
        subprocess.run([sys.executable, "-m", "halocline", *command.split()], env=environment, check=True)
        record = json.loads(file.read_text())
        assert record["setup"]["core"] == wanted
        digests.add(record["outcomes"][0]["digest"])
    assert len(digests) == 1

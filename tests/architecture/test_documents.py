"""Documents say what is so: links lead somewhere, made pages are current, every module and law has its words."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import halocline
from testing.source import PACKAGE, PROJECT, SOURCES, module_name

PAGES = [*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")]
LAWS = range(1, 14)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_every_module_opens_with_what_it_owns(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{module_name(path)} has no docstring"
    assert len(docstring) > 20


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"], ids=module_name)
def test_a_package_is_in_the_readmes_file_tree(path: Path) -> None:
    folder = path.parent.name
    assert f"{folder}/" in (PROJECT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:src|tests|docs|examples|benchmarks|scripts)/[\w/.-]+)`", text):
        assert (PROJECT / name).exists(), f"{page.name} names {name}, which is not there"


def test_made_pages_are_current() -> None:
    made = runpy.run_path(str(PROJECT / "scripts" / "reference.py"))["PAGES"]
    stale = [name for name, make in made.items() if (PROJECT / "docs" / name).read_text(encoding="utf-8") != make()]
    assert not stale, f"run `python scripts/reference.py`: {stale} differ from the program"


@pytest.mark.parametrize("law", LAWS)
def test_a_law_is_held_by_a_test_and_listed_in_the_readme(law: int) -> None:
    word = re.compile(rf"\bL{law}\b")
    held = [
        path
        for path in (PROJECT / "tests").rglob("test_*.py")
        if path != Path(__file__) and word.search(path.read_text(encoding="utf-8"))
    ]
    assert held, f"no test names L{law}"
    assert word.search((PROJECT / "README.md").read_text(encoding="utf-8")), f"the README does not list L{law}"


def test_public_names_are_few_and_exist() -> None:
    assert sorted(halocline.__all__) == [
        "AsyncLLM",
        "CompletionOutput",
        "LLM",
        "RequestOutput",
        "SamplingParams",
        "__version__",
    ]
    assert all(getattr(halocline, name) is not None for name in halocline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        halocline.Engine  # noqa: B018


@pytest.mark.parametrize("module", ["halocline", "halocline.memory", "halocline.config", "halocline.cli.main"])
def test_importing_it_brings_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version_is_the_changelogs_newest() -> None:
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+)", (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == halocline.__version__


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("example", sorted((PROJECT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_what_it_shows(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= 60


def test_the_sizing_example_prints_the_worked_example_of_the_documents() -> None:
    path = PROJECT / "examples" / "03_size_an_arena.py"
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert "1092 slabs of 240 KiB" in done.stdout
    assert re.search(r"2048 \+ 128 +18 ", done.stdout)


@pytest.mark.e2e  # the README's example, below, runs in the quick suite
@pytest.mark.parametrize("name", ["01_generate.py", "02_stream.py"])
def test_an_example_with_a_model_runs(name: str) -> None:
    path = PROJECT / "examples" / name
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) >= 2
    assert "Traceback" not in done.stderr


def test_the_readmes_example_is_ten_lines_and_runs() -> None:
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(code.splitlines()) <= 10
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.count(" -> ") for line in done.stdout.splitlines()] == [1, 1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_make_targets_that_a_page_names_exist_and_set_up_what_they_need(page: Path) -> None:
    targets = re.findall(r"(?:^|`)make ([a-z0-9]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        assert re.search(rf"^{target}: \$\(STAMP\)", makefile, re.MULTILINE), f"{page.name} names `make {target}`"

"""The kernel is built once, safely among several processes, and nobody is stranded without a compiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from halocline.errors import ConfigError
from halocline.memory.retention import Sliding
from halocline.model.attention import BlockedAttention, CpuAttention, build, choose, cpu
from testing.attention import Case, by_definition, over_pages

QUICK = ("-O0", "-std=c++17", "-fPIC", "-w")
BUILD = f"from halocline.model.attention import build; build.FLAGS = {QUICK!r}; print(build.library_path())"


@pytest.fixture
def no_library_yet() -> Iterator[None]:
    cpu._library.cache_clear()
    yield
    cpu._library.cache_clear()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALOCLINE_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def test_processes_that_build_at_the_same_time_agree(own_cache: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = {process.communicate(timeout=200)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert {str(path) for path in own_cache.iterdir()} == told
    assert len(told) == 1


def test_what_was_built_is_not_built_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", QUICK)
    first = build.library_path()
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("it built twice"))
    assert build.library_path() == first


def test_other_flags_make_another_library(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build._key(Path(build.__file__).parent, "c++", None)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build._key(Path(build.__file__).parent, "c++", None) != first


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").write_text("no folder can be made below this")
    monkeypatch.setenv("HALOCLINE_CACHE", str(tmp_path / "a file"))
    monkeypatch.setattr(build, "FLAGS", QUICK)
    path = build.library_path()
    assert path.exists()
    assert tmp_path not in path.parents


def test_auto_warns_and_falls_back_without_a_compiler(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, no_library_yet: None
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.warns(RuntimeWarning, match=r"no C\+\+ compiler"):
        assert isinstance(choose("auto"), BlockedAttention)
    with pytest.raises(ConfigError, match=r"attention is cpu, but there is no C\+\+ compiler"):
        choose("cpu")


def test_auto_warns_and_falls_back_when_the_build_fails(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, no_library_yet: None
) -> None:
    monkeypatch.setattr(build, "FLAGS", ("--no-such-flag",))
    with pytest.warns(RuntimeWarning, match="no-such-flag"):
        assert isinstance(choose("auto"), BlockedAttention)
    assert not list(own_cache.iterdir()), "a failed build must leave nothing behind"


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="one of reference, cpu, blocked"):
        choose("fast")


@pytest.mark.parametrize("first", ["torch", "sentencepiece"])
def test_the_kernel_runs_on_torchs_own_threads(first: str) -> None:
    # sentencepiece brings an OpenMP library of its own; whichever is loaded first, the kernel must not take it.
    pytest.importorskip("sentencepiece")
    code = f"import {first}; import sentencepiece; from halocline.model.attention import build, cpu; "
    code += "print(build.openmp_of(cpu._library())); print(build.openmp_runtime())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True).stdout
    kernels, torchs = told.split()
    assert kernels == torchs
    assert Path(torch.__file__).parent in Path(kernels).parents


def test_without_an_openmp_runtime_the_kernel_runs_on_one_thread(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, no_library_yet: None
) -> None:
    monkeypatch.setattr(build, "FLAGS", QUICK)
    monkeypatch.setattr(build, "openmp_runtime", lambda: None)
    case = Case([(600, 1), (0, 9)])
    assert float((over_pages(case, CpuAttention()) - by_definition(case)).abs().max()) < 1e-12


@pytest.mark.parametrize("machine", ["x86-64-v3", "x86-64"])
def test_the_kernel_is_right_on_lesser_machines(
    machine: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch, no_library_yet: None
) -> None:
    if not build._processor().startswith("x86_64"):
        pytest.skip("these are x86 machines")
    flags = {"-march=native": f"-march={machine}", "-O3": "-O1"}  # -O1 only because it compiles faster
    monkeypatch.setattr(build, "FLAGS", tuple(flags.get(flag, flag) for flag in build.FLAGS))
    backend = CpuAttention()
    for dtype, tolerance in (
        (torch.float64, 1e-12),
        (torch.float32, 2e-5),
        (torch.bfloat16, 2e-2),
        (torch.float16, 3e-3),
    ):
        case = Case([(29, 41), (600, 1)], heads=12, kv_heads=2, k_dim=20, v_dim=36, sinks=True, kv_dtype=dtype)
        assert float((over_pages(case, backend).double() - by_definition(case)).abs().max()) < tolerance
        case.retention, case.softcap = Sliding(9), 3.0
        assert float((over_pages(case, backend).double() - by_definition(case)).abs().max()) < tolerance

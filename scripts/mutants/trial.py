"""One trial: a copy of src/ with one fault in it, and the tests that should notice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from table import HERE, PACKAGE, PROJECT, SOURCES, Mutant

TEST_SECONDS = 120
"""After so long one test hangs."""
TRIAL_SECONDS = 600
"""After so long a trial hangs, whatever its tests say."""
PASSED, FAILED, INTERRUPTED = 0, 1, 2
MISSPELT = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError")
"""Errors that show a typing mistake in the table, not a test that bites."""


@dataclass(frozen=True)
class Verdict:
    """What came of a trial."""

    word: str
    """`caught`, `hang` (caught too), `SURVIVED` or `BROKEN`: the mutant is no program, or the tests are none."""
    test: str
    seconds: float

    @property
    def is_caught(self) -> bool:
        """Whether the fault was noticed."""
        return self.word in ("caught", "hang")


def attempt(mutant: Mutant) -> Verdict:
    """Try `mutant` on the tests it names and, where all of them pass, on the quick tests of its layer."""
    began = time.monotonic()
    word, test = "SURVIVED", ""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        sources = copy_sources(Path(folder))
        path = mutant.path(sources)
        path.write_text(mutant.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
        for tests in (mutant.tests, mutant.wider):
            word, test = _judge(run_tests(mutant.module, path, tests))
            if word != "SURVIVED":
                break
        if word in ("caught", "hang") and tests is mutant.wider:
            test += " (one of the wider tests)"
    return Verdict(word, test, time.monotonic() - began)


def passes_unchanged(tests: Sequence[str]) -> Verdict:
    """Run `tests` on a copy without a fault: whatever fails there could not be a mutant's."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="unchanged-") as folder:
        sources = copy_sources(Path(folder))
        done = run_tests(PACKAGE, sources / PACKAGE / "__init__.py", tests)
        word, test = _judge(done)
    return Verdict("passed" if word == "SURVIVED" else "BROKEN", test, time.monotonic() - began)


def copy_sources(folder: Path) -> Path:
    """Copy src/ below `folder`, compiled files included: those of a changed file are out of date by its time."""
    sources = folder / "src"
    shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("*.egg-info"))
    return sources


def run_tests(module: str, path: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `tests` of the checkout on the copy in which `path` is `module`, up to the first failure."""
    sources = path.parents[len(module.split(".")) - (path.name != "__init__.py")]
    command = [sys.executable, str(HERE / "witness.py"), module, str(path), "-x", "-q", "--tb=no", "-rfE"]
    command += [
        "-p",
        "no:cacheprovider",
        f"--timeout={TEST_SECONDS}",
        "-m",
        "not slow and not e2e and not laws and not gpu",
        *tests,
    ]
    # Without randomness and shrinking: the same verdict each time, and a failure ends the trial at once.
    environment = os.environ | {"PYTHONPATH": str(sources), "CI": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    environment["HYPOTHESIS_PROFILE"] = "ci"
    try:
        return subprocess.run(
            command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False, timeout=TRIAL_SECONDS
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, FAILED, f"FAILED the whole trial - Timeout >{TRIAL_SECONDS} s")


def _judge(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    if done.returncode == PASSED:
        return "SURVIVED", ""
    first = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", done.stdout, re.MULTILINE)
    if done.returncode != FAILED or first is None:
        return "BROKEN", (done.stdout + (done.stderr or ""))[-2000:]
    test, why = first.group(1), first.group(2) or ""
    if why.startswith(MISSPELT):
        return "BROKEN", f"{test}: {why}"
    return ("hang" if "Timeout" in why else "caught"), test

"""What all tests share: hypothesis profiles, one thread per process, no network, a cache folder of a test's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

# Set before torch is imported anywhere: on a small machine several OpenMP pools slow each other down many times over.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Shrinking a failing state machine takes minutes, so it is for the desk (HYPOTHESIS_PROFILE=dev) and not for every run.
_COMMON = {"deadline": None, "suppress_health_check": (HealthCheck.too_slow, HealthCheck.data_too_large)}
_NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("ci", derandomize=True, print_blob=True, phases=_NO_SHRINK, max_examples=60, **_COMMON)
settings.register_profile("dev", print_blob=True, max_examples=100, **_COMMON)
settings.register_profile("nightly", print_blob=True, max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test a HALOCLINE_CACHE of its own; without this, converted models are shared with the user's runs."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HALOCLINE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Return the folder of question and trace files, or skip the test with the reason."""
    folder = os.environ.get("HALOCLINE_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("HALOCLINE_DATA does not name a folder with the question and trace files")
    return Path(folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """After `make laws`, say what was explored: tests tell it with `record_property("explored", ...)`."""
    if config.getoption("markexpr") != "laws":
        return
    told = sorted(
        f"{report.nodeid.removeprefix('tests/')}: {value}"
        for report in terminalreporter.stats.get("passed", [])
        for name, value in report.user_properties
        if name == "explored"
    )
    if told:
        terminalreporter.section("explored")
    for line in told:
        terminalreporter.write_line(line)

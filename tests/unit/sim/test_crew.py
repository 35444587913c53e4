"""Replays in processes of their own: what goes wrong in one reaches the caller, and none is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from halocline.errors import ConfigError, FailedError, InvariantError
from halocline.sim import crew
from halocline.sim.crew import How, simulate_all
from halocline.sim.device import device_named
from halocline.sim.setup import Setup
from halocline.sim.shapes import shape_named
from halocline.sim.simulation import Progress
from halocline.sim.workload import Job, Workload
from halocline.units import MIB

JOBS = tuple(Job(f"j{number}", 0.1 * number, ((number, 300),), 20, 1000 + number) for number in range(6))
SETUP = Setup(shape=shape_named("gemma-3-270m"), kv_bytes=64 * MIB, policy="shared", device=device_named("h200"))


def run(*setups: Setup, jobs: tuple[Job, ...] = JOBS, on_progress: Any = lambda *_: None) -> list[dict[str, Any]]:
    return simulate_all(setups, Workload("w", "test", jobs), How(), processes=2, on_progress=on_progress)


def test_outcomes_come_in_the_order_of_the_setups_and_progress_from_each() -> None:
    ended: dict[int, int] = {}

    def on_progress(number: int, progress: Progress) -> None:
        ended[number] = progress.ended

    policies = ("full", "shared")
    outcomes = run(*(replace(SETUP, policy=policy) for policy in policies), on_progress=on_progress)
    assert [outcome["policy"] for outcome in outcomes] == list(policies)
    assert ended == {0: 6, 1: 6}
    assert multiprocessing.active_children() == []


def test_what_a_replay_has_built_is_put_on_huge_pages_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[int] = []
    monkeypatch.setattr(crew, "use_huge_pages", lambda: settled.append(1))
    run(SETUP)
    assert settled == [], "nothing, within a second"
    monkeypatch.setattr(crew, "SETTLE_SECONDS", 0.0)
    told: list[Progress] = []
    run(SETUP, on_progress=lambda _, progress: told.append(progress))
    assert len(settled) == len(told) > 0


def test_a_setup_that_cannot_work_is_told_with_its_problems_and_ends_the_others() -> None:
    with pytest.raises(ConfigError) as caught:
        run(replace(SETUP, kv_bytes=1000), SETUP)
    assert all(len(problem) > 1 for problem in caught.value.problems), "sentences, not letters"
    assert multiprocessing.active_children() == []


def test_a_process_that_is_killed_is_told_and_the_others_end() -> None:
    long = tuple(replace(job, output_tokens=30_000) for job in JOBS)
    setup = replace(SETUP, kv_bytes=4096 * MIB)

    def kill(number: int, progress: Progress) -> None:
        for victim in multiprocessing.active_children():
            if victim.name == "replay full" and victim.pid is not None:
                os.kill(victim.pid, signal.SIGKILL)

    with pytest.raises(FailedError, match="full ended without an answer"):
        run(setup, replace(setup, policy="full"), jobs=long, on_progress=kill)
    assert multiprocessing.active_children() == []


def test_a_broken_law_is_a_failure_of_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise InvariantError(["two owners"])

    monkeypatch.setattr(crew, "simulate", broken)
    with pytest.raises(FailedError, match="shared failed: two owners"):
        run(SETUP)

"""Transfers under faults: 2,000 of them here, 100,000 in `make laws`, and wrong machines that the same worlds find."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from halocline.faults.__main__ import main
from halocline.faults.sketch import draw, slowed
from halocline.faults.worker import Makers
from halocline.faults.world import command, explore, explore_many
from testing.faults import (
    WRONG_WHEN_SLOW,
    DoneBelieved,
    DuplicateCountedTwice,
    NobodyGivesWay,
    NoFence,
    NothingEnds,
    ReleasedBeforeDone,
    RenewedByHeartbeat,
    SameAttempt,
)

FAULTS = 2000
CIRCLE = 7


def test_no_law_breaks_under_two_thousand_faults() -> None:
    tally = explore_many(0, FAULTS)
    print("\n".join(tally.lines()))
    assert not tally.broken, "\n".join(tally.lines())
    assert tally.fault_count >= FAULTS
    assert set(tally.faults) == {"loss", "duplicate", "delay", "partition", "crash", "stop", "slow"}
    # Faults that killed every request would prove nothing: most of those who stay get their whole answer.
    assert tally.ends["length"] + tally.ends["stop"] > tally.ends["lost"] + tally.ends["died"]


def test_steps_may_break_as_well() -> None:
    stories = [explore(seed, breakdown=0.004) for seed in range(12)]
    assert not [story.line() for story in stories if story.fault is not None]
    assert sum(story.faults.get("breakdown", 0) for story in stories) > 0


def test_steps_break_in_many_worlds_where_that_is_asked_for() -> None:
    """Exploring many worlds once dropped the wish without a word."""
    assert explore_many(500, 60, breakdown=0.02).faults["breakdown"] > 0


def test_without_faults_every_request_gets_its_whole_answer() -> None:
    received = 0
    for seed in range(12):
        story = explore(seed, most_faults=0)
        assert story.fault is None, story.line()
        assert set(story.ends) <= {"length", "stop", "abort"}, story.line()
        assert story.totals["leases_lost"] == 0 or not draw(seed).is_calm, story.line()
        received += story.totals["received"]
    assert received > 50


def test_nothing_is_lost_over_lines_that_are_slow_and_move() -> None:
    """Leases were renewed by whole chunks once: one that took longer than a lease lost its attempt."""
    for seed in range(5):
        story = explore(seed, is_slow=True)
        assert story.fault is None, story.line()
        assert set(story.faults) <= {"slow"}
        assert story.totals["leases_lost"] == 0 or not slowed(draw(seed)).is_calm, story.line()


@pytest.mark.parametrize("wrong", WRONG_WHEN_SLOW, ids=lambda wrong: wrong.__name__)
def test_slow_lines_show_who_does_not_cut_or_count_what_they_carry(wrong: type[Makers]) -> None:
    stories = (explore(seed, is_slow=True, makers=wrong()) for seed in range(80))
    found = next((story for story in stories if story.fault), None)
    assert found is not None
    assert "patience" in str(found.fault)


def test_workers_that_compute_for_each_other_do_not_wait_in_a_circle() -> None:
    """Without the rule of `schedule.courtesy` this seed ends with a valid request that was never computed."""
    seed = CIRCLE
    assert {worker.address[0] for worker in draw(seed).workers} == {"b"}
    story = explore(seed, most_faults=0)
    assert story.fault is None, story.line()
    assert story.totals["leases_lost"] == 0
    assert "is valid and cannot finish" in str(explore(seed, most_faults=0, makers=NobodyGivesWay()).fault)


@pytest.mark.parametrize(
    "wrong",
    [NoFence, RenewedByHeartbeat, DuplicateCountedTwice, DoneBelieved, SameAttempt, ReleasedBeforeDone, NothingEnds],
    ids=lambda wrong: wrong.__name__,
)
def test_the_exploration_finds_wrong_machines(wrong: type[Makers]) -> None:
    found = next((story for seed in range(60) if (story := explore(seed, makers=wrong())).fault), None)
    assert found is not None
    assert command(found.seed) in found.line()


def test_the_digest_depends_on_nothing_but_the_seed() -> None:
    told = []
    for hash_seed in ("1", "4711"):
        code = "from halocline.faults.world import explore_many; print(explore_many(7, 150).lines()[-1])"
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        told.append(run.stdout)
    assert told[0] == told[1]
    assert explore_many(7, 150).lines()[-1] == told[0].strip()
    assert explore_many(8, 150).lines()[-1] != told[0].strip()


def test_worlds_differ_in_what_matters() -> None:
    sketches = [draw(seed) for seed in range(60)]
    roles = {"".join(worker.address for worker in sketch.workers) for sketch in sketches}
    assert roles == {"p0p1d0", "p0p1d0d1", "p1d0d1", "b0b1", "b0b1b2"}
    cuts = [{pool.page_tokens for worker in sketch.workers for pool in worker.layout.pools[:1]} for sketch in sketches]
    assert any(len(tokens) > 1 for tokens in cuts), "no world has pages of different lengths"
    assert {worker.rules.prefix_cache for sketch in sketches for worker in sketch.workers} == {True, False}


def test_the_command_line_shows_one_world_and_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--trace"]) == 0
    shown = capsys.readouterr().out
    assert "NewToken" in shown
    assert "digest" in shown
    assert main(["--seed", "3", "--faults", "100"]) == 0
    assert "0 worlds broke a law" in capsys.readouterr().out

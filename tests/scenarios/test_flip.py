"""Traffic that flips between two kinds: the line between the waters moves by itself, and a fixed wall does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halocline.memory.layout import LayerKV
from halocline.memory.retention import Full, Sliding
from halocline.sim.likenesses import azure_like, mooncake_like
from halocline.sim.setup import Setup
from halocline.sim.shapes import Shape
from halocline.sim.workload import Workload
from halocline.units import MIB
from testing.flips import Flipping, Traffic, paced
from testing.replays import small_setup

SCALE = 16
"""Lengths, window and arena are so many times smaller than those of Gemma 3 27B and the traces."""
LAYERS = tuple(LayerKV(at, kind, 1, 16, 16) for at, kind in enumerate([Full()] + [Sliding(1024 // SCALE)] * 5))
SETUP: Setup = replace(
    small_setup(),
    shape=Shape("gemma-like", LAYERS, 1000, 1000, None, "made for a test"),
    kv_bytes=3 * MIB,
    step_tokens=2048,
    max_running_requests=400,
)
TURN_SECONDS = 80.0
"""A step takes a second: some three lives of a request."""


def small(workload: Workload) -> Workload:
    """Return the same lengths, so many times smaller; nothing is shared."""
    jobs = (
        replace(
            job,
            prompt=((at, max(1, job.prompt_tokens // SCALE)),),
            output_tokens=max(1, job.output_tokens // SCALE),
            output_id=10**6 + at,
        )
        for at, job in enumerate(workload.jobs)
    )
    return replace(workload, jobs=tuple(jobs))


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    sides = [paced(SETUP, small(made)) for made in (mooncake_like(320), azure_like(2000))]
    return Traffic(SETUP, *sides, TURN_SECONDS)


def run(traffic: Traffic, policy: str) -> Flipping:
    found = traffic.run(replace(SETUP, policy=policy))
    assert [flip.side for flip in found.flips] == ["b", "a"]
    assert found.outcome.requests.finished == len(traffic.mixed.jobs)
    return found


def test_concurrency_is_back_in_the_first_steps_after_enough_bytes_are_free(traffic: Traffic) -> None:
    """95 % of the steady value in the very step in which the old traffic holds 5 % or less, and from there on."""
    found = run(traffic, "shared")
    assert traffic.steady["b"] > 2 * traffic.steady["a"]
    for flip in found.flips:
        assert flip.steps_to_back is not None
        assert flip.steps_to_back <= 2, flip
        assert flip.mean_over_steady > 0.95, flip
        assert flip.lowest_held_share > 0.85, f"bytes were free for long while somebody waited: {flip}"


@pytest.mark.parametrize("policy", ["static:0.8", "static:0.09"])
def test_no_fixed_split_follows_both(traffic: Traffic, policy: str) -> None:
    """So the figures above do not come about by themselves."""
    found = run(traffic, policy)
    assert min(flip.mean_over_steady for flip in found.flips) < 0.6
    assert any(flip.steps_to_back is None for flip in found.flips)

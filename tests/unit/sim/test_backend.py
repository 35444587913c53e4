"""Which segments of a plan are decodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from halocline.params import SamplingParams
from halocline.sim.backend import count_decodes
from halocline.step import Segment, StepPlan

PARAMS = SamplingParams()


def segment(start: int, tokens: int, prompt_tokens: int, known: int, samples: bool = True) -> Segment:
    return Segment("a", start, tokens, samples, PARAMS, 0, (1,) * known, prompt_tokens, False)


DECODE, LEAP = segment(12, 1, 10, 13), segment(12, 4, 10, 13)
FIRST, LAST_OF_PROMPT = segment(0, 10, 10, 10), segment(9, 1, 10, 10)
RETURN = segment(12, 1, 10, 13)
"""The last token to compute again after a retraction: told from a decode only by standing behind a chunk."""


def plan(*segments: Segment) -> StepPlan:
    none = np.zeros(0, np.int64)
    return replace(StepPlan(0, (), (), none, none, np.zeros(1, np.int32), ()), segments=segments)


def test_decodes_are_counted_from_the_front_whatever_stands_behind_a_chunk() -> None:
    assert count_decodes(plan(DECODE, DECODE)) == 2
    assert count_decodes(plan(LEAP, LEAP)) == 2
    assert count_decodes(plan(DECODE, FIRST, RETURN)) == 1
    assert count_decodes(plan(FIRST, RETURN)) == 0
    assert count_decodes(plan(DECODE, LAST_OF_PROMPT)) == 1
    assert count_decodes(plan(LAST_OF_PROMPT)) == 0

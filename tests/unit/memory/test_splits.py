"""The best static split of a mix: what it holds, and that no other ratio holds more."""

from __future__ import annotations

from random import Random

import pytest

from halocline.memory.capacity import concurrency, mix_concurrency, mix_of
from halocline.memory.demand import Demand, resident
from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Chunked, Full, Sliding, State
from halocline.memory.sizing import static_caps
from halocline.memory.splits import best_split
from halocline.units import GIB
from testing.layouts import model_layout, small_layout


@pytest.mark.parametrize(("length", "ratio", "requests"), [((256, 64), 1.0093, 396), ((32768, 512), 0.0309, 20)])
def test_the_best_ratio_of_a_length_is_the_worked_one(length: tuple[int, int], ratio: float, requests: int) -> None:
    split = best_split(model_layout("gemma-3-27b", 60 * GIB, None), mix_of(layout60(), [length]))
    assert split is not None
    assert (split.ratio, split.state_ratio, split.requests) == (ratio, None, requests)
    assert split.name == f"static:{ratio:g}"


def layout60() -> ArenaLayout:
    return model_layout("gemma-3-27b", 60 * GIB, None)


@pytest.mark.parametrize("seed", range(6))
def test_no_other_ratio_holds_more_and_the_named_one_holds_as_many(seed: int) -> None:
    random = Random(seed)
    kinds = random.choice([(Full(), Sliding(12)), (Full(), Sliding(8), Chunked(24)), (Full(), Sliding(12), State())])
    layout = small_layout(*kinds, page_tokens=4, slabs=random.randint(20, 60), state_bytes=128)
    lengths = [(random.randint(1, 40), random.randint(1, 20)) for _ in range(random.randint(1, 3))]
    mix = mix_of(layout, lengths)
    split = best_split(layout, mix)
    assert split is not None
    ratios = () if split.state_ratio is None else (split.state_ratio,)
    assert static_caps(layout, split.ratio, *ratios) == split.caps
    assert mix_concurrency(layout, split.caps, mix) == split.requests <= mix_concurrency(layout, None, mix)
    others = [static_caps(layout, steps / 50, *ratios) for steps in range(1, 500)]
    assert max(mix_concurrency(layout, caps, mix) for caps in others) <= split.requests + 1


def test_one_ratio_for_two_windows_gives_the_shorter_one_too_much() -> None:
    layout = small_layout(Full(), Sliding(8), Chunked(40), page_tokens=4, slabs=200)
    mix = mix_of(layout, [(100, 4)])
    split = best_split(layout, mix)
    assert split is not None
    # 26 full, 3 sliding and 10 chunked pages a request: 5 fit together, but the windows' shares are one ratio.
    assert mix_concurrency(layout, None, mix) == 5
    assert split.requests == mix_concurrency(layout, split.caps, mix) == 4


def test_a_split_that_cannot_hold_one_request_is_none() -> None:
    layout = small_layout(Full(), Sliding(8), page_tokens=4, slabs=4)
    assert best_split(layout, mix_of(layout, [(100, 1)])) is None


def test_a_mix_needs_the_mean_of_its_requests_rounded_up_once_per_pool() -> None:
    layout = small_layout(Full(), Sliding(8), page_tokens=4, slabs=40)
    mix = mix_of(layout, [(5, 1), (5, 1), (30, 3)])
    whole = Demand(map(sum, zip(*[resident(layout, *length) for length in ((5, 1), (5, 1), (30, 3))], strict=True)))
    assert (mix.of(3), mix.of(6)) == (whole, whole.plus(whole))
    assert mix.of(1) == Demand(-(-pages // 3) for pages in whole)


def test_a_mix_of_one_length_is_that_length() -> None:
    layout = model_layout("gpt-oss-20b")
    for caps in (None, static_caps(layout, 0.8)):
        mix = mix_of(layout, [(2048, 128)] * 7)
        assert mix_concurrency(layout, caps, mix) == concurrency(layout, caps, 2048, 128)

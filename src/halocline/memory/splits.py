"""The static split that an operator would set who knew what comes: the best one for a mix of requests.

A split has to be set before anything is known, so its best ratio is a yardstick and not a policy: what the shared arena
loses against it is slabs, what the split loses against the shared arena is every other mix.

    Gemma 3 27B, 60 GiB     256 + 64 tokens: R = 1.0093     8,192 + 256: R = 0.1208     32,768 + 512: R = 0.0309
"""

from __future__ import annotations

from dataclasses import dataclass

from halocline.memory.budget import Budget
from halocline.memory.capacity import Caps, Mix, largest, mix_concurrency
from halocline.memory.demand import Demand, floor_demand
from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Chunked, Sliding, State
from halocline.memory.sizing import STATE_RATIO, static_caps

RATIO_STEPS = 10_000
"""Ratios are looked for in steps of 1 / RATIO_STEPS."""
MOST_RATIO = 100
"""The largest ratio that a setting may have."""


@dataclass(frozen=True, slots=True)
class Split:
    """A static split `static:R`, with `static:R:S` where the model has states, and what it holds."""

    ratio: float
    state_ratio: float | None
    caps: Caps
    requests: int

    @property
    def name(self) -> str:
        """The policy that sets this split."""
        return f"static:{self.ratio:g}" + ("" if self.state_ratio is None else f":{self.state_ratio:g}")


def best_split(layout: ArenaLayout, mix: Mix, checkpoints: bool = False) -> Split | None:
    """Return the split that holds most requests of `mix`, with the smallest such ratios; None if none holds one.

    Whole slabs are rounded as `static_caps` does, so a neighbouring ratio may hold one request more.
    """
    floor = floor_demand(layout, checkpoints)

    def split_of(requests: int) -> Split | None:
        return _smallest_split(layout, mix.of(requests).plus(floor), requests)

    # No split holds more than the arena that has none, and the best one mostly as many.
    most = mix_concurrency(layout, None, mix, checkpoints)
    if most == 0:
        return None
    split = split_of(most)
    if split is not None:
        return split
    fewer = largest(1, most - 1, lambda requests: split_of(requests) is not None)
    return split_of(fewer) if fewer else None


def _smallest_split(layout: ArenaLayout, demand: Demand, requests: int) -> Split | None:
    """Return the split with the smallest ratios that hold `demand`, or None when none does."""
    needs = Budget(layout).slabs_by_pool(demand)
    if sum(needs) > layout.slabs:
        return None
    states = [index for index, pool in enumerate(layout.pools) if isinstance(pool.retention, State)]
    windows = [index for index, pool in enumerate(layout.pools) if isinstance(pool.retention, Sliding | Chunked)]

    def caps(ratio_steps: int, state_steps: int) -> Caps:
        return static_caps(layout, ratio_steps / RATIO_STEPS, state_steps / RATIO_STEPS)

    def lacks(split: Caps, pools: list[int]) -> bool:
        return any((split[index] or 0) < needs[index] for index in pools)

    # A larger ratio gives more to the pools that it is for, and takes it from the measure: so the smallest that does.
    state_steps = int(STATE_RATIO * RATIO_STEPS)
    if states:
        state_steps = 1 + largest(1, RATIO_STEPS * MOST_RATIO, lambda steps: lacks(caps(1, steps), states))
    ratio_steps = RATIO_STEPS
    if windows:
        ratio_steps = 1 + largest(1, RATIO_STEPS * MOST_RATIO, lambda steps: lacks(caps(steps, state_steps), windows))
    split = caps(ratio_steps, state_steps)
    if lacks(split, list(range(len(layout.pools)))):
        return None
    return Split(ratio_steps / RATIO_STEPS, state_steps / RATIO_STEPS if states else None, split, requests)

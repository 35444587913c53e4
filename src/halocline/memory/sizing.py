"""How an arena is sized: its bytes, a static split of it, and the record of what it holds.

The questions behind the record stand in `halocline.memory.capacity`, what start-up refuses in
`halocline.memory.startup`; callers take all of it from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from halocline.errors import ConfigError
from halocline.memory.capacity import (
    UNLIMITED_TOKENS,
    Caps,
    concurrency,
    exact_concurrency,
    largest,
    longest_request,
    uniform_concurrency,
)
from halocline.memory.facts import CapacityFacts, ConcurrencyFacts, ModelLength, PoolFacts
from halocline.memory.layout import ArenaLayout, PoolLayout
from halocline.memory.startup import Limits, check_start, start_problems
from halocline.units import GIB, format_bytes

__all__ = [
    "UNLIMITED_TOKENS",
    "CapacityFacts",
    "Caps",
    "ConcurrencyFacts",
    "Limits",
    "ModelLength",
    "PoolFacts",
    "auto_device_kv_bytes",
    "auto_kv_bytes",
    "capacity_facts",
    "check_start",
    "concurrency",
    "exact_concurrency",
    "longest_request",
    "start_problems",
    "static_caps",
    "uniform_concurrency",
]

STATIC_RATIO = 0.8
"""Window tokens per full token in the static split that users know from other engines."""
STATE_RATIO = 0.9
"""Bytes of the state pool per byte of all other pools in such a split."""
SHOWN_LENGTHS = ((256, 64), (2048, 128), (8192, 256), (32768, 512))
"""Prompt and output lengths for which concurrency is printed."""

_CPU_SHARE = 4
_CPU_MOST_BYTES = 4 * GIB


def static_caps(layout: ArenaLayout, ratio: float, state_ratio: float = STATE_RATIO) -> Caps:
    """Return the slabs per pool of a static split: each sliding or chunked pool gets `ratio` x the full pool's tokens.

    In whole slabs, rounded down; what rounding leaves goes to the full pool. Where the model has states, their pool
    first gets `state_ratio` bytes per byte of the others. Without a full pool the first window pool is the measure.
    The shares sum to all slabs; one may be 0, which start-up refuses.
    """
    share = Fraction(str(state_ratio)) / (1 + Fraction(str(state_ratio)))
    positional = [index for index, pool in enumerate(layout.pools) if pool.is_positional]
    caps = [0] * len(layout.pools)
    left = layout.slabs
    for index, pool in enumerate(layout.pools):
        if not pool.is_positional:
            caps[index] = int(layout.slabs * share) if positional else layout.slabs
            left -= caps[index]
    if not positional:
        return tuple(caps)
    measure, others = positional[0], positional[1:]

    def shares(measure_slabs: int) -> dict[int, int]:
        tokens = measure_slabs * _slab_tokens(layout.pools[measure]) * Fraction(str(ratio))
        return {index: int(tokens / _slab_tokens(layout.pools[index])) for index in others}

    most = max(0, largest(1, left, lambda slabs: slabs + sum(shares(slabs).values()) <= left))
    for index, slabs in shares(most).items():
        caps[index] = slabs
        left -= slabs
    caps[measure] = left
    return tuple(caps)


def auto_kv_bytes(free_bytes: int) -> int:
    """Return the arena's bytes on a CPU: a quarter of the free memory, at most 4 GiB."""
    return min(free_bytes // _CPU_SHARE, _CPU_MOST_BYTES)


def auto_device_kv_bytes(memory_bytes: int, weight_bytes: int, activation_bytes: int) -> int:
    """Return a device's memory less weights and measured peak activations; ConfigError when nothing is left."""
    left = memory_bytes - weight_bytes - activation_bytes
    if left <= 0:
        raise ConfigError(
            [
                f"the device has {format_bytes(memory_bytes)}, the weights take {format_bytes(weight_bytes)} and "
                f"a step {format_bytes(activation_bytes)}: nothing is left for the arena; use a larger device or a "
                "smaller model"
            ]
        )
    return left


def capacity_facts(
    layout: ArenaLayout,
    caps: Caps | None,
    limits: Limits,
    lengths: Sequence[tuple[int, int]] = SHOWN_LENGTHS,
    static_ratio: float = STATIC_RATIO,
) -> CapacityFacts:
    """Return the record that log, command line and API print. Raises ConfigError as `check_start`.

    Concurrency is given for those `lengths` (prompt, output) that the model length allows, and for the model length.
    """
    length = check_start(layout, caps, limits)
    shown = sorted({pair for pair in lengths if sum(pair) <= length.tokens})
    if length.tokens < UNLIMITED_TOKENS and length.tokens not in map(sum, shown):
        shown.append((length.tokens - 1, 1))
    static = static_caps(layout, static_ratio)
    return CapacityFacts(
        budget_bytes=layout.budget_bytes,
        arena_bytes=layout.arena_bytes,
        slab_bytes=layout.slab_bytes,
        slabs=layout.slabs,
        remainder_bytes=layout.remainder_bytes,
        granule_tokens=layout.granule_tokens,
        pools=tuple(map(_pool_facts, layout.pools, caps or (None,) * len(layout.pools))),
        longest_request_tokens=longest_request(layout, caps, limits.lookahead_tokens, limits.checkpoints),
        max_model_len=length,
        static_ratio=static_ratio,
        concurrency=tuple(
            ConcurrencyFacts(
                prompt,
                output,
                concurrency(layout, caps, prompt, output, limits.checkpoints),
                concurrency(layout, static, prompt, output, limits.checkpoints),
                uniform_concurrency(layout, prompt, output),
            )
            for prompt, output in shown
        ),
    )


def _pool_facts(pool: PoolLayout, cap: int | None) -> PoolFacts:
    return PoolFacts(
        pool.name, len(pool.layers), pool.page_tokens, pool.page_bytes, pool.stride_bytes, pool.pages_per_slab, cap
    )


def _slab_tokens(pool: PoolLayout) -> int:
    return pool.pages_per_slab * pool.page_tokens

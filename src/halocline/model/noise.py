"""The randomness of sampling: a pure function of (seed, position, index), with no generator and no state.

    key   = mix(mix(seed) + position)            one per sampled token
    noise = Gumbel(mix(key + (index + 1) * G))   the index-th output of SplitMix64 started at `key`

A request that was retracted, batched otherwise or moved to another machine draws the same numbers again. They are
computed on the host, in float64, wherever the model runs.

SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_MASK = (1 << 64) - 1


def noise_key(seed: int, position: int) -> np.uint64:
    """Return the key of the token sampled at `position` (its index in its request) under `seed` (any integer)."""
    # Arrays of one: NumPy lets arrays wrap around silently, scalars warn.
    start = _mix(np.array([seed & _MASK], np.uint64) + _GOLDEN)
    return np.uint64(_mix(start + np.array([position], np.uint64) * _GOLDEN)[0])


def gumbel(key: np.uint64, first: int, count: int) -> NDArray[np.float64]:
    """Return standard Gumbel noise for the indices [first, first + count), shape (count,).

    argmax(log p + gumbel) is distributed as p (the Gumbel-max trick).
    """
    index = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    bits = _mix(key + index * _GOLDEN) >> np.uint64(11)
    # Small uniforms make large noise, and those decide: -log1p(-u) keeps all 53 bits there, -log(1 - u) would not.
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log1p(-uniform))


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> _SHIFTS[0])) * _MIX_1
    z = (z ^ (z >> _SHIFTS[1])) * _MIX_2
    return z ^ (z >> _SHIFTS[2])

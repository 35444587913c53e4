"""The sampling noise: known answers, distribution, and independence of everything but its arguments."""

from __future__ import annotations

import math

import numpy as np

from halocline.model.noise import gumbel, noise_key


def test_the_bits_are_those_of_splitmix64() -> None:
    # The first outputs of SplitMix64 seeded with 0, as its authors' reference implementation prints them.
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    expected = [-math.log(-math.log1p(-((bits >> 11) + 0.5) / 2**53)) for bits in known]
    assert np.allclose(gumbel(np.uint64(0), 0, 3), expected, rtol=1e-12)


def test_a_range_is_a_part_of_every_longer_range() -> None:
    key = noise_key(5, 9)
    assert (gumbel(key, 0, 1000)[400:600] == gumbel(key, 400, 200)).all()


def test_seed_and_position_make_the_key() -> None:
    keys = {int(noise_key(seed, position)) for seed in range(-50, 50) for position in range(100)}
    assert len(keys) == 10_000
    assert noise_key(-1, 3) == noise_key(2**64 - 1, 3)
    assert noise_key(3, 4) != noise_key(4, 3)


def test_the_noise_is_standard_gumbel() -> None:
    # One value from each of many keys, and many values of one key.
    across = np.concatenate([gumbel(noise_key(seed, position), 7, 1) for seed in range(100) for position in range(200)])
    for sample in (across, gumbel(noise_key(1, 1), 0, 20_000)):
        below = np.sort(np.exp(-np.exp(-sample)))
        ideal = (np.arange(len(below)) + 0.5) / len(below)
        # Kolmogorov-Smirnov at one in ten million; the seeds are fixed, so this cannot flicker.
        assert np.abs(below - ideal).max() < 2.9 / math.sqrt(len(below))


def test_neighbouring_positions_and_tokens_are_uncorrelated() -> None:
    table = np.stack([gumbel(noise_key(0, position), 0, 500) for position in range(500)])
    table = table - table.mean()
    for shifted in (table[1:] * table[:-1], table[:, 1:] * table[:, :-1]):
        assert abs(shifted.mean() / table.var()) < 5 / math.sqrt(shifted.size)

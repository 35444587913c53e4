"""Digests of a prefix are the same whether it was hashed at once or as it grew."""

from __future__ import annotations

from itertools import product

import pytest

from halocline.cache.ghosts import Digester, digests
from halocline.cache.keys import EVERYBODY, Key, Namespace

UNIT = 8
DATA = bytes(range(200)) * 2


ASKED = list(product((0, 1, 2, 3, 4, 7, 8, 9, 40), repeat=2))


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_prefix_that_grew_has_the_digests_of_one_that_was_hashed_at_once(asked: tuple[int, ...]) -> None:
    grown = Digester(EVERYBODY)
    for granules in asked:
        found = grown.digests(DATA, granules, UNIT)
        assert found == digests(Key(DATA, 0, EVERYBODY), granules, UNIT)
        assert [length for length, _ in found] == sorted(
            {2**e for e in range(6) if 2**e <= granules} | {granules} - {0}
        )
        assert len({digest for _, digest in found}) == len(found)


def test_the_same_tokens_of_another_namespace_have_other_digests() -> None:
    mine, yours = (digests(Key(DATA, 0, Namespace(salt=salt)), 4, UNIT) for salt in ("", "x"))
    assert not {digest for _, digest in mine} & {digest for _, digest in yours}


def test_prefixes_that_part_have_the_same_digests_up_to_there_and_no_others() -> None:
    others = bytearray(DATA)
    others[6 * UNIT] += 1
    mine, theirs = (digests(Key(bytes(data), 0, EVERYBODY), 20, UNIT) for data in (DATA, others))
    assert [granules for (granules, one), (_, other) in zip(mine, theirs, strict=True) if one == other] == [1, 2, 4]
    assert digests(Key(DATA, 0, EVERYBODY), 6, UNIT)[-1] == digests(Key(bytes(others), 0, EVERYBODY), 6, UNIT)[-1]

"""Digests of a prefix are the same whether it was hashed at once or as it grew."""

from __future__ import annotations

import copy
from itertools import combinations_with_replacement

import pytest

from halocline.cache.ghosts import Digester, digests
from halocline.cache.keys import EVERYBODY, Key, Namespace

UNIT = 8
DATA = bytes(range(200)) * 2


ASKED = list(combinations_with_replacement((0, 1, 2, 3, 4, 7, 8, 9, 40), 3))


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_prefix_that_grew_has_the_digests_of_one_that_was_hashed_at_once(asked: tuple[int, ...]) -> None:
    grown = Digester(EVERYBODY)
    for granules in asked:
        found = grown.digests(DATA, granules, UNIT)
        assert grown.granules == granules
        assert found == digests(Key(DATA, 0, EVERYBODY), granules, UNIT)
        assert [length for length, _ in found] == sorted(
            {2**e for e in range(6) if 2**e <= granules} | {granules} - {0}
        )
        assert len({digest for _, digest in found}) == len(found)


def test_a_copy_goes_on_by_itself() -> None:
    grown = Digester(EVERYBODY)
    grown.digests(DATA, 3, UNIT)
    twin = copy.deepcopy(grown)
    assert twin.digests(DATA, 9, UNIT) == digests(Key(DATA, 0, EVERYBODY), 9, UNIT)
    assert grown.digests(DATA, 4, UNIT) == digests(Key(DATA, 0, EVERYBODY), 4, UNIT)


def test_the_same_tokens_of_another_namespace_have_other_digests() -> None:
    mine, yours = (digests(Key(DATA, 0, Namespace(salt=salt)), 4, UNIT) for salt in ("", "x"))
    assert not {digest for _, digest in mine} & {digest for _, digest in yours}


def test_a_shorter_prefix_is_asked_of_another_digester() -> None:
    grown = Digester(EVERYBODY)
    grown.digests(DATA, 9, UNIT)
    with pytest.raises(AssertionError, match="8 granules are asked for, 9 were hashed"):
        grown.digests(DATA, 8, UNIT)

"""What a prefix is looked up by: packed bytes, a fixed number of them per granule, under a namespace.

    tokens     |t0 t1 ... t15|t16 ... t31|t32 ... t40|          G = 16: two whole granules, nine tokens beyond
    data       |    64 bytes |  64 bytes |                      4 bytes a token: an edge of any length is one memcmp
    block ids  |7|12|                                           or one opaque int64 per granule, as traces give them

Everything that changes KV belongs in the namespace: the same tokens under another model, adapter or salt are another
prefix.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOKEN_BYTES = 4
BLOCK_BYTES = 8


@dataclass(frozen=True, slots=True)
class Namespace:
    """All that changes KV besides the tokens."""

    model: str = ""
    adapter: str = ""
    salt: str = ""


EVERYBODY = Namespace()


@dataclass(frozen=True, slots=True)
class Key:
    """A prompt as the tree reads it."""

    data: bytes
    """The whole granules, packed; what exceeds them may follow or be missing."""
    tokens: int
    """L: the length in tokens, which decides how far a match may go."""
    namespace: Namespace = EVERYBODY


def token_key(tokens: Sequence[int], namespace: Namespace = EVERYBODY) -> Key:
    """Pack `tokens`, which are never negative, in 4 bytes each: a granule has 4 * G bytes."""
    # Of what packs a Python list this is the fastest: 65 us for 12,000 tokens, where NumPy and array("i") take 180.
    return Key(array("I", tokens).tobytes(), len(tokens), namespace)


def block_key(blocks: Sequence[int], tokens: int, namespace: Namespace = EVERYBODY) -> Key:
    """Pack one opaque id per granule, in 8 bytes. Equal ids must mean equal prefixes up to the block's end."""
    return Key(np.asarray(blocks, np.int64).tobytes(), tokens, namespace)


def common_granules(edge: bytes, data: bytes, at: int, granule_bytes: int) -> int:
    """Return how many whole granules of `edge` stand in `data` from byte `at` on.

    Nearly always all of them, found by one memcmp; else the border is found by halving: memcmp of ever shorter parts.
    """
    if data.startswith(edge, at):
        return len(edge) // granule_bytes
    low, high = 0, min(len(edge), max(0, len(data) - at)) // granule_bytes + 1
    while high - low > 1:
        middle = (low + high) // 2
        if data.startswith(edge[low * granule_bytes : middle * granule_bytes], at + low * granule_bytes):
            low = middle
        else:
            high = middle
    return low

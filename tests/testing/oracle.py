"""The token oracle, which lives in the simulator: small worlds of a user check themselves with it, too."""

from __future__ import annotations

from halocline.sim.oracle import (
    A1,
    B2,
    FOLD,
    WORD,
    Context,
    FakeBackend,
    choose,
    first_seen,
    mix,
    mix_words,
    reference,
    salt_of,
)

__all__ = [
    "A1",
    "B2",
    "FOLD",
    "WORD",
    "Context",
    "FakeBackend",
    "choose",
    "first_seen",
    "mix",
    "mix_words",
    "reference",
    "salt_of",
]

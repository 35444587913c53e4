"""Attention over the arena's pages: one function registered with `transformers`, and the backends that compute it.

    binding.py     the function, and who it works for          facts.py     the step's facts, the layers' views
    reference.py   plain PyTorch, any device and dtype         cpu.py       compiled, walks pages, gathers nothing
"""

from __future__ import annotations

from collections.abc import Callable

from halocline.errors import ConfigError
from halocline.model.attention.binding import ATTENTION, ArenaAttention, AttentionBackend, register
from halocline.model.attention.facts import AttentionStep, LayerView, Scores
from halocline.model.attention.reference import ReferenceAttention

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "reference": ReferenceAttention,
}


def choose(name: str = "auto", device: str = "cpu") -> AttentionBackend:
    """Return the backend called `name`; `auto` takes the fastest that runs on `device`.

    Raises ConfigError for a name that is not in the table.
    """
    del device
    if name == "auto":
        name = "reference"
    if name not in BACKENDS:
        raise ConfigError([f"attention is {name!r}; it must be auto or one of {', '.join(BACKENDS)}"])
    return BACKENDS[name]()


__all__ = [
    "ATTENTION",
    "BACKENDS",
    "ArenaAttention",
    "AttentionBackend",
    "AttentionStep",
    "LayerView",
    "ReferenceAttention",
    "Scores",
    "choose",
    "register",
]

"""Attention over the arena's pages: one function registered with `transformers`, and the backends that compute it.

binding.py     the function, and who it works for          facts.py     the step's facts, the layers' views
reference.py   plain PyTorch, any device and dtype         cpu.py       compiled (build.py), gathers nothing
blocked.py     where nothing can be compiled
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from halocline.errors import ConfigError
from halocline.model.attention.binding import ATTENTION, ArenaAttention, AttentionBackend, register
from halocline.model.attention.blocked import BlockedAttention
from halocline.model.attention.build import BuildError
from halocline.model.attention.cpu import CpuAttention
from halocline.model.attention.facts import AttentionStep, LayerView, Scores
from halocline.model.attention.reference import ReferenceAttention

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "reference": ReferenceAttention,
    "cpu": CpuAttention,
    "blocked": BlockedAttention,
}


def choose(name: str = "auto", device: torch.device | str = "cpu") -> AttentionBackend:
    """Return a backend called `name`, for one model; `auto` takes the fastest that runs on `device`.

    Raises ConfigError for a name that is not in the table, and for `cpu` where it cannot run; `auto` then warns and
    falls back.
    """
    on_cpu = torch.device(device).type == "cpu"
    if name == "auto":
        return _fastest() if on_cpu else ReferenceAttention()
    if name not in BACKENDS:
        raise ConfigError([f"attention is {name!r}; it must be auto or one of {', '.join(BACKENDS)}"])
    if name == "cpu" and not on_cpu:
        raise ConfigError([f"attention is cpu, but the model runs on {device}; use auto"])
    try:
        return BACKENDS[name]()
    except BuildError as error:
        raise ConfigError([f"attention is {name}, but {error}; use auto"]) from error


def _fastest() -> AttentionBackend:
    try:
        return CpuAttention()
    except BuildError as error:
        warnings.warn(f"attention will be slow, its kernel cannot be compiled: {error}", RuntimeWarning, stacklevel=3)
        return BlockedAttention()


__all__ = [
    "ATTENTION",
    "BACKENDS",
    "ArenaAttention",
    "AttentionBackend",
    "AttentionStep",
    "BlockedAttention",
    "CpuAttention",
    "LayerView",
    "ReferenceAttention",
    "Scores",
    "choose",
    "register",
]

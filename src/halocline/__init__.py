"""Halocline: hybrid-attention language models served out of one arena of bytes."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halocline.llm import LLM, AsyncLLM, CompletionOutput, RequestOutput
    from halocline.params import SamplingParams

__version__ = _version("halocline")
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

# Importing the package must stay cheap: the pure core, the simulator and `halocline --help` need no torch.
_HOMES = {
    "LLM": "halocline.llm",
    "AsyncLLM": "halocline.llm",
    "CompletionOutput": "halocline.llm",
    "RequestOutput": "halocline.llm",
    "SamplingParams": "halocline.params",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'halocline' has no attribute {name!r}")
    return vars(import_module(_HOMES[name]))[name]


def __dir__() -> list[str]:
    return sorted(__all__)

"""The tiny model of the boundary tests, its four juniors, and the settings of the worker that they press.

As many full as sliding layers of equal width: with equal page lengths a slab is a page in both pools.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from halocline.config import Config
from halocline.memory.retention import Full, Sliding
from testing.layouts import layers_of
from testing.models import FULL, SLIDING, reference_tokens, tiny_model, tiny_prompt
from testing.pair import worker
from testing.pressure import Asked, Pressure
from testing.rooms import Room, senior_beside
from testing.server import LiveServer

WINDOW = 2047
MODEL: dict[str, Any] = {
    "layer_types": [SLIDING, FULL],
    "num_hidden_layers": 2,
    "sliding_window": WINDOW,
    "max_position_embeddings": 4096,
    # Many words make a step slow and a prompt no slower: the senior must outlast four transfers.
    "vocab_size": 100_000,
}
LAYERS = layers_of((1, Full()), (1, Sliding(WINDOW)), heads=2, dim=16, dtype_bytes=8)
SENIOR_TOKENS, MOST_SENIOR_PROMPT = 400, 2048
JUNIORS = 4
PATIENCE_SECONDS = 240.0


def juniors(prompt_tokens: int, new_tokens: int) -> list[Asked]:
    """Return four of the same lengths, the most senior first."""
    return [Asked(tiny_prompt(prompt_tokens, seed=10 + number), new_tokens) for number in range(JUNIORS)]


def answers(asked: list[Asked]) -> list[list[int]]:
    """Return what `generate` says of each."""
    model = tiny_model("gemma3", **MODEL)
    return [reference_tokens(model, junior.prompt, junior.new_tokens) for junior in asked]


def base_config(folder: Path, link_kind: str = "shm") -> Config:
    """Return what both workers have."""
    return Config(
        model=str(folder),
        dtype="float64",
        threads=1,
        kv_bytes="64MiB",
        step_tokens=640,
        max_running_requests=8,
        audit="every",
        log_level="error",
        link_kind=link_kind,
        lease_seconds=60.0,
    )


def decode_settings(room: Room, setting: str, asked: list[Asked]) -> dict[str, Any]:
    """Return what the worker has whose room this is: nothing granted in advance, nothing kept for prefixes."""
    return {
        "kv_bytes": room.layout.budget_bytes,
        "page_tokens": setting,
        "policy": room.policy,
        "prefix_cache": "off",
        "decode_reserve_tokens": 0,
        # Else a window and one page of the full pool would have to fit.
        "max_model_len": 1 + max(each.life.positions for each in (senior(room, asked), *asked)),
    }


def senior(room: Room, asked: list[Asked]) -> Asked:
    """Return the one that takes all but the pages of one prompt."""
    life = senior_beside(room, [each.life for each in asked], MOST_SENIOR_PROMPT, SENIOR_TOKENS)
    return Asked(tiny_prompt(life.prompt_tokens), life.new_tokens)


def pressure(prefill: LiveServer, decode: LiveServer, room: Room, asked: list[Asked]) -> Pressure:
    """Return four juniors beside their senior."""
    made = Pressure(prefill, decode, room, senior(room, asked), asked, PATIENCE_SECONDS)
    made.check_room()
    return made


class Prefills:
    """One prefill worker at a time, kept for all decode workers that come one after another."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.config: Config | None = None
        self.live: LiveServer | None = None

    def at(self, config: Config) -> LiveServer:
        """Return the worker of this configuration; another one is stopped."""
        if self.live is None or config != self.config:
            self.stack.close()
            self.config, self.live = config, self.stack.enter_context(worker(config))
        return self.live

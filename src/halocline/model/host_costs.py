"""What copying a byte and computing a token take here: measured at start, where there is a host arena."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from halocline.memory.host import HostCosts
from halocline.model.loading import LoadedModel

COPIED_BYTES = 16 << 20
COMPUTED_TOKENS = 256
"""A chunk that fills a processor: fewer would make computing look dear, and copies too good."""
TIMES = 3
"""Runs of each; the fastest counts, because whatever disturbs a run makes it slower."""


@torch.inference_mode()
def measure_costs(loaded: LoadedModel, step_tokens: int) -> HostCosts:
    """Time copies between `loaded`'s device and host memory and a prefill, with the weights in place.

    A prefill of `COMPUTED_TOKENS` or a whole step, if that is less, from an empty context.
    """
    device = loaded.device
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda").fill_(0)
    there = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device).fill_(0)
    tokens = min(COMPUTED_TOKENS, step_tokens)
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
    positions = torch.arange(tokens, device=device)[None]

    def copy() -> Tensor:
        return host.copy_(there, non_blocking=True)

    def compute() -> None:
        loaded.model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)

    copied = COPIED_BYTES / _seconds(copy, device)
    link = min(HostCosts().link_bytes_per_second, copied / 2)  # it copies each byte once and reads it twice for its sum
    return HostCosts(copied, tokens / _seconds(compute, device), link)


def _seconds(act: Callable[[], object], device: torch.device) -> float:
    """Return what `act` takes, with all that it queues; a first run that warms up does not count."""
    taken = []
    for _ in range(1 + TIMES):
        _wait(device)
        began = time.perf_counter()
        act()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return max(min(taken[1:]), 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

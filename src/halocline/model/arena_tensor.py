"""The arena itself: one tensor of bytes on the model's device, allocated once, and the pages that are copied in it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from halocline.errors import ModelError
from halocline.huge_pages import map_file, private_memory
from halocline.memory.layout import ArenaLayout
from halocline.step import Copy, Move
from halocline.units import format_bytes

ALIGNMENT = 64


def allocate_arena(layout: ArenaLayout, device: torch.device, memory_file: int | None = None) -> Tensor:
    """Return the arena: uint8, shape (arena_bytes,), its start a multiple of 64 bytes. Nothing else holds KV.

    With `memory_file`, the descriptor of an empty memfd that allows seals, its bytes are those of that file, so that
    a process which is handed the file can read them; only on the CPU. The bytes are not cleared: every reader reads
    only what was written. Raises ModelError when there is no room.
    """
    try:
        if memory_file is not None:
            assert device.type == "cpu", f"the memory of {device} is no file"
            os.ftruncate(memory_file, layout.arena_bytes)
            # Readers refuse memory that could shrink under them.
            fcntl.fcntl(memory_file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return torch.frombuffer(map_file(memory_file, layout.arena_bytes, is_writable=True), dtype=torch.uint8)
        if device.type == "cpu":
            return torch.frombuffer(private_memory(layout.arena_bytes), dtype=torch.uint8)
        whole = torch.empty(layout.arena_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    except (OSError, RuntimeError) as error:  # torch has no narrower type for "no memory" on the CPU
        raise ModelError(
            f"cannot allocate the arena of {format_bytes(layout.arena_bytes)} on {device}; lower --kv-bytes"
        ) from error
    start = -whole.data_ptr() % ALIGNMENT
    return whole[start : start + layout.arena_bytes]


class PageMover:
    """Carries out a plan's moves, copies and saves."""

    def __init__(self, arena: Tensor, layout: ArenaLayout) -> None:
        # One row per page; the padding at a page's end is not moved.
        self._pages = tuple(
            arena.view(layout.slabs * pool.pages_per_slab, pool.stride_bytes)[:, : pool.page_bytes]
            for pool in layout.pools
        )

    def move(self, moves: Sequence[Move | Copy]) -> None:
        """Copy all pages in one pass: every source is read before any target is written."""
        if not moves:
            return
        batches = []
        for pool, pages in enumerate(self._pages):
            mine = [move for move in moves if move.pool == pool]
            if mine:
                sources, targets = (
                    torch.tensor(numbers, device=pages.device)
                    for numbers in ([move.source for move in mine], [move.target for move in mine])
                )
                batches.append((pages, targets, pages[sources]))
        for pages, targets, contents in batches:
            pages.index_copy_(0, targets, contents)

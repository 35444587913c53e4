"""The host arena itself: bytes in host memory, page-locked beside a GPU, and the copies between it and the device.

All copies are queued on the device's stream, in the order of the plan, as contiguous runs: pages that lie side by side
in both arenas are one copy. Only moves inside the host arena are the processor's: they wait for the copies before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from halocline.errors import ModelError
from halocline.huge_pages import private_memory
from halocline.memory.host import HostCopies, HostMoves, HostWork, Places, host_layout
from halocline.memory.layout import ArenaLayout
from halocline.model.arena_tensor import PageMover
from halocline.units import format_bytes


class HostPages:
    """The pages of both arenas, by pool, and what a plan does between them."""

    def __init__(self, arena: Tensor, layout: ArenaLayout, quota_bytes: int) -> None:
        """Allocate the host arena of `quota_bytes` beside `arena`, uint8 of shape (arena_bytes,).

        Raises ConfigError when that is no whole slab, ModelError when there is no room for it.
        """
        host = host_layout(layout, quota_bytes)
        self._is_apart = arena.device.type != "cpu"
        try:
            bytes_ = (
                torch.empty(host.arena_bytes, dtype=torch.uint8, pin_memory=True)
                if self._is_apart
                else torch.frombuffer(private_memory(host.arena_bytes), dtype=torch.uint8)
            )
        except (OSError, RuntimeError) as error:
            raise ModelError(
                f"cannot allocate the host arena of {format_bytes(host.arena_bytes)}; lower --host-bytes"
            ) from error
        self._device = _rows(arena, layout)
        self._host = _rows(bytes_, host)
        self._mover = PageMover(bytes_, host)

    def offload(self, work: Sequence[HostWork]) -> None:
        """Copy device pages to the host and move pages there, one after another."""
        for each in work:
            if isinstance(each, HostMoves):
                self._move(each)
            else:
                host, device = self._host[each.pool], self._device[each.pool]
                for device_run, host_run in _runs(each.device_pages, each.host_pages):
                    host[host_run].copy_(device[device_run], non_blocking=True)

    def load(self, loads: Sequence[HostCopies]) -> None:
        """Copy host pages to the device."""
        for each in loads:
            host, device = self._host[each.pool], self._device[each.pool]
            for device_run, host_run in _runs(each.device_pages, each.host_pages):
                device[device_run].copy_(host[host_run], non_blocking=True)

    def _move(self, work: HostMoves) -> None:
        if self._is_apart:
            torch.cuda.current_stream().synchronize()
        self._mover.move(work.moves)


def _rows(arena: Tensor, layout: ArenaLayout) -> tuple[Tensor, ...]:
    """Return the arena once per pool, one row per page, its padding included: so that runs of pages are contiguous."""
    return tuple(arena.view(layout.slabs * pool.pages_per_slab, pool.stride_bytes) for pool in layout.pools)


def _runs(device_pages: Places, host_pages: Places) -> Iterator[tuple[slice, slice]]:
    """Yield runs of pages that lie side by side in both arenas."""
    breaks = np.flatnonzero((np.diff(device_pages) != 1) | (np.diff(host_pages) != 1)) + 1
    for first, last in zip((0, *breaks.tolist()), (*breaks.tolist(), len(device_pages)), strict=True):
        count = last - first
        device_first, host_first = int(device_pages[first]), int(host_pages[first])
        yield slice(device_first, device_first + count), slice(host_first, host_first + count)

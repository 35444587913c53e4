"""Copies between the two arenas, byte by byte: order, runs of pages, padding, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from halocline.errors import ConfigError
from halocline.memory.host import HostCopies, HostMoves
from halocline.memory.retention import Full, Sliding
from halocline.model import host_costs
from halocline.model.host_costs import measure_costs
from halocline.model.host_pages import HostPages, _runs
from halocline.step import Move
from testing.models import tiny_loaded
from testing.schedule import tiny_layout

LAYOUT = tiny_layout(((Full(), 4, 3), (Sliding(6), 4, 2)), 4)


@pytest.fixture
def arenas() -> tuple[torch.Tensor, HostPages]:
    """A device arena whose every page of pool 0 holds its own number, and a host arena of two slabs."""
    device = torch.zeros(LAYOUT.arena_bytes, dtype=torch.uint8)
    pages = HostPages(device, LAYOUT, 2 * LAYOUT.slab_bytes)
    for page in range(12):
        pages._device[0][page] = page + 1
    return device, pages


def copies(pool: int, device: list[int], host: list[int]) -> HostCopies:
    """Return copies of pages."""
    return HostCopies(pool, np.array(device, np.int32), np.array(host, np.int32))


def test_pages_go_to_the_host_and_come_back_to_other_places(arenas: tuple[torch.Tensor, HostPages]) -> None:
    device, pages = arenas
    pages.offload([copies(0, [7, 2, 3], [1, 4, 5])])
    device.zero_()
    pages.load([copies(0, [0, 11, 4], [1, 4, 5])])
    found = [int(pages._device[0][page].unique()) for page in range(12)]
    assert found == [8, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 3]


def test_host_work_is_done_in_its_order(arenas: tuple[torch.Tensor, HostPages]) -> None:
    """Page 0 of the host moves away before another one is copied there."""
    _, pages = arenas
    pages.offload([copies(0, [5], [0]), HostMoves((Move(0, 0, 3),)), copies(0, [6], [0])])
    assert [int(pages._host[0][page].unique()) for page in (0, 3)] == [7, 6]


def test_the_slab_of_one_pool_serves_another(arenas: tuple[torch.Tensor, HostPages]) -> None:
    device, pages = arenas
    pages.offload([copies(0, [0, 1, 2], [0, 1, 2])])
    device.fill_(9)
    pages.offload([copies(1, [6], [1])])  # the second half of slab 0
    assert pages._host[1][1].unique().tolist() == [9]
    assert int(pages._host[0][0].unique()) == 1


@pytest.mark.parametrize(
    ("device", "host", "runs"),
    [
        ([4, 5, 6], [1, 2, 3], [(4, 7, 1, 4)]),
        ([4, 5, 6], [1, 2, 4], [(4, 6, 1, 3), (6, 7, 4, 5)]),
        ([4, 6, 7], [1, 2, 3], [(4, 5, 1, 2), (6, 8, 2, 4)]),
        ([6, 5], [2, 1], [(6, 7, 2, 3), (5, 6, 1, 2)]),
        ([3], [8], [(3, 4, 8, 9)]),
    ],
)
def test_pages_side_by_side_in_both_arenas_are_one_copy(
    device: list[int], host: list[int], runs: list[tuple[int, int, int, int]]
) -> None:
    found = _runs(np.array(device, np.int32), np.array(host, np.int32))
    assert [(a.start, a.stop, b.start, b.stop) for a, b in found] == runs


def test_a_host_arena_below_one_slab_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than one slab"):
        HostPages(torch.zeros(LAYOUT.arena_bytes, dtype=torch.uint8), LAYOUT, LAYOUT.slab_bytes - 1)


def test_costs_are_measured_with_the_model_that_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_costs, "COPIED_BYTES", 1 << 20)
    small, large = (measure_costs(tiny_loaded("llama"), tokens) for tokens in (1, 200))
    assert small.copy_bytes_per_second > 1e6
    assert large.compute_tokens_per_second > 4 * small.compute_tokens_per_second, "a full chunk was meant to be timed"
